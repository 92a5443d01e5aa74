"""Passes that were recorded and are played again say what they say when they run.

See `recorded.Played` for how that is without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import oracle
import pytest
import torch
from oracle import DEVICE
from recorded import Played
from torch import Tensor
from weaving import rows, text

from kvweave import Engine
from kvweave.run.graphs import Graphs, P, Recorded
from kvweave.run.model import Runner

KINDS = ["played", "refused"] + (["cuda"] if DEVICE.type == "cuda" else [])


class Refusing(Graphs):
    """A model that cannot be recorded, which shows amid the pass."""

    def record(self, batch: P, call: Callable[[P], Tensor]) -> Recorded:
        call(batch)
        raise RuntimeError("operation not permitted when stream is capturing")


GRAPHS = {"played": Played, "refused": Refusing, "cuda": Graphs}


class Pooled(Runner):
    pooled = True


@contextmanager
def engine(name: str, graphs: Any = None) -> Iterator[Engine]:
    """An engine whose passes are recorded by ``graphs``, by default by nobody."""
    model = oracle.build(*oracle.MODELS[name])
    # the other one waits for the device to say which experts there are: nothing of that can be recorded
    model.config._experts_implementation = "batched_mm"
    runner = Pooled(model, name=name)
    runner.new_rows()
    assert runner.pools is not None
    runner.pools.graphs = None if graphs is None else graphs(runner.device)
    with Engine(runner, base="", repair="none") as made:
        yield made
        made.check_integrity()


def played(engine: Engine) -> int:
    runner = engine.runner
    assert isinstance(runner, Runner) and runner.pools is not None
    return 0 if runner.pools.graphs is None else runner.pools.graphs.n_played


@cache
def plain_lives(name: str) -> list[Any]:
    """`lives` of an engine whose passes nobody records."""
    with engine(name) as plain:
        return lives(plain)


def lives(engine: Engine) -> list[Any]:
    """What contexts say and are after they answer together, lose chunks, and are repaired."""
    found: list[Any] = []
    contexts = [engine.context(f"{i}", share=0.4) for i in range(3)]
    for i, context in enumerate(contexts):
        for part in range(3):
            context.append(text(9 + 5 * i + part, 10 * i + part), name=f"{i}/{part}")
    for repair in ("none", "random", "auto", "query", "none"):
        for answer in engine.generate_many(contexts, 4, ignore_eos=True):
            found.append(answer.tokens)
        for context in contexts:
            context.drop(context.oldest())
            context.weave(repair=repair)
            context.append(text(20, len(found)))
    found.append(contexts[0].generate(5, ignore_eos=True, logprobs=2).tokens)
    for context in contexts:
        found.append(context.check().kl)
        mine = rows(context)
        for layer in range(len(mine.infos)):
            found += [x.cpu() for x in mine.read(layer)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [*product(["llama"], KINDS),
     *(pytest.param("gpt_oss_sinks", kind, marks=pytest.mark.slow) for kind in KINDS),
     *product(["gemma3", "smollm3_nope", "llama4_chunked"], KINDS[::2])],  # refusing is not theirs
)  # fmt: skip
@pytest.mark.sampled
def test_contexts_live_the_same_life_whoever_launches(name: str, kind: str) -> None:
    wanted = plain_lives(name)
    with engine(name, GRAPHS[kind]) as other:
        found = lives(other)
        assert (played(other) > 10) == (kind != "refused")
    for mine, one in zip(found, wanted, strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(mine, one, rtol=1e-9, atol=1e-9)
        else:
            assert mine == pytest.approx(one, rel=1e-6, abs=1e-12)


def test_what_was_recorded_ends_when_rows_move() -> None:
    with engine("llama", Played) as one:
        runner = one.runner
        assert isinstance(runner, Runner) and runner.pools is not None
        context = one.context("short")
        context.append(text(12, 1))
        context.generate(6, ignore_eos=True)
        before, n_moves = played(one), runner.pools.n_moves
        long = one.context("long")
        long.append(text(300, 2))
        long.generate(1, ignore_eos=True)
        assert runner.pools.n_moves > n_moves
        context.append(text(5, 3))
        context.generate(6, ignore_eos=True)
        assert played(one) > before
        assert context.check().kl < 1e-12
