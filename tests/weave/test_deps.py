"""What chunks read of one another: python -m pytest tests/weave/test_deps.py"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from weaving import again, chat, text

from kvweave import Context, Engine
from kvweave.run.base import Ints
from kvweave.run.model import Runner
from kvweave.weave.deps import Dependence
from kvweave.weave.passes import Floats
from kvweave.weave.repair import Deps

Make = Callable[..., Engine]


@torch.no_grad()
def attention(runner: Runner, tokens: list[int]) -> Tensor:
    """Attention [query, key] of transformers' own full prefill, mean over heads and layers."""
    runner.model.set_attn_implementation("eager")
    try:
        found = runner.model(
            torch.tensor([tokens], device=runner.device),
            past_key_values=DynamicCache(),
            output_attentions=True,
        ).attentions
    finally:
        runner.model.set_attn_implementation("kvweave")
    return torch.stack([layer[0].mean(0) for layer in found]).mean(0)


def assert_records(engine: Engine, context: Context, index: int, n_base: int = 0) -> None:
    """The record of a part equals what the oracle pays to the parts before it but the base."""
    full = attention(engine.runner, context.tokens())
    starts = [0]
    for part in context.parts:
        starts.append(starts[-1] + part.n)
    mine = full[starts[index] : starts[index + 1]].float().cpu().numpy()
    found = engine.weaver.dependence
    part = context.parts[index]
    wanted = mine[:, n_base : starts[index]].sum(1)
    assert np.allclose(found.rows(int(part.id)), wanted, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt_neox"])
def test_prefilled_text_records_what_it_reads(engines: Make, name: str) -> None:
    engine = engines(name)
    context = engine.context("c", repair="deps")
    for i, n in enumerate((6, 9, 4)):
        context.append(text(n, i))
        if i:
            context.weave()
    for i in range(3):
        assert_records(engine, context, i)
    assert float(engine.weaver.dependence.rows(int(context.parts[0].id)).sum()) == 0


@pytest.mark.parametrize("which", ["full:records", "deps"])
def test_recomputed_chunks_record_what_they_read_but_not_of_their_base(
    engines: Make, which: str
) -> None:
    engine = engines()
    context = chat(engine, "c", [6, 9, 4])
    context.weave(which, share=1.0)
    for i in (2, 3):
        assert_records(engine, context, i, n_base=5)
    assert engine.weaver.dependence.rows(int(context.parts[1].id)) is None, "not computed here"


def test_an_answer_records_what_it_reads_and_its_last_token_later(engines: Make) -> None:
    engine = engines()
    context = engine.context("c", repair="deps")
    context.append(text(6, 1))
    context.append(text(5, 2))
    context.generate(7, ignore_eos=True)
    rows = engine.weaver.dependence.rows(int(context.parts[2].id))
    assert rows[-1] == 0 < rows[-2], "the last token was sampled, not run"
    context.append(text(3, 3))
    context.weave()
    for i in range(4):
        assert_records(engine, context, i)


def test_nothing_is_recorded_unless_asked(engines: Make) -> None:
    engine = engines()
    context = chat(engine, "c", [6, 9, 4], repair="random", share=1.0)
    context.append(text(3, 77))
    context.weave()
    context.weave("full")
    assert engine.weaver.dependence.n_bytes == 0


class Spy(Deps):
    mass: Floats
    chosen: Ints

    def choose(self, view):  # type: ignore[no-untyped-def]
        self.mass = view.dependence()
        self.chosen = super().choose(view)
        return self.chosen


def test_deps_takes_the_rows_that_read_most(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [6, 9, 4])
    first.weave("full:records")
    spy = Spy()
    context = again(engine, "d", first, repair=spy, share=4 / 13)
    context.append(text(3, 77))
    records = [engine.weaver.dependence.rows(int(first.parts[i].id)) for i in (2, 3)]
    assert context.weave().repaired == 4
    assert np.array_equal(spy.mass, np.concatenate(records)) and spy.mass.min() > 0
    assert spy.chosen.tolist() == (np.sort(np.argsort(-spy.mass)[:4]) + 11).tolist()


def test_rows_nothing_is_recorded_of_come_last_and_chunk_starts_first(engines: Make) -> None:
    engine = engines()
    spy = Spy()
    context = chat(engine, "c", [6, 9, 4], repair=spy, share=4 / 13)
    context.weave()
    assert spy.mass.tolist() == [0.0] * 13 and spy.chosen.tolist() == [11, 12, 20, 21]
    mass = np.full((4, 3), 0.1, np.float32)
    engine.weaver.dependence.note(context.parts[3], 0, mass, context.session.state.woven[:3])
    later = again(engine, "d", context, repair=spy, share=6 / 13)
    later.weave()
    assert spy.chosen.tolist() == [11, 12, 20, 21, 22, 23]


def test_a_chunk_repaired_in_part_keeps_its_record(engines: Make) -> None:
    engine = engines()
    first = chat(engine, "c", [6, 9, 4])
    first.weave("full:records")
    before = engine.weaver.dependence.rows(int(first.parts[2].id)).copy()
    again(engine, "d", first, repair="deps", share=0.5).weave()
    assert np.array_equal(before, engine.weaver.dependence.rows(int(first.parts[2].id)))


def test_records_go_with_their_chunk_and_within_their_limit(engines: Make) -> None:
    engine = engines()
    found = engine.weaver.dependence
    context = engine.context("c", repair="deps")
    for i in range(3):
        context.append(text(6, i))
    context.weave()
    ids = [int(p.id) for p in context.parts]
    assert found.n_bytes == 3 * 6 * 4
    small = Dependence(engine.table, limit=100)
    for part in context.parts:
        small.note(part, 0, np.ones((6, 0), np.float32), ())
    assert small.rows(ids[0]) is not None and small.n_bytes == 72
    small.limit = 60
    small.note(context.parts[0], 0, np.ones((6, 0), np.float32), ())
    assert [small.rows(i) is None for i in ids] == [False, True, False]
    context.drop(2)
    assert found.rows(ids[2]) is None and found.rows(ids[1]) is not None
    engine.close_context("c")
    assert found.n_bytes == 0
