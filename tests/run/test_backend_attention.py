"""Attention of every backend: as it is shown, and over what has not been freed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from run.backend import (
    EXACT,
    Recorder,
    assert_rows,
    computed,
    cuts,
    ids,
    loud,
    off,
    prefill,
    room,
    run,
    some,
    visible,
    whole,
)

from kvweave.run.base import Backend, Observer, Work
from kvweave.store.kv import KV

# ---- attention observed


def test_attention_is_shown_as_it_is_paid(backend: Backend) -> None:
    """Every row sums to 1 over what its mask shows, and is nothing elsewhere."""
    n, seen = 40, Recorder()
    positions = np.sort(np.random.default_rng(4).choice(70, n, replace=False))
    prefill(backend, ids(n), positions, observer=seen)
    assert seen.layers == list(range(len(backend.layers))) and seen.ended == 1
    for i, layer in enumerate(backend.layers):
        rows, weights = seen.shown(i, n)
        assert rows == list(range(n)) and weights.shape[0] % layer.shape.k_heads == 0
        may = visible(layer, positions, positions)
        assert bool(((weights > 0) == may).all())
        assert off(weights.sum(-1), torch.ones(weights.shape[:2], dtype=weights.dtype)) < 1e-6


def test_observing_changes_nothing(backend: Backend) -> None:
    wanted, logits = prefill(backend, ids(25))
    rows, found = prefill(backend, ids(25), observer=Recorder({1: (3, 9)}))
    assert off(found, logits) < EXACT
    assert_rows(backend, rows, wanted)


@pytest.mark.parametrize("scattered", [False, True])
def test_parts_of_a_work_are_observed_as_the_whole(backend: Backend, scattered: bool) -> None:
    """Rows keep their numbers, and only those asked for are shown."""
    n = 30
    slots = np.r_[3:9, 12:20, 25:30] if scattered else np.arange(n)
    asked = {0: (0, len(slots)), 1: (4, 11), 2: (0, 1)}
    rows, _ = prefill(backend, ids(n))
    once, parts, nobody = Recorder(asked), Recorder(asked), Observer()
    run(backend, some(rows, ids(n), slots, observer=once))
    work = some(rows, ids(n), slots, observer=parts)
    for cut in cuts(len(slots), 2, 5, 13):
        run(backend, work.part(*cut))
    run(backend, some(rows, ids(n), slots, observer=nobody))
    assert once.ended == 1 and parts.ended == 4
    assert once.asked == {len(slots)} and parts.asked == {2, 5, 13, len(slots)}
    assert once.layers == parts.layers == [0, 1, 2]
    for layer, (first, stop) in asked.items():
        (which, whole_), (again, cut_) = once.shown(layer, n), parts.shown(layer, n)
        assert which == again == list(range(first, stop))
        assert off(cut_, whole_) < 1e-6


def test_only_the_observed_work_of_a_pass_is_shown(backend: Backend) -> None:
    one, two, alone = Recorder(), Recorder(), Recorder()
    backend.forward(
        [
            whole(room(backend, 9), ids(9, 1), observer=one),
            whole(room(backend, 12), ids(12, 2)),
            whole(room(backend, 14), ids(14, 3), observer=two),
        ]
    )
    prefill(backend, ids(14, 3), observer=alone)
    assert one.shown(0, 9)[0] == list(range(9))
    for layer in range(len(backend.layers)):
        assert off(two.shown(layer, 14)[1], alone.shown(layer, 14)[1]) < 1e-6


# ---- rows freed


def test_rows_freed_everywhere_were_never_there(backend: Backend) -> None:
    n, gone = 26, np.array([0, 3, 4, 10])
    kept = np.setdiff1d(np.arange(16), gone)
    rows, _ = prefill(backend, ids(16))
    rows.put(gone, loud(backend, len(gone)))
    heads = [layer.shape.k_heads for layer in backend.layers]
    for layer, n_heads in enumerate(heads):
        for head in range(n_heads):
            rows.free(layer, head, gone)
    assert rows.n == 16 and rows.n_freed == len(gone) * sum(heads)
    assert rows.gone().tolist() == gone.tolist()
    rows.reserve(n)
    less = room(backend, n - len(gone))
    for layer in range(len(backend.layers)):
        before, after = prefill(backend, ids(16))[0].read(layer, kept), rows.read(layer, kept)
        assert all(off(a, b) < EXACT for a, b in zip(after, before, strict=True))
    copied = backend.new_kv(16)
    prefill(backend, ids(16), raw=copied)
    less.place([(0, [KV([t[kept] for t in copied.k], [t[kept] for t in copied.v])])], kept)
    tail = np.arange(16, n)
    found = run(backend, some(rows, ids(n), tail))
    short = Work(less, ids(n)[tail], tail - len(gone), tail, want=np.arange(len(tail)))
    assert off(found, run(backend, short)) < EXACT


def test_rows_are_freed_by_layer_and_head(backend: Backend) -> None:
    """The others of that head get what the freed ones got; all else sees them as before."""
    n, layer, head, gone = 24, 1, backend.layers[1].shape.k_heads - 1, np.array([18, 19, 21])
    rows, _ = prefill(backend, ids(n))
    before, after, twin = Recorder(), Recorder(), Recorder()
    last = some(rows, ids(n), [22, 23], observer=before)
    run(backend, last)
    n_bytes = rows.n_bytes
    rows.free(layer, head, gone[:2])
    rows.free(layer, head, gone[1:])
    assert rows.n_freed == 3 and rows.n_bytes <= n_bytes
    assert not len(rows.gone()), "other heads keep them"
    rows.check_integrity()
    last.observer = after
    logits = run(backend, last)
    for i in range(layer):
        assert off(after.shown(i, n)[1], before.shown(i, n)[1]) < 1e-6
    wanted = before.shown(layer, n)[1].clone()
    group = len(wanted) // backend.layers[layer].shape.k_heads
    mine = wanted[head * group : (head + 1) * group]
    mine[..., gone] = 0
    mine /= mine.sum(-1, keepdim=True)
    assert off(after.shown(layer, n)[1], wanted) < 1e-6
    copy = rows.clone()
    last.rows, last.observer = copy, twin
    assert copy.n_freed == 3 and off(run(backend, last), logits) < EXACT


def test_new_rows_are_not_freed_ones(backend: Backend) -> None:
    n = 16
    wanted, logits = prefill(backend, ids(n))
    kv = computed(backend, ids(n))
    rows = wanted.clone()
    rows.free(0, 0, np.array([2, 9, 14]))
    rows.truncate(9)
    assert rows.n_freed == 1
    rows.place([(0, [kv.rows(0, 9)])], np.arange(9))
    assert rows.n_freed == 0
    assert off(run(backend, some(rows, ids(n), range(9, n))), logits[9:]) < EXACT
    assert_rows(backend, rows, wanted)
