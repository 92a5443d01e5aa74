"""A last layer that is computed for a few rows leaves and gives what one for all rows does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
import zoo
from conftest import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import only_on_cpu
from run.backend import EXACT, Recorder, off

from kvweave.run import attention
from kvweave.run.base import Mask, Work
from kvweave.run.model import Runner
from kvweave.run.narrow import last_layer
from kvweave.run.part import EACH, ROWS_EACH, STEP, BatchPart

N = 40
NARROWING = (
    "llama", "gemma3", "mixtral", "gpt_neox", "deepseek_v3_latent", "cohere_interleaved",
    "gpt_oss_sinks", "llama4_chunked",
)  # fmt: skip


def widths(runner: Runner) -> list[int]:
    """Note how many rows the MLP of the last layer is given."""
    seen: list[int] = []
    layer = last_layer(runner.model, runner.layers)
    inner = next(m for name, m in layer.named_children() if "mlp" in name or "moe" in name)
    inner.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    return seen


def passes(runner: Runner, plan: list[dict], narrow: bool) -> list[object]:
    """Two contexts in one pass each time, by ``plan``; return all that came of it."""
    was, runner._narrows = runner._narrows, narrow
    try:
        contexts = [runner.new_rows(), runner.new_rows()]
        found: list[object] = []
        for rows in contexts:
            rows.reserve(N)
        for step in plan:
            works, observers = [], []
            for rows, (slots, want, watched) in zip(contexts, step["works"], strict=True):
                seen = None if watched is None else Recorder(watched)
                observers.append(seen)
                tokens = (slots * 31 + step["seed"]) % 97 + 3
                works.append(Work(rows, tokens, slots, slots, want=want, observer=seen))
            found += runner.forward(works)
            for seen in observers:
                if seen is not None:
                    for layer in seen.layers:
                        at, weights = seen.shown(layer, N)
                        found += [torch.tensor(at) + 1, weights]
        for rows in contexts:
            for layer in range(len(runner.layers)):
                found += rows.read(layer)
        return found
    finally:
        runner._narrows = was


@st.composite
def plans(draw: st.DrawFn, n_layers: int) -> list[dict]:
    """All rows of both contexts, then some of them again."""
    steps = []
    for i in range(3):
        works = []
        for _ in range(2):
            slots = np.arange(N)
            if i:
                slots = np.array(sorted(draw(st.sets(st.integers(0, N - 1), min_size=9))))
            n = len(slots)
            want = np.array(sorted(draw(st.sets(st.integers(0, n - 1), max_size=4))), np.int64)
            first = draw(st.integers(0, n - 1))
            last = draw(st.sampled_from([n, draw(st.integers(first, n))]))
            layers = draw(st.sampled_from([(n_layers - 1,), range(n_layers), ()]))
            watched = draw(st.sampled_from([None, dict.fromkeys(layers, (first, last))]))
            works.append((slots, want, watched))
        steps.append({"works": works, "seed": i})
    return steps


@pytest.mark.parametrize("name", NARROWING)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
@pytest.mark.sampled
def test_few_rows_come_to_the_same_as_all(name, data):
    runner = tiny(name)
    assert runner._narrows
    plan = data.draw(plans(len(runner.layers)))
    few, whole = passes(runner, plan, True), passes(runner, plan, False)
    assert len(few) == len(whole)
    for a, b in zip(few, whole, strict=True):
        assert off(a.double(), b.double()) < EXACT


@only_on_cpu("passes over the pools of a GPU are not narrowed")
def test_only_what_is_wanted_is_computed():
    runner = Runner(oracle.build(*oracle.MODELS["llama"], torch.float64), name="counted")
    seen = widths(runner)
    every = np.arange(N)
    rows = runner.new_rows()
    rows.reserve(N)
    work = Work(rows, every + 3, every, every, want=np.array([3, N - 1]))
    runner.forward([work])
    assert seen == [2]
    watched = Recorder({len(runner.layers) - 1: (N - 5, N)})
    runner.forward([Work(rows, every + 3, every, every, want=np.array([N - 1]), observer=watched)])
    assert seen == [2, 5]
    assert watched.shown(len(runner.layers) - 1, N)[0] == [*range(N - 5, N)]


def test_who_asks_for_queries_gets_those_of_all_rows():
    class Asks(Recorder):
        asks = True
        n = 0

        def ask(self, layer, first, queries):
            if layer == last:
                self.n += len(queries)

    runner, every = tiny("llama"), np.arange(N)
    last, seen, rows = len(runner.layers) - 1, Asks({}), runner.new_rows()
    rows.reserve(N)
    runner.forward([Work(rows, every + 3, every, every, want=every[-1:], observer=seen)])
    assert seen.n == N


def test_a_pass_that_fails_in_its_last_layer_leaves_no_batch_behind():
    runner, every = Runner(oracle.build(*oracle.MODELS["llama"], torch.float64)), np.arange(N)
    layer = last_layer(runner.model, runner.layers)

    def fail(*args):
        raise RuntimeError("no")

    hook = layer.mlp.register_forward_pre_hook(fail)
    rows = runner.new_rows()
    rows.reserve(N)
    work = Work(rows, every + 3, every, every, want=every[-1:])
    with pytest.raises(RuntimeError, match="no"):
        runner.forward([work])
    assert attention.current.get(None) is None
    hook.remove()
    again = runner.new_rows()
    again.reserve(N)
    (logits,) = runner.forward([work])
    (other,) = runner.forward([Work(again, every + 3, every, every, want=every[-1:])])
    assert torch.equal(logits, other)


def test_the_callers_model_has_no_hook():
    model = oracle.build(*oracle.MODELS["llama"], torch.float64)
    runner = Runner(model, name="mine")
    assert runner._narrows
    assert not any(module._forward_pre_hooks for module in model.modules())


# one that shapes what comes of its layers as its input was, attention of its own, states
@pytest.mark.parametrize("kind", ["gpt2", "deepseek_v32", "qwen3_next"])
def test_models_that_cannot_are_run_whole(kind):
    runner = Runner(zoo.tiny(kind), name=kind)
    assert runner.can_run and not runner._narrows


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_are_the_cheapest(data):
    runner = tiny("llama")
    n_slots = data.draw(st.integers(20, 4000))
    some = data.draw(st.sets(st.integers(0, n_slots - 1), min_size=2, max_size=56))
    slots = np.array(sorted(some))
    rows = runner.new_rows()
    rows.reserve(n_slots)
    rows.expect(np.arange(n_slots), np.arange(n_slots))
    window = data.draw(st.sampled_from([None, 64]))
    part = BatchPart(Work(rows, slots, slots, slots), 0)
    mask = Mask(window=window)
    begins = part.see(mask)
    pieces = part.cut(mask, (0, 0))
    n = len(slots)
    assert [p.first for p in pieces] == [0, *(p.last for p in pieces[:-1])] and pieces[-1].last == n
    if part.contiguous and part.first == 0 and begins is None:
        return
    first = np.zeros(n, np.int64) if begins is None else begins
    for p in pieces:
        assert p.begin <= first[p.first : p.last].min() and p.stop > slots[p.last - 1]

    def cost(cuts: tuple[int, ...]) -> int:
        return sum(
            (j - i + ROWS_EACH) * (int(slots[j - 1]) + 1 - int(first[i])) + EACH
            for i, j in pairwise(cuts)
        )

    inside = range(STEP, n, STEP)
    every = [
        (0, *(at for bit, at in enumerate(inside) if chosen >> bit & 1), n)
        for chosen in range(1 << len(inside))
    ]
    assert cost((0, *(p.last for p in pieces))) == min(map(cost, every))
