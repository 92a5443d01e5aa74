"""What graphs of launches need: steady passes launch the same over the same addresses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from device.counted import Counted, Log
from device.test_budgets import STEADY, engine_on_it, steps_of
from torch import Tensor
from weaving import text

from kvweave import Engine
from kvweave.run import together
from kvweave.run.model import Runner

Where = tuple[int, tuple[int, ...], tuple[int, ...]]
Static = dict[str, Where]  # name -> address, shape and strides


def where(x: Tensor) -> Where:
    assert isinstance(x, Counted)
    return x.held.data_ptr(), tuple(x.shape), tuple(x.stride())


@contextmanager
def inputs(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> Iterator[list[Static]]:
    """Where each pass finds what it does not make itself."""
    passes: list[Static] = []
    write, attend, call = together.write_rows, together.interval_attention, runner._call

    def writes(keys: Any, values: Any, k: Any, v: Any, slots: Any, *rest: Any) -> None:
        n = sum(name.startswith("write") for name in passes[-1])
        passes[-1] |= {f"write {n}/{i}": where(t) for i, t in enumerate((k, v, slots))}
        write(keys, values, k, v, slots, *rest)

    def attends(query: Any, *static: Any) -> Any:
        n = sum(name.startswith("attend") for name in passes[-1])
        passes[-1] |= {f"attend {n}/{i}": where(t) for i, t in enumerate(static[:4])}
        return attend(query, *static)

    def calls(batch: Any) -> Tensor:
        known = {"ids": batch.ids, "want": batch.want, "positions": batch._positions}
        passes.append({name: where(t) for name, t in known.items()})
        return call(batch)

    with monkeypatch.context() as patched:
        patched.setattr(together, "write_rows", writes)
        patched.setattr(together, "interval_attention", attends)
        patched.setattr(runner, "_call", calls)
        yield passes


def answer(engine: Engine, n: int, name: str, size: int = 12) -> list[Log]:
    options = {"repair": "none", "denoise": False}
    contexts = [engine.context(f"{name}/{i}", **options) for i in range(n)]
    for i, context in enumerate(contexts):
        context.append(text(size + i, i))
    with steps_of(engine) as logs:
        engine.generate_many(contexts, 6, ignore_eos=True)
    for i in range(n):
        engine.close_context(f"{name}/{i}")
    return [log for log in logs if log.events]


def launched(log: Log) -> list[tuple[str, str]]:
    return [(e.op, e.line) for e in log.events if e.kind == "launch" and "/sample.py" not in e.line]


@pytest.mark.parametrize("name", ["llama", "gemma3", "smollm3_nope"])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.sampled
def test_steady_passes_launch_the_same_over_the_same_addresses(
    monkeypatch: pytest.MonkeyPatch, name: str, n: int
) -> None:
    with engine_on_it(name) as (engine, _):
        runner = engine.runner
        assert isinstance(runner, Runner)
        with inputs(monkeypatch, runner) as passes:
            logs = answer(engine, n, "a")
        assert len(passes) == len(logs) == 6
        steady = passes[STEADY]
        assert len(steady[0]) == 3 + 7 * len(runner.layers)
        assert all(each == steady[0] for each in steady)
        assert all(launched(log) == launched(logs[-1]) for log in logs[STEADY])


@pytest.mark.slow
def test_numbers_of_contexts_up_to_a_power_of_two_are_one_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_on_it() as (engine, _):
        runner = engine.runner
        assert isinstance(runner, Runner)
        answer(engine, 8, "first")  # pools grow to what eight need
        found: dict[int, Static] = {}
        for n in (8, 5, 7, 4):
            with inputs(monkeypatch, runner) as passes:
                answer(engine, n, f"of {n}")
            found[n] = passes[-1]
        assert runner.pools is not None
        assert found[5] == found[7] == found[8] != found[4]
        assert found[8]["ids"][1] == (1, 8) and found[4]["ids"][1] == (1, 4)


def test_who_keeps_graphs_is_told_when_rows_move(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_on_it() as (engine, _):
        runner = engine.runner
        assert isinstance(runner, Runner)
        with inputs(monkeypatch, runner) as passes:
            answer(engine, 1, "short")
            before, pools = passes[-1], runner.pools
            assert pools is not None
            n_moves = pools.n_moves
            answer(engine, 1, "short again")
            assert passes[-1] == before and pools.n_moves == n_moves
            answer(engine, 1, "long", 300)
        assert pools.n_moves > n_moves
        moved = {name for name, at in passes[-1].items() if at != before[name]}
        assert moved and not moved & {"ids", "want", "positions"}
