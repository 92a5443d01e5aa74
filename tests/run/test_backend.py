"""Every backend does what `kvweave.run.base` says: python -m pytest tests/run/test_backend.py"""

from __future__ import annotations

import threading
from functools import cache
from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from reference import Reference, Sizes
from run.backend import (
    EXACT,
    MOVED,
    Recorder,
    assert_kv,
    assert_rows,
    computed,
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
from torch import Tensor

from kvweave.errors import ContextTooLong, InvalidArgument, LoadFailed
from kvweave.run.base import Backend, Ints, Mask, Observer, Rows, Work
from kvweave.run.model import Runner
from kvweave.store.arriving import Arriving, Load
from kvweave.store.kv import KV

# name -> (model type of transformers, changes of its configuration)
MODELS = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": 7}),
    "ministral": (
        "ministral",
        {
            "sliding_window": 7,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "num_key_value_heads": 1,
        },
    ),
}


@cache
def reference(name: str) -> Reference:
    if name == "masks":
        return Reference(Sizes(masks=(Mask(window=5), Mask(), Mask(chunk=8))))
    model = oracle.build(*MODELS[name])
    return Reference(Sizes.of(model.config), model.state_dict())


@cache
def transformers(name: str) -> Runner:
    return Runner(oracle.build(*MODELS[name]), name=name)


BACKENDS = {"reference": reference, "transformers": transformers}
NAMES = [(kind, name) for kind in BACKENDS for name in MODELS] + [("reference", "masks")]


@pytest.fixture(params=NAMES, ids="-".join)
def backend(request: pytest.FixtureRequest) -> Backend:
    kind, name = request.param
    made: Backend = BACKENDS[kind](name)
    return made


# ---- what it says of itself


def test_shapes(backend: Backend) -> None:
    assert backend.can_move and backend.layers
    backend.require_move()
    shapes = [layer.shape for layer in backend.layers]
    kv = backend.new_kv(5)
    for shape, k, v in zip(shapes, kv.k, kv.v, strict=True):
        assert (k.dtype, k.device) == (v.dtype, v.device) == (backend.dtype, backend.device)
        assert k.shape == (5, shape.k_heads, shape.k_dim)
        assert v.shape == (5, shape.v_heads, shape.v_dim)
    assert kv.n_bytes == 5 * backend.row_bytes
    rows, logits = prefill(backend, ids(5))
    assert logits.shape == (5, backend.n_vocab) and rows.n == 5 and not rows.lossy
    for layer, shape in enumerate(shapes):
        k, v = rows.read(layer)
        assert k.shape == (5, shape.k_heads, shape.k_dim)
        assert v.shape == (5, shape.v_heads, shape.v_dim)
    with pytest.raises(InvalidArgument):
        backend.new_rows("nothing")


def test_bytes_are_told_before_they_are_taken(backend: Backend) -> None:
    rows = backend.new_rows()
    assert rows.n == 0 and rows.n_bytes == 0
    for n in (3, 40, 20, 41):
        told = rows.bytes_for(n)
        rows.reserve(n)
        assert rows.n_bytes == told >= n * backend.row_bytes
        assert rows.n == 0


# ---- passes


def cuts(n: int, *at: int) -> list[tuple[int, int]]:
    return list(pairwise([0, *at, n]))


@pytest.mark.parametrize("at", [(1,), (29,), (13, 14), (5, 12, 20, 28)])
def test_pieces_are_a_whole(backend: Backend, at: tuple[int, ...]) -> None:
    n = 30
    kvs = [backend.new_kv(n) for _ in range(2)]
    wanted, logits = prefill(backend, ids(n), raw=kvs[0])
    rows = room(backend, n)
    work = whole(rows, ids(n), raw=kvs[1])
    parts = [run(backend, work.part(*cut)) for cut in cuts(n, *at)]
    assert off(torch.cat(parts), logits) < EXACT
    assert_rows(backend, rows, wanted)
    assert_kv(kvs[1], kvs[0])


def test_contexts_of_one_pass_do_not_see_each_other(backend: Backend) -> None:
    """A prefill, the next token of another, scattered rows of a third, all together."""
    tokens = [ids(n, n) for n in (13, 20, 26)]
    wanted = [prefill(backend, each) for each in tokens]
    raw = computed(backend, tokens[0])
    rows = [room(backend, 20), prefill(backend, tokens[1][:19])[0], wanted[2][0].clone()]
    rows[1].reserve(20)
    rows[2].put(np.array([3, 4, 11]), loud(backend, 3))
    found_raw = backend.new_kv(13)
    works = [
        whole(rows[0], tokens[0], want=np.array([12]), raw=found_raw),
        some(rows[1], tokens[1], [19]),
        some(rows[2], tokens[2], [3, 4, 11], want=np.array([0, 2])),
    ]
    found = backend.forward(works)
    for mine, (_, logits), at in zip(found, wanted, ([12], [19], [3, 11]), strict=True):
        assert off(mine, logits[at]) < EXACT
    for mine, (theirs, _) in zip(rows, wanted, strict=True):
        assert_rows(backend, mine, theirs)
    assert_kv(found_raw, raw)


@pytest.mark.parametrize("n", [30, 400])
def test_scattered_rows_are_recomputed_exactly(backend: Backend, n: int) -> None:
    """Where rows are wrong, recomputing those gives what a prefill gives, in whatever pieces."""
    wanted, logits = prefill(backend, ids(n))
    rng = np.random.default_rng(n)
    todo = np.sort(rng.choice(n - 1, n // 3, replace=False))
    for cut in ((), (len(todo) // 2,), (1, 2, len(todo) - 1)):
        rows = wanted.clone()
        rows.put(todo, loud(backend, len(todo)))
        assert off(rows.read(1, todo)[1], wanted.read(1, todo)[1]) > 1
        work = some(rows, ids(n), todo)
        found = [run(backend, work.part(*c)) for c in cuts(len(todo), *cut)]
        assert off(torch.cat(found), logits[todo]) < EXACT
        assert_rows(backend, rows, wanted)


def test_no_row_sees_what_comes_after_it(backend: Backend) -> None:
    """Rows before, between and behind the computed ones: only those before count.

    A causal mask aligned to the bottom right, right for a suffix, fails here.
    """
    n, slots = 24, np.array([2, 9, 10, 17])
    _, logits = prefill(backend, ids(n))
    for stop, at in enumerate(slots, 1):
        rows, _ = prefill(backend, ids(n))
        behind = np.arange(at + 1, n)
        rows.put(behind, loud(backend, len(behind)))
        found = run(backend, some(rows, ids(n), slots))
        assert off(found[:stop], logits[slots[:stop]]) < EXACT
        if stop < len(slots):
            assert off(found[stop:], logits[slots[stop:]]) > 1e-3, "nothing was there to be seen"


def test_positions_may_have_gaps(backend: Backend) -> None:
    """Distance counts, not slots; and far away all is as at the start."""
    n = 20
    gaps = np.sort(np.random.default_rng(3).choice(60, n, replace=False))
    wanted, logits = prefill(backend, ids(n), gaps)
    assert off(prefill(backend, ids(n))[1], logits) > 1e-3
    rows = room(backend, n)
    for start, stop in cuts(n, 4, 5, 12):
        run(backend, whole(rows, ids(n), gaps).part(start, stop))
    assert_rows(backend, rows, wanted)
    assert wanted.positions[:n].tolist() == gaps.tolist()
    far = gaps + 8 * 50  # a multiple of every aligned run of positions
    assert off(prefill(backend, ids(n), far)[1], logits) < 10 * MOVED


def test_the_same_works_again_change_nothing(backend: Backend) -> None:
    n = 18
    rows, raw, seen = room(backend, n), backend.new_kv(n), Recorder()
    work = whole(rows, ids(n), raw=raw, observer=seen)
    logits = run(backend, work)
    once, first = rows.clone(), raw.clone()
    assert off(run(backend, work), logits) < EXACT
    assert_rows(backend, rows, once)
    assert_kv(raw, first)
    assert seen.ended == 2


def test_only_wanted_logits_come_back(backend: Backend) -> None:
    n = 12
    _, logits = prefill(backend, ids(n))
    for want in ([], [0], [11], [0, 5, 6], list(range(n))):
        at = np.array(want, dtype=np.int64)
        _, found = prefill(backend, ids(n), want=at)
        assert found.shape == (len(want), backend.n_vocab)
        assert off(found, logits[at]) < EXACT


@pytest.mark.parametrize("last", [0, 1])
def test_a_pass_may_end_early(backend: Backend, last: int) -> None:
    """Rows are written up to that layer; the others stay, also beside a work that goes on."""
    n, above = 14, range(last + 1, len(backend.layers))
    wanted, logits = prefill(backend, ids(n))
    other = loud(backend, n)
    for beside in (False, True):
        rows, before, through = room(backend, n), room(backend, n), room(backend, n)
        for each in (rows, before):
            each.place([(0, [other])], np.arange(n))
        raw, seen = backend.new_kv(n), Recorder()
        raw.k[-1].fill_(7)
        works = [whole(rows, ids(n), want=np.arange(0), last=last, raw=raw, observer=seen)]
        works += [whole(through, ids(n))] if beside else []
        found = backend.forward(works)
        assert len(found[0]) == 0
        assert_rows(backend, rows, wanted, layers=range(last + 1))
        assert_rows(backend, rows, before, layers=above)
        assert bool((raw.k[-1] == 7).all()) and seen.layers == list(range(last))
        if beside:
            assert off(found[1], logits) < EXACT
            assert_rows(backend, through, wanted)


def test_tokens_may_be_on_the_device(backend: Backend) -> None:
    n = 12
    wanted, logits = prefill(backend, ids(n))
    tokens = torch.from_numpy(ids(n)).to(backend.device)
    rows = room(backend, n)
    work = whole(rows, tokens)
    assert isinstance(work.part(0, 5).tokens, Tensor)
    beside = room(backend, n)
    first, also = backend.forward([work.part(0, 5), whole(beside, ids(n))])
    assert off(torch.cat((first, run(backend, work.part(5, n)))), logits) < EXACT
    assert off(also, logits) < EXACT
    assert_rows(backend, rows, wanted)


def test_too_long_is_refused_before_anything_is_written(backend: Backend) -> None:
    rows, _ = prefill(backend, ids(8))
    rows.reserve(10)
    before, beside = rows.clone(), room(backend, 4)
    raw, seen = KV([torch.zeros(0)], [torch.zeros(0)]), Recorder()
    works = [
        whole(beside, ids(4)),
        some(
            rows,
            ids(10),
            [7, 8, 9],
            positions=np.array([7, 8, backend.limit]),
            raw=raw,
            observer=seen,
        ),
    ]
    with pytest.raises(ContextTooLong) as error:
        backend.forward(works)
    assert (error.value.n, error.value.limit) == (backend.limit + 1, backend.limit)
    assert beside.n == 0 and seen.ended == 0 and not seen.asked
    assert_rows(backend, rows, before)
    works[1].positions[-1] -= 1
    works[1].raw = None
    backend.forward(works)
    assert rows.n == 10 and rows.positions[9] == backend.limit - 1


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
    shapes = [layer.shape for layer in backend.layers]
    load = Load(7, shapes, kv.n_tokens, backend.dtype.itemsize)
    for layer in range(n_layers):
        load.add(kv.k[layer], kv.v[layer])
    return Arriving(load)


def test_a_chunk_may_arrive_while_the_pass_runs(backend: Backend) -> None:
    n, layers = 8, len(backend.layers)
    kv, tokens = computed(backend, ids(n)), ids(12)
    there, away = room(backend, 12), room(backend, 12)
    there.place([(0, [kv])], np.arange(n))
    chunk = arriving(backend, kv, 1)
    away.place([(0, [chunk])], np.arange(n))
    assert away.pending and not away.arrived and away.n == n

    def arrive() -> None:
        for layer in range(1, layers):
            chunk.load.add(kv.k[layer], kv.v[layer])

    later = threading.Timer(0.05, arrive)
    later.start()
    found, wanted = (run(backend, some(rows, tokens, range(8, 12))) for rows in (away, there))
    later.join()
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


def test_a_chunk_that_does_not_arrive_fails_the_pass(backend: Backend) -> None:
    """What was computed beside it may be run again; the chunk is forgotten with its rows."""
    n = 6
    kv, tokens = computed(backend, ids(n)), ids(16)
    wanted, logits = prefill(backend, tokens)
    rows, beside = room(backend, 16), room(backend, 16)
    rows.place([(0, [kv])], np.arange(n))
    lost = arriving(backend, kv, 1)
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
    assert not rows.pending
    works[1] = some(rows, tokens, range(n, 16), observer=seen)
    found = backend.forward(works)
    assert off(found[0], logits) < EXACT and off(found[1], logits[n:]) < EXACT
    assert_rows(backend, rows, wanted)
    assert (seen.ended, other.ended) == (1, 1)
    assert other.shown(0, 16)[0] == list(range(16)), "the failed pass counts"


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


# ---- against transformers, and each other


@cache
def truth(name: str, n: int) -> tuple[Tensor, list[Tensor]]:
    """Logits and attention of transformers' own forward."""
    model = oracle.build(*MODELS[name])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model(torch.from_numpy(ids(n))[None], output_attentions=True)
    return out.logits[0], [weights[0] for weights in out.attentions]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_attention_are_those_of_transformers(kind: str, name: str) -> None:
    n, seen, backend = 30, Recorder(), BACKENDS[kind](name)
    _, logits = prefill(backend, ids(n), observer=seen)
    theirs, attention = truth(name, n)
    assert off(logits, theirs) < 2e-6  # their softmax is in float32
    for layer, weights in enumerate(attention):
        assert off(seen.shown(layer, n)[1].double(), weights.double()) < 2e-6


def story(backend: Backend) -> tuple[list[Tensor], Rows, KV, Recorder]:
    """Placed chunks, gaps, repaired rows, freed ones, two contexts, a few new tokens."""
    n, positions = 60, np.r_[0:30, 40:75]
    seen, raw, tokens = Recorder(), backend.new_kv(20), ids(65)
    rows, other = room(backend, 65), room(backend, 65)
    chunks = [computed(backend, ids(size, size)) for size in (12, 9, 17)]
    rows.place([(4, chunks[:2]), (30, chunks[2:])], positions)
    todo = np.r_[0:4, 6, 11:13, 20, 25:30, 33, 47:53]
    work = some(rows, tokens, todo, positions=positions[todo], raw=raw, observer=seen)
    logits = [run(backend, work.part(0, 9)), run(backend, work.part(9, 20))]
    rows.free(0, 0, np.array([5, 6, 31]))
    rows.free(len(backend.layers) - 1, 0, np.arange(2, 50))
    tail = np.arange(53, n)
    both = [some(rows, tokens, tail, positions=positions[tail]), whole(other, tokens[:50])]
    logits += backend.forward(both)
    for at in range(n, 65):
        one = np.array([at])
        logits.append(run(backend, some(rows, tokens, one, positions=positions[one])))
    return logits, rows, raw, seen


@pytest.mark.parametrize("name", MODELS)
def test_backends_agree(name: str) -> None:
    ours, theirs = reference(name), transformers(name)
    for a, b in zip(ours.layers, theirs.layers, strict=True):
        assert (a.shape, a.mask, a.rotation.key) == (b.shape, b.mask, b.rotation.key)
    assert (ours.limit, ours.n_vocab, ours.ends) == (theirs.limit, theirs.n_vocab, theirs.ends)
    assert ours.row_bytes == theirs.row_bytes
    (wanted, rows, raw, seen), (found, rows2, raw2, seen2) = map(story, (ours, theirs))
    for a, b in zip(found, wanted, strict=True):
        assert off(a, b) < EXACT
    alive = np.arange(50, 65)
    assert_rows(ours, rows2, rows, alive)
    assert_rows(ours, rows2, rows, layers=[1, 2])
    assert_kv(raw2, raw)
    for layer in seen.layers:
        assert off(seen2.shown(layer, 53)[1].double(), seen.shown(layer, 53)[1]) < 1e-6


def test_positions_are_integers_of_the_host(backend: Backend) -> None:
    rows, _ = prefill(backend, ids(5), np.array([0, 2, 3, 8, 9]))
    positions: Ints = rows.positions
    assert isinstance(positions, np.ndarray) and positions.dtype == np.int64
