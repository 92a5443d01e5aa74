"""Attention of packed rows over the slots of their contexts.

The mask is exact: a query sees an interval of slots that ends with its own (`run/base.py`),
wherever the rows come from. A causal mask aligned to the bottom right, which fits only a contiguous
suffix, would let a repaired row see its own future.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

import torch
import torch.nn.functional as F
from torch import Tensor

from kvweave.run import bags
from kvweave.run.batch import Batch
from kvweave.run.latent import Latent
from kvweave.run.packed import CodedLevel
from kvweave.run.part import BatchPart, Piece
from kvweave.run.thinned import ThinnedRows
from kvweave.run.together import Together
from kvweave.run.upload import up
from kvweave.run.written import (
    Scaling,
    VisibleKV,
    blocks_of,
    in_place,
    is_quick,
    rows_of,
    scores_of,
    shares_of,
    suits,
    weights_of,
)

SINKS = 8  # dims that hold sinks in one kernel: two are used, and kernels want widths of eight
FOLD = 32  # rows below which query heads that share keys stand in one block, which reads these once
WIDE = 192  # rows from which torch's kernel for CPUs takes wider blocks: a fifth faster
NOTHING = (0, 0)

current: ContextVar[Batch] = ContextVar("kvweave_batch")


def attend(
    number: int,
    query: Tensor,
    scale: float | None,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention [1, total, head, v_dim] of unrotated ``query`` [1, head, total, dim] in the
    layer that the model calls ``number``; ``sinks`` [head] are scores that go to nothing."""
    batch = current.get()
    layer = batch.readers[number]
    info = batch.infos[layer]
    how = Scaling(query.shape[-1] ** -0.5 if scale is None else scale, softcap, sinks)
    asked = query[0].transpose(0, 1)
    if info.latent is not None:
        asked = info.latent.sorted(asked)
    own = info.readers[:1] in ((), (number,))
    for part in batch.parts:
        observer = part.work.observer
        if own and observer is not None and observer.asks and layer < part.last:
            observer.ask(layer, part.work.at, asked[part.span])
    turned = batch.turned_queries(layer, asked)
    if batch.together is not None:
        return _together(batch, batch.together, layer, turned, how, own)[None]
    outs: list[Tensor] = []
    for part in batch.parts:
        if layer < part.last:
            outs += _part(batch, part, layer, turned[part.span], how, own)
        else:  # nothing behind this layer is wanted of it
            wide = info.shape.v_dim if info.latent is None else info.latent.values.shape[2]
            outs.append(turned.new_zeros(part.n, turned.shape[1], wide))
    return (outs[0].contiguous() if len(outs) == 1 else torch.cat(outs))[None]


def _together(
    batch: Batch, together: Together, layer: int, query: Tensor, how: Scaling, shown: bool
) -> Tensor:
    """Attention of all rows at once, ``query`` [total, head, dim] -> [total, head, v_dim]."""
    out, sums = together.attend(layer, query, how.scale, how.softcap)
    if how.sinks is not None:
        sinks = how.sinks.to(sums.dtype)
        out *= torch.sigmoid(sums - sinks)[..., None].to(out.dtype)
        sums = torch.logaddexp(sums, sinks)
    if shown:
        together.add_up(layer, query, sums, (how.scale, how.softcap or 0.0), batch.beside)
    for part in batch.parts if shown and together.sums is None else ():
        watched = rows_watched(part, layer) if layer < part.last else NOTHING
        mask, mine = batch.infos[layer].mask, query[part.span]
        for piece in part.cut(mask, watched) if watched != NOTHING else ():
            if piece.watched:
                rows = slice(piece.first, piece.last)
                keys, values = part.rows.layers[layer].seen(slice(piece.begin, piece.stop))
                bias = batch.bias(part, piece, mask, sums.dtype)
                seen = VisibleKV(keys.to(sums.dtype), values, bias)
                scores = scores_of(mine[rows].to(sums.dtype), seen, how)
                scores = scores.view(query.shape[1], piece.last - piece.first, -1)
                _show(part, piece, layer, (scores - sums[part.span][rows].t()[..., None]).exp_())
    return out


def _part(
    batch: Batch, part: BatchPart, layer: int, query: Tensor, how: Scaling, shown: bool
) -> list[Tensor]:
    """Attention of one work's rows, ``query`` [row, head, dim] -> pieces [row, head, v_dim]."""
    mask, latent = batch.infos[layer].mask, batch.infos[layer].latent
    rows = part.rows.layers[layer]
    joins = suits(query, how) and latent is None and not isinstance(rows, ThinnedRows)
    pieces = part.cut(mask, rows_watched(part, layer) if shown else NOTHING, joins=joins)
    if isinstance(rows, ThinnedRows):
        return [_thinned(batch, part, piece, layer, query, how) for piece in pieces]
    begin, outs = pieces[0].begin, []
    every = rows.seen(slice(begin, part.stop))
    expanded: tuple[Tensor, Tensor] | None = None
    for piece in pieces:
        span = slice(piece.begin - begin, piece.stop - begin)
        q, (keys, values) = query, every
        if len(pieces) > 1:
            q, keys, values = q[piece.first : piece.last], keys[:, span], values[:, span]
        many = latent is not None and not piece.watched and len(q) >= latent.pays
        causal = piece.causal and how.softcap is None and (latent is None or many)
        bias = None if causal else batch.bias(part, piece, mask, q.dtype)
        if latent is not None and many:
            expanded = expanded or latent.expanded(*every)
            seen = VisibleKV(expanded[0][:, span], expanded[1][:, span], bias, causal)
            outs.append(_attention(q, seen, how, False)[0])
            continue
        show = _adding_up(part, piece, layer) if piece.watched else None
        seen = VisibleKV(keys, values, bias, causal, piece, show)
        out, weights = _latently(q, seen, how, piece.watched, latent)
        outs.append(out)
        if weights is not None:
            _show(part, piece, layer, weights)
    return outs


def _latently(
    query: Tensor, seen: VisibleKV, how: Scaling, watched: bool, latent: Latent | None
) -> tuple[Tensor, Tensor | None]:
    """The same as `_attention`, also for rows that are latents."""
    if latent is None:
        return _attention(query, seen, how, watched)
    bias = None if seen.bias is None else latent.wide(seen.bias)
    wide = VisibleKV(latent.wide(seen.keys), latent.wide(seen.values), bias, seen.causal)
    out, weights = _attention(latent.absorbed(query), wide, how, watched)
    return latent.read(out).to(query.dtype), weights


def _thinned(
    batch: Batch, part: BatchPart, piece: Piece, layer: int, query: Tensor, how: Scaling
) -> Tensor:
    """The same for one piece and rows of which each head keeps its own."""
    rows, mask = part.rows.layers[layer], batch.infos[layer].mask
    latent, group = batch.infos[layer].latent, batch.infos[layer].group
    assert isinstance(rows, ThinnedRows)
    query, outs, shown = query[piece.first : piece.last], [], []
    together = _thinned_together(batch, part, piece, layer, query, how)
    if together is not None:
        return together
    for head, q in enumerate(query.chunk(len(rows.heads), 1)):
        kept, keys, values = rows.seen_by(head, piece.begin, piece.stop)
        slots = up(kept, q.device)
        many = len(q) > 1
        bias = batch.bias_of(slots, part, piece, mask, q.dtype) if many else None
        mine = how.of(head * group, (head + 1) * group)
        out, weights = _latently(q, VisibleKV(keys, values, bias), mine, piece.watched, latent)
        if bias is not None:  # a row of which all before it was freed, and it itself, sees nothing
            blind = torch.isneginf(bias).all(-1)
            out = out.masked_fill(blind[:, None, None], 0)
            weights = None if weights is None else weights.masked_fill(blind[:, None], 0)
        outs.append(out)
        if weights is not None:
            every = weights.new_zeros(*weights.shape[:2], piece.stop - piece.begin)
            shown.append(every.index_copy_(2, slots - piece.begin, weights))
    if shown:
        _show(part, piece, layer, torch.cat(shown))
    return torch.cat(outs, 1)


def _thinned_together(
    batch: Batch, part: BatchPart, piece: Piece, layer: int, query: Tensor, how: Scaling
) -> Tensor | None:
    """All heads in one attention, where they keep as many rows each, or `bags` suit, and all before the
    piece are seen: what is seen is then the same whatever the slots."""
    rows, latent = part.rows.layers[layer], batch.infos[layer].latent
    assert isinstance(rows, ThinnedRows)
    first = int(part.work.slots[piece.first])
    n = piece.last - piece.first
    if piece.begin > 0 or first < rows.tail or piece.stop - first != n:
        return None
    if n > 1 and part.begins[batch.infos[layer].mask] is not None:
        return None
    out: Tensor
    weights: Tensor | None
    laned = bool(rows.levels) and latent is None and bags.suit(rows.levels, query, len(rows.heads))
    if laned:
        raw = rows.raw_together(piece.stop)
        each = rows.raw_apart(piece.stop) if raw is None else [raw]
        out, weights = bags.attended(
            query, rows.levels, [_behind(query, *own) for own in each], how
        )
    else:
        folds = rows.coded_together if n < FOLD and latent is None else None
        found = rows.raw_together(piece.stop) if folds else rows.seen_together(piece.stop)
        if found is None:
            return None
        seen = _behind(query, *found)
        if folds:
            out, weights = _coded(query, folds, seen, how)
        else:
            out, weights = _latently(query, seen, how, piece.watched, latent)
    if weights is not None and piece.watched:
        _show_kept(part, piece, layer, weights, rows.slots_together(weights.shape[2], laned))
    return out


def _behind(query: Tensor, keys: Tensor, values: Tensor) -> VisibleKV:
    """Return keys and values [head, slot, dim] as the rows of ``query`` see them, which are the last."""
    n, bias = len(query), None
    if n > 1:
        bias = query.new_zeros(n, keys.shape[1])
        bias[:, -n:].fill_(float("-inf")).triu_(1)
    return VisibleKV(keys, values, bias)


def _coded(
    query: Tensor, levels: Sequence[CodedLevel], seen: VisibleKV, how: Scaling
) -> tuple[Tensor, Tensor]:
    """Return attention [row, head, v_dim] and weights [head, row, slot] over the rows of ``levels`` and
    then those that are ``seen``; every row sees all of ``levels``."""
    n, heads, _ = query.shape
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    folded = blocks_of(query, len(seen.keys)).to(wide) * how.scale
    scores = [level.scores(folded) for level in levels]
    if how.softcap is not None:
        scores = [torch.tanh(each / how.softcap) * how.softcap for each in scores]
    scores.append(scores_of(query, seen, how).to(wide))
    weights = shares_of(torch.cat(scores, -1), how, n)
    at = weights.shape[-1] - seen.keys.shape[1]
    out = (weights[..., at:].to(seen.values.dtype) @ seen.values).to(wide)
    for level in reversed(levels):
        at, stop = at - level.n // len(level.slots), at
        out += level.mixed(weights[..., at:stop])
    return rows_of(out.to(query.dtype), n), weights.reshape(heads, n, -1)


def _adding_up(part: BatchPart, piece: Piece, layer: int) -> Callable[[Tensor, int], None] | None:
    """Return what shows a piece's weights of some heads, from a row of it on; None where an observer
    is to see all heads at once."""
    observer = part.work.observer
    if observer is None or observer.sums is None:
        return None
    at, see = part.work.at + piece.first, observer.see
    return lambda weights, row: see(layer, at + row, piece.begin, weights)


def _show(part: BatchPart, piece: Piece, layer: int, weights: Tensor) -> None:
    assert part.work.observer is not None
    first = part.work.at + piece.first + piece.skipped
    part.work.observer.see(layer, first, piece.begin, weights)


def _show_kept(part: BatchPart, piece: Piece, layer: int, weights: Tensor, slots: Tensor) -> None:
    """The same of ``weights`` [head, row, key], the keys of which are each kv head's own ``slots``."""
    observer = part.work.observer
    if observer is not None and observer.packs:
        first = part.work.at + piece.first + piece.skipped
        observer.see_kept(layer, first, piece.stop, weights, slots)
        return
    mine = weights.view(len(slots), -1, *weights.shape[1:])
    every = mine.new_zeros(*mine.shape[:3], piece.stop)
    every.scatter_add_(3, slots[:, None, None].expand_as(mine), mine)
    _show(part, piece, layer, every.flatten(0, 1))


def _attention(
    query: Tensor, seen: VisibleKV, how: Scaling, watched: bool
) -> tuple[Tensor, Tensor | None]:
    """Return attention [row, head, v_dim] of ``query`` [row, head, dim], and if it is watched its
    weights [head, row, slot]."""
    n, heads, _ = query.shape
    if not seen.keys.shape[1]:  # all was freed that these rows could see
        nothing = seen.values.new_zeros(n, heads, seen.values.shape[2])
        return nothing, query.new_zeros(heads, n, 0) if watched else None
    absorbed = query.shape[2] > seen.keys.shape[2]
    shows = watched and not seen.causal
    if suits(query, how) and not absorbed and (shows or is_quick(query, seen)):
        return in_place(query, seen, how, watched)
    few = how.sinks is not None and len(query) < FOLD and not seen.causal
    if not (how.softcap is not None or watched or absorbed or few):
        fused = _fused if how.sinks is None else _fused_with_sinks
        return fused(query, seen, how), None
    weights = weights_of(query, seen, how)
    out = rows_of(weights.to(seen.values.dtype) @ seen.values, n)
    return out, weights.reshape(heads, n, -1) if watched else None


def show_all(batch: Batch, layer: int, weights: Tensor) -> None:
    """Show what rows of the only part of a pass pay to all slots, ``weights`` [head, row, slot]."""
    (part,) = batch.parts
    first, last = rows_watched(part, layer)
    if first < last:
        piece = Piece(first, last, 0, part.stop, False, True)
        wide = weights if weights.dtype == torch.float64 else weights.float()
        _show(part, piece, layer, wide[:, first:last])


def rows_watched(part: BatchPart, layer: int) -> tuple[int, int]:
    """Return the rows of a part whose attention its observer wants; it counts the whole work's."""
    observer, at = part.work.observer, part.work.at
    if observer is None or not observer.sees:
        return NOTHING
    first, last = observer.rows(layer, at + part.n)
    first, last = max(first - at, 0), min(last - at, part.n)
    return (first, last) if first < last else NOTHING


def _fused(query: Tensor, seen: VisibleKV, how: Scaling) -> Tensor:
    """Attention of ``query`` [row, head, dim] in one kernel."""
    n, heads, dim = query.shape
    keys, values = seen.keys, seen.values
    kv_heads, n_keys, v_dim = values.shape
    folded = 1 if seen.causal else _fold(n, heads // kv_heads, query.is_cpu)
    blocks = heads // kv_heads // folded
    if v_dim < dim and (n >= FOLD or seen.causal):  # kernels want keys and values as wide
        values = F.pad(values, (0, dim - v_dim))
    asked = query.view(n, kv_heads, blocks, folded, dim)
    if n > 1:
        asked = asked.permute(1, 2, 3, 0, 4)
    keys, values = keys[:, None], values[:, None]
    if blocks > 1:
        keys = keys.expand(kv_heads, blocks, n_keys, dim)
        values = values.expand(kv_heads, blocks, n_keys, values.shape[3])
    out = F.scaled_dot_product_attention(
        asked.reshape(kv_heads, blocks, -1, dim),
        keys,
        values,
        attn_mask=seen.repeated(folded),
        is_causal=seen.causal,
        scale=how.scale,
    )
    if v_dim < out.shape[3]:
        out = out[..., :v_dim]
    if n > 1:
        out = out.view(kv_heads, blocks, folded, n, v_dim).permute(3, 0, 1, 2, 4)
    return out.reshape(n, heads, v_dim)


def _fold(n: int, group: int, cpu: bool) -> int:
    """Return how many query heads of ``group`` that share keys stand in one block of ``n`` rows each."""
    if n < FOLD or n >= WIDE or not cpu:
        return group if n < FOLD else 1
    return next((each for each in range(1, group + 1) if not group % each and n * each >= WIDE), 1)


def _fused_with_sinks(query: Tensor, seen: VisibleKV, how: Scaling) -> Tensor:
    """The same with `Scaling.sinks`: a slot in front of all others that every row sees, of no value,
    whose key meets queries in dims of its own, where they hold the sinks."""
    assert how.sinks is not None
    dim, wide = query.shape[2], query.dtype
    aim = (how.sinks / how.scale).to(wide)
    rest = (how.sinks - (aim * how.scale).to(how.sinks.dtype)) / how.scale  # half precision rounds
    query = F.pad(query, (0, SINKS))
    query[..., dim], query[..., dim + 1] = aim, rest.to(wide)
    keys, values = F.pad(seen.keys, (0, SINKS, 1, 0)), F.pad(seen.values, (0, 0, 1, 0))
    keys[:, 0, dim : dim + 2] = 1
    if seen.causal:  # row i sees i + 1 slots: one more row sees that in front alone
        padded = F.pad(query, (0, 0, 0, 0, 1, 0))
        return _fused(padded, VisibleKV(keys, values, None, True), how)[1:]
    bias = None if seen.bias is None else F.pad(seen.bias, (1, 0))
    return _fused(query, VisibleKV(keys, values, bias), how)
