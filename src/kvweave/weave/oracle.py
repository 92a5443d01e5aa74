"""How far a woven context is from a full prefill of the same tokens at the same positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvweave.run.base import Backend, Ints, Rows, Steps, T, Work
from kvweave.store.kv import KV
from kvweave.weave.check import Check
from kvweave.weave.maker import BLOCK

Given = Sequence[tuple[int, Sequence[KV]]]  # (slot, KV) of rows that no token made


def prefill(
    backend: Backend, tokens: Ints, positions: Ints, span: slice, given: Given = ()
) -> tuple[Rows, Tensor]:
    """Return rows and the logits [span, vocab] of a full prefill; ``given`` rows are as they are."""
    return drive(backend, prefilling(backend, tokens, positions, span, given))


def drive(backend: Backend, steps: Steps[T]) -> T:
    """Run steps here and now, so many rows a pass."""
    try:
        work = next(steps)
        while True:
            cuts = range(0, work.n, BLOCK)
            found = [backend.forward([work.part(at, at + BLOCK)])[0] for at in cuts]
            work = steps.send(torch.cat(found))
    except StopIteration as done:
        result: T = done.value
        return result


def prefilling(
    backend: Backend, tokens: Ints, positions: Ints, span: slice, given: Given = ()
) -> Steps[tuple[Rows, Tensor]]:
    """As `prefill`, as steps."""
    n = len(tokens)
    rows = backend.new_rows()
    rows.reserve(n)
    there = np.zeros(n, bool)
    for slot, kvs in given:
        there[slot : slot + sum(kv.n_tokens for kv in kvs)] = True
    if given:
        rows.place(given, positions)
    slots = np.flatnonzero(~there)
    want = np.flatnonzero((slots >= span.start) & (slots < span.stop))
    logits = yield Work(rows, tokens[slots], slots, positions[slots], want)
    return rows, logits


def comparing(
    backend: Backend, rows: Rows, tokens: Ints, span: slice, given: Given = ()
) -> Steps[Check]:
    """Compare woven ``rows`` of ``tokens`` with the oracle; changes nothing.

    The logits after the tokens of ``span`` are computed again over a copy of the rows.
    """
    n, n_compared = len(tokens), span.stop - span.start
    positions = rows.positions[:n].copy()
    true_rows, wanted = yield from prefilling(backend, tokens, positions, span, given)
    slots = np.arange(span.start, span.stop)
    found = yield Work(rows.clone(), tokens[slots], slots, positions[slots], np.arange(n_compared))
    wanted_log, found_log = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    kl = (wanted_log.exp() * (wanted_log - found_log)).sum(-1).clamp_min(0)
    difference = (wanted - found).double().abs()
    errors = [_errors(rows, true_rows, layer) for layer in range(len(backend.layers))]
    return Check(
        n_tokens=n,
        n_compared=n_compared,
        kl=float(kl.mean()),
        kl_max=float(kl.max()),
        top1=float((wanted.argmax(-1) == found.argmax(-1)).double().mean()),
        logit_max=float(difference.max()),
        logit_mean=float(difference.mean()),
        k_error=tuple(k for k, _ in errors),
        v_error=tuple(v for _, v in errors),
    )


def forced(backend: Backend, runs: Sequence[tuple[Rows, int, Sequence[int]]]) -> list[Tensor]:
    """Return, for each (woven rows, slot, tokens), the logits [token, vocab] after every token.

    The tokens are run from that slot on, over copies of the rows, all in one pass; this is what
    greedy decoding sees as long as it agrees with them. Changes nothing.
    """
    works = []
    for woven, start, tokens in runs:
        rows, n = woven.clone(), len(tokens)
        rows.truncate(start)
        rows.reserve(start + n)
        last = int(rows.positions[start - 1]) if start else -1
        slots = np.arange(start, start + n)
        ids = np.array(tokens, np.int64)
        works.append(Work(rows, ids, slots, last + 1 + np.arange(n), np.arange(n)))
    return backend.forward(works)


def _errors(rows: Rows, true_rows: Rows, layer: int) -> list[float]:
    """Return the errors of a layer's keys and values, of the rows that each head keeps of all that
    there should be."""
    kept = [own[own < true_rows.n] for own in rows.kept(layer)]
    found = []
    for a, b in zip(rows.read(layer), true_rows.read(layer), strict=True):
        heads = a.shape[1]  # of values there may be more than of keys
        slots = [kept[h * len(kept) // heads] for h in range(heads)]
        pairs = [(a[own, h], b[own, h]) for h, own in enumerate(slots)]
        found.append(_error(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs])))
    return found


def _error(found: Tensor, wanted: Tensor) -> float:
    found, wanted = found.double(), wanted.double()
    return float((found - wanted).norm() / wanted.norm().clamp_min(1e-30))
