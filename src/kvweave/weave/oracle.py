"""How far a woven context is from a full prefill of the same tokens at the same positions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvweave.run.attention import BLOCK, Segment
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows
from kvweave.weave.check import Check as Check

if TYPE_CHECKING:
    from kvweave.weave.context import Context


def prefill(
    runner: Runner, tokens: Tensor, positions: Tensor, span: slice
) -> tuple[KVRows, Tensor]:
    """Return rows and the logits [span, vocab] of a full prefill."""
    n = tokens.numel()
    rows = runner.new_rows()
    rows.reserve(n)
    found = []
    for slots in torch.split(torch.arange(n), BLOCK):
        at = slots.to(tokens.device)
        wanted = (slots >= span.start) & (slots < span.stop)
        segment = Segment(rows, tokens[at], slots, positions[at])
        found.append(runner.forward([segment], wanted.nonzero()[:, 0].to(tokens.device)))
    return rows, torch.cat(found)


def compare(runner: Runner, rows: KVRows, tokens: Tensor, span: slice) -> Check:
    """Compare woven ``rows`` of ``tokens`` with the oracle; changes nothing.

    The logits after the tokens of ``span`` are computed again over a copy of the rows.
    """
    n, n_compared = tokens.numel(), span.stop - span.start
    positions = rows.positions[:n].clone()
    true_rows, wanted = prefill(runner, tokens, positions, span)
    copy = rows.clone()
    slots = torch.arange(span.start, span.stop)
    at = slots.to(tokens.device)
    segment = Segment(copy, tokens[at], slots, positions[at])
    found = runner.forward([segment], torch.arange(n_compared, device=tokens.device))
    wanted_log, found_log = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    kl = (wanted_log.exp() * (wanted_log - found_log)).sum(-1).clamp_min(0)
    difference = (wanted - found).double().abs()
    return Check(
        n_tokens=n,
        n_compared=n_compared,
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float((wanted.argmax(-1) == found.argmax(-1)).double().mean()),
        logit_max=float(difference.max()),
        logit_mean=float(difference.mean()),
        k_error=tuple(_error(a[:n], b[:n]) for a, b in zip(rows.k, true_rows.k, strict=True)),
        v_error=tuple(_error(a[:n], b[:n]) for a, b in zip(rows.v, true_rows.v, strict=True)),
    )


def forced(runs: Sequence[tuple[Context, int, Sequence[int]]]) -> list[Tensor]:
    """Return, for each (woven context, slot, tokens), the logits [token, vocab] after every token.

    The tokens are run from that slot on, over copies of the rows, all in one pass; this is what
    greedy decoding sees as long as it agrees with them. Changes nothing.
    """
    runner = runs[0][0]._weaver.runner
    segments = []
    for context, start, tokens in runs:
        rows, stop = context._state.rows.clone(), start + len(tokens)
        rows.reserve(stop)
        last = rows.positions[start - 1] if start else -1
        positions = last + torch.arange(1, len(tokens) + 1, device=runner.device)
        ids = torch.tensor(tokens, device=runner.device)
        segments.append(Segment(rows, ids, torch.arange(start, stop), positions))
    sizes = [s.n for s in segments]
    logits = runner.forward(segments, torch.arange(sum(sizes), device=runner.device))
    return list(torch.split(logits, sizes))


def _error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
