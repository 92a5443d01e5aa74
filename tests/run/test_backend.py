"""Every backend does what `kvweave.run.base` says: python -m pytest tests/run -k backend"""

from __future__ import annotations

from functools import cache

import numpy as np
import oracle
import pytest
import torch
from run.backend import (
    ACROSS,
    BACKENDS,
    EXACT,
    MODELS,
    MOVED,
    Recorder,
    assert_kv,
    assert_rows,
    computed,
    cuts,
    ids,
    loud,
    off,
    prefill,
    reference,
    room,
    run,
    some,
    transformers,
    whole,
)
from torch import Tensor

from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.run.base import Backend, Ints, Rows
from kvweave.store.kv import KV

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


def test_positions_are_integers_of_the_host(backend: Backend) -> None:
    rows, _ = prefill(backend, ids(5), np.array([0, 2, 3, 8, 9]))
    positions: Ints = rows.positions
    assert isinstance(positions, np.ndarray) and positions.dtype == np.int64


# ---- passes


@pytest.mark.parametrize("at", [(1,), (29,), (13, 14), (5, 12, 20, 28)])
@pytest.mark.sampled
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
@pytest.mark.sampled
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


# ---- against transformers, and each other


@cache
def truth(name: str, n: int) -> tuple[Tensor, list[Tensor]]:
    """Logits and attention of transformers' own forward."""
    model = oracle.build(*MODELS[name])
    model.set_attn_implementation("eager")
    with torch.no_grad(), oracle.Float64():  # their softmax would be in float32
        out = model(torch.from_numpy(ids(n))[None].to(oracle.DEVICE), output_attentions=True)
    return out.logits[0], [weights[0] for weights in out.attentions]


@pytest.mark.parametrize("kind", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_attention_are_those_of_transformers(kind: str, name: str) -> None:
    n, seen, backend = 30, Recorder(), BACKENDS[kind](name)
    _, logits = prefill(backend, ids(n), observer=seen)
    theirs, attention = truth(name, n)
    assert off(logits, theirs) < ACROSS
    for layer, weights in enumerate(attention):
        assert off(seen.shown(layer, n)[1].double(), weights.double()) < 1e-6


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
        assert off(a, b) < ACROSS
    alive = np.arange(50, 65)
    assert_rows(ours, rows2, rows, alive, bound=ACROSS)
    assert_rows(ours, rows2, rows, layers=[1, 2], bound=ACROSS)
    assert_kv(raw2, raw, ACROSS)
    for layer in seen.layers:
        assert off(seen2.shown(layer, 53)[1].double(), seen.shown(layer, 53)[1]) < 1e-6
