"""What the engine may cost on a GPU, counted on a device that is not there (`counted.py`).

::

    a decode step   1 sync, 1.2 times the launches of transformers' own at most, 1 upload, for 1, 8
                    and 16 contexts alike
    a weave         4 syncs at most, its first token included
    everything      no copies of unpinned memory, no operations over two devices

Both yardstick and engine run the same model in float32. Where a kernel of ours is two launches on
CUDA (the parts of attention and their sum, for few rows), it counts as two.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from device.counted import DEVICE, Log, counting
from device.test_counted import step
from transformers import DynamicCache
from weaving import text

from kvweave import Context, Engine
from kvweave.run.model import Runner
from kvweave.run.sampling import Sampling
from kvweave.weave.calibration import Calibration, Curve
from kvweave.weave.repair import STRATEGIES
from kvweave.weave.turn import run_all

LAUNCHES = 1.2  # times those of transformers
WEAVE_SYNCS = 4
STEADY = slice(2, None)  # steps from the third on: the first prefills, then sizes settle
MODELS = ["llama", "gemma3", "mistral", "qwen3", "smollm3_nope", "cohere_interleaved"]
WISHES = ["none", "random", "auto", "query", "deps", "deviation"]


@cache
def on_it(name: str) -> tuple[Runner, Any]:
    """A model on the counted device, for the engine and as transformers runs it; looked at once."""
    with counting():
        model = oracle.build(*oracle.MODELS[name], torch.float32).cpu().to(DEVICE)
        return Runner(model, name=name), model


@contextmanager
def engine_on_it(name: str = "llama", **options: Any) -> Iterator[tuple[Engine, Any]]:
    """An engine on the counted device, and its model as transformers runs it."""
    runner, model = on_it(name)
    runner.pools = None  # rows are made room for as if nobody had been here
    with counting():
        engine = Engine(runner, base="", **options)
        assert engine.runner.can_move, engine.runner.can_move.reason
        yield engine, model
        engine.check_integrity()
        engine.close()


@contextmanager
def steps_of(engine: Engine) -> Iterator[list[Log]]:
    """One log for each step of the loop."""
    logs: list[Log] = []
    run = engine.loop.step

    def counted() -> bool:
        with counting() as log:
            ran = run()
        logs.append(log)
        return ran

    engine.loop.step = counted  # type: ignore[method-assign]
    try:
        yield logs
    finally:
        del engine.loop.step


def check_clean(log: Log) -> None:
    for kind in ("unpinned", "mix"):
        assert not log.count(kind), log.lines(kind)


def launches(log: Log) -> int:
    """Launches on CUDA: attention over few rows is two."""
    return log.count("launch") + sum(
        n for line, n in log.lines("launch").items() if line.endswith("interval_attention")
    )


# ---- decoding


def answers(engine: Engine, n: int, **options: Any) -> list[Log]:
    """Let ``n`` contexts of several lengths answer together; return their steps."""
    contexts = []
    for i in range(n):
        name = f"{len(engine.contexts)}"
        contexts.append(engine.context(name, repair="none", denoise=False))
        contexts[-1].append(text(12 + i, i))
    with steps_of(engine) as logs, counting() as whole:
        engine.generate_many(contexts, 5, ignore_eos=True, **options)
    check_clean(whole)
    return [log for log in logs if log.events]


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_a_decode_step_costs_what_transformers_does_whoever_decodes(name: str) -> None:
    with engine_on_it(name) as (engine, model):
        for n in (1, 8, 16):
            theirs, _ = step(model, DynamicCache(config=model.config), n)
            steady = answers(engine, n)[STEADY]
            assert len(steady) == 3
            for log in steady:
                assert log.count("sync") == log.count("download") == 1, log.lines("sync")
                assert log.count("upload") == 1, log.lines("upload")
                few = launches(log) - log.count("launch")
                assert few == len(engine.runner.layers)
                assert launches(log) <= LAUNCHES * theirs.count("launch"), log.lines("launch")


def test_one_context_is_continued_by_generate_as_by_generate_many() -> None:
    with engine_on_it() as (engine, _):
        together = answers(engine, 1)
        context = engine.context("alone", repair="none", denoise=False)
        context.append(text(12, 0))
        with steps_of(engine) as alone:
            context.generate(5, ignore_eos=True)
        pairs = zip(alone[STEADY], together[STEADY], strict=True)
        for mine, one in pairs:
            assert not mine.lines("launch") - one.lines("launch")


SAMPLED = {  # how -> launches that sampling so adds to a step at most, whoever samples
    "all tokens": ({"temperature": 0.8}, 11),
    "top_k": ({"temperature": 0.8, "top_k": 9}, 12),
    "top_p": ({"temperature": 0.8, "top_p": 0.9}, 26),
    "logprobs": ({"logprobs": 4}, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", SAMPLED)
def test_requests_that_sample_alike_are_sampled_together(how: str) -> None:
    options, most = SAMPLED[how]
    with engine_on_it() as (engine, _):
        greedy = answers(engine, 2)[-1].count("launch")
        for n in (1, 8, 16):
            log = answers(engine, n, **options)[-1]
            assert log.count("launch") <= greedy + most, log.lines("launch")
            assert log.count("sync") == log.count("upload") == 1


def test_requests_of_every_kind_wait_once_a_step() -> None:
    with engine_on_it() as (engine, _), counting() as whole:
        turns = []
        for i, (options, _) in enumerate([*SAMPLED.values(), ({}, 0)] * 2):
            context = engine.context(f"{i}", repair="none", denoise=False)
            context.append(text(12 + i, i))
            turns.append(context.begin(Sampling(5, ignore_eos=True, **options)))
        with steps_of(engine) as logs:
            run_all(turns)
        assert all(log.count("sync") == log.count("upload") == 1 for log in logs[STEADY])
        check_clean(whole)


@pytest.mark.slow
def test_a_seed_costs_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    made = torch.Generator  # none is there for a device that is not
    monkeypatch.setattr(torch, "Generator", lambda device="cpu": made())
    with engine_on_it() as (engine, _):
        found = [answers(engine, n, temperature=0.8, seed=7)[-1] for n in (1, 8, 16)]
        first = found[0].count("launch")
        assert [log.count("launch") for log in found] == [first, first + 7, first + 15]
        assert all(log.count("sync") == log.count("upload") == 1 for log in found)


# ---- weaving


def composed(engine: Engine, question: int = 20, **options: Any) -> Context:
    """A context of three documents and a question, all rows of the documents to be placed."""
    names = [f"doc/{i}" for i in range(3)]
    for i, name in enumerate(names):
        engine.put(name, text(40 + 7 * i, i), replace=True)
    context = engine.compose("{docs}", docs=names, **options)
    context.append(text(question, 99))
    return context


def first_token(context: Context, **options: Any) -> Log:
    """What it takes from the call until the first token can be read."""
    with counting() as log:
        turn = context.begin(Sampling(4, ignore_eos=True), **options)
        while not turn.take()[1]:
            assert context.session.loop.step()
    turn.run()
    return log


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("repair", WISHES)
@pytest.mark.sampled
def test_a_weave_and_its_first_token_wait_four_times_at_most(name: str, repair: str) -> None:
    with engine_on_it(name) as (engine, _), counting() as whole:
        context = composed(engine, repair=repair, share=0.2)
        log = first_token(context)
        assert context.session.plan is not None
        assert (context.session.plan.repaired > 0) == (repair != "none")
        assert 0 < log.count("sync") <= WEAVE_SYNCS, log.lines("sync")
        context.drop("doc/0")  # a move, and an answer from call to return
        with counting() as log:
            context.generate(1, ignore_eos=True)
        assert log.count("sync") <= WEAVE_SYNCS, log.lines("sync")
        context.append(text(9, 5))
        with counting() as log:
            context.weave()
            context.weave(repair=repair)
        assert log.count("sync") <= 2 * (WEAVE_SYNCS - 1), log.lines("sync")
        check_clean(whole)


@pytest.mark.parametrize("repair", sorted({*STRATEGIES} - {*WISHES}) + ["auto:evidence"])
@pytest.mark.parametrize("prune", ["forget", "evict"])
@pytest.mark.sampled
@pytest.mark.slow
def test_so_does_every_other_strategy(repair: str, prune: str) -> None:
    with engine_on_it() as (engine, _), counting() as whole:
        for name in (one := composed(engine, repair="none")).parts[:-1]:
            assert engine.shelf.tier(int(name.id)) == "ram"
        context = engine.context("other", repair=repair, share=0.2, prune=prune)
        for part in one.parts:
            context.append_chunk(f"#{part.id}")
        assert first_token(context).count("sync") <= WEAVE_SYNCS
        context.drop(context.parts[0])
        assert (log := first_token(context)).count("sync") <= WEAVE_SYNCS, log.lines("sync")
        check_clean(whole)


def test_contexts_that_are_woven_together_wait_no_more_than_one() -> None:
    with engine_on_it() as (engine, _):
        contexts = [composed(engine, repair="auto", name=f"c/{i}") for i in range(8)]
        with steps_of(engine) as logs:
            engine.generate_many(contexts, 1, ignore_eos=True)
        assert sum(log.count("sync") for log in logs) <= 8 * (WEAVE_SYNCS - 1) + len(logs)


@pytest.mark.usefixtures("looks")
def test_a_bound_that_takes_a_second_repair_waits_once_more() -> None:
    def curve(share: float, bound: float) -> Curve:
        return Curve(0.2, share, (0.0,) * 6, (0.0,), (bound,), (-9.0,) * 5, (9.0,) * 5)

    with engine_on_it() as (engine, _):
        curves = (curve(0.2, 1.0), curve(0.5, 0.1))
        engine.weaver.calibration = Calibration(engine.runner.fingerprint, 0.9, 9, curves)
        log = first_token(composed(engine, repair="auto", share=0.2), max_drift=0.2)
        assert log.count("sync") == WEAVE_SYNCS + 1, log.lines("sync")
        check_clean(log)


def test_a_chunk_is_made_with_one_wait() -> None:
    with engine_on_it() as (engine, _), counting() as log:
        engine.put("doc", text(50, 3))
    assert log.count("sync") == 1, log.lines("sync")
    check_clean(log)
