"""Hold still the frequencies of rotary modules that depend on the length of a call.

`dynamic` (NTK) and `longrope` choose theirs by the largest position they are shown, so calls of
different lengths would rotate with different frequencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def pinned(model: nn.Module, limit: int) -> Iterator[None]:
    """Make length-dependent rotary modules see position ``limit - 1`` in every call."""

    def add(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        given = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        longer = torch.cat([given, torch.full_like(given[..., :1], limit - 1)], -1)
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": longer}
        return (args[0], longer, *args[2:]), kwargs

    def cut(module: nn.Module, args: Any, out: Any) -> Any:
        return tuple(t[..., :-1, :] for t in out)

    hooks = []
    for module in model.modules():
        if getattr(module, "rope_type", None) in ("dynamic", "longrope"):
            hooks.append(module.register_forward_pre_hook(add, with_kwargs=True))
            hooks.append(module.register_forward_hook(cut))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def inv_freqs(model: nn.Module) -> list[Tensor]:
    """Return the frequencies the rotary modules hold now (after a pinned call: the pinned ones)."""
    found: list[Tensor] = []
    for name, buffer in model.named_buffers():
        if name.endswith("inv_freq") and "original" not in name:
            freq = buffer.detach().float().cpu()
            if not any(torch.equal(freq, f) for f in found):
                found.append(freq)
    return found
