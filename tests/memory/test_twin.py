"""Random verbs against a twin of plain lists; what fails or is undone leaves what was before."""

from __future__ import annotations

import random

import pytest
from conftest import tiny
from memory_twin import State, Tokens, Twin

from kvweave import Engine, Memory, MemoryBudget
from kvweave.errors import InvalidArgument
from kvweave.memory import Segment

BUDGET = MemoryBudget(window=40, turns=5, keep=0.5, summaries=20, summary=8, recalled=24, warm=30)
BASE = (3, 4, 5)
FAULTS = ("raises", "empty", "too long")


def first_of_each(said: list[Tokens]) -> Tokens:
    return tuple(tokens[0] for tokens in said)[-BUDGET.summary :]


class Summing:
    """The twin's summary, and on demand a faulty one."""

    fault: str | None = None
    after = 0  # calls that are in order before
    n_calls = 0

    def __call__(self, segment: Segment) -> list[int]:
        self.n_calls += 1
        self.after -= 1
        if self.after >= 0:
            pass
        elif self.fault == "raises":
            raise RuntimeError("no summary today")
        elif self.fault == "empty":
            return []
        elif self.fault == "too long":
            return [7] * (segment.limit + 1)
        return list(first_of_each([said.tokens for said in segment.said]))


class Play:
    """One memory and its twin."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        prune = "evict" if seed % 3 == 2 else "forget"
        self.context = engine.context("c", repair="none", prune=prune)
        self.summing = Summing()
        self.memory = Memory(engine, self.context, budget=BUDGET, summarise=self.summing)
        self.twin = Twin(BASE, BUDGET, first_of_each, self.age)
        self.done: dict[str, int] = {}

    def age(self, name: str) -> int:
        return int(self.memory.items_below.get(name).id)

    def seen(self) -> State:
        """What the memory holds, read out of context and index."""
        table, memory = self.engine.table, self.memory

        def tokens(id: int) -> Tokens:
            return tuple(int(t) for t in table.tokens(id))

        def named(parts) -> list[tuple[str, Tokens]]:
            return [(part.name, tokens(part.id)) for part in parts]

        items = {name: tokens(table.resolve(name).id) for name in table.names("", "memory/")}
        turns = [named(turn) for turn in memory._ground.turns()]
        zones = (named(memory.zone(zone)) for zone in ("anchor", "recalled", "summary"))
        return State(*zones, turns, items)

    def check(self) -> None:
        now = self.twin.now
        seen = self.seen()
        # texts without a name of their own go by their chunk's id once they are made again
        assert seen == now
        assert self.context.tokens() == now.tokens()
        names = set(self.engine.table.names("", "c/"))
        assert names == {name for turn in now.turns for name, _ in turn}
        self.engine.check_integrity()

    def some_tokens(self) -> Tokens:
        return tuple(self.random.randint(6, 30) for _ in range(self.random.randint(1, 9)))

    def step(self) -> str:
        verbs = "fail fail tell tell tell tell write delete rename anchor recall rank release settle undo".split()
        verb = self.random.choice([*verbs, "idle", "weave"])
        if not self.twin.now.items and verb in ("delete", "rename"):
            verb = "write"
        self.done[verb] = self.done.get(verb, 0) + 1
        getattr(self, verb)()
        self.check()
        return verb

    # ---- verbs, on both

    def tell(self) -> None:
        tokens, kind = self.some_tokens(), self.random.choice(["user", "user", "assistant"])
        self.memory.tell(tokens, kind)
        self.twin.step("tell", tokens, kind)

    def write(self) -> None:
        known = [name for name in self.twin.now.items if self.random.random() < 0.3]
        name = self.random.choice([*known, f"memory/n/{self.random.randint(0, 5)}"])
        tokens = self.some_tokens()
        self.memory.write(name, tokens)
        self.twin.step("write", name, tokens)

    def delete(self) -> None:
        one = self.random.choice(list(self.twin.now.items))
        pattern = self.random.choice([one, one, "memory/n/*", "memory/c/u-*"])
        self.memory.delete(pattern)
        self.twin.step("delete", pattern)

    def rename(self) -> None:
        old, new = (
            self.random.choice(list(self.twin.now.items)),
            f"memory/r/{self.random.randint(0, 9)}",
        )
        if new not in self.twin.now.items:
            self.memory.rename(old, new)
            self.twin.step("rename", old, new)

    def anchor(self) -> None:
        label, tokens = f"l{self.random.randint(0, 3)}", self.some_tokens()
        name = f"memory/anchors/{label}"
        if name not in self.twin.now.items and len(self.twin.now.anchors) < 4:
            assert self.memory.anchor(label, tokens) == name
            self.twin.step("anchor", name, tokens)

    def recall(self) -> None:
        pattern = self.random.choice(["memory/n/*", "memory/c/*", "memory/**"])
        placed = self.memory.recall(pattern, "name")
        self.twin.step("recall", self.twin.matching(pattern.replace("**", "*")))
        assert placed == [name for name, _ in self.twin.now.recalled]

    def rank(self) -> None:
        by = self.random.choice(["embedding", "embedding", "attention"])
        question = self.some_tokens()
        found = [name for name, _ in self.memory.search(question, by)]
        assert self.seen() == self.twin.now, "to search changes nothing"
        self.memory.recall(question, by)
        self.twin.step("recall", found)

    def release(self) -> None:
        self.memory.release("memory/n/*")
        self.twin.step("release", "memory/n/*")

    def settle(self) -> None:
        self.memory.settle()
        self.twin.step("settle")

    def undo(self) -> None:
        label = self.memory.undo()
        assert (label is None) == (not self.twin.past)
        self.twin.undo()

    def idle(self) -> None:
        if self.memory._settling.is_due:
            self.twin.step("settle")
        slept = self.memory.idle()
        assert slept is None or slept.what in ("settle", "denoise", "place")

    def weave(self) -> None:
        self.context.weave()

    def fail(self) -> None:
        """Tell something while the summariser is out of order."""
        fault, n_calls = self.random.choice(FAULTS), self.summing.n_calls
        self.summing.after = after = self.random.choice([0, 0, 1])
        before = self.context.snapshot(), self.context.history.version, self.memory._journal.moments
        before = (*before[:2], list(before[2]))
        tokens = self.some_tokens()
        self.summing.fault = fault
        try:
            self.memory.tell(tokens)
        except (RuntimeError, InvalidArgument):
            assert self.summing.n_calls == n_calls + after + 1
            after = self.context.snapshot(), self.context.history.version
            assert (*after, self.memory._journal.moments) == before
            self.done["failed"] = self.done.get("failed", 0) + 1
        else:
            assert self.summing.n_calls <= n_calls + after
            self.summing.fault = None
            self.twin.step("tell", tokens, "user")
        finally:
            self.summing.fault = None


@pytest.fixture
def engine():
    with Engine(tiny(), base=list(BASE), repair="none") as made:
        yield made


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 16, 34])
@pytest.mark.sampled
def test_the_memory_does_what_its_twin_does(engine: Engine, seed: int) -> None:
    play = Play(engine, seed)
    for _ in range(150):
        play.step()
    assert len(play.done) > 12
    while play.twin.past[-len(play.memory._journal.moments) :] and play.memory._journal.moments:
        play.undo()
        play.check()
