"""How many rows of each layer a policy keeps in which form, and the bytes they take."""

from __future__ import annotations

from collections.abc import Sequence

from kvweave.keep.tokens.spec import Keep
from kvweave.run.base import LayerInfo
from kvweave.run.below import BELOW
from kvweave.run.packed import FORMS, form_bytes


def row_bytes(info: LayerInfo, form: str, itemsize: int) -> int:
    """Return the bytes of a row of a layer, of all heads, in ``form``; "" as it was computed, in numbers
    of ``itemsize`` bytes. Below memory it takes none of it."""
    if form in FORMS:
        return form_bytes(form, info.shape)
    return 0 if form == BELOW else info.shape.width * itemsize


def whole_bytes(info: LayerInfo, itemsize: int, moves: bool = False) -> int:
    """Return the bytes of a row of a layer as it was computed; of rows that move with unrotated keys."""
    shape = info.shape
    return (shape.width + moves * shape.k_heads * shape.k_dim) * itemsize


def sizes(keep: Keep, infos: Sequence[LayerInfo], n: int, layer: int, itemsize: int) -> list[int]:
    """Return how many of ``n`` rows a head of a layer keeps as they are, and then in each form."""
    whole = sum(whole_bytes(info, itemsize, keep.policy.moves) for info in infos)
    of = {f: sum(row_bytes(x, f, itemsize) for x in infos) or whole for f in keep.forms}
    return keep.sizes(n, {"": whole} | of, layer, len(infos))


def bytes_at(keep: Keep, infos: Sequence[LayerInfo], n: int, itemsize: int) -> int:
    """Return the bytes of the rows, at most, that are there behind a choice among ``n``.

    Layers that see a window keep what that holds, unless rows of all layers close up. Heads that keep
    all rows as they are (`TokenPolicy.judged`) are not counted.
    """
    total, policy = 0, keep.policy
    for layer, info in enumerate(infos):
        mine = sizes(keep, infos, n, layer, itemsize)
        raw = whole_bytes(info, itemsize, policy.moves)
        if policy.moves:
            total += min(n, mine[0]) * raw
            continue
        window = info.mask.window or info.mask.chunk
        if window is not None:
            total += raw * min(n, window)
            continue
        if policy.splits:  # in any of its forms, the newest as they are
            kept = min(n, mine[0])
            safe = min(kept, policy.sinks + policy.window)
            most = max(row_bytes(info, form, itemsize) for form in policy.splits)
            total += safe * raw + (kept - safe) * most
            continue
        left, forms = n, ("", *keep.forms)
        for size, form in zip(mine, forms, strict=True):
            total += min(left, size) * row_bytes(info, form, itemsize)
            left -= min(left, size)
    return total
