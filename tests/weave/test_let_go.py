"""Iterators over answers may be let go of anywhere: in what a verb calls back, by the collector in the midst
of one, by another thread. Their answers end when no verb is under way."""

from __future__ import annotations

import gc
import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import count
from threading import Event, Thread
from typing import Any

import pytest
from world import models

from kvweave import Context, Engine, interrupts, verbs
from kvweave.errors import InvalidArgument
from kvweave.memory import Memory

ASKED: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True}


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(models.build("llama")[0], base=[1, 2], repair="none") as made:
        made.context("c").append([20, 21])
        yield made
        assert not made.loop.requests
        made.check_integrity()


@pytest.fixture
def context(engine: Engine) -> Context:
    return engine.contexts["c"]


def whole(engine: Engine) -> list[str]:
    other = engine.context("whole")
    other.append([20, 21])
    return list(other.stream(**ASKED))


def back(engine: Engine, call: Callable[[], Any]) -> Exception | None:
    """Call within what `put` calls back; return what it raised."""
    raised: list[Exception] = []

    def progress(n: int) -> None:
        try:
            call()
        except Exception as error:
            raised.append(error)

    engine.put("x", [30, 31], progress=progress, replace=True)
    return raised[0] if raised else None


def circle(held: list[Any]) -> None:
    """Leave what is held to the collector."""
    held.append([held.pop()])
    held[0].append(held[0])
    held.clear()
    gc.collect()


LETTING_GO = {
    "closed": lambda held: held[0].close(),
    "dropped": lambda held: held.clear(),
    "collected": circle,
}


@pytest.mark.parametrize("how", LETTING_GO)
@pytest.mark.parametrize("n_read", [0, 2])
def test_in_a_callback_it_ends_with_the_verb(
    engine: Engine, context: Context, how: str, n_read: int
) -> None:
    want, stream = whole(engine), context.stream(**ASKED)
    assert [next(stream) for _ in range(n_read)] == want[:n_read]
    held: list[Any] = [stream]
    del stream
    assert back(engine, lambda: LETTING_GO[how](held)) is None
    assert not context.session.busy and "x" in [e.name for e in engine.files.ls()]
    assert context.parts[-1].n == n_read if n_read else len(context.parts) == 2
    assert not held or list(held[0]) == []


@pytest.mark.parametrize("how", [next, lambda stream: stream.throw(ValueError("mine"))])
def test_in_a_callback_it_goes_no_further_and_loses_nothing(
    engine: Engine, context: Context, how: Callable[[Any], Any]
) -> None:
    want, stream = whole(engine), context.stream(**ASKED)
    first = next(stream)
    error = back(engine, lambda: how(stream))
    assert isinstance(error, InvalidArgument) and "called back" in str(error)
    assert [first, *stream] == want


@pytest.mark.parametrize("how", ["dropped", "collected"])
def test_in_the_midst_of_a_verb_it_waits_for_its_end(
    engine: Engine, context: Context, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = context.stream(**ASKED)
    next(stream)
    held, busy, add = [stream], [], engine.maker.add
    del stream

    def adding(*args: Any, **options: Any) -> Any:
        if held:
            LETTING_GO[how](held)
            busy.append(context.session.busy)
        return add(*args, **options)

    monkeypatch.setattr(engine.maker, "add", adding)
    engine.context("d").append([40])
    assert busy == [True] and not context.session.busy and context.parts[-1].n == 1


def test_another_thread_does_not_wait_to_let_go_of_one(engine: Engine, context: Context) -> None:
    stream = context.stream(**ASKED)
    next(stream)
    held = [stream]
    del stream
    with engine.context("d").edit():
        thread = Thread(target=held.clear, daemon=True)
        thread.start()
        thread.join(30)
        assert not thread.is_alive() and not held, "it waits for who holds the engine"
        assert context.session.busy
    assert not context.session.busy and context.parts[-1].n == 1


@pytest.mark.parametrize("verb", ["answer", "edit"])
def test_who_let_go_of_one_asks_again_before_who_left_the_gate_looks(
    engine: Engine, context: Context, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own answer was still under way, while others used the engine."""
    stream = context.stream(**ASKED)
    next(stream)
    held, inside, leaves = [stream], Event(), Event()
    del stream

    def other() -> None:
        with engine.context("d").edit():
            inside.set()
            leaves.wait(30)

    thread = Thread(target=other, daemon=True)
    thread.start()
    assert inside.wait(30)
    held.clear()
    monkeypatch.setattr(engine.gate, "catch_up", lambda: None)  # whoever waits was faster
    leaves.set()
    if verb == "edit":
        with context.edit():
            context.append([42])
    else:
        assert len(context.generate(2, ignore_eos=True).tokens) == 2
    thread.join(30)


@pytest.mark.parametrize("how", ["thrown", "closed", "dropped", "read"])
def test_an_answer_of_a_memory_ends_its_step(engine: Engine, how: str) -> None:
    memory = Memory(engine, "c")
    before = memory.context.parts
    stream: Generator[str] = memory.stream("w1", recall=None, **ASKED)
    next(stream)
    if how == "read":
        assert len(list(stream)) == 5
    elif how == "thrown":
        with pytest.raises(ValueError, match="mine"):
            stream.throw(ValueError("mine"))
        assert memory.context.parts == before
    else:
        held = [stream]
        back(engine, lambda: LETTING_GO[how](held))
    del stream
    memory.tell([50])
    assert [memory.undo(), memory.undo()] == ["tell", None if how == "thrown" else "ask"]
    assert memory.context.parts == before


def test_a_block_of_edits_cannot_be_entered_from_a_callback(
    engine: Engine, context: Context
) -> None:
    block = context.edit()
    assert isinstance(back(engine, block.__enter__), InvalidArgument)
    context.append([41])


def test_file_verbs_are_verbs_of_the_engine(engine: Engine) -> None:
    engine.put("y", [33])
    assert isinstance(back(engine, lambda: engine.files.rm("y")), InvalidArgument)
    assert engine.files.stat("y").n_tokens == 1


@pytest.mark.parametrize(
    "verb", [lambda e: e.files.ls(), lambda e: e.contexts["c"].history.log()], ids=["ls", "log"]
)
def test_what_reads_waits_for_other_threads(
    engine: Engine, context: Context, verb: Callable[[Engine], Any]
) -> None:
    done = Event()
    thread = Thread(target=lambda: (verb(engine), done.set()), daemon=True)
    with context.edit():
        thread.start()
        assert not done.wait(0.1)
    assert done.wait(30)
    thread.join()


def test_contexts_can_be_gone_through_while_others_are_opened(engine: Engine) -> None:
    for name, context in engine.contexts.items():
        engine.fork(context, f"{name}/2")
        engine.close_context(name)
    assert list(engine.contexts) == ["c/2"]


def test_ctrl_c_between_any_two_lines_leaves_the_engine_to_other_threads(engine: Engine) -> None:
    """At each line of what a verb and a block of edits are entered and left by."""
    files = {module.__file__ for module in (verbs, interrupts)}
    free: list[bool] = []

    def look() -> None:
        free.append(engine.loop.gate.lock.acquire(timeout=5))
        engine.loop.gate.lock.release()

    def run(at: int) -> bool:
        """Interrupt the line of that number; tell whether there was one."""
        n, before = [at], sys.gettrace()

        def trace(frame: Any, event: str, _: object) -> Any:
            if frame.f_code.co_filename not in files:
                return trace if event == "call" else None
            if event == "line":
                n[0] -= 1
                if not n[0]:
                    signal.raise_signal(signal.SIGINT)
            return trace

        with suppress(KeyboardInterrupt):
            sys.settrace(trace)
            try:
                engine.files.ls()
                with engine.contexts["c"].edit():
                    pass
            finally:
                sys.settrace(before)
        return n[0] <= 0

    for at in count(1):
        if not run(at):
            break
        thread = Thread(target=look, daemon=True)
        thread.start()
        thread.join()
        assert free[-1], f"line {at} leaves it locked"
        assert not interrupts.HELD.depth
    assert at > 50
