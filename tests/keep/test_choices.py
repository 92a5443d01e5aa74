"""Claims about what a choice takes short cuts to: the same rows and the same numbers as the long way round."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from run.backend import ids, transformers

from kvweave.keep.tokens.kvzip import Replay, Replayed
from kvweave.keep.tokens.spec import _highest
from kvweave.run.base import Work
from kvweave.run.packed import among, less, shared
from kvweave.run.thinned import ThinnedRows


@pytest.mark.parametrize("seed", range(12))
def test_the_highest_are_the_first_of_a_stable_sort(seed: int) -> None:
    """Of equals the newest, whatever else they are: infinite, or all the same."""
    rng = np.random.default_rng(seed)
    heads, n = int(rng.integers(1, 4)), int(rng.integers(1, 40))
    scores = torch.from_numpy(rng.integers(0, 6, (heads, n)).astype(np.float32))
    scores[torch.from_numpy(rng.random((heads, n)) < 0.2)] = torch.inf
    scores[torch.from_numpy(rng.random((heads, n)) < 0.2)] = -torch.inf
    for target in (0, 1, n // 2, n, n + 3):
        found = _highest(scores, target)
        for own, mine in zip(scores.tolist(), found.tolist(), strict=True):
            order = sorted(range(n), key=lambda i: (-own[i], -i))[:target]
            assert np.flatnonzero(mine).tolist() == sorted(order)


@pytest.mark.parametrize("seed", range(8))
def test_slots_are_compared_as_sets_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = (np.flatnonzero(rng.random(30) < share) for share in (rng.random(), rng.random()))
    both = [x for x in a.tolist() if x in b.tolist()]
    assert a[among(a, b)].tolist() == both
    assert less(a, b).tolist() == [x for x in a.tolist() if x not in both]
    first, second = shared(a, b)
    assert a[first].tolist() == b[second].tolist() == both


@pytest.mark.parametrize("start", [0, 3, 20])
def test_replays_are_counted_of_kept_rows_as_of_all(start: int) -> None:
    """Each head's own rows in any order, with padding of weight 0: the most is that of weights of all slots."""
    rng, n, own, heads = np.random.default_rng(start), 40, 6, 3
    stop, end = start + 15, n + own
    tally = Replayed([], sinks=4)
    tally.read(Replay(n, start, stop, np.arange(own)))
    wide = torch.zeros(heads, 2, own, end)
    slots, kept = torch.zeros(heads, 50, dtype=torch.int64), torch.zeros(heads, 2, own, 50)
    for head in range(heads):
        mine = np.append(rng.choice(n, 25 + 3 * head, False), np.arange(n, end))
        weights = torch.from_numpy(rng.random((2, own, len(mine))).astype(np.float32))
        wide[head][..., mine] = weights
        at = rng.permutation(50)[: len(mine)]
        slots[head, at], kept[head][..., at] = torch.from_numpy(mine), weights
    at, most = tally.of_kept(0, end, kept, slots)
    first, wanted = tally.of_attention(0, 0, wide)
    assert at == first == start and torch.allclose(most, wanted, atol=1e-6)
    tally.read(None)
    assert tally.of_kept(0, end, kept, slots) is None


@pytest.mark.parametrize("form", ["", "int8"])
def test_rows_that_went_leave_room_for_those_to_come(form: str) -> None:
    """So that nothing is copied again for these; and no more is there than before."""
    backend = transformers("llama")
    rows, n = backend.new_rows(), 30
    rows.reserve(n)
    slots, heads = np.arange(n), backend.layers[0].shape.k_heads
    backend.forward([Work(rows, ids(n, 1), slots, slots)])
    some = np.arange(2, n)
    for layer in range(len(backend.layers)):
        rows.keep(layer, [some] * heads)
    for ahead in (5, 9, 3):  # as many as go, more, fewer
        before, some = rows.n_bytes, some[5:]
        for layer in range(len(backend.layers)):
            if form:
                rows.code(layer, form, [some[:5] - 5] * heads, ahead)
            else:
                rows.keep(layer, [some] * heads, ahead)
        coded = sum(x.n_bytes for layer in rows.layers for x in layer.levels)
        assert rows.n_bytes <= before + coded
        held = [layer.k for layer in rows.layers if isinstance(layer, ThinnedRows)]
        rows.reserve(n + ahead, exact=True)
        rows.check_integrity()
        assert rows.capacity == n + ahead
        assert all(layer.capacity == n + ahead for layer in rows.layers)
        same = [a.k is b for a, b in zip(rows.layers, held, strict=True)]
        assert all(same) if ahead != 9 else not any(same)
        slots = np.arange(n, n + ahead)
        backend.forward([Work(rows, ids(ahead, 2), slots, slots)])
        n, some = n + ahead, np.append(some, slots)
        rows.check_integrity()
