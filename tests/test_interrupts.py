"""Ctrl-C at any line of a verb: what was done is whole, or has not been."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest
from conftest import tiny
from weaving import text

import kvweave
from kvweave import Context, Engine, interrupts
from kvweave.interrupts import HELD, let_in

SOURCE = kvweave.__path__[0]
LINES = int(os.environ.get("KVWEAVE_INTERRUPTS", "60"))  # of each verb, with -m slow
OURS = (interrupts.__file__,)  # between two lines of its own nothing else has happened


class Signalled:
    """Sends SIGINT before the ``n``-th line of ours within the block; counts them."""

    def __init__(self, n: int = 0, package: str = "") -> None:
        self.at, self.n, self.within = n, 0, f"{SOURCE}/{package}"

    def __enter__(self) -> Signalled:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith(self.within) or file in OURS:
            return None
        if event == "line":
            self.n += 1
            if self.n == self.at:
                signal.raise_signal(signal.SIGINT)
        return self._trace


@pytest.fixture(autouse=True)
def plain() -> Iterator[None]:
    """Ctrl-C as Python has it: a shell has what it starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def opened() -> tuple[Engine, Context, Context]:
    engine = Engine(tiny(), base=text(3, 99), repair="full", share=1.0)
    for i in range(3):
        engine.put(f"d/{i}", text(6, i))
    a, b = engine.context("a"), engine.context("b")
    for context in (a, b):
        context.append_chunk("d/1")
        context.append(text(4, 7))
        context.append_chunk("d/2")
    a.weave()
    return engine, a, b


def edited(a: Context) -> None:
    with a.edit():
        a.append(text(2, 8))
        a.drop(1)
        a.append_chunk("d/0")


def streamed(a: Context) -> None:
    pieces = a.stream(3, ignore_eos=True)
    list(pieces)


VERBS: dict[str, Callable[[Engine, Context, Context], object]] = {
    "drop": lambda engine, a, b: a.drop(2),
    "edit": lambda engine, a, b: edited(a),
    "replace": lambda engine, a, b: a.replace(1, text(3, 9)),
    "fork": lambda engine, a, b: engine.fork(a, "c"),
    "close": lambda engine, a, b: engine.close_context("a"),
    "rm": lambda engine, a, b: engine.files.rm("d/0"),
    "put": lambda engine, a, b: engine.put("d/9", text(5, 5)),
    "compose": lambda engine, a, b: engine.compose("{d/0}{d/1}"),
    "stream": lambda engine, a, b: streamed(a),
    "many": lambda engine, a, b: engine.generate_many([a, b], 2, ignore_eos=True),
    "check": lambda engine, a, b: a.check(),
}


def holds(engine: Engine) -> None:
    """Nothing is half done: contexts answer from the tokens they say they hold."""
    engine.check_integrity()
    for context in engine.contexts.values():
        if len(context.parts) > 1:  # else it is new, and was not filled
            tokens = context.tokens()
            answer = context.generate(2, ignore_eos=True)
            assert context.tokens() == [*tokens, *answer.tokens] and len(answer.tokens) == 2
            assert context.check().kl < 1e-9
    engine.check_integrity()


def interrupted(verb: str, n: int) -> None:
    engine, a, b = opened()
    with engine:
        with Signalled(n), pytest.raises(KeyboardInterrupt):
            VERBS[verb](engine, a, b)
        assert HELD.depth == 0 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        holds(engine)


def lines(verb: str) -> int:
    """How many there are in it, but for those of a first time."""
    for _ in range(2):
        engine, a, b = opened()
        with engine, Signalled() as all:
            VERBS[verb](engine, a, b)
    return all.n


@pytest.mark.parametrize("verb", ["drop", "edit", "close", "rm", "many"])
def test_an_interrupt_leaves_nothing_half_done(verb: str) -> None:
    n = lines(verb)
    for at in Random(0).sample(range(1, n), 3):
        interrupted(verb, at)


@pytest.mark.slow
def test_an_engine_whose_opening_was_interrupted_has_let_go_of_its_home(tmp_path: Path) -> None:
    def opening() -> Engine:
        return Engine(tiny(), home=tmp_path, base=text(3, 99))

    with opening() as engine:
        engine.put("d", text(6, 1))
    with Signalled(package="store/") as all:
        opening().close()
    for at in Random(2).sample(range(1, all.n), 60):
        try:
            with Signalled(at, "store/"):
                opening().close()
        except KeyboardInterrupt as interrupt:
            error = interrupt  # it knows all frames, so that nothing is let go of by chance
            with opening() as engine:
                engine.files.stat("d")
                engine.check_integrity()
            del error


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.sampled(6)
def test_an_interrupt_at_many_lines_leaves_nothing_half_done(verb: str) -> None:
    n = lines(verb)
    for at in Random(1).sample(range(1, n), min(n - 1, LINES)):
        interrupted(verb, at)


def test_it_comes_before_the_next_pass_and_not_at_the_end_of_all() -> None:
    engine, a, _ = opened()
    with engine:
        turn = a.begin(kvweave.Sampling(max_tokens=200, ignore_eos=True))
        turn.take()
        asked = turn._weaving.request
        step = engine.loop.step

        def stepping() -> bool:
            if len(asked.out) == 2:
                signal.raise_signal(signal.SIGINT)
            return step()

        engine.loop.step = stepping  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            turn.run()
        engine.loop.step = step  # type: ignore[method-assign]
        assert len(asked.out) == 2
        holds(engine)


def test_a_block_of_the_callers_own_is_interrupted_at_once_and_taken_back() -> None:
    engine, a, _ = opened()
    with engine:
        parts, reached = a.parts, 0
        with pytest.raises(KeyboardInterrupt), a.edit():
            a.append(text(2, 3))
            reached = 1
            signal.raise_signal(signal.SIGINT)
            reached = 2
        assert (reached, a.parts) == (1, parts)
        holds(engine)


def test_a_second_one_is_taken_at_once_where_the_first_has_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now)
    with pytest.raises(KeyboardInterrupt), HELD:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # a process and its group: two that are one
        now += interrupts.PATIENCE
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("it was not taken")
    with HELD:
        let_in()  # nothing is left over


def test_handlers_of_others_are_called_and_stay() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        with HELD, HELD:
            signal.raise_signal(signal.SIGINT)
            assert not came
            let_in()
            assert came == [signal.SIGINT]
            signal.raise_signal(signal.SIGINT)
        assert len(came) == 2 and signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        with HELD:
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
