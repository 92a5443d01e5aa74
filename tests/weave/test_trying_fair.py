"""What answers woven again take and hold, and whom they may hurt: python -m pytest tests/weave/test_trying_fair.py"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
from weave.test_trying import AUTO, asked, taught, waiting, woven_again
from weaving import chat, text

from kvweave import Context, Engine
from kvweave.weave.check import COMPARED
from kvweave.weave.learning import MOST, MOST_KINDS, SELDOM, WAYS, Learner
from kvweave.weave.parts import seen_from
from kvweave.weave.recipes import RECIPES
from kvweave.weave.shadow import UNDER_ALARM, drift_of
from kvweave.weave.trying import Again

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")


class Trial:
    """An audit under way, request by request: the prefill, then one way after the other."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.task = engine, engine.shadow.audit(engine.loop)
        self.request: Any = next(self.task)
        self.audit: Any = None

    def run(self, n: int) -> Trial:
        """Run so many requests to their end; the task does not know yet of the last one's."""
        for i in range(n):
            if i:
                self.go_on()
            self.engine.loop.add(self.request)
            self.engine.loop.run(lambda: not self.request.running)
        return self

    def go_on(self) -> bool:
        """Let the task go on; return whether it has another request."""
        try:
            self.request = self.task.send(None)  # type: ignore[arg-type]
        except StopIteration as ended:
            self.audit = ended.value
            return False
        return True


def learned(engine: Engine) -> int:
    return len(engine.shadow.auditor.learner)


@pytest.mark.sampled
@pytest.mark.parametrize("n", [1, 16, 17, 64, 65, 150])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_question_of_any_length_is_woven_again_as_it_was(
    engines: Make, name: str, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces of 64 rows, where the answer had passes of more."""
    engine = engines(name, **AUTO)
    for i, recipe in enumerate((RECIPES[0], RECIPES[5], "0@3@1")):
        with monkeypatch.context() as patch:
            learner = engine.shadow.auditor.learner
            patch.setattr(learner, "recipe", lambda *_, recipe=recipe: recipe)
            context = asked(engine, f"c{i}")
            context.append(text(n, 77))
            context.generate(3, ignore_eos=True)
        if not len(engine.shadow):
            continue  # of so long a question all is repaired, and nothing is approximate
        found, _ = woven_again(engine, waiting(engine), recipe)
        assert torch.allclose(found, waiting(engine).logits, rtol=1e-9, atol=1e-9), recipe
        engine.shadow.spare()
        engine.close_context(context.name)


def test_of_a_long_answer_no_more_is_predicted_than_was_kept(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(**AUTO)
    asked(engine, "c").generate(COMPARED + 40, ignore_eos=True)
    assert len(waiting(engine).logits) == COMPARED
    trial, forward, wanted = Trial(engine), engine.runner.forward, list[int]()

    def counting(works: Any) -> Any:
        wanted.append(sum(len(work.want) for work in works))
        return forward(works)

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "forward", counting)
        trial.run(1)
        assert sum(wanted) == COMPARED
        for _ in range(3):
            wanted.clear()
            assert trial.go_on()
            trial.run(1)
            assert COMPARED <= sum(wanted) <= COMPARED + 3, "and what a look predicts"


def test_kv_that_goes_is_not_held_by_what_was_placed_of_it(engines: Make) -> None:
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    trial = Trial(engine).run(2)
    assert trial.go_on()
    engine.loop.add(trial.request)  # placed, and no pass was run
    assert trial.request.running
    id = int(engine.table.resolve("c/1").id)
    kv = engine.shelf.ram.get(id)
    assert kv is not None
    held = [ref(t) for t in kv.k]
    del kv
    engine.shelf.drop(id)
    gc.collect()
    assert not any(each() is not None for each in held)
    engine.shadow.spare()
    trial.go_on()


def test_ways_are_compared_over_the_same_rows_only(engines: Make) -> None:
    """Somebody else's answer leaves rows that are exact here too, after three of the ways."""
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    [placed, loaded] = waiting(engine).again.placed()
    trial = Trial(engine).run(4)
    at = placed[2]
    seen = seen_from(placed[:2], at.position)
    assert not at.exact
    engine.shelf.put_in_context(int(at.part.id), seen, loaded[at.part.uid])
    while trial.go_on():
        trial.run(1)
    assert trial.audit.drift > 0 and not learned(engine)


def test_rows_that_went_through_a_codec_since_are_not_tried(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    kv = engine.shelf.ram.get(int(engine.table.resolve("c/1").id))
    assert kv is not None
    kv.lossy = True
    [audit] = engine.audit()
    assert audit.drift > 0 and not learned(engine)


def test_memory_that_was_given_back_is_not_taken_again(engines: Make) -> None:
    """Between the end of one way and the next it is let go of, and somebody takes it."""
    engine = engines(**AUTO)
    chat(engine, "others", [200, 200], first=70)
    asked(engine, "c").generate(3, ignore_eos=True)
    trial, shelf = Trial(engine).run(4), engine.shelf
    held = set(shelf.ram)
    engine.shadow.spare()
    shelf.busy(())
    shelf.charge("||other", shelf.room)
    assert not trial.go_on() and trial.audit.drift > 0 and not learned(engine)
    assert set(shelf.ram) == held and not shelf.room
    shelf.charge("||other", 0)
    engine.check_integrity()


def test_a_drift_counts_before_other_ways_are_tried(engines: Make) -> None:
    """They may wait for hours, where others always ask."""
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    trial = Trial(engine).run(1)
    assert trial.go_on()
    assert [r.n_audits for r in engine.shadow.auditor.report()] == [1]
    trial.task.close()


def test_nothing_is_tried_under_an_alarm(engines: Make) -> None:
    """Time is for audits then, and another way would leave the alarm behind."""
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    auditor, cell = engine.shadow.auditor, waiting(engine).cell
    auditor.saw(cell, 0.1, None)
    auditor._cells[cell].alarm = True
    [audit] = engine.audit()
    assert audit.drift > 0 and not learned(engine)


def test_with_evidence_it_is_another_way(engines: Make) -> None:
    engine = engines(**(AUTO | {"repair": "auto:evidence"}))
    asked(engine, "c").generate(3, ignore_eos=True)
    assert waiting(engine).again is None


def test_rows_of_another_base_teach_nothing(engines: Make) -> None:
    """Their chunk is not lent KV any more when it is placed again: that of this base would be another's."""
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    engine.shadow.spare()
    context: Context = engine.context("d")
    context.set_base(engine.maker.add(text(5, 2000), kind="system"), "base")
    for i in range(3):
        context.append_chunk(f"c/{i}")
    bases = engine.weaver.sources.bases
    engine.maker.canonicalise(bases.rebased(context.parts))
    context.append(text(6, 501))
    context.generate(3, ignore_eos=True)
    assert waiting(engine).cell.bases == "own" and waiting(engine).again is None


# ---- time


def loop_of(audit: float) -> Any:
    return SimpleNamespace(seconds={"": 1.0, "audit": audit})


def test_what_is_placed_and_compared_is_part_of_the_time(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(**AUTO)
    asked(engine, "c").generate(3, ignore_eos=True)
    placing, clock = Again._placing, [0.0]

    def slow(self: Again, rows: Any) -> Any:
        clock[0] += 100
        return placing(self, rows)

    def slowly(*tensors: Any) -> float:
        clock[0] += 1000
        return drift_of(*tensors)

    monkeypatch.setattr("kvweave.run.loop.time.perf_counter", lambda: clock[0])
    monkeypatch.setattr(Again, "_placing", slow)
    monkeypatch.setattr("kvweave.weave.shadow.drift_of", slowly)
    engine.audit()
    n = len(WAYS)
    assert engine.loop.seconds["audit"] == 100 * n + 1000 * (n + 1)


def test_an_alarm_that_nobody_answers_under_takes_no_more_time(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.weave.shadow.EARLY", 0)
    engine = engines(**(AUTO | {"audit": 0.2}))
    shadow, auditor = engine.shadow, engine.shadow.auditor
    shadow._random.random = lambda: 0.0  # type: ignore[method-assign]
    asked(engine, "c").generate(3, ignore_eos=True)
    cell = waiting(engine).cell
    for each in (cell, replace(cell, repair="auto:0@0@1")):
        auditor.saw(each, 0.1, None)
    auditor._cells[replace(cell, repair="auto:0@0@1")].alarm = True
    assert not shadow.is_due(loop_of(0.21))
    auditor._cells[cell].alarm = True
    assert shadow.is_due(loop_of(0.2 * UNDER_ALARM - 0.01))


def test_one_who_asks_for_many_shares_takes_nothing_from_others() -> None:
    learner = Learner()
    taught(learner, 3, "a")
    for i in range(100):
        taught(learner, 5, "b", share=i / 100)
    assert len(learner) == MOST_KINDS
    assert learner.report()[0]["tenant"] == "a" and learner.report()[0]["n"] == 3


def test_each_one_that_is_known_is_tried_now_and_then() -> None:
    """Also where two ask in turns."""
    learner = Learner()
    taught(learner, MOST, "a")
    taught(learner, MOST, "b")
    tried = [(t, learner.wants(t, 0.25)) for _ in range(10 * SELDOM) for t in "ab"]
    assert [sum(was for t, was in tried if t == who) for who in "ab"] == [10, 10]
