"""``keep="full"`` on layers with windows: what no later token sees goes, and nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from weaving import chat, rows, text

from kvweave import Engine
from kvweave.run.model import Runner

KEEPS = ["full", "full,every=3", "h2o:4096,every=5"]


class Pooled(Runner):
    pooled = True


@pytest.mark.parametrize("kind", [Runner, Pooled])
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "llama4_chunked"])
@pytest.mark.sampled
def test_what_goes_is_not_missed_and_comes_back_for_an_edit(name: str, kind: Any) -> None:
    runner = kind(oracle.build(*oracle.MODELS[name]), name=name)
    windowed = [info for info in runner.layers if info.mask.first(np.arange(9)) is not None]
    heads = sum(info.shape.k_heads for info in windowed)
    assert heads
    with Engine(runner, base="", repair="full") as engine:
        answers, freed = [], []
        for keep in (None, "full"):
            context = chat(engine, f"c{keep}", [20, 30, 25, 8], keep=keep)
            said = [context.generate(max_tokens=9, ignore_eos=True)]
            freed.append(rows(context).n_freed)
            context.drop(context.parts[2].name)
            context.append(text(6, 77))
            said.append(context.generate(max_tokens=9, ignore_eos=True))
            engine.check_integrity()
            assert context.check().kl < 1e-8 and max(context.check().k_error) < 1e-4
            answers.append([answer.tokens for answer in said])
        assert answers[0] == answers[1]
        assert freed[0] == 0 and freed[1] >= heads * 60


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["gemma2", "llama4_chunked"])
@pytest.mark.sampled
def test_any_verbs_say_the_same_with_and_without(name: str, seed: int) -> None:
    """Parts come and go, at any place, while answers are written."""
    draw = np.random.default_rng(seed)
    with Engine(Runner(oracle.build(*oracle.MODELS[name]), name=name), base="") as engine:
        both = [
            chat(engine, f"c{i}", [9, 14, 21], keep=keep, repair="full")
            for i, keep in enumerate((None, KEEPS[seed]))
        ]
        for step in range(10):
            verb = draw.choice(["append", "drop", "fork"])
            at, n_new = int(draw.integers(1, 99)), int(draw.integers(1, 14))
            said = []
            for i, context in enumerate(both):
                if verb == "append":
                    context.append(text(1 + at % 13, 100 * seed + step))
                elif verb == "drop" and len(context.parts) > 3:
                    context.drop(context.parts[1 + at % (len(context.parts) - 1)])
                elif verb == "fork":
                    twin = context.fork(f"{context.name}{step}")
                    context.close()
                    both[i] = context = twin
                said.append(context.generate(max_tokens=n_new, ignore_eos=True).tokens)
                assert context.check().kl < 1e-8, (step, verb)
            engine.check_integrity()
            assert said[0] == said[1], (step, verb)


@pytest.mark.parametrize("kind", [Runner, Pooled])
def test_a_later_repair_has_all_rows(kind: Any) -> None:
    with Engine(kind(oracle.build(*oracle.MODELS["gemma3"]), name="g"), base="") as engine:
        context = chat(engine, "c", [20, 30, 25], keep="full", repair="none")
        context.generate(max_tokens=4, ignore_eos=True)
        assert context.check().kl > 1e-6
        context.weave(repair="full")
        assert context.check().kl < 1e-8


@pytest.mark.parametrize("kept", ["full", "snapkv:3"])
def test_what_is_left_of_a_chunk_at_the_end_is_measured(kept: str) -> None:
    """Of a thinned chunk no row finds all that its window reaches, not even the last."""
    with Engine(Runner(oracle.build(*oracle.MODELS["gemma2"]), name="g"), base="") as engine:
        engine.put("d", text(40, 7)), engine.compress("d", kept)
        context = engine.context("c", keep="full", repair="none")
        context.append(text(3, 8))
        context.append_chunk("d")
        found = context.check()
        assert found.n_compared == 1 and found.kl > 1e-9
