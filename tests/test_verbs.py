"""Every public verb with what it is not meant for. The verbs are found by looking at the classes, and what a
parameter may be at its annotation, so a verb that is added is walked too.

python -m pytest tests/test_verbs.py
"""

from __future__ import annotations

import collections.abc as abc
import contextlib
import functools
import inspect
import operator
import os
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from numbers import Integral, Real
from typing import Any

import days
import numpy as np
import pytest
import torch
from faces import FACES, faces
from loaded import short_runner
from served import served

from kvweave import Client, Engine, KVWeaveError, Memory, MemoryBudget, Runner, Sampling
from kvweave.chunk.files import Files
from kvweave.client import RemoteContext, RemoteFiles, RemoteMemory
from kvweave.errors import InvalidArgument
from kvweave.memory import FirstSentences, MemoryBlocks
from kvweave.memory.asking import Asking
from kvweave.verbs import STILL
from kvweave.weave.context import Context
from kvweave.weave.history import ContextHistory
from kvweave.weave.naming import WORDS
from kvweave.weave.parts import Snapshot
from kvweave.weave.putting import NewChunk
from kvweave.weave.settings import Settings
from kvweave.weave.turn import Turn

A, B = "Nina's river is wide . so well .\n", "Yuki's metal is sharp . so well .\n"
BUDGET = MemoryBudget(window=200, summaries=60, summary=30, recalled=60, warm=400)


@pytest.fixture(scope="module")
def runner():
    return short_runner()


def opened(runner: Runner, *texts: str) -> Engine:
    """An engine with two chunks, and a context that has answered."""
    engine = Engine(runner, repair="none")
    engine.put_many(list(zip(("docs/a", "docs/b"), texts, strict=True)))
    chat = engine.context("chat", system="keep the notes .")
    chat.append_chunk("docs/a")
    chat.append("what about Nina's river")
    chat.generate(2)
    return engine


@functools.cache
def strange(runner: Runner) -> Context:
    """A context of another engine, whose parts have the same numbers."""
    return opened(runner, B, A).contexts["chat"]


class World:
    """An engine with something of everything, and a context of another one."""

    def __init__(self, runner: Runner) -> None:
        self.engine, self.strange = opened(runner, A, B), strange(runner)
        self.chat = self.engine.contexts["chat"]
        self.closed = self.engine.context("closed")
        self.engine.close_context("closed")
        talk = self.engine.context("talk", system="keep the notes .")
        self.memory = Memory(self.engine, talk, budget=BUDGET, summarise=FirstSentences())
        self.memory.write("notes/a", B)
        self.blocks = MemoryBlocks(self.memory)
        self.blocks.add("human", "so well .")
        self.of = {
            Engine: self.engine, Context: self.chat, Memory: self.memory, Files: self.engine.files,
            ContextHistory: self.chat.history, MemoryBlocks: self.blocks,
        }  # fmt: skip

    def state(self) -> tuple[object, ...]:
        """All that a refused verb leaves as it was."""
        engine = self.engine
        # what was found out of items, to recall them by, stays found out
        found = sum(n for who, n in engine.shelf.charged() if WORDS in who)
        return (
            [(r.id, r.names, r.tier, r.pinned, r.n_bytes, r.deps) for r in engine.table],
            [
                (c.name, c.parts, c.history.version, c._base, c.session.busy)
                for c in engine._contexts
            ],
            {r.id: engine.table.contexts_of(r.id) for r in engine.table},
            (engine.shelf.n_bytes - found, engine.shelf.budget, len(engine.loop.requests)),
            (self.memory.n_steps, [b.value for b in self.blocks]),
        )

    def close(self) -> None:
        self.engine.check_integrity()
        self.engine.close()


class Raises:
    """Whatever is asked of it, it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    def raises(self, *_: Any) -> Any:
        raise RuntimeError

    __iter__ = __len__ = __index__ = __str__ = __repr__ = __float__ = __eq__ = __bool__ = raises
    __hash__ = None  # type: ignore[assignment]


class Takes:
    """A class that is called with anything."""

    def __init__(self, *_: Any) -> None: ...


class Word(str):
    """Text of another class."""


WRONG: dict[str, Callable[[World], Any]] = {
    "None": lambda w: None, "1.5": lambda w: 1.5, "True": lambda w: True, "nan": lambda w: float("nan"),
    "2**70": lambda w: 2**70, "-2**70": lambda w: -(2**70), "2**62": lambda w: 2**62, "-1": lambda w: -1,
    "-2": lambda w: -2, "0": lambda w: 0, "inf": lambda w: float("inf"), "digits": lambda w: 10**5000,
    "''": lambda w: "", "bytes": lambda w: b"docs/a", "mixed": lambda w: [1, "docs/a", None, 2.5],
    "empty": lambda w: [], "raises": lambda w: Raises(), "raise": lambda w: [Raises()], "word": lambda w: Word("docs/a"),
    "int64": lambda w: np.int64(1), "float32": lambda w: np.float32(0.5), "bool_": lambda w: np.bool_(True),
    "array": lambda w: np.array([5, 6]), "floats": lambda w: np.array([0.5]), "tensor": lambda w: torch.tensor([5, 6]),
    "scalar": lambda w: torch.tensor(1), "matrix": lambda w: torch.ones(2, 2), "iterator": lambda w: iter([5, 6]),
    "breaks": lambda w: (1 // x for x in (1, 0)), "surrogate": lambda w: "\ud800", "NUL": lambda w: "a\0b",
    "id": lambda w: "#99999999999999999999", "#": lambda w: "#", "long": lambda w: "x" * 70_000, "glob": lambda w: "{[",
    "set": lambda w: {5, 6}, "dict": lambda w: {"docs/a": 1}, "object": lambda w: object(), "type": lambda w: Takes,
    "lambda": lambda w: lambda *_: 1, "part": lambda w: w.strange.parts[1], "snapshot": lambda w: w.strange.snapshot(),
    "bare": lambda w: Snapshot(w.chat.parts), "context": lambda w: w.strange, "closed": lambda w: w.closed,
    "pairs": lambda w: [("x", [5]), ("x",)], "sampling": lambda w: (Sampling(), None), "biases": lambda w: {2**40: 1.0},
}  # fmt: skip

DAYS = min(3, int(os.environ.get("KVWEAVE_EVERY", "1")))  # in which each of these was each argument
GOOD: dict[str, Callable[[World], Any]] = {  # where an annotation does not say enough
    "name": lambda w: "new/name", "ref": lambda w: "docs/a", "pattern": lambda w: "docs/*", "src": lambda w: "docs/a",
    "dst": lambda w: "new/b", "to": lambda w: "new/c", "keep": lambda w: "full", "namespace": lambda w: "",
    "label": lambda w: "human", "old": lambda w: "so", "what": lambda w: "run", "sort": lambda w: "name",
    "order": lambda w: [0, 1, 2, 3], "ranges": lambda w: (0, 9), "index": lambda w: 1, "start": lambda w: 0, "stop": lambda w: 3,
    "kv": lambda w: w.engine.shelf.get(w.chat.parts[1].id), "snapshot": lambda w: w.chat.snapshot(),
    "context": lambda w: w.chat, "contexts": lambda w: [w.chat], "items": lambda w: [("new/x", [5, 6])],
    "part": lambda w: w.chat.parts[1], "refs": lambda w: 1, "max_tokens": lambda w: 2, "tier": lambda w: "none",
    "version": lambda w: 1, "since": lambda w: 0, "template": lambda w: "so {docs/a} well", "header": lambda w: None,
    "sampling": lambda w: Sampling(2), "asked": lambda w: (Sampling(2), None), "pieces": lambda w: [],
    "call": lambda w: {"command": "view", "path": "/memories"}, "repair": lambda w: "none", "mover": lambda w: lambda record, tier: 0, "kind": lambda w: "user", "role": lambda w: "user",
    "key": lambda w: "key", "verb": lambda w: "edit", "base": lambda w: None, "plan": lambda w: w.chat.plan, "zone": lambda w: "turn",
    "preview": lambda w: w.chat.plan, "parts": lambda w: w.chat.parts, "tokens": lambda w: [5, 6], "uid": lambda w: 1,
}  # fmt: skip
MADE_INSIDE = {  # verbs that only the engine's own parts call; their arguments are not a user's
    ContextHistory: {"copy", "keep", "record", "wove", "back_to", "why", "tokens"},
    Context: {"wove", "answered", "set_base"},
    Files: {"place"},  # its mover is; the engine's is the verb
}


@functools.cache  # to read annotations takes as long as a verb
def verbs(cls: type) -> list[tuple[str, inspect.Signature]]:
    """The public methods of a class."""
    return [
        (name, inspect.signature(found, eval_str=True))
        for name, found in inspect.getmembers(cls, inspect.isfunction)
        if name[0] != "_" and name not in MADE_INSIDE.get(cls, ())
    ]


def fits(value: Any, asked: Any) -> bool:
    """Whether a value is what an annotation asks for: slow, and by the words of typing alone."""
    origin, inner = typing.get_origin(asked), typing.get_args(asked)
    if origin is typing.Annotated:
        return fits(value, inner[0]) and (inner[0] is str or value >= 0)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, each) for each in inner)
    if origin is typing.Literal:
        return isinstance(value, str) and value in inner
    if origin is abc.Callable or asked is abc.Callable:
        return callable(value)
    if origin in (abc.Sequence, abc.Iterable, list, tuple):
        if isinstance(value, str | bytes | dict | set | Raises) or not isinstance(
            value, abc.Iterable
        ):
            return False
        items = value.tolist() if isinstance(value, np.ndarray | torch.Tensor) else value
        if not isinstance(items, list | tuple):
            return isinstance(items, abc.Iterator)  # what comes of it is seen when it is read
        if origin is tuple and inner[-1] is not ...:
            return len(items) == len(inner) and all(map(fits, items, inner))
        return all(fits(item, inner[0]) for item in items)
    if origin in (abc.Mapping, dict):
        return isinstance(value, dict) and all(
            fits(k, inner[0]) and fits(v, inner[1]) for k, v in value.items()
        )
    if asked in (int, float):
        kind = Integral if asked is int else Real
        if not isinstance(value, kind) or isinstance(value, bool) or value != value:
            return False
        return isinstance(value, float | np.floating) or abs(int(value)) < (
            2**63 if asked is int else 2**1023
        )
    if asked is str:
        return isinstance(value, str) and "\ud800" not in value
    if asked is None:
        return value is None
    if isinstance(asked, typing.NewType):
        return fits(value, asked.__supertype__)
    if isinstance(asked, typing.TypeVar):
        return fits(value, asked.__bound__)
    if getattr(asked, "_is_protocol", False):
        return callable(value) if "__call__" in vars(asked) else hasattr(type(value), "begin")
    return asked in (Any, object, inspect.Parameter.empty) or isinstance(value, origin or asked)


def good(world: World, name: str, asked: Any) -> Any:
    """What a parameter may well be."""
    if asked == abc.Sequence[NewChunk]:
        return [NewChunk("new/x", [5, 6])]
    if name in GOOD:
        return GOOD[name](world)
    for value in ("so well .", 1, 0.5, True, None):
        if fits(value, asked):
            return value
    raise AssertionError(f"{name}: say in GOOD what it may be")


@functools.cache
def signature_of(cls: type, verb: str) -> inspect.Signature:
    return inspect.signature(inspect.getattr_static(cls, verb), eval_str=True)


@functools.cache
def returns_of(cls: type, verb: str) -> str:
    return str(inspect.signature(inspect.getattr_static(cls, verb)).return_annotation)


def needs(world: World, cls: type, verb: str) -> dict[str, Any]:
    """What a verb cannot be called without."""
    return {
        p.name: good(world, p.name, bound(p.annotation))
        for p in list(signature_of(cls, verb).parameters.values())[1:]
        if p.kind is not p.VAR_KEYWORD and (p.default is p.empty or p.name == "max_tokens")
    }


def call(world: World | Far, cls: type, verb: str, given: dict[str, Any]) -> Any:
    """Call a verb, and see what it gives through to its end."""
    signature = signature_of(cls, verb)
    args = [p for p in signature.parameters.values() if p.kind is p.VAR_POSITIONAL]
    options = {k: v for k, v in given.items() if k not in {p.name for p in args}}
    if args:  # *refs, behind what stands before it
        before = [
            options.pop(p.name)
            for p in signature.parameters.values()
            if p.kind is p.POSITIONAL_OR_KEYWORD and p.name in options
        ]
        found = getattr(world.of[cls], verb)(
            *before, *[given[p.name] for p in args if p.name in given], **options
        )
    else:
        found = getattr(world.of[cls], verb)(**options)
    if inspect.isgenerator(found) and "Task" in returns_of(cls, verb):
        found = world.engine.loop.finish(found)
    if isinstance(found, Turn):
        found.cancel()
    elif isinstance(found, Asking):
        found.turn.cancel()
        found.end()
    elif inspect.isgenerator(found):
        list(found)
    elif isinstance(found, AbstractContextManager) and not isinstance(found, Context):
        with found:
            pass
    return found


def cases(cls: type, verb: str) -> Iterator[tuple[str, Any]]:
    """The parameters of a verb and what may stand there; of its options too."""
    for p in list(dict(verbs(cls))[verb].parameters.values())[1:]:
        if p.kind is not p.VAR_KEYWORD:
            yield p.name, p.annotation
    options = next(
        (p for p in dict(verbs(cls))[verb].parameters.values() if p.kind is p.VAR_KEYWORD), None
    )
    if options is not None and (cls, verb) in ((Engine, "context"), (Context, "generate")):
        made = Settings if verb == "context" else Sampling
        for name, p in inspect.signature(made, eval_str=True).parameters.items():
            if name not in ("max_tokens", "constraint"):  # an object of the program's own
                yield name, str | p.annotation if name == "stop" else p.annotation


EVERY = [
    (cls, verb)
    for cls in (Engine, Context, Memory, Files, ContextHistory, MemoryBlocks)
    for verb, _ in verbs(cls)
]


@pytest.mark.parametrize(
    ("cls", "verb"), EVERY, ids=[f"{cls.__name__}.{verb}" for cls, verb in EVERY]
)
def test_a_verb_takes_what_is_meant_or_changes_nothing(runner, cls, verb):
    world, faults = World(runner), []
    before = world.state()
    wrong = list(WRONG.items())
    for n, (name, asked) in enumerate(cases(cls, verb)):
        for what, make in (wrong[i] for i in days.one_in(DAYS, len(wrong), n)):
            value = make(world)
            given = needs(world, cls, verb) | {name: value}
            says = f"{name}={what}"
            try:
                call(world, cls, verb, given)
            except KVWeaveError as error:
                if not error.hint and not fits(make(world), asked):
                    faults.append(f"{says}: no hint: {error!r}")
                if world.state() != before:
                    faults.append(f"{says}: something changed: {error}")
                    world = World(runner)
                    before = world.state()
            except Exception as error:
                faults.append(f"{says}: {error!r}")
                world = World(runner)
                before = world.state()
            else:
                if not fits(make(world), asked):
                    faults.append(f"{says}: is taken")
                if world.state() != before:
                    world.close()
                    world = World(runner)
                    before = world.state()
    world.close()
    assert not faults, "\n".join(faults)


# ---- closed, half read, called back, from other threads


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call gives, or raises; it is in a thread, so that one that hangs is seen."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert found, "it hangs"
    return found[0]


def outcome(world: World, cls: type, verb: str) -> Exception | None:
    """What a verb that is called well raises."""
    return within(60, lambda: call(world, cls, verb, needs(world, cls, verb)))[1]


@pytest.mark.parametrize("what", ["engine", "context"])
def test_what_is_closed_says_so(runner, what):
    world, faults = World(runner), []
    snapshot, kv, plan = world.chat.snapshot(), GOOD["kv"](world), world.chat.plan
    good = {"snapshot": snapshot, "kv": kv, "plan": plan, "part": world.chat.parts[1]}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in good.items():
            patch.setitem(GOOD, name, lambda w, value=value: value)
        if what == "engine":
            world.engine.close()
            world.engine.close()
        for name in ("chat", "talk") if what == "context" else ():
            world.engine.close_context(name)
        told = (Context, Memory, *((Engine, Files, MemoryBlocks) if what == "engine" else ()))
        for cls, verb in EVERY:
            if cls in told:
                error = outcome(world, cls, verb)
                clear = isinstance(error, KVWeaveError) and "closed" in str(error) and error.hint
                if not (clear or (error is None and verb in STILL)):
                    faults.append(f"{cls.__name__}.{verb}: {error!r}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("verb", [verb for verb, _ in verbs(Context)])
def test_a_verb_beside_an_answer_that_is_read_changes_nothing_of_it(runner, verb):
    world = World(runner)
    twin = world.engine.fork(world.chat, "twin")
    wanted = twin.generate(6, ignore_eos=True)
    pieces = world.chat.stream(6, ignore_eos=True)
    said = [next(pieces)]
    error = outcome(world, Context, verb)
    assert error is None or (isinstance(error, KVWeaveError) and error.hint), repr(error)
    if verb == "close":
        with pytest.raises(InvalidArgument, match="given up"):
            next(pieces)
    else:
        assert "".join([*said, *pieces]) == wanted.text
        assert world.chat.tokens() == twin.tokens()
    world.close()


def test_nothing_is_entered_from_what_a_verb_calls_back(runner):
    world, faults, told = World(runner), [], []

    def progress(n: int) -> None:
        for cls, verb in EVERY if not told else ():
            if cls in (Engine, Context, Memory):
                told.append(verb)
                try:
                    call(world, cls, verb, needs(world, cls, verb))
                except InvalidArgument as error:
                    faults.extend([] if "called back" in str(error) else [f"{verb}: {error!r}"])
                except Exception as error:
                    faults.append(f"{verb}: {error!r}")
                else:
                    faults.append(f"{verb} was done")

    before = world.state()[1]
    world.engine.put("late", "then we saw it", progress=progress)
    assert not faults and len(told) > 60, "\n".join(faults)
    assert world.state()[1] == before and world.engine.files.stat("late").tier == "ram"
    assert world.chat.append_chunk("late").n and world.chat.generate(2).tokens
    world.close()


@pytest.mark.slow
def test_threads_take_turns(runner):
    """Each says in a context of its own what it would have said alone; one waits for another's edits."""
    world, found = World(runner), {}
    texts = [
        "what about Nina's river",
        "so well then we saw it",
        "keep the notes .",
        "what about Yuki's metal",
    ]

    def talk(engine: Engine, n: int) -> list[object]:
        context = engine.context(f"thread/{n}", system="keep the notes .")
        for k, text in enumerate([*texts[n:], *texts[:n]]):
            engine.put(f"thread/{n}/{k}", text)
            with context.edit():
                context.append_chunk(f"thread/{n}/{k}")
                context.append(text)
            context.generate(3, ignore_eos=True)
            "".join(context.stream(3, ignore_eos=True))
            context = engine.fork(context, f"thread/{n}-{k}")
            context.drop(1)
        return [context.tokens(), [(p.name, p.n) for p in context.parts]]

    def run(n: int) -> None:
        found[n] = talk(world.engine, n)

    alone = [talk(World(runner).engine, n) for n in range(len(texts))]
    threads = [threading.Thread(target=run, args=(n,), daemon=True) for n in range(len(texts))]
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(switch)
    assert [found.get(n) for n in range(len(texts))] == alone
    world.close()


# ---- the same over HTTP


def refusal(world: World | Far, cls: type, verb: str, given: dict[str, Any]) -> Any:
    """What a call raises."""
    try:
        return call(world, cls, verb, given)
    except Exception as error:
        return error


def bound(asked: Any) -> Any:
    """An annotation of a client's class as the engine has it."""
    if isinstance(asked, typing.TypeVar):
        return asked.__bound__
    if typing.get_origin(asked) in (typing.Union, types.UnionType):
        return functools.reduce(operator.or_, map(bound, typing.get_args(asked)))
    return asked


class Far:
    """A client of a server over a `World`, and what its verbs are called on."""

    def __init__(
        self, runner: Runner, make: Callable[..., Any], stack: contextlib.ExitStack
    ) -> None:
        self.world = World(runner)
        self.world.memory.close()  # the server's is over the same context
        server = stack.enter_context(served(self.world.engine))
        client = stack.enter_context(make(server.url))
        self.of = {Client: client, RemoteContext: client.get_context("chat"), RemoteFiles: client.files,
                   RemoteMemory: client.memory("talk", budget=BUDGET, summarise="sentences")}  # fmt: skip


NEAR = {Client: Engine, RemoteContext: Context, RemoteFiles: Files, RemoteMemory: Memory}


@functools.cache
def far_verbs(cls: type) -> list[tuple[str, inspect.Signature]]:
    """The verbs of a client's class."""
    every = [(name, inspect.getattr_static(cls, name)) for name in dir(cls)]
    return [
        (name, inspect.signature(found, eval_str=True))
        for name, found in every
        if name[0] != "_" and callable(found) and not isinstance(found, type)
    ]


FAR = [(cls, verb) for cls in NEAR for verb, _ in far_verbs(cls)]


@pytest.mark.slow
@pytest.mark.parametrize("face", FACES)
def test_a_client_refuses_what_the_engine_refuses(runner, face):
    """Before anything is sent; what may be sent, the server refuses as the engine does."""
    faults, n = [], 0
    with contextlib.ExitStack() as stack:
        far = Far(runner, stack.enter_context(faces(face)), stack)
        near, before = World(runner), far.world.state()
        for cls, verb in FAR:
            mine = dict(verbs(NEAR[cls])).get(verb)
            for p in list(dict(far_verbs(cls))[verb].parameters.values())[1:]:
                for what, make in WRONG.items():
                    if p.kind is p.VAR_KEYWORD or fits(make(far.world), bound(p.annotation)):
                        continue
                    n += 1
                    given = needs(far.world, cls, verb) | {p.name: make(far.world)}
                    same = mine is not None and p.name in mine.parameters
                    wanted = (
                        InvalidArgument
                        if not same
                        else type(
                            refusal(
                                near,
                                NEAR[cls],
                                verb,
                                needs(near, NEAR[cls], verb) | {p.name: make(near)},
                            )
                        )
                    )
                    error = refusal(far, cls, verb, given)
                    if type(error) is not wanted or not error.hint:
                        faults.append(
                            f"{cls.__name__}.{verb}: {p.name}={what}: {error!r}, not {wanted.__name__}"
                        )
        assert far.world.state() == before and n > 1000
        near.close()
    far.world.close()
    assert not faults, "\n".join(faults)


def test_items_of_a_dict_are_a_list_of_pairs(runner: Runner) -> None:
    with Engine(runner, repair="none") as engine:
        entries = engine.put_many({"d/a": [1, 2, 3], "d/b": [4, 5]}.items())
        assert [entry.n_tokens for entry in entries] == [3, 2]
        with pytest.raises(InvalidArgument):  # which has no order
            engine.put("d/c", {4, 5})
