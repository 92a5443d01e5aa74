"""Undo beside others who edit the same context: random interleavings against a list of who did what."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress

import pytest
from loaded import short_runner

from kvweave import Engine, KVWeaveError, Memory, MemoryBudget
from kvweave.errors import ContextChanged

WORDS = "so well Anna's river is cold . then we saw it".split()
OTHERS = "somebody else"  # stands in the log where others edited: nothing before it is undone
Parts = list[tuple[int, ...]]


class Play:
    """A memory, others, and the twin: parts as lists of tokens, and what was before each step."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.random, self.context = random.Random(seed), engine.context("undo", system="so well .")
        budget = MemoryBudget(window=10_000, turns=1000)
        self.memory = Memory(engine, self.context, budget=budget)
        self.parts, self.items = self.found(), dict[str, str]()
        self.log: list[tuple[Parts, dict[str, str]] | str] = []

    def found(self) -> Parts:
        tokens = iter(self.context.tokens())
        return [tuple(next(tokens) for _ in range(part.n)) for part in self.context.parts]

    def said(self) -> str:
        return " ".join(self.random.choices(WORDS, k=self.random.randint(1, 6)))

    # ---- steps

    def tell(self) -> None:
        self.log.append((list(self.parts), dict(self.items)))
        part, said = self.memory.tell(self.said()), self.context.tokens()
        self.parts.append(tuple(said[-part.n :]))

    def write(self) -> None:
        name, said = f"memory/n{self.random.randint(0, 3)}", self.said()
        if self.items.get(name) != said:
            self.log.append((list(self.parts), dict(self.items)))
        self.memory.write(name, said)
        self.items[name] = said

    def nothing(self) -> None:
        with self.memory.step("nothing"):
            self.context.drop(self.context.append(self.said()))

    def fault(self) -> None:
        with suppress(ZeroDivisionError), self.memory.step("fault"):
            made = self.context.append(self.said())
            if self.random.random() < 0.5:
                self.context.drop(made)
            raise ZeroDivisionError

    def undo(self) -> None:
        if not self.log:
            assert self.memory.undo() is None
        elif self.log[-1] == OTHERS:
            if self.memory.n_steps:
                with pytest.raises(ContextChanged):
                    self.memory.undo()
        else:
            assert self.memory.undo() is not None
            self.parts, self.items = self.log.pop()

    # ---- others

    def edit(self, verb: Callable[[], object]) -> None:
        n = len(self.parts)
        verb()
        found = self.found()
        assert found[:n] == self.parts
        self.parts = found
        self.log.append(OTHERS)

    def append(self) -> None:
        self.edit(lambda: self.context.append(self.said()))

    def message(self) -> None:
        self.edit(lambda: self.context.message("user", self.said()))

    def answer(self) -> None:
        self.edit(lambda: self.context.generate(2, ignore_eos=True))

    def drop(self) -> None:
        if len(self.parts) > 1:
            i = self.random.randrange(1, len(self.parts))
            self.context.drop(i)
            del self.parts[i]
            self.log.append(OTHERS)

    def run(self, n: int) -> None:
        ours = "tell tell tell write write nothing fault undo undo undo undo undo".split()
        theirs = ["append", "drop", "message", "answer"]
        for _ in range(n):
            getattr(self, self.random.choice(ours if self.random.random() < 0.9 else theirs))()
            assert self.found() == self.parts
            below = {item.name: self.memory.read(item.name) for item in self.memory.items()}
            assert below == self.items


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(12))
def test_undo_never_takes_back_what_others_did(seed: int) -> None:
    with Engine(short_runner(), repair="none", denoise="never") as engine:
        Play(engine, seed).run(80)


def test_an_edit_between_two_steps_outlives_both() -> None:
    with Engine(short_runner()) as engine:
        context = engine.context("c", system="so well .")
        memory = Memory(engine, context)
        memory.tell("so well")
        context.append("then we saw it", label="external")
        memory.tell("we saw it")
        assert memory.undo() == "tell"
        for _ in range(2):
            with pytest.raises(ContextChanged):
                memory.undo()
        assert context.parts[-1].name == "external"


def test_a_verb_that_fails_in_a_step_is_put_back_alone() -> None:
    """`ask` had recalled for the message that it then could not say."""
    with Engine(short_runner(), repair="none") as engine:
        context = engine.context("c", system="so well .")
        memory = Memory(engine, context)
        memory.write("river", "Anna's river is cold .")

        def state() -> object:
            items = [(item.name, item.pinned, memory.read(item.name)) for item in memory.items()]
            return context.parts, items, memory.n_steps, memory.zone("recalled")

        with memory.step("plan"):
            memory.write("metal", "Omar's metal is hot .")
            before = state()
            with pytest.raises(KVWeaveError):
                memory.ask("what about Anna's river", max_tokens=10**6)
            assert state() == before
            with suppress(ZeroDivisionError), memory.step("inner"):
                memory.write("metal", "Omar's metal is cold .")
                memory.anchor("label", "so")
                raise ZeroDivisionError
            assert state() == before
            memory.anchor("rules", "so well .")
            memory.delete("river")
        assert memory.n_steps == 2 and memory.undo() == "plan"
        assert [item.name for item in memory.items()] == ["memory/river"]
        assert memory.undo() == "write" and not memory.items()
        engine.check_integrity()


def test_undo_brings_back_a_base_that_is_gone() -> None:
    with Engine(short_runner(), repair="none") as engine:
        context = engine.context("c", system="so well .")
        memory, tokens = Memory(engine, context), context.tokens()
        with memory.step("other"):
            context.replace(0, "then we saw it .", kind="system")
        engine.files.unpin("c/s-000"), engine.files.rm("c/s-000")
        assert memory.undo() == "other" and context.tokens() == tokens
        assert context.snapshot().base == context.parts[0].id
        context.message("user", "so well")
        assert context.generate(2).plan.drift == 0
        engine.check_integrity()
