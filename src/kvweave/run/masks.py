"""Say what a mask function lets queries see, by asking it.

A function as transformers builds them, ``(batch, head, query, key) -> seen`` on index tensors, is
asked at positions; nothing of the model's configuration is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

from kvweave.run.base import ALL, Ints, Mask

MaskFunction = Callable[..., torch.Tensor]
DENSE = 192  # first positions at which every query is asked for every key
SPREAD = 64  # positions spread over all others
NEAR = 2  # positions on each side of a border


class UnknownMask(Exception):
    """A mask that `Mask` cannot say; the message says what it does."""


def classify(function: MaskFunction, limit: int, device: torch.device) -> Mask:
    """Return the mask that ``function`` is on positions ``[0, limit)``. Raises UnknownMask.

    A window or chunk that no two positions are far enough apart for is no mask at all.
    """
    last = limit - 1
    if not _seen(function, [last], [last], device).item():
        raise UnknownMask("a query does not see its own position")
    begin = _first(function, last, device)
    candidates = [ALL]
    if begin > 0:
        # the run before tells chunks' size; a window has it in every query
        candidates = [
            Mask(window=last - begin + 1),
            Mask(chunk=begin - _first(function, begin - 1, device)),
        ]
    for mask in candidates:
        at = borders(mask, limit)
        if np.array_equal(_seen(function, at, at, device), seen(mask, at)):
            return mask
    at = borders(ALL, limit)
    if np.triu(_seen(function, at, at, device), 1).any():
        raise UnknownMask("a query sees keys after its own position")
    raise UnknownMask("what a query sees is neither all, nor a window, nor aligned chunks")


def seen(mask: Mask, positions: Ints) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Return which of ``positions`` each of them sees, [query, key]."""
    found = positions[None] <= positions[:, None]
    first = mask.first(positions)
    return found if first is None else found & (positions[None] >= first[:, None])


def borders(mask: Mask, limit: int) -> Ints:
    """Return increasing positions that tell ``mask`` from others: the first ones, those around
    its first three borders and the last one before ``limit``, and some spread over the rest."""
    size = mask.window or mask.chunk or limit
    around = [m * size for m in (1, 2, 3)] + [(limit - 1) // size * size, limit - 1]
    near = [b + d for b in around for d in range(-NEAR, NEAR + 1)]
    spread = np.random.default_rng(0).integers(0, limit, SPREAD)
    found = np.unique([*range(DENSE), *near, *spread]).astype(np.int64)
    return found[(found >= 0) & (found < limit)]


def _first(function: MaskFunction, query: int, device: torch.device) -> int:
    """Return the first position a query sees, if what it sees is one run that ends at itself."""
    low, high = 0, query
    while low < high:
        middle = (low + high) // 2
        if _seen(function, [query], [middle], device).item():
            high = middle
        else:
            low = middle + 1
    return low


def _seen(
    function: MaskFunction, queries: Iterable[int], keys: Iterable[int], device: torch.device
) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
    """Ask for every pair of positions: bool [query, key]."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    q = torch.as_tensor(np.asarray(queries), dtype=torch.int64, device=device)[:, None]
    k = torch.as_tensor(np.asarray(keys), dtype=torch.int64, device=device)[None]
    try:
        found = function(zero, zero, q, k)
    except IndexError as error:
        raise UnknownMask("it depends on the tokens of a call, not only on positions") from error
    return np.asarray(found.expand(q.shape[0], k.shape[1]).to("cpu", torch.bool).numpy())
