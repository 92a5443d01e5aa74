"""A block of edits that fails takes back all that happened to its engine meanwhile, of other contexts too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from world import models

from kvweave import Context, Engine, KVWeaveError
from kvweave.errors import InvalidArgument, StoreError
from kvweave.memory import Memory
from kvweave.weave.answer import request_from


class Planned(Exception):
    """The block was meant to fail."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(models.build("llama")[0], base=[1, 2], repair="none") as made:
        made.put("d", [10, 11, 12])
        for name in ("a", "b"):
            made.context(name).append([20, 21])
        yield made
        for name in list(made.contexts):
            made.close_context(name)
        made.files.rm("**")
        made.check_integrity()
        assert not made.table.collect() and len(list(made.table)) <= 1, "somebody holds chunks"


def texts(engine: Engine, context: Context) -> list[list[int]]:
    return [engine.table.tokens(part.id).tolist() for part in context.parts]


def seen(engine: Engine) -> object:
    """What there is: contexts and what they say, names, versions."""
    contexts = {
        name: (context.parts, context.history.version, texts(engine, context))
        for name, context in engine.contexts.items()
    }
    return contexts, [(entry.name, entry.id) for entry in engine.files.ls("**")]


def begun(context: Context, chat: bool = False, n: int = 3) -> Any:
    return context.begin(*request_from(n, {"ignore_eos": True}), chat=chat)


MEANWHILE: list[Callable[[Engine, Context], Any]] = [
    lambda e, b: b.append([30, 31]),
    lambda e, b: b.append([30], name="told"),
    lambda e, b: b.drop(1),
    lambda e, b: (b.append([30]), b.replace(1, [31]), b.reorder([0, 2, 1])),
    lambda e, b: b.generate(2, ignore_eos=True),
    lambda e, b: b.ask("w1 w2", 2, ignore_eos=True),
    lambda e, b: list(b.stream(2, ignore_eos=True)),
    lambda e, b: (b.append([30]), b.weave("full", 1.0), b.check(), b.refine()),
    lambda e, b: (b.append([30]), begun(b)),
    lambda e, b: (b.append([30]), begun(b, chat=True), e.loop.step()),
    lambda e, b: begun(b, chat=True).run(),
    lambda e, b: begun(b, chat=True).abandon(),
    lambda e, b: e.put("n", [30, 31]),
    lambda e, b: e.context("n").append([30]),
    lambda e, b: e.context("n", system="w1").ask("w2", 1),
    lambda e, b: (e.fork(b, "n").append([30]), b.append([31])),
    lambda e, b: (e.compose("{d} w3", name="n").generate(1), e.close_context("n")),
    lambda e, b: e.files.rm("d"),
    lambda e, b: b.revert(0),
]


@pytest.mark.parametrize("how", range(len(MEANWHILE)))
@pytest.mark.parametrize("depth", [1, 2])
def test_what_happened_within_a_block_that_failed_did_not(
    engine: Engine, how: int, depth: int
) -> None:
    a, b = engine.contexts["a"], engine.contexts["b"]
    before = seen(engine)
    with suppress(Planned), a.edit():
        a.append([40])
        with engine.context("c").edit() if depth > 1 else a.edit():
            MEANWHILE[how](engine, b)
        raise Planned
    assert seen(engine) == before
    assert not engine.loop.requests and not b.session.busy
    engine.check_integrity()
    answer = b.generate(2, ignore_eos=True)
    again = engine.context("x")
    again.append([20, 21])
    assert answer.tokens == again.generate(2, ignore_eos=True).tokens and answer.plan.drift == 0
    assert b.history.version > before[0]["b"][1], "a number was given twice"  # type: ignore[index]


@pytest.mark.parametrize("end", ["run", "cancel", "abandon"])
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_that_ends_within_such_a_block_was_not_said(
    engine: Engine, end: str, chat: bool, depth: int
) -> None:
    a, b = engine.contexts["a"], engine.contexts["b"]
    before = texts(engine, b)
    turn = begun(b, chat)
    engine.loop.step()
    with suppress(Planned), a.edit():
        with suppress(Planned), engine.context("c").edit():
            getattr(turn, end)()
            if depth > 1:
                raise Planned
        raise Planned
    engine.check_integrity()
    assert texts(engine, b) == before and not b.session.busy
    assert b.generate(1, ignore_eos=True).plan.n_tokens == sum(map(len, before))


def test_a_context_that_was_closed_in_one_stays_closed_and_holds_nothing(engine: Engine) -> None:
    a, b = engine.contexts["a"], engine.contexts["b"]
    b.append_chunk("d")
    with suppress(Planned), a.edit():
        b.append([50])
        engine.close_context("b")
        raise Planned
    assert b.closed and list(engine.contexts) == ["a"]
    assert engine.files.stat("d").refs == 1
    with a.edit():
        engine.context("b").append([51])
        engine.close_context("b")
    engine.check_integrity()


@pytest.mark.parametrize("fork", [False, True])
def test_a_context_that_was_opened_in_one_is_closed(engine: Engine, fork: bool) -> None:
    a, b = engine.contexts["a"], engine.contexts["b"]
    with suppress(Planned), a.edit():
        made = engine.fork(b, "n") if fork else engine.context("n")
        made.append([30])
        made.weave()
        raise Planned
    assert made.closed and not made.parts and not made.session.state.rows.n
    engine.context("n").append([31])


def test_what_would_end_a_block_from_within_it_is_refused(engine: Engine) -> None:
    a = engine.contexts["a"]
    with a.edit():
        for verb in (engine.close, a.close, lambda: engine.close_context("a")):
            with pytest.raises(InvalidArgument, match="under way"):
                verb()
        a.append([41])
    assert texts(engine, a)[1:] == [[20, 21], [41]] and engine.contexts["a"] is a


def test_a_block_within_one_that_fails_knows_what_was_before_it(engine: Engine) -> None:
    a, b = engine.contexts["a"], engine.contexts["b"]
    with b.edit():
        b.append([32])
        with suppress(Planned), a.edit():
            b.append([33])
            b.message("user", "w1")
            raise Planned
        b.append([34])
    assert texts(engine, b)[2:] == [[32], [34]]
    assert not engine.files.ls("b/*"), "its message was not said"


def test_steps_of_a_memory_that_did_not_happen_are_not_undone(engine: Engine) -> None:
    a, memory = engine.contexts["a"], Memory(engine, "b")
    memory.write("note", [35, 36])
    memory.tell([37])
    before = seen(engine)
    for verb in (lambda: memory.tell([38]), lambda: memory.write("note", [39]), memory.undo):
        with suppress(Planned), a.edit():
            verb()
            raise Planned
        assert seen(engine) == before and memory.n_steps == 2
    assert [memory.undo(), memory.undo(), memory.undo()] == ["tell", "write", None]
    assert texts(engine, engine.contexts["b"])[1:] == [[20, 21]] and not memory.items()


@pytest.mark.parametrize("seed", range(3))
def test_blocks_in_blocks_are_as_lists_would_be(engine: Engine, seed: int) -> None:
    """Random edits of three contexts, in blocks of each other of which any may fail."""
    random, lists = Random(seed), {name: texts(engine, c) for name, c in engine.contexts.items()}
    engine.context("c")
    lists["c"] = texts(engine, engine.contexts["c"])

    def some(depth: int) -> None:
        for _ in range(random.randint(1, 5)):
            name = random.choice("abc")
            context, mine = engine.contexts[name], lists[name]
            verb = random.choice(["append", "drop", "generate", "block", "block", "chunk"])
            if verb == "append":
                mine.append([random.randrange(10, 60) for _ in range(2)])
                context.append(mine[-1])
            elif verb == "drop" and len(mine) > 2:
                at = random.randrange(1, len(mine))
                context.drop(at)
                del mine[at]
            elif verb == "generate":
                mine.append(list(context.generate(2, ignore_eos=True).tokens))
            elif verb == "chunk":
                context.append_chunk("d")
                mine.append([10, 11, 12])
            elif verb == "block" and depth < 3:
                block(context, depth)

    def block(context: Context, depth: int) -> None:
        was = {name: list(mine) for name, mine in lists.items()}
        try:
            with context.edit():
                some(depth + 1)
                if random.random() < 0.5:
                    raise Planned
        except Planned:
            lists.update(was)

    for _ in range(30):
        with suppress(KVWeaveError):
            some(0)
        assert {name: texts(engine, c) for name, c in engine.contexts.items()} == lists
        engine.check_integrity()
        for name, context in engine.contexts.items():
            if sum(map(len, lists[name])) > 60:
                context.revert(0)
                lists[name] = texts(engine, context)


@pytest.mark.parametrize("verb", ["put", "append", "answer", "block"])
def test_what_cannot_be_committed_did_not_happen(
    engine: Engine, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    b, rows = engine.contexts["b"], engine.table._tx.rows
    before, held = seen(engine), set(engine.shelf.ram)

    def refused(n_freed: int) -> None:
        monkeypatch.undo()
        raise StoreError("the disk is full")

    monkeypatch.setattr(rows, "commit", refused)
    with pytest.raises(StoreError):
        if verb == "put":
            engine.put("n", [30, 31, 32])
        elif verb == "append":
            b.append([30])
        elif verb == "answer":
            b.generate(1, ignore_eos=True)
        else:
            with engine.contexts["a"].edit():
                b.generate(1, ignore_eos=True)
                engine.context("n")
    assert seen(engine) == before
    engine.check_integrity()
    known = {int(record.id) for record in engine.table}
    assert not {*engine.shelf.ram} - known and held <= {*engine.shelf.ram}
