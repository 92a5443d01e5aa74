"""Run a half-precision model in float32 without a second copy of its weights.

Half-precision tensors are widened call by call, one weight at a time, and what a call creates is
float32; so a pass shows what a model computes, not how it rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

HALF = (torch.bfloat16, torch.float16)
CASTS = ("half", "bfloat16")
# These read no more than a part of a tensor or none of it: what they return is widened at its use,
# so that one expert's weights, or one row of an embedding, do not cost those of all.
PARTS = frozenset(
    "__getitem__ chunk detach embedding expand flatten index_select is_floating_point narrow permute"
    " reshape select size split squeeze stride t transpose unbind unsqueeze view".split()
)


@contextmanager
def widened(dtype: torch.dtype) -> Iterator[None]:
    """Give a context in which what is of half precision ``dtype`` computes in float32, and float32
    in full (no TF32)."""
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with _Widened() if dtype in HALF else nullcontext():
            yield
    finally:
        torch.set_float32_matmul_precision(precision)


class _Widened(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        options = dict(kwargs or {})
        if name == "__get__":
            return _dtype(func(*args, **options))
        if name in CASTS:
            return args[0].float()
        in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
        if name in PARTS or in_place:
            return func(
                *(_dtype(each) for each in args), **{k: _dtype(v) for k, v in options.items()}
            )
        return func(*_wide(args), **{k: v if k == "out" else _wide(v) for k, v in options.items()})


def _wide(value: Any) -> Any:
    """Widen the half-precision tensors and dtypes in an argument."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALF else value
    if type(value) in (list, tuple):
        return type(value)(_wide(each) for each in value)
    return _dtype(value)


def _dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF else value
