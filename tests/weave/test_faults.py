"""Faults that were there once, each as small as it can be. The world (`tests/world`) finds them too.

Against plain transformers (`world.twin`), in float64. C1 to C8 are the numbers of the review.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from world import checks, memory, models
from world.mirror import Piece, whole
from world.rows import rows_of
from world.twin import Twin

from kvweave import Answer, Context, Engine, KVWeaveError, Runner, Sampling
from kvweave.errors import InvalidArgument

A, B, NOTES = [20, 21, 22, 23, 24, 25], [30, 31, 32, 33, 34], [9, 10, 11]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def engine(home: Path) -> Iterator[Engine]:
    with opened(home) as made:
        yield made
        made.check_integrity()


def opened(home: Path | None, **options: Any) -> Engine:
    runner, _ = models.build("llama")
    made = Engine(runner, home=home, **({"repair": "none"} | options))
    made.put_many([("a", A), ("b", B)])
    return made


def twin() -> Twin:
    return models.build("llama")[1]


def woven(context: Context, pieces: list[list[int]], out: tuple[int, ...] = ()) -> checks.Woven:
    """The rows of a context made of these tokens behind a BOS token, beside those that are right."""
    all: list[Piece] = [whole([models.BOS], ()), *(whole(p, (models.BOS,)) for p in pieces)]
    assert context.tokens() == [t for p in all for t in p.tokens] + list(out)
    return checks.Woven(twin(), all, out, rows_of(context, 3))


def as_its_rows_say(context: Context, pieces: list[list[int]], answer: Answer) -> None:
    """The answer stands behind everything and is what the model says over the context's rows."""
    found = woven(context, pieces, answer.tokens)
    checks.said(found, [c.logprob for c in answer.choices], greedy=True)
    checks.generated(found)
    if answer.plan.drift == 0:
        checks.said(found, None, greedy=True, right=found.right)
    context.check_integrity()
    assert context.check().n_tokens == len(found.tokens)


# ---- C1: a context that ends in a stored chunk


@pytest.mark.parametrize("repair", ["none", "first_k", "query", "deviation", "auto", "full"])
def test_documents_last_are_answered_from_the_last_row(engine: Engine, repair: str) -> None:
    context = engine.compose("t9 t10 t11{docs}", docs=["a", "b"], repair=repair, share=0.3)
    answer = context.generate(4, ignore_eos=True)
    as_its_rows_say(context, [NOTES, A, B], answer)


def test_a_chunk_behind_new_text_is_answered_from_the_last_row(engine: Engine) -> None:
    context = engine.context("c")
    context.append(NOTES)
    context.append_chunk("a")
    first = context.generate(2, ignore_eos=True)
    context.append_chunk("b")
    second = context.generate(3, ignore_eos=True)
    as_its_rows_say(context, [NOTES, A, [*first.tokens], B], second)


# ---- C2: exact is said of what lost something


def test_a_chunk_stored_with_a_loss_is_not_exact(engine: Engine) -> None:
    engine.place("a", "disk", codec="int4+zstd")
    context = engine.compose("{a}")
    plan = context.weave()
    found = woven(context, [A])
    assert found.error(1, 1 + len(A)) > 1e-3 and not plan.spans[-1].exact
    assert plan.drift is None, "a number would be a promise"


def test_a_chunk_behind_a_base_stored_with_a_loss_is_not_exact(engine: Engine) -> None:
    base = engine.context("c").parts[0]
    engine.place("**", "none")
    engine.place(f"#{base.id}", "disk", codec="int4+zstd")
    context = engine.compose("{a}")
    plan = context.weave()
    assert woven(context, [A]).error(1, 1 + len(A)) > 1e-4
    assert plan.drift is None and not any(span.exact for span in plan.spans)


def test_full_repair_makes_up_for_what_storage_lost(engine: Engine) -> None:
    engine.place("**", "disk", codec="int4+zstd")
    context = engine.compose("{a}t9 t10 t11{b}", repair="full")
    context.weave()
    assert woven(context, [A, NOTES, B]).error(0, 15) < checks.ROWS


@pytest.mark.parametrize("rows", ["int8", "fp8"])
def test_rows_of_eight_bits_are_not_exact(rows: str) -> None:
    with opened(None, rows=rows, repair="full") as engine:
        context = engine.compose("{a}t9 t10 t11")
        plan = context.weave()
        assert woven(context, [A, NOTES]).error(0, 10) > 1e-4
        assert plan.drift is None and not any(span.exact for span in plan.spans)


# ---- C5: check


def test_check_measures_the_rows_of_the_order_there_is(engine: Engine) -> None:
    context = engine.compose("{a}{b}", repair="full")
    context.weave()
    context.reorder([0, 2, 1])
    assert context.check().kl_max < checks.KL
    assert woven(context, [B, A]).error(0, 12) < checks.ROWS


# ---- C6: the budget is of what is alive


def test_what_is_kept_of_an_answer_does_not_hold_its_whole_buffer() -> None:
    runner, _ = models.build("llama")
    budget = 1000 * runner.row_bytes
    with memory.only_from_here(), Engine(runner, repair="none", budget=budget) as engine:
        for i in range(20):
            context = engine.context(f"c{i}")
            context.append([9 + i], name=f"n/{i}")
            context.generate(150, stop_tokens=tuple(range(models.N_VOCAB)))
            engine.close_context(f"c{i}")
        engine.check_integrity()
        assert memory.alive() <= 1.05 * budget + (64 << 10)


# ---- C7: damage stays where it is


def test_a_context_that_is_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, changes, _ = models.MODELS["llama"]
    model, right = models.make(kind, changes)
    runner = Runner(model, models.tokenizer(False), name="damaged")
    monkeypatch.setattr(Runner, "watch_weights", lambda runner: None)  # which would see it
    for broken in (model, runner.model):
        broken.get_input_embeddings().weight[63] = torch.nan
    with Engine(runner, repair="none") as engine:
        well, ill = engine.context("well"), engine.context("ill")
        well.append(A)
        ill.append([*B, 63])
        parts = ill.parts
        answers = [c.begin(Sampling(max_tokens=4, ignore_eos=True)) for c in (well, ill)]
        answer = answers[0].run()
        with pytest.raises(KVWeaveError):
            answers[1].run()
        assert ill.parts == parts, "as it was before its answer"
        prefill = right.full([*A, *answer.tokens], range(len(A) + 4))
        assert prefill.logits.argmax(-1).tolist()[len(A) - 1 : -1] == list(answer.tokens)
        ill.drop(0)
        ill.append(B)
        assert len(ill.generate(2, ignore_eos=True).tokens) == 2
        engine.check_integrity()


# ---- C8


def test_a_context_lives_on_when_its_base_is_dropped_alone(engine: Engine) -> None:
    context = engine.context("c")
    context.drop(0)
    context.append(NOTES)
    context.append_chunk("a")
    context.drop(0)
    context.insert(0, B)
    answer = context.generate(2, ignore_eos=True)
    assert context.tokens() == [*B, *A, *answer.tokens] and context.oldest() == context.parts[0]


def test_closing_while_an_answer_is_under_way_holds_nothing(engine: Engine) -> None:
    context = engine.compose("t9 t10 t11{a}", name="c")
    context.begin(Sampling(max_tokens=9, ignore_eos=True))
    engine.loop.step()
    engine.close_context("c")
    assert sum(u.n_chunks for u in engine.files.du()) == 3, "the base, a and b"
    assert not engine.loop.step(), "and nobody goes on computing it"
    engine.files.rm("a")


@pytest.mark.parametrize(
    "options",
    [
        {"share": -0.5},
        {"share": 1.5},
        {"prune": "evictt"},
        {"positions": "kept"},
        {"repair": "all"},
    ],
)
def test_settings_that_mean_nothing_are_refused(engine: Engine, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        engine.context("c", **options)
    assert "c" not in engine.contexts


def test_a_refused_weave_repairs_as_before(engine: Engine) -> None:
    context = engine.compose("{a}{b}")
    with pytest.raises(InvalidArgument):
        context.weave(repair="full", max_drift=0.1)
    assert context.preview().strategy == "none" and context.weave().repaired == 0


def test_a_fork_repairs_as_what_it_was_forked_from(engine: Engine) -> None:
    context = engine.compose("{a}{b}")
    context.weave(repair="full")
    assert engine.fork(context, "twin").preview().strategy == context.preview().strategy


def test_a_plan_says_from_which_tier_it_was_loaded(engine: Engine) -> None:
    engine.place("b", "disk")
    context = engine.compose("{a}{b}")
    assert [s.tier for s in context.weave().spans] == [oracle.MEMORY, oracle.MEMORY, "disk"]


# ---- found by the world


def test_a_refused_question_leaves_no_name(engine: Engine) -> None:
    context = engine.context("c")
    with pytest.raises(InvalidArgument):
        context.ask("t9 t10", 3, max_drift=0.1)
    assert [e.name for e in engine.files.ls()] == ["a", "b"]


def test_a_stream_that_is_closed_unread_ends_its_answer(engine: Engine) -> None:
    context = engine.compose("{a}t9")
    context.stream(5).close()
    context.append(NOTES)
    assert context.tokens()[-3:] == NOTES


def test_answers_that_are_refused_together_leave_all_as_they_were(engine: Engine) -> None:
    one, two = engine.compose("t9{a}", repair="auto", share=0.5), engine.compose("t10{b}")
    one.weave()
    plan, parts = one.plan, one.parts
    with pytest.raises(InvalidArgument):
        engine.generate_many([one, two, one], 3)
    assert one.parts == parts and one.plan == plan


def test_a_fork_that_fails_holds_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    context = engine.compose("{a}{b}")
    context.weave()
    held, charged = engine.table.hold, dict(engine.shelf.charged())

    def hold(id: Any, name: str) -> None:
        if context.parts[1].id == id:
            raise OSError("the index is full")
        held(id, name)

    monkeypatch.setattr(engine.table, "hold", hold)
    with pytest.raises(OSError):
        engine.fork(context, "twin")
    assert dict(engine.shelf.charged()) == charged
    for part in context.parts:
        assert "twin" not in engine.table.contexts_of(part.id)
    monkeypatch.undo()
    assert engine.fork(context, "twin").tokens() == context.tokens()
