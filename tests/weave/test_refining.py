"""Rows that become exact while nobody waits, held against transformers' own full prefill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import oracle
import pytest
import torch
from weaving import again, chat, same_rows, text

from kvweave import Context, Engine, Sampling
from kvweave.errors import ChunkNotFound, InvalidArgument
from kvweave.run.model import Runner
from kvweave.serve.driver.tasks import Tasks
from kvweave.weave.passes import SLICE

Make = Callable[..., Engine]
pytestmark = pytest.mark.usefixtures("looks")
MODELS = ["llama", "gemma3", "deepseek_v3_latent", "deepseek_v32_indexed", "qwen3_moe", "gpt2"]


def error(context: Context, first: int = 0) -> float:
    """Of the rows from ``first`` on to those of a full prefill, relative."""
    rows, runner = context.session.state.rows, context.session.weaver.backend
    assert isinstance(runner, Runner)
    right, _ = oracle.rows_of(runner, torch.tensor(context.tokens()[: rows.n]))
    pairs = [
        (found[first:], wanted[first:])
        for layer in range(len(runner.layers))
        for found, wanted in zip(rows.read(layer), right.read(layer), strict=True)
        if found.numel()
    ]
    return max(oracle.relative(a, b) for a, b in pairs) if first < rows.n else 0.0


def predicts(context: Context) -> float:
    """How far the next token's logits are from transformers' own, relative."""
    runner = context.session.weaver.backend
    assert isinstance(runner, Runner)
    turn = context.begin(Sampling(max_tokens=1))
    seen: list[torch.Tensor] = []
    turn._weaving.request.watch = seen.append
    wanted = oracle.full_prefill(runner, torch.tensor(context.tokens()))[-1]
    turn.run()
    context.drop(context.parts[-1])
    return oracle.relative(seen[0], wanted)


CASES = [*((name, "auto") for name in MODELS), ("llama", "query"), ("gemma3", "none")]


@pytest.mark.parametrize(("name", "repair"), CASES)
@pytest.mark.sampled
def test_all_of_a_context_becomes_exact(engines: Make, name: str, repair: str) -> None:
    context = chat(engines(name, repair=repair, share=0.1), "c", [40, 70, 30])
    context.append(text(9, 77))
    answer = context.generate(4, ignore_eos=True)
    moves = context.session.weaver.backend.can_move
    assert answer.plan.drift != 0 or not moves
    n = context.refine()
    assert n == (context.n_tokens - 1 - 5 - 40 if moves else 0)  # base and first chunk were exact
    assert error(context) < 1e-9 and context.preview().drift == 0
    assert context.refine() == 0 and predicts(context) < 1e-9
    assert context.check().kl < 1e-12


def test_it_goes_on_where_it_stopped_and_a_repair_leaves_what_is_done(engines: Make) -> None:
    engine = engines(repair="auto", share=0.2)
    context = chat(engine, "c", [40, 100])
    context.append(text(4, 7))
    context.generate(1, ignore_eos=True)
    assert context.refine(30) == 30 and context.refine(25) == 25
    rows, state = context.session.state.rows, context.session.state
    before = [t[45:100].clone() for t in rows.read(3)]
    context.append(text(6, 8))
    answer = context.generate(2, ignore_eos=True)
    assert 0 < answer.plan.repaired <= 0.2 * (context.n_tokens - 100) + 1
    assert all(torch.equal(a, b[45:100]) for a, b in zip(before, rows.read(3), strict=True))
    assert context.session.state is state and state.n_right == 100
    assert context.refine() == rows.n - 100 and error(context) < 1e-9


@pytest.mark.parametrize("repair", ["full", "random", "auto", "boundary", "query"])
@pytest.mark.parametrize("n", [1, 20, 45])
def test_what_was_placed_ahead_is_repaired_by_who_asks(engines: Make, repair: str, n: int) -> None:
    context = chat(engines(repair=repair, share=1.0), "c", [40, 70, 30])
    assert context.refine(n) == n  # all is placed, and little is right
    assert context.preview().repaired >= 100 - n
    context.append(text(5, 9))
    answer = context.generate(3, ignore_eos=True)
    assert answer.plan.repaired >= 100 - n and error(context) < 1e-9
    context.append(text(5, 10))
    answer = context.generate(1, ignore_eos=True)
    assert answer.plan.repaired <= 5 and error(context) < 1e-9  # it was done once


def test_what_was_pruned_and_asked_is_placed_before_the_question(engines: Make) -> None:
    engine = engines(repair="auto", share=0.1)
    context = chat(engine, "c", [40, 70, 30, 50])
    context.weave()
    context.drop("c/1")
    context.append(text(5, 9))
    assert context.refine() == 30 + 50 + 5 and error(context) < 1e-9
    answer = context.generate(3, ignore_eos=True)
    assert answer.plan.drift == 0 and answer.plan.repaired <= 1 and not answer.plan.prefilled
    assert predicts(context) < 1e-9


@pytest.mark.parametrize(
    "options", [{"prune": "evict"}, {"keep": "streaming:32"}, {"rows": "int8"}]
)
def test_what_cannot_become_exact_is_refused_and_nothing_changes(
    engines: Make, options: dict[str, str]
) -> None:
    settings = {k: v for k, v in options.items() if k == "rows"}
    engine = engines(repair="auto", **settings)
    context = chat(engine, "c", [20, 30], **{k: v for k, v in options.items() if k != "rows"})
    context.weave()
    plan = context.plan
    with pytest.raises(InvalidArgument, match="refine"):
        context.refine()
    assert context.plan == plan and not context.session.refinable(context.parts)
    with pytest.raises(InvalidArgument, match="below 1"):
        context.refine(0)


def _step(tasks: Tasks, engine: Engine, n: int) -> None:
    for _ in range(n):
        engine.loop.step()
        tasks.go_on()


def test_others_run_first_and_the_context_is_never_busy(engines: Make) -> None:
    engine = engines(repair="none")
    context, other = chat(engine, "c", [20, 3 * SLICE]), chat(engine, "d", [30], first=5)
    context.weave()
    tasks = Tasks(engine.loop)
    tasks.begin(context.refining())
    _step(tasks, engine, 1)
    assert context.session.state.n_right == 25 + SLICE and not context.session.busy
    turn = other.begin(Sampling(max_tokens=5, ignore_eos=True))
    _step(tasks, engine, 3)
    assert context.session.state.n_right == 25 + SLICE and tasks
    turn.run()
    context.append(text(3, 1))
    _step(tasks, engine, 3)
    assert not tasks and context.session.state.n_right == 25 + SLICE
    assert engine.loop.seconds["refine"] > 0 == engine.loop.seconds["audit"]


def test_giving_up_while_parts_are_placed_keeps_the_rows_there_were(engines: Make) -> None:
    engine = engines(repair="auto")
    context = chat(engine, "c", [20, 30])
    context.append(text(40, 5))  # has no KV but these rows
    context.weave("full")
    rows = context.session.state.rows
    context.append(text(50, 6))
    before = [t[:95].clone() for t in rows.read(2)]
    tasks = Tasks(engine.loop)
    tasks.begin(context.refining())
    assert not context.session.state.woven
    answer = context.generate(1)
    assert answer.plan.exact == 95 and answer.plan.prefilled == 50 and answer.plan.drift == 0
    _step(tasks, engine, 2)
    assert not tasks and all(
        torch.equal(a, b[:95]) for a, b in zip(before, rows.read(2), strict=True)
    )
    assert error(context) < 1e-9


def test_a_pass_that_fails_leaves_the_rows_approximate(
    engines: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engines(repair="none")
    context = chat(engine, "c", [20, 30, 40])
    context.weave()

    def failing(works: object) -> object:
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(
            engine.runner, "forward", failing
        )  # of its class: others may have set its own
        with pytest.raises(MemoryError):
            context.refine()
    assert context.preview().drift != 0 and not context.session.busy
    assert context.refine() == 70 and error(context) < 1e-9


def test_a_fork_has_what_is_done(engines: Make) -> None:
    engine = engines(repair="none")
    context = chat(engine, "c", [20, 2 * SLICE])
    context.weave()
    context.refine(50)
    twin = engine.fork(context, "twin")
    assert twin.refine() == 2 * SLICE - 50 and error(twin) < 1e-9
    assert context.preview().drift != 0 and context.refine() == 2 * SLICE - 50
    assert same_rows(context.session.state.rows, twin.session.state.rows)


@pytest.mark.parametrize("seed", range(24))
@pytest.mark.sampled
def test_whatever_is_done_meanwhile(engines: Make, seed: int) -> None:
    """Random verbs while it goes on; what the plan calls exact is, and at last all is."""
    rng = Random(seed)
    engine = engines(
        rng.choice(MODELS[:5]), repair=rng.choice(("auto", "query", "none")), share=0.2
    )
    context = chat(engine, "c", [rng.choice((9, 30, 90)) for _ in range(4)])
    tasks, names = Tasks(engine.loop), [p.name for p in context.parts[1:]]
    for i in range(12):
        verb = rng.choice(
            ("ahead", "ahead", "step", "step", "drop", "insert", "say", "answer", "weave")
        )
        if verb == "ahead":
            tasks.begin(context.refining())
        elif verb == "step":
            _step(tasks, engine, rng.randint(1, 4))
        elif verb == "drop" and len(context.parts) > 2:
            context.drop(rng.choice(context.parts[1:]))
        elif verb == "insert":
            context.insert_chunk(rng.randint(1, len(context.parts)), rng.choice(names))
        elif verb == "say":
            context.append(text(rng.randint(1, 9), 100 * seed + i))
        elif verb == "answer":
            context.generate(2, ignore_eos=True)
        elif verb == "weave":
            context.weave(rng.choice((None, None, "auto", "none")))
        _exact_as_claimed(context)
    context.refine()
    assert error(context) < 1e-9 and context.preview().drift == 0
    _step(tasks, engine, 20)
    assert not tasks and error(context) < 1e-9


def _exact_as_claimed(context: Context) -> None:
    woven = context.session.state.woven
    n = sum(p.ready for p in woven[: next((i for i, p in enumerate(woven) if not p.exact), None)])
    rows, runner = context.session.state.rows, context.session.weaver.backend
    n = max(n, context.session.state.n_right if woven else 0)
    assert isinstance(runner, Runner)
    if not n:
        return
    try:
        tokens = context.session.weaver.tokens(woven).tolist()[:n]
    except ChunkNotFound:  # dropped, and not woven since
        return
    right, _ = oracle.rows_of(runner, torch.tensor(tokens))
    for layer in range(len(runner.layers)):
        for found, wanted in zip(rows.read(layer), right.read(layer), strict=True):
            assert not found.numel() or oracle.relative(found[:n], wanted) < 1e-9


def test_what_was_done_when_somebody_else_came_does_not_count(engines: Make) -> None:
    """A piece has run, and before that is noted other rows stand there."""
    engine = engines(repair="none")
    context = chat(engine, "c", [20, 30, 40])
    context.weave()
    tasks = Tasks(engine.loop)
    tasks.begin(context.refining())
    engine.loop.step()
    context.drop("c/1")
    context.weave()
    tasks.go_on()
    assert not tasks and context.preview().drift != 0
    assert context.refine() == 40 and error(context) < 1e-9


def test_a_fork_while_parts_are_placed_has_the_rows_there_were(engines: Make) -> None:
    engine = engines(repair="auto")
    context = chat(engine, "c", [20, 30])
    context.weave("full")
    context.append(text(50, 6))
    tasks = Tasks(engine.loop)
    tasks.begin(context.refining())
    assert engine.fork(context, "twin").generate(1).plan.exact == 55
    _step(tasks, engine, 2)
    assert not tasks and context.generate(1).plan.drift == 0


def test_what_went_through_a_codec_is_whole_again(engines: Make, tmp_path: Path) -> None:
    engine = engines(repair="none", home=tmp_path / "home")
    first = chat(engine, "c", [20, 30])
    engine.place("c/0", "disk", codec="int4")
    context = again(engine, "d", first)
    assert "codec:int4" in context.weave().spans[1].approximate
    assert context.refine() == 50 and error(context) < 1e-9
    assert context.preview().drift == 0 and not context.session.state.kept.lossy
