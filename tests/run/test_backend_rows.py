"""Rows of every backend: placed, put, read, copied, forgotten, on their way."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from run.backend import (
    EXACT,
    MOVED,
    Recorder,
    assert_rows,
    computed,
    ids,
    loud,
    off,
    prefill,
    room,
    run,
    some,
    whole,
)

from kvweave.errors import LoadFailed
from kvweave.run.base import Backend
from kvweave.store.arriving import Arriving, Load
from kvweave.store.kv import KV
from kvweave.store.record.transfer import Expected

# ---- rows


def test_placed_rows_are_the_computed_ones(backend: Backend) -> None:
    """KV kept at some positions, placed at the same: equal; at others: as computed there."""
    n, here, there = 9, np.arange(5, 14), np.arange(205, 214)
    kv = computed(backend, ids(n), here)
    for where, allowed in ((here, EXACT), (there, MOVED)):
        wanted, _ = prefill(backend, ids(n), where)
        rows = room(backend, n)
        rows.place([(0, [kv])], where)
        assert not rows.pending and rows.n == n
        rows.check_integrity()
        for layer in range(len(backend.layers)):
            for a, b in zip(rows.read(layer), wanted.read(layer), strict=True):
                assert off(a, b) < allowed
        assert off(rows.read(0)[0], wanted.read(0)[0]) < EXACT, "layer 0 sees no context"


def test_chunks_are_placed_with_gaps_between(backend: Backend) -> None:
    """What is computed in a gap sees the chunks before it, and these stay as they were placed."""
    a, b, c = (computed(backend, ids(n, n)) for n in (6, 4, 5))
    positions = np.r_[0:10, 15:21, 30:36]  # b and c follow each other, at other positions
    tokens = ids(22)
    apart = [room(backend, 22) for _ in range(3)]
    for rows, start in zip(apart, (2, 10, 14), strict=True):
        if start == 10:
            rows.place([(2, [a]), (10, [b, c])], positions)
            assert rows.n == 19 and rows.positions[:19].tolist() == positions[:19].tolist()
        elif start == 14:  # in two times, the second with other rows before it
            rows.place([(2, [a])], positions)
            rows.place([(10, [b, c])], positions)
        else:  # one chunk a time, each before what stands behind it is known
            for at, kv in ((2, a), (10, b), (14, c)):
                rows.place([(at, [kv])], positions[: at + kv.n_tokens])
    gaps = np.r_[0:2, 8:10, 19:22]
    found = []
    for rows in apart:
        rows.check_integrity()
        found.append(run(backend, some(rows, tokens, gaps, positions=positions[gaps])))
        assert rows.n == 22 and rows.positions[:22].tolist() == positions.tolist()
        assert_rows(backend, rows, apart[0])
        assert off(found[-1], found[0]) < EXACT
    alone = room(backend, 4)
    alone.place([(0, [b])], positions[10:14])
    for layer in range(len(backend.layers)):
        for mine, theirs in zip(
            apart[0].read(layer, np.arange(10, 14)), alone.read(layer), strict=True
        ):
            assert off(mine, theirs) < EXACT


def test_put_writes_unrotated_rows(backend: Backend) -> None:
    n, raw = 15, backend.new_kv(15)
    where = np.arange(40, 40 + n)
    wanted, logits = prefill(backend, ids(n), where, raw=raw)
    rows = wanted.clone()
    slots = np.array([1, 4, 5, 14])
    rows.put(slots, loud(backend, 4))
    assert off(rows.read(0, slots)[0], wanted.read(0, slots)[0]) > 1
    rows.put(slots, KV([t[slots] for t in raw.k], [t[slots] for t in raw.v]))
    assert_rows(backend, rows, wanted)
    last = some(rows, ids(n), [14], positions=where[14:])
    assert off(run(backend, last), logits[14:]) < EXACT


def test_read_gives_copies(backend: Backend) -> None:
    rows, _ = prefill(backend, ids(6))
    before = rows.clone()
    slots = np.array([1, 4])
    for layer in range(len(backend.layers)):
        for part, both in zip(rows.read(layer, slots), rows.read(layer), strict=True):
            assert off(part, both[slots]) == 0
            part.fill_(0)
    assert_rows(backend, rows, before)


def test_a_clone_is_on_its_own(backend: Backend) -> None:
    n = 10
    rows, _ = prefill(backend, ids(n))
    before, twin = rows.clone(), rows.clone()
    assert_rows(backend, twin, rows)
    twin.put(np.array([3]), loud(backend, 1))
    twin.truncate(6)
    twin.reserve(40)
    run(backend, some(twin, ids(12, 1), range(6, 12)))
    twin.free(0, 0, np.array([2]))
    assert (rows.n, rows.n_freed, twin.n, twin.n_freed) == (n, 0, 12, 1)
    assert_rows(backend, rows, before)
    rows.check_integrity()
    twin.check_integrity()


def test_a_clone_may_share_layers(backend: Backend) -> None:
    """Those below are its own; it costs no copy of the others."""
    n = 10
    rows, _ = prefill(backend, ids(n))
    before, twin = rows.clone(), rows.clone(1)
    run(backend, whole(twin, ids(n, 1), want=np.arange(0), last=0))
    assert_rows(backend, rows, before)
    assert_rows(backend, twin, prefill(backend, ids(n, 1))[0], layers=[0])
    assert_rows(backend, twin, before, layers=range(1, len(backend.layers)))


def test_forgotten_rows_are_gone(backend: Backend) -> None:
    wanted, logits = prefill(backend, ids(20))
    other = ids(20)
    other[11:] = ids(9, 5)
    rows, _ = prefill(backend, other)
    rows.truncate(30)
    assert rows.n == 20
    rows.truncate(11)
    assert rows.n == 11
    rows.reserve(50)
    found = run(backend, some(rows, ids(20), range(11, 20)))
    assert off(found, logits[11:]) < EXACT
    assert_rows(backend, rows, wanted)
    rows.truncate(0)
    assert rows.n == 0 and rows.read(0)[0].shape[0] == 0


# ---- chunks on their way


def arriving(backend: Backend, kv: KV, n_layers: int) -> Arriving:
    """A chunk of which so many layers have arrived."""
    shapes = tuple(layer.shape for layer in backend.layers)
    load = Load(7, Expected("", kv.n_tokens, shapes, backend.dtype))
    for layer in range(n_layers):
        load.add(kv.k[layer], kv.v[layer])
    return Arriving(load)


def test_a_chunk_may_arrive_while_the_pass_runs(backend: Backend) -> None:
    n, layers = 8, len(backend.layers)
    kv, tokens = computed(backend, ids(n)), ids(12)
    there, away = room(backend, 12), room(backend, 12)
    there.place([(0, [kv])], np.arange(n))
    chunk = arriving(backend, kv, 1)
    guard = threading.Timer(60, chunk.load.fail, ["it was waited for too early"])
    guard.start()
    away.place([(0, [chunk])], np.arange(n))
    assert away.pending and not away.arrived and away.n == n

    def arrive() -> None:
        for layer in range(1, layers):
            chunk.load.add(kv.k[layer], kv.v[layer])

    later = threading.Timer(0.05, arrive)
    later.start()
    found, wanted = (run(backend, some(rows, tokens, range(8, 12))) for rows in (away, there))
    later.join()
    guard.cancel()
    assert off(found, wanted) < EXACT
    assert not away.pending
    assert_rows(backend, away, there)


def test_rows_settle(backend: Backend) -> None:
    n, layers = 8, len(backend.layers)
    kv, more = computed(backend, ids(n)), computed(backend, ids(3, 1))
    there, away = room(backend, 11), room(backend, 11)
    there.place([(0, [kv, more])], np.arange(11))
    away.place([(0, [arriving(backend, kv, layers), more])], np.arange(11))
    assert away.arrived
    away.settle(0)
    assert_rows(backend, away, there, layers=[0])
    away.settle()
    assert not away.pending and away.arrived
    assert_rows(backend, away, there)


@pytest.mark.parametrize("together", [False, True])
def test_a_chunk_that_does_not_arrive_fails_the_pass(backend: Backend, together: bool) -> None:
    """What was computed beside it may be run again; the chunk is forgotten with its rows."""
    n = 6
    kv, tokens = computed(backend, ids(n)), ids(16)
    wanted, logits = prefill(backend, tokens)
    rows, beside = room(backend, 16), room(backend, 16)
    lost = arriving(backend, kv, 1)
    if together:
        rows.place([(0, [kv, lost])], np.arange(2 * n))
    else:
        rows.place([(0, [kv])], np.arange(n))
        rows.place([(n, [lost])], np.arange(2 * n))
    lost.load.fail("it is gone")
    assert rows.arrived, "nothing is waited for"
    seen, other = Recorder(), Recorder()
    works = [
        whole(beside, tokens, observer=other),
        some(rows, tokens, range(12, 16), observer=seen),
    ]
    with pytest.raises(LoadFailed, match="gone"):
        backend.forward(works)
    assert seen.ended == other.ended == 0
    rows.truncate(n)
    works[1] = some(rows, tokens, range(n, 16), observer=seen)
    found = backend.forward(works)
    assert off(found[0], logits) < EXACT and off(found[1], logits[n:]) < EXACT
    assert_rows(backend, rows, wanted)
    assert (seen.ended, other.ended) == (1, 1)
    assert other.shown(0, 16)[0] == list(range(16)), "the failed pass counts"
