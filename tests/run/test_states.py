"""Mixers: states replayed from their input rows, carried over by maps, kept and let go of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zoo import VOCAB, tiny

from kvweave import Engine
from kvweave.errors import InvalidArgument
from kvweave.run import replay, states
from kvweave.run.base import Work
from kvweave.run.carry import RoundedMap, StateMap
from kvweave.run.model import Runner
from kvweave.run.states import StateRows
from kvweave.store.kv import KV

TYPES = ("qwen3_next", "lfm2", "falcon_h1", "jamba", "nemotron_h")
N = 200


@pytest.fixture(scope="module", params=TYPES)
def pair(request):
    model = tiny(request.param)
    return Runner(model), model


def text(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB, n)


def native(model, tokens) -> torch.Tensor:
    with torch.inference_mode():
        return model(torch.as_tensor(tokens)[None], use_cache=False).logits[0]


def filled(runner, tokens, raw=None):
    rows, n = runner.new_rows(), len(tokens)
    rows.reserve(n)
    every = np.arange(n)
    (logits,) = runner.forward([Work(rows, tokens, every, every, want=every, raw=raw)])
    return rows, logits


def stateful(rows) -> list[StateRows]:
    found = [layer for layer in rows.layers if isinstance(layer, StateRows)]
    assert found, "no layer keeps a state"
    return found


def close(ours, theirs, tolerance=1e-4) -> None:
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < tolerance


def test_decoding_and_slices_equal_one_full_prefill(pair):
    runner, model = pair
    assert runner.can_move, runner.can_move.reason
    tokens = text(60)
    wanted = native(model, tokens)
    rows, logits = filled(runner, tokens[:40])
    close(logits, wanted[:40])
    for at in range(40, 60):
        rows.reserve(at + 1)
        slot = np.array([at])
        (logits,) = runner.forward([Work(rows, tokens[slot], slot, slot, want=np.array([0]))])
        close(logits[0], wanted[at])
    rows.check_integrity()


def test_rows_written_again_spoil_the_states_behind_them(pair):
    runner, model = pair
    tokens, other = text(60), text(60, 1)
    rows, _ = filled(runner, tokens)
    changed = np.concatenate([tokens[:20], other[20:23], tokens[23:]])
    every = np.arange(20, 60)
    (logits,) = runner.forward([Work(rows, changed[20:], every, every, want=every - 20)])
    close(logits, native(model, changed)[20:])


def test_scattered_rows_are_those_of_a_full_prefill(pair):
    runner, model = pair
    tokens = text(150)
    rows, _ = filled(runner, tokens)
    spoilt = text(150, 3)
    slots = np.array([40, 41, 60, 99, 100, 149])
    for said in (spoilt, tokens):
        work = Work(rows, said[slots], slots, slots, want=np.arange(len(slots)))
        (logits,) = runner.forward([work])
    close(logits, native(model, tokens)[slots])


def test_a_clone_goes_on_by_itself(pair):
    runner, model = pair
    tokens, other = text(50), text(50, 2)
    rows, _ = filled(runner, tokens[:40])
    twin = rows.clone()
    for mine, said in ((rows, tokens), (twin, np.concatenate([tokens[:40], other[40:]]))):
        mine.reserve(50)
        slots = np.arange(40, 50)
        (logits,) = runner.forward([Work(mine, said[slots], slots, slots, want=slots - 40)])
        close(logits, native(model, said)[40:])


def placed(runner, chunks: list[KV], tokens, exact: int | None = None):
    """Return rows with chunks as they are, and the logits of the last ten tokens behind them."""
    n = len(tokens)
    rows = runner.new_rows()
    rows.reserve(n)
    rows.place([(0, chunks)], np.arange(n - 10), exact)
    slots = np.arange(n - 10, n)
    (logits,) = runner.forward([Work(rows, tokens[slots], slots, slots, want=slots - n + 10)])
    rows.check_integrity()
    return rows, logits


def test_maps_carry_what_replaying_would(pair, monkeypatch):
    runner, _ = pair
    tokens = text(N)
    chunks = []
    for first in range(0, N - 10, 95):
        kv = runner.new_kv(95)
        filled(runner, tokens[first : first + 95], raw=kv)
        chunks.append(kv)
    monkeypatch.setattr(replay, "LEAST", N)
    _, wanted = placed(runner, chunks, tokens)
    monkeypatch.undo()
    seen = []
    carry = replay._carry
    monkeypatch.setattr(replay, "_carry", lambda *a: seen.append(1) or carry(*a))
    for _ in range(2):  # made, and made use of
        rows, logits = placed(runner, chunks, tokens)
        close(logits, wanted)
    maps = [span.holder.map for layer in stateful(rows) for span in layer.spans]
    held = [t for m in maps if m for t in (m.factor, m.rest, *m.tails.convs.values())]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in held), "more held than counted"
    mapped = [info for info in runner.layers if info.mixer is not None and info.mixer.form]
    assert len(seen) == 2 * len(mapped) * len(chunks)
    assert bool(held) == bool(mapped)


def test_maps_that_are_many_are_rounded_and_never_used_where_rows_are_exact(pair, monkeypatch):
    runner, _ = pair
    cache = states.MapCache(1 << 30)
    for module in (states, replay):
        monkeypatch.setattr(module, "MAPS", cache)
    tokens = text(N)
    kv = runner.new_kv(95)
    filled(runner, tokens[:95], raw=kv)
    _, wanted = placed(runner, [kv, kv], tokens)
    whole = cache.n_bytes
    if not whole:
        return  # none of its mixers has maps
    holders = [known() for known in cache._used.values()]
    cache.limit = 1
    cache.keep(holders[-1], holders[-1].map)
    assert [holder.map for holder in holders[:-1]] == [None] * (len(holders) - 1)
    cache.limit = 1 << 30
    placed(runner, [kv, kv], tokens)
    cache.limit = whole - 1
    cache.keep(holders[-1], holders[-1].map)
    rounded = [holder for holder in holders if isinstance(holder.map, RoundedMap)]
    assert len(rounded) == (len(holders) > 1) and all(holder.map for holder in holders)
    cache.limit = 1 << 30
    for holder in holders:
        if isinstance(holder.map, StateMap):
            holder.map = RoundedMap.of(holder.map)
    assert cache.n_bytes < 0.5 * whole
    _, near = placed(runner, [kv, kv], tokens, exact=0)
    assert all(isinstance(holder.map, RoundedMap) for holder in holders)
    off = float((near - wanted).abs().max() / wanted.abs().max())
    assert 0 < off < 0.05
    _, both = placed(runner, [kv, kv], tokens)
    assert all(isinstance(holder.map, StateMap) for holder in holders)
    close(both, wanted, 1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_an_exact_answer_rests_on_no_rounded_map(exact, monkeypatch):
    """Maps are rounded as soon as they are made; one chunk is in front of another text, or behind it."""
    cache = states.MapCache(1 << 30)
    for module in (states, replay):
        monkeypatch.setattr(module, "MAPS", cache)
    keep = states.MapCache.keep
    used = []

    def rounding(self, holder, made):
        keep(self, holder, made)
        holder.map = RoundedMap.of(made)

    whole = RoundedMap.whole
    monkeypatch.setattr(states.MapCache, "keep", rounding)
    monkeypatch.setattr(RoundedMap, "whole", lambda map: used.append(1) or whole(map))
    with Engine(Runner(tiny("qwen3_next"), name="q"), base="", repair="none") as engine:
        engine.put("notes", text(80).tolist())
        for i in range(3):
            context = engine.context(f"c{i}")
            if not exact:
                context.append(text(5, i).tolist())
            context.append_chunk("notes")
            context.append(text(7, 9 + i).tolist())
            context.generate(max_tokens=3, ignore_eos=True)
            assert (context.plan.drift == 0) == exact
            assert (context.check().kl < 1e-9) == exact
        assert bool(used) != exact and cache.n_bytes
    assert not cache.n_bytes, "a closed engine leaves no map"


def test_states_are_few_and_counted(pair):
    runner, _ = pair
    rows, _ = filled(runner, text(60))
    slots = np.array([60])
    for at in range(60, 90):
        rows.reserve(at + 1)
        slots = np.array([at])
        runner.forward([Work(rows, text(1), slots, slots, want=np.array([0]))])
    for layer in stateful(rows):
        assert max(layer.marks, default=None) == (90 if layer.mixer.sums else None)
        alive = sum(state.n_bytes for state in layer.marks.values())
        assert layer.k.nbytes + layer.v.nbytes + alive <= layer.n_bytes
    rows.truncate(30)
    assert all(slot <= 30 for layer in stateful(rows) for slot in layer.marks)


def test_single_rows_cannot_be_freed():
    with Engine(Runner(tiny("qwen3_next"))) as engine:
        with pytest.raises(InvalidArgument, match="states"):
            engine.context("agent", keep="h2o:64")
        with pytest.raises(InvalidArgument, match="states"):
            engine.context("agent", keep="full:64")
        said = []
        for keep in (None, "full"):  # which frees nothing, and is what none is
            context = engine.context(f"agent-{keep}", keep=keep)
            context.append([*map(int, text(30))])
            said.append(context.generate(max_tokens=4, ignore_eos=True))
        assert said[0].tokens == said[1].tokens and said[1].plan.drift == 0


def test_the_callers_model_stays_as_it_was():
    model = tiny("qwen3_next")
    tokens = text(30)
    before = native(model, tokens)
    Runner(model)
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(native(model, tokens), before)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.sampled
def test_half_precision_is_learned_and_off_by_its_rounding_alone(model_type, half):
    narrow = tiny(model_type, half)
    wide = tiny(model_type)
    wide.load_state_dict(narrow.state_dict())
    runner, tokens = Runner(narrow), text(60)
    assert runner.can_run and runner.can_move, runner.can_run.reason
    wanted = native(wide, tokens)
    own = (native(narrow, tokens).float() - wanted).abs().max() / wanted.abs().max()
    rows, logits = filled(runner, tokens)
    close(logits.float(), wanted, 2 * float(own) + 1e-3)
    learned = Runner(wide).layers
    for ours, theirs in zip(runner.layers, learned, strict=True):
        if ours.mixer is not None:
            assert ours.mixer.form == theirs.mixer.form
    for layer in stateful(rows):
        assert all(state.n_bytes == layer.mixer.n_bytes for state in layer.marks.values())
