"""Blocks of edits with whatever in them: an edit that fails is as if it had not been tried, also where
its error is caught in the block, and what a failed block made or moved leaves nothing behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from random import Random
from typing import Any

import pytest
from world import models

from kvweave import Context, Engine, KVWeaveError
from kvweave.errors import ChunkNotFound, InvalidArgument

BASE = [1, 2, 3]
NAMES = [f"d{i}" for i in range(4)]
SMALL = 40_000  # bytes of memory: a few chunks


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(models.build("llama")[0], base=BASE, repair="none") as made:
        made.put_many([(name, [10 + i, 11, 12]) for i, name in enumerate(NAMES)])
        yield made
        sound(made)


@pytest.fixture
def context(engine: Engine) -> Context:
    made = engine.context("c")
    for tokens in ([20, 21, 22], [30, 31]):
        made.append(tokens)
    made.append_chunk("d0")
    made.amend("d0", [40])
    return made


def state(engine: Engine, context: Context) -> object:
    """What an edit may change: parts, base, names, chunks."""
    names = {entry.name: entry.id for entry in engine.files.ls("**")}
    return context.parts, context.snapshot().base, names, sorted(int(r.id) for r in engine.table)


def sound(engine: Engine) -> None:
    """Index and memory are of the same chunks, and agree where their KV is."""
    engine.check_integrity()
    told = {int(record.id): record.tier for record in engine.table}
    assert told == {id: engine.shelf.tier(id) for id in told}
    assert not {*engine.shelf.ram} - told.keys(), "KV of chunks that there are not"


FAILING: list[tuple[str, Callable[[Engine, Context], Any]]] = [
    ("append", lambda e, c: c.append([5, 6], name="d0")),
    ("append", lambda e, c: c.append([])),
    ("insert", lambda e, c: c.insert(77, [5])),
    ("insert", lambda e, c: c.insert(0, [5])),
    ("insert", lambda e, c: c.insert_chunk(0, "d1")),
    ("insert", lambda e, c: c.insert_slice(0, "d1", 0, 2)),
    ("drop", lambda e, c: c.drop(1, "nope")),
    ("drop", lambda e, c: c.drop(0)),
    ("replace", lambda e, c: c.replace(1, [])),
    ("replace", lambda e, c: c.replace(0, [10**6])),
    ("amend", lambda e, c: c.amend(1, [])),
    ("reorder", lambda e, c: c.reorder([1, 0, 2, 3, 4])),
    ("leave", lambda e, c: c.leave((0, 1), (0, 1))),
    ("revert", lambda e, c: c.revert(77)),
    ("put", lambda e, c: e.put_many([("new", [5]), ("d0", [6])])),
]


@pytest.mark.parametrize(("verb", "call"), FAILING)
def test_an_edit_that_fails_in_a_block_leaves_no_trace(
    engine: Engine, context: Context, verb: str, call: Callable[[Engine, Context], Any]
) -> None:
    before, tokens = state(engine, context), context.tokens()
    with context.edit():
        with pytest.raises(KVWeaveError):
            call(engine, context)
        assert state(engine, context) == before
        context.append([7, 8])
    assert context.history.log()[0].verb == "append"
    assert context.tokens() == [*tokens, 7, 8]


EDITS: list[Callable[[Context], Any]] = [
    lambda c: c.replace(1, [50, 51]),
    lambda c: c.replace("d0", [50, 51]),
    lambda c: c.replace(0, [50, 51]),
    lambda c: c.amend(1, [50]),
    lambda c: (c.drop(1), c.append([50])),
    lambda c: c.reorder([0, 3, 2, 1, 4]),
    lambda c: c.revert(2),
]


@pytest.mark.parametrize("edit", EDITS)
def test_a_block_that_fails_puts_back_other_contexts(
    engine: Engine, context: Context, edit: Callable[[Context], Any]
) -> None:
    before, log = state(engine, context), context.history.log()
    with suppress(ZeroDivisionError), engine.context("around").edit():
        edit(context)
        raise ZeroDivisionError
    assert (state(engine, context), context.history.log()) == (before, log)
    tokens = context.tokens()
    context.weave(repair="full")
    assert context.check().kl_max < 1e-9 and context.tokens() == tokens


def test_nothing_comes_before_the_base(engine: Engine, context: Context) -> None:
    """`oldest`, `replace` and all chunks of the context count on where it stands."""
    with pytest.raises(InvalidArgument, match="front"):
        context.insert(0, [9])
    assert engine.context("free", system=None).parts[0].name == "base"
    context.insert(1, [9])
    assert context.oldest().n == 1


def test_a_context_comes_back_from_nothing(engine: Engine) -> None:
    with Engine(models.build("llama")[0], base="") as bare:
        context = bare.context("c")
        for tokens in ([4, 5], [6]):
            context.append(tokens)
        context.drop(0, 1)
        context.revert(2)
        assert context.tokens() == [4, 5, 6]
        sound(bare)


def test_what_a_block_made_and_dropped_is_gone(engine: Engine, context: Context) -> None:
    before = sorted(int(record.id) for record in engine.table)
    with context.edit():
        made = context.append([50, 51])
        context.replace(made, [52])
        context.drop(-1 + len(context.parts))
    assert sorted(int(record.id) for record in engine.table) == before


@pytest.mark.parametrize("home", [False, True])
def test_a_block_that_fails_leaves_memory_to_others(home: bool, tmp_path: Any) -> None:
    """KV of chunks that never were cannot be let go of: in time nothing could be stored."""
    where = tmp_path / "home" if home else None
    with Engine(models.build("llama")[0], base="", budget=SMALL, home=where) as engine:
        context = engine.context("c")
        for i in range(12):
            with suppress(ZeroDivisionError), context.edit():
                engine.put(f"gone{i}", [4, 5, 6, 7, 8, i])
                context.append_chunk(f"gone{i}")
                context.weave()
                raise ZeroDivisionError
        assert not [*engine.shelf.ram] and not len(engine.table)
        for i in range(12):
            engine.put(f"kept{i}", [50, 51, 52, 53, 54, i])
        sound(engine)


def test_where_kv_went_in_a_block_that_failed_is_known(tmp_path: Any) -> None:
    with Engine(models.build("llama")[0], base="", budget=SMALL, home=tmp_path / "h") as engine:
        for i in range(4):
            engine.put(f"d{i}", [4, 5, 6, 7, 8, i])
        context = engine.context("c")
        with suppress(ZeroDivisionError), context.edit():
            engine.place("d0", "none"), engine.place("d1", "disk")
            engine.put_many([(f"e{i}", [50, 51, 52, 53, 54, i]) for i in range(4)])
            raise ZeroDivisionError
        assert [engine.files.stat(f"d{i}").tier for i in range(2)] == ["none", "disk"]
        sound(engine)


class Blocks:
    """Random blocks over one engine, and what was before each verb."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.draw = engine, Random(seed)
        self.contexts = [engine.context(f"c{i}") for i in range(2)]

    def tokens(self) -> list[int]:
        return [self.draw.randrange(4, 60) for _ in range(self.draw.choice([0, 1, 1, 3, 6]))]

    def verb(self, context: Context) -> None:
        """Do one thing, mostly a wrong one."""
        engine, draw, name = self.engine, self.draw, self.draw.choice(NAMES)
        at, n = draw.randrange(-1, 6), len(context.parts)
        free = draw.choice([None, name, "n"])
        calls: list[Callable[[], Any]] = [
            lambda: context.append(self.tokens(), name=free),
            lambda: context.append_chunk(name),
            lambda: context.insert(at, self.tokens()),
            lambda: context.insert_slice(at, name, 0, 2),
            lambda: context.drop(at, draw.randrange(6)),
            lambda: context.drop(n - 1),
            lambda: context.replace(at, self.tokens()),
            lambda: context.amend(at, self.tokens()),
            lambda: context.reorder(draw.sample(range(n), n)),
            lambda: context.leave((0, at), (at + 1, at + 2)),
            lambda: context.revert(draw.randrange(9)),
            lambda: context.weave(),
            lambda: engine.put(name, self.tokens(), replace=draw.random() < 0.7),
            lambda: engine.put_many([(name, self.tokens()), ("n", self.tokens())]),
            lambda: engine.files.rm(name),
            lambda: engine.files.mv(name, draw.choice(NAMES), replace=True),
            lambda: engine.place("**", draw.choice(["none", "ram"])),
            lambda: engine.compress(name, "knorm:0.5"),
        ]
        draw.choice(calls)()

    def tried(self, context: Context) -> None:
        """Do one thing; what is refused has changed nothing."""
        before = state(self.engine, context)
        try:
            self.verb(context)
        except KVWeaveError as error:
            assert state(self.engine, context) == before, repr(error)

    def block(self) -> None:
        context, fails = self.draw.choice(self.contexts), self.draw.random() < 0.4
        before = state(self.engine, context)
        with suppress(ZeroDivisionError), context.edit():
            for _ in range(self.draw.randrange(4)):
                self.tried(context)
            if fails:
                raise ZeroDivisionError
        if fails:
            assert state(self.engine, context) == before


@pytest.mark.parametrize("seed", range(4))
def test_any_verbs_in_blocks(seed: int, tmp_path: Any) -> None:
    how: dict[str, Any] = {"base": BASE if seed % 2 else "", "budget": ["64MiB", 80_000][seed // 2]}
    with Engine(models.build("llama")[0], home=tmp_path / "home", **how) as engine:
        play = Blocks(engine, seed)
        for _ in range(60):
            play.block()
            with suppress(ChunkNotFound, KVWeaveError):
                play.verb(play.contexts[0])
            sound(engine)
        for context in play.contexts:
            engine.close_context(context.name)
        for entry in engine.files.ls("**"):
            engine.files.rm(entry.name)
        assert len(engine.table) == (1 if seed % 2 else 0), "only the base is left"
        sound(engine)
