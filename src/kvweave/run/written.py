"""Attention written out: scores, shares of them, and what rows read; where no kernel does all in one,
where somebody wants to see the weights, and where it is quicker.

On CPUs some tens of rows are: scores are made, turned into shares and read in one place that stays
in the cache, and only slots that some row may not see are masked. Against torch's kernel for CPUs
up to a third of the time at 47 rows over 4,096 slots (two cores, float32; docs/LOG.md, 2026-11-26).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
from torch import Tensor

from kvweave.run.part import Piece
from kvweave.run.products import pays, product

QUICK = range(20, 129)  # rows for which it is
SCRATCH = 1 << 23  # bytes of scores at once; each thread keeps as many
FEW = 8  # queries of a head that are multiplied from behind
BLOCK = 256  # rows at once, where each sees those before it
_mine = threading.local()


@dataclass(frozen=True, slots=True)
class Scaling:
    """What a model does with scores."""

    scale: float
    softcap: float | None
    # [head] a score that each head gives to nothing (arXiv 2309.17453, section 3.3; gpt-oss)
    sinks: Tensor | None = None

    def of(self, first: int, last: int) -> Scaling:
        """Return what is done with the scores of query heads ``[first, last)``."""
        return self if self.sinks is None else replace(self, sinks=self.sinks[first:last])


@dataclass(frozen=True, slots=True)
class VisibleKV:
    """Keys and values [kv_head, slot, dim] that some rows see."""

    keys: Tensor
    values: Tensor
    bias: Tensor | None  # 0 and -inf [row, slot], None: all rows see all
    causal: bool = False  # row i sees the first i + 1 slots
    piece: Piece | None = None  # whose bias that is
    # takes weights [head, row, slot] of some heads, and the number of the first of these rows: who
    # only adds up is shown them while they are in the cache
    show: Callable[[Tensor, int], None] | None = None

    def repeated(self, n: int) -> Tensor | None:
        """Return the bias ``n`` times, one below the other: for heads that stand in one block."""
        if self.bias is None or n == 1:
            return self.bias
        made = {} if self.piece is None else self.piece.repeated
        if n not in made:
            made[n] = self.bias.repeat(n, 1)
        return made[n]


def suits(query: Tensor, how: Scaling) -> bool:
    """Tell whether `in_place` computes attention of ``query`` [row, head, dim] over keys as wide, each
    row of which sees what a bias says."""
    return (
        query.is_cpu and query.dtype == torch.float32 and how.softcap is None and how.sinks is None
    )


def is_quick(query: Tensor, seen: VisibleKV) -> bool:
    """Tell whether it is quicker than a kernel, and the scores of one head are few."""
    n, heads, _ = query.shape
    kv_heads, n_keys = seen.keys.shape[:2]
    few = n in QUICK and 4 * n * heads // kv_heads * n_keys <= SCRATCH
    return pays(n * heads // kv_heads, n_keys) or (few and not seen.causal)


def in_place(
    query: Tensor, seen: VisibleKV, how: Scaling, watched: bool
) -> tuple[Tensor, Tensor | None]:
    """Return attention [row, head, v_dim] of ``query`` [row, head, dim], and if it is watched the
    weights [head, row, slot] of the rows that its piece does not skip, where they were not shown yet.
    For what `suits` only."""
    n, heads, _ = query.shape
    kv_heads, n_keys, v_dim = seen.values.shape
    if pays(n * heads // kv_heads, n_keys):
        return _by_head(query * how.scale, seen, watched)
    asked, group = blocks_of(query, kv_heads) * how.scale, heads // kv_heads
    n_rows, bias, piece = n * group, seen.repeated(group), seen.piece
    clear, skipped = (0, 0) if piece is None else (piece.clear, piece.skipped)
    step = min(kv_heads, max(1, SCRATCH // (4 * n_rows * n_keys)))
    out, scratch = query.new_empty(kv_heads, n_rows, v_dim), _scratch(step * n_rows * n_keys)
    show, keeps = seen.show if watched else None, watched and seen.show is None
    shown = query.new_empty(kv_heads, group, n - skipped, n_keys) if keeps else None
    for first in range(0, kv_heads, step):
        some = slice(first, min(first + step, kv_heads))
        shares = scratch.view(step, n_rows, n_keys)[: some.stop - first]
        scores = asked_of(asked[some], seen.keys[some], shares)
        if bias is not None:
            scores[..., clear:] += bias[:, clear:]
        whole = None if shown is None or skipped or step < kv_heads else shown.view(shares.shape)
        shares = torch.softmax(scores, -1, out=shares if whole is None else whole)
        torch.bmm(shares, seen.values[some], out=out[some])
        mine = shares.view(-1, group, n, n_keys)[:, :, skipped:]
        if show is not None:
            show(mine.flatten(0, 1), skipped)
        if shown is not None and whole is None:
            shown[some] = mine
    return rows_of(out, n), None if shown is None else shown.flatten(0, 1)


def asked_of(asked: Tensor, keys: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``asked`` [head, query, dim] times ``keys`` [head, slot, dim], [head, query, slot], maybe in ``out``.
    Few queries are multiplied from behind on CPUs, by which keys are read as they lie: a tenth to a third
    of the time of both products less (docs/LOG.md, 2026-11-27)."""
    if asked.shape[1] <= FEW and asked.is_cpu and asked.dtype == torch.float32:
        return torch.bmm(keys, asked.transpose(1, 2)).transpose(1, 2)
    return torch.bmm(asked, keys.transpose(1, 2), out=out)


def _by_head(query: Tensor, seen: VisibleKV, watched: bool) -> tuple[Tensor, Tensor | None]:
    """The same head by head, some rows at a time, by `product`; ``query`` is scaled."""
    n, heads, dim = query.shape
    kv_heads, n_keys, v_dim = seen.values.shape
    group, bias, piece = heads // kv_heads, seen.bias, seen.piece
    clear, skipped = (0, 0) if piece is None else (piece.clear, piece.skipped)
    asked = query.view(n, kv_heads, group, dim).permute(1, 2, 0, 3)
    out = query.new_empty(kv_heads, group, n, v_dim)
    show, keeps = seen.show if watched else None, watched and seen.show is None
    shown = query.new_empty(kv_heads, group, n - skipped, n_keys) if keeps else None
    step = max(1, SCRATCH // (4 * group * n_keys))
    if seen.causal:
        step = min(step, BLOCK)
        later = query.new_full((step, step), -inf).triu_(1)
    for first in range(0, n, step):
        rows = slice(first, min(first + step, n))
        stop = rows.stop if seen.causal else n_keys
        for head in range(kv_heads):
            some = product(asked[head, :, rows].reshape(-1, dim), seen.keys[head, :stop])
            shares = some.view(group, -1, stop)
            if seen.causal:
                shares[..., first:] += later[: stop - first, : stop - first]
            elif bias is not None:
                shares[..., clear:] += bias[rows, clear:]
            torch.softmax(shares, -1, out=shares)
            read = product(some, seen.values[head, :stop].t())
            out[head, :, rows] = read.view(group, -1, v_dim)
            begin = max(first, skipped)
            if show is not None and rows.stop > begin:
                show(shares[:, begin - first :], begin)
            if shown is not None and rows.stop > begin:
                shown[head, :, begin - skipped : rows.stop - skipped] = shares[:, begin - first :]
    made = out.permute(2, 0, 1, 3).reshape(n, heads, v_dim)
    return made, None if shown is None else shown.flatten(0, 1)


def _scratch(n: int) -> Tensor:
    """Return a place for ``n`` scores, of which nobody may keep anything: the same each time, since new
    memory costs more than the scores do."""
    if n * 4 > SCRATCH:
        return torch.empty(n)
    if not hasattr(_mine, "scores"):
        with torch.inference_mode(False):  # it is written in and out of inference mode
            _mine.scores = torch.empty(SCRATCH // 4)
    scores: Tensor = _mine.scores
    return scores[:n]


def weights_of(query: Tensor, seen: VisibleKV, how: Scaling) -> Tensor:
    """Return attention weights [kv_head, group * row, slot], in float32 at least."""
    return shares_of(scores_of(query, seen, how), how, len(query))


def shares_of(scores: Tensor, how: Scaling, n: int) -> Tensor:
    """Return what of each of ``n`` rows' attention [kv_head, group * row, slot] goes where."""
    half = scores.dtype in (torch.bfloat16, torch.float16)
    wide = torch.float32 if half else scores.dtype
    if how.sinks is None:
        return scores.softmax(-1, dtype=wide)
    sinks = how.sinks.view(len(scores), -1, 1).expand(-1, -1, n).reshape(*scores.shape[:2], 1)
    return torch.cat((scores.to(wide), sinks.to(wide)), -1).softmax(-1)[..., :-1]


def scores_of(query: Tensor, seen: VisibleKV, how: Scaling) -> Tensor:
    """Return attention scores [kv_head, group * row, slot], -inf where a row sees nothing.

    Where a query is wider than keys, what is behind meets the values (`run/latent.py`).
    """
    kv_heads = len(seen.keys)
    folded, keys = blocks_of(query, kv_heads), seen.keys.transpose(1, 2)
    bias = seen.repeated(query.shape[1] // kv_heads)
    if query.shape[2] > seen.keys.shape[2]:
        scores = torch.baddbmm(
            folded[..., : keys.shape[1]] @ keys,
            folded[..., keys.shape[1] :],
            seen.values.transpose(1, 2),
        ).mul_(how.scale)
        if how.softcap is not None:
            scores = torch.tanh(scores / how.softcap) * how.softcap
        return scores if bias is None else scores + bias
    if how.softcap is not None:
        scores = torch.tanh(folded @ keys * (how.scale / how.softcap)) * how.softcap
        return scores if bias is None else scores + bias
    if bias is not None:
        return torch.baddbmm(bias.expand(kv_heads, -1, -1), folded, keys, alpha=how.scale)
    return asked_of(folded * how.scale, seen.keys)


def blocks_of(query: Tensor, kv_heads: int) -> Tensor:
    """[row, head, dim] -> [kv_head, group * row, dim]: no copy of the keys a group shares."""
    n, heads, dim = query.shape
    group = heads // kv_heads
    return query.view(n, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def rows_of(out: Tensor, n: int) -> Tensor:
    """[kv_head, group * row, dim] -> [row, head, dim]."""
    kv_heads, both, dim = out.shape
    group = both // n
    return out.view(kv_heads, group, n, dim).permute(2, 0, 1, 3).reshape(n, -1, dim)
