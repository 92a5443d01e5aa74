"""Rotary positions (RoFormer, arXiv 2104.09864): how one layer's keys turn with their position.

A `Rotation` is found by looking at what the model does to keys (`identify`), never declared by
architecture. Angles are ``float32(position) * inv_freq``, the product transformers computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The first ``width`` dims turn in pairs; ``width == 0`` means the keys carry no position."""

    width: int
    interleaved: bool
    inv_freq: Tensor  # [width / 2], float32, radians per position; negative turns the other way
    _there: dict[torch.device, Tensor] = field(default_factory=dict, repr=False)  # copies of it

    @property
    def key(self) -> tuple[int, bool, tuple[float, ...]]:
        """A value equal for equal rotations."""
        return (self.width, self.interleaved, tuple(self.inv_freq.tolist()))

    def angles(self, positions: Tensor) -> Angles:
        """Return cos and sin, [token, width] float32, of integer ``positions`` [token].

        Both are as wide as what turns, and sin is negative where a pair's first dim takes from its
        second, so that turning is one product and one sum over whole rows.
        """
        if positions.device not in self._there:
            self._there[positions.device] = self.inv_freq.to(positions.device)
        freqs = positions.to(torch.float32)[:, None] * self._there[positions.device]
        cos, sin = freqs.cos(), freqs.sin()
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)

    def apply(self, x: Tensor, angles: Angles, out: Tensor | None = None) -> Tensor:
        """Turn position-free ``x`` [token, head, dim] by ``angles``; write to ``out`` if given.

        Half-precision rows are turned in float32 and rounded once. ``out`` must not overlap ``x``.
        """
        if out is None:
            out = torch.empty_like(x)
        if self.width == 0:
            return out.copy_(x)
        wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        cos, sin = (a[:, None].to(wide) for a in angles)  # [token, 1, width]
        turning = x[..., : self.width].to(wide)
        turned = out[..., : self.width]
        if wide == x.dtype:
            self._add_partners(torch.mul(turning, cos, out=turned), turning, sin)
        else:
            turned.copy_(self._add_partners(turning * cos, turning, sin))
        if self.width < x.shape[-1]:
            out[..., self.width :] = x[..., self.width :]
        return out

    def _add_partners(self, turned: Tensor, x: Tensor, sin: Tensor) -> Tensor:
        """Add each dim's other half of its pair, times ``sin``, to ``turned``; return that."""
        if self.interleaved:
            partners = x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2)
            return turned.addcmul_(partners, sin)
        half = self.width // 2  # by halves: a roll of the whole would be a copy
        turned[..., :half].addcmul_(x[..., half:], sin[..., :half])
        turned[..., half:].addcmul_(x[..., :half], sin[..., half:])
        return turned


STATIC = Rotation(0, False, torch.empty(0))


def identify(
    keys: Mapping[int, Tensor], frequencies: Sequence[Tensor], tolerance: float
) -> Rotation | None:
    """Find the rotation that explains one token's keys at several positions.

    Args:
        keys: position -> keys [head, dim] of the same token in the same layer; holds position 0.
        frequencies: the ``inv_freq`` buffers of the model's rotary modules, float32.
        tolerance: largest error relative to the largest key.

    Returns None when no known rotation explains the keys (learned or absolute positions).
    """
    base = keys[0]
    scale = float(base.abs().max())
    if all(_close(k, base, scale, tolerance) for k in keys.values()):
        return STATIC
    for inv_freq in frequencies:
        for interleaved in (False, True):
            for sign in (1.0, -1.0):
                width = 2 * inv_freq.numel()
                if width > base.shape[-1]:
                    continue
                spec = Rotation(width, interleaved, (sign * inv_freq).to(torch.float32).cpu())
                if _explains(spec, keys, scale, tolerance):
                    return spec
    return None


def _explains(spec: Rotation, keys: Mapping[int, Tensor], scale: float, tolerance: float) -> bool:
    for position, found in keys.items():
        turned = spec.apply(keys[0][None], spec.angles(torch.tensor([position])))[0]
        if not _close(turned, found, scale, tolerance):
            return False
    return True


def _close(a: Tensor, b: Tensor, scale: float, tolerance: float) -> bool:
    return float((a - b).abs().max()) <= tolerance * scale
