"""Models whose rows hold their position in a way that is no rotation: learned or absolute positions.

Such a model runs with true positions, and its rows stay where they were computed. Where its own
positions begin (not at 0 in some) is learned by looking, like all else of `run/probe.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from kvweave.run.base import LayerInfo
from kvweave.run.looking import KeptLayer, Refused, look
from kvweave.run.rotary import STATIC

FIXED = replace(STATIC, fixed=0, _there={})
FIRST = 64  # positions of a model that are tried as its first
COUNTED = 37  # tokens that a cache says there are
CLOSE = 1e-5  # of rows at one position, relative to the largest: they are computed alike


def as_fixed(
    model: PreTrainedModel,
    found: Sequence[LayerInfo],
    layers: Sequence[Any],
    make: Callable[[int], list[Any]],
    limit: int,
) -> list[LayerInfo]:
    """Return what was ``found``, with all rows fixed where those of one layer are.

    ``layers`` hold what was cached, in their first row at position 0; ``make`` makes others, whose
    tokens are at an offset. Raises Refused.
    """
    _check_not_counted(model, layers, make, limit)
    if all(info.rotation.fixed is None for info in found):
        return list(found)
    if any(info.mixer is not None for info in found):
        raise Refused("it has states, and rows that contain their position")
    if any(info.latent is not None for info in found):
        raise Refused("it has latents, and rows that contain their position")
    if any(
        getattr(module, "rope_type", None) in ("dynamic", "longrope") for module in model.modules()
    ):
        raise Refused("its frequencies depend on the length of a call, and its rows on positions")
    rotation = replace(FIXED, fixed=_first(model, make, limit), _there={})
    return [replace(info, rotation=rotation, query=None) for info in found]


def _check_not_counted(
    model: PreTrainedModel, layers: Sequence[Any], make: Callable[[int], list[Any]], limit: int
) -> None:
    """Refuse a model that does not go by the positions that it is told."""
    again = make(min(COUNTED, limit - 2))
    look(model, again, [0], limit)
    for i, (one, two) in enumerate(zip(layers, again, strict=True)):
        if getattr(one, "keys", None) is not None and not _same(one, two, 0):
            raise Refused(f"layer {i}: rows change with how many tokens a cache says there are")


def _first(model: PreTrainedModel, make: Callable[[int], list[Any]], limit: int) -> int:
    """Return the position that the model gives to the first token of a text."""
    own = make(0)
    look(model, own, None, limit)
    tried = make(0)
    look(model, tried, range(min(FIRST, limit)), limit)
    for first in range(min(FIRST, limit) - 1):
        if all(
            _same(theirs, mine, first, token)
            for theirs, mine in zip(own, tried, strict=True)
            for token in (0, 1)
        ):
            return first
    raise Refused("the positions that it gives to the tokens of a text are not found")


def _same(one: KeptLayer, two: KeptLayer, first: int, token: int = 0) -> bool:
    """Tell whether ``two`` has in its row ``first + token`` what ``one`` has in its row 0."""
    pairs = ((one.keys, two.keys), (one.values, two.values))
    return all(
        _close(a[0, :, token], b[first + token, :, token])
        for a, b in pairs
        if a is not None and b is not None
    )


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() <= CLOSE * b.abs().max()).all())
