"""Matrix products in float32, by oneDNN where that is faster than what torch takes.

torch's CPU builds multiply float32 by MKL, which leaves AVX-512 unused on processors that are not
Intel's. oneDNN, which torch has too, uses it: 2.0 to 2.9 times as fast from one row to 4,096
(`bench/products.py`). torch has no public way to ask for it, so this takes the operation that
`torch.compile` does, and only where it is there and right.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LARGE = 1 << 18  # numbers in a weight, from which on a call's cost does not show
MANY = 1 << 16  # scores of a head, likewise
KERNELS = 128
"""Of each shape of a product oneDNN and torch keep what was made for it, .3 MiB each, 1,024 of them unless
told, in bfloat16 on every CPU: and every context has another length. Making one anew takes .6 ms."""


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x`` [..., k] times ``weight`` [m, k] transposed, and ``bias`` [m], by oneDNN; float32 on a
    CPU, without gradients."""
    found: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return found


def _is_faster() -> bool:
    """Tell whether this machine is one where MKL leaves AVX-512 unused."""
    try:
        vendors = {
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("vendor_id")
        }
    except OSError:
        return False
    if not vendors or "GenuineIntel" in vendors:
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]


def _is_right() -> bool:
    """Tell whether the operation is there and does what is said above."""
    x = torch.arange(6.0).view(1, 2, 3) / 3
    weight, bias = torch.arange(12.0).view(3, 4).t() - 5, torch.arange(4.0)
    try:
        found = product(x, weight, bias)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.allclose(found, nn.functional.linear(x, weight, bias))


for _name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_name, str(KERNELS))  # both are read with the first product
faster = _is_faster() and _is_right()
"""Whether products are computed so; may be set, before a model is loaded."""


def pays(n_rows: int, n_keys: int) -> bool:
    """Tell whether `product` pays for scores [row, key] of float32 rows on a CPU."""
    return faster and n_rows * n_keys >= MANY


class _Linear(nn.Linear):
    """The same layer, where oneDNN is faster."""

    def forward(self, input: Tensor) -> Tensor:
        weight = self.weight
        learns = torch.is_grad_enabled() and (weight.requires_grad or input.requires_grad)
        floats = input.dtype == weight.dtype == torch.float32
        if learns or not floats or not (input.is_cpu and weight.is_cpu) or not input.numel():
            return super().forward(input)
        return product(input, weight, self.bias)


def install(model: nn.Module) -> None:
    """Have large linear layers of ``model`` compute so where that is faster."""
    for module in model.modules() if faster else ():
        kept: Any = getattr(module, "weight", None)
        if type(module) is nn.Linear and kept.dtype == torch.float32 and kept.numel() >= LARGE:
            module.__class__ = _Linear
