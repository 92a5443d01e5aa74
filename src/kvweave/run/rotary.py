"""Rotary positions (RoFormer, arXiv 2104.09864): how one layer's keys turn with their position.

A `Rotation` is found by looking at what the model does to keys (`identify`), never declared by
architecture. Angles are ``float32(position) * inv_freq``, the product transformers computes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

Angles = tuple[Tensor, Tensor]
# cos, and sin of the first and of the second dims, [token, 1, dim]
Spread = tuple[Tensor, Tensor, Tensor]
TINY = 1e-6  # a ratio below which a pair has lost a dim


@dataclass(frozen=True, slots=True, eq=False)
class Rotation:
    """The first ``width`` dims turn in pairs; ``width == 0`` means the keys carry no position.

    Where a model scales dims behind its rotation (a norm's weights), a pair does not turn on a circle:
    ``ratio`` says how its first dim is scaled in terms of its second. ``fixed``: rows hold their
    position in a way that is no rotation, so that nothing turns them; it is the number that the
    model's own positions begin with.
    """

    width: int
    interleaved: bool
    inv_freq: Tensor  # [width / 2], float32, radians per position; negative turns the other way
    ratio: Tensor | None = None  # [width / 2], float32
    fixed: int | None = None
    # copies of both
    _there: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @property
    def key(self) -> tuple[int, bool, tuple[float, ...]]:
        """A value equal for equal rotations but for their ``ratio``, which is measured: the weights
        that it comes from are told apart as such."""
        return (self.width, self.interleaved, tuple(self.inv_freq.tolist()))

    def equals(self, other: Rotation) -> bool:
        """Tell whether both turn rows alike."""
        if (self.key, self.fixed) != (other.key, other.fixed):
            return False
        if (self.ratio is None) != (other.ratio is None):
            return False
        return self.ratio is None or other.ratio is None or torch.equal(self.ratio, other.ratio)

    def angles(self, positions: Tensor) -> Angles:
        """Return cos and sin, [token, width] float32, of integer ``positions`` [token].

        Both are as wide as what turns, and sin is negative where a pair's first dim takes from its
        second, so that turning is one product and one sum over whole rows.
        """
        if positions.device not in self._there:
            ratio = torch.ones_like(self.inv_freq) if self.ratio is None else self.ratio
            both = self.inv_freq.to(positions.device), ratio.to(positions.device)
            self._there[positions.device] = both
        inv_freq, ratio = self._there[positions.device]
        freqs = positions.to(torch.float32)[:, None] * inv_freq
        cos, sin = freqs.cos(), freqs.sin()
        first, second = (-sin, sin) if self.ratio is None else (-sin * ratio, sin / ratio)
        if self.interleaved:
            return cos.repeat_interleave(2, -1), torch.stack((first, second), -1).flatten(-2)
        return torch.cat((cos, cos), -1), torch.cat((first, second), -1)

    def back(self, angles: Angles) -> Angles:
        """Return, in float64, the angles that undo those: rounded cosines and sines also scale a little."""
        cos, sin = (each.double() for each in angles)
        if self.interleaved:
            product = (sin[..., 0::2] * sin[..., 1::2]).repeat_interleave(2, -1)
        else:
            first, second = sin.chunk(2, -1)
            product = torch.cat((first * second,) * 2, -1)
        scale = cos.square() - product  # of a pair: its sines have opposite signs
        return cos / scale, -sin / scale

    def apply(self, x: Tensor, angles: Angles, out: Tensor | None = None) -> Tensor:
        """Turn position-free ``x`` [token, head, dim] by ``angles``; write to ``out`` if given.

        Half-precision rows are turned in float32 and rounded once. ``out`` must not overlap ``x``.
        """
        return self.turn(x, self.spread(angles, x.dtype), out)

    def spread(self, angles: Angles, dtype: torch.dtype) -> Spread:
        """Return ``angles`` as `turn` takes them for rows of ``dtype``: of all layers that turn alike."""
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        cos, sin = (each[:, None].to(wide) for each in angles)
        if self.interleaved:
            return cos, sin, sin
        return cos, sin[..., : self.width // 2], sin[..., self.width // 2 :]

    def turn(self, x: Tensor, spread: Spread, out: Tensor | None = None) -> Tensor:
        """Turn ``x`` as `apply` does, by what `spread` made for its dtype."""
        if out is None:
            out = torch.empty_like(x)
        if self.width == 0:
            return out.copy_(x)
        whole, cos = self.width == x.shape[-1], spread[0]
        turning = (x if whole else x[..., : self.width]).to(cos.dtype)
        turned = out if whole else out[..., : self.width]
        if cos.dtype == x.dtype:
            self._add_partners(torch.mul(turning, cos, out=turned), turning, spread)
        else:
            turned.copy_(self._add_partners(turning * cos, turning, spread))
        if not whole:
            out[..., self.width :] = x[..., self.width :]
        return out

    def _add_partners(self, turned: Tensor, x: Tensor, spread: Spread) -> Tensor:
        """Add each dim's other half of its pair, times its sine, to ``turned``; return that."""
        _, first, second = spread
        if self.interleaved:
            return turned.addcmul_(x.view(*x.shape[:-1], -1, 2).flip(-1).flatten(-2), first)
        half = self.width // 2  # by halves: a roll of the whole would be a copy
        turned[..., :half].addcmul_(x[..., half:], first)
        turned[..., half:].addcmul_(x[..., :half], second)
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
    kinds = [
        Rotation(2 * inv_freq.numel(), interleaved, (sign * inv_freq).to(torch.float32).cpu())
        for inv_freq in frequencies
        for interleaved in (False, True)
        for sign in (1.0, -1.0)
        if 2 * inv_freq.numel() <= base.shape[-1]
    ]
    for spec in kinds:
        if _explains(spec, keys, scale, tolerance):
            return spec
    for spec in kinds:
        ratio = _ratio(spec, keys)
        if ratio is not None:
            scaled = replace(spec, ratio=ratio, _there={})
            if _explains(scaled, keys, scale, tolerance):
                return scaled
    return None


def _ratio(spec: Rotation, keys: Mapping[int, Tensor]) -> Tensor | None:
    """Return the `Rotation.ratio` with which ``spec`` explains ``keys`` best, None for none.

    Behind a rotation and weights w, the first dim of a pair is a cos - r b sin, where a, b are the
    pair at position 0 and r = w_first / w_second: least squares over heads, at the position where
    the pair has turned most.
    """
    first, second = _pairs(keys[0], spec)
    ratio, most = torch.ones_like(spec.inv_freq), torch.zeros_like(spec.inv_freq)
    for position, found in keys.items():
        angles = position * spec.inv_freq
        turned, _ = _pairs(found, spec)
        shown = second * angles.sin()
        best = angles.sin().abs() > most
        fitted = (shown * (first * angles.cos() - turned)).sum(0) / shown.square().sum(0)
        ratio[best], most[best] = fitted.to(ratio.dtype)[best], angles.sin().abs()[best]
    usable = torch.isfinite(ratio) & (ratio.abs() > TINY)
    return ratio if bool(usable.all()) else None


def _pairs(keys: Tensor, spec: Rotation) -> tuple[Tensor, Tensor]:
    """Return the first and the second dims of all pairs that turn, [head, pair] each."""
    turning = keys[..., : spec.width]
    if spec.interleaved:
        return turning[..., 0::2], turning[..., 1::2]
    first, second = turning.chunk(2, -1)
    return first, second


def _explains(spec: Rotation, keys: Mapping[int, Tensor], scale: float, tolerance: float) -> bool:
    for position, found in keys.items():
        turned = spec.apply(keys[0][None], spec.angles(torch.tensor([position])))[0]
        if not _close(turned, found, scale, tolerance):
            return False
    return True


def _close(a: Tensor, b: Tensor, scale: float, tolerance: float) -> bool:
    return float((a - b).abs().max()) <= tolerance * scale
