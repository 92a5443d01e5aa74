"""The memories over a server's contexts: opened, found, put to sleep, and let go of with their contexts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvweave.engine import Engine
from kvweave.errors import InvalidArgument, KVWeaveError, MemoryNotFound, NameTaken
from kvweave.memory import (
    AskModel,
    FirstSentences,
    Memory,
    MemoryBlocks,
    MemoryBudget,
    MemoryTool,
    Summariser,
)
from kvweave.run.loop import Task
from kvweave.serve.guard.quota import Quota
from kvweave.weave.context import Context

log = logging.getLogger("kvweave.serve")
MOST_ITEMS = 20_000  # below one root: opening a memory, and each recall by words, looks at all


@dataclass(eq=False, slots=True)
class OpenMemory:
    """One memory, and how agents name its items."""

    memory: Memory
    tool: MemoryTool
    blocks: MemoryBlocks
    summarise: str

    @property
    def n_items(self) -> int:
        """Names below its root."""
        items = self.memory.items_below
        return len(items.table.names(items.namespace, items.root + "/"))


class Memories:
    """By context, whatever that is called now. Used in the driver's thread only.

    Beside what clients ask for, items are laid down and get canonical KV while nobody asks for
    anything (`rest`); nothing that stands in a context changes by that.
    """

    def __init__(self, engine: Engine, quota: Quota) -> None:
        self.engine, self.quota = engine, quota
        self._open: dict[int, OpenMemory] = {}  # by id() of contexts, which the memories hold
        self._due: list[OpenMemory] = []  # that may have something to do while idle

    # ---- finding

    def open(
        self, context: Context, root: str, budget: MemoryBudget, summarise: str, sentences: int
    ) -> OpenMemory:  # fmt: skip
        """Open a memory over a context. Raises NameTaken where it has one, InvalidArgument."""
        self._sweep()
        if id(context) in self._open:
            raise NameTaken(context.name, 0, "memory of")
        n = len(self.engine.table.names(context.namespace, root + "/"))
        if n > MOST_ITEMS:
            reason = f"{n} names are below {root!r}, {MOST_ITEMS} is the most"
            raise InvalidArgument("root", reason, "choose another root")
        how: Summariser = AskModel(self.engine, context)
        if summarise == "sentences":
            how = FirstSentences(sentences or None)
        memory = Memory(self.engine, context, root=root, budget=budget, summarise=how)
        made = OpenMemory(memory, MemoryTool(memory), MemoryBlocks(memory), summarise)
        self._open[id(context)] = made
        self._due.append(made)
        return made

    def get(self, context: Context) -> OpenMemory:
        """Return the memory over a context. Raises MemoryNotFound."""
        self._sweep()
        if id(context) not in self._open:
            raise MemoryNotFound(context.name)
        return self._open[id(context)]

    def of(self, namespace: str) -> dict[str, OpenMemory]:
        """Return the memories of one namespace by the names of their contexts."""
        self._sweep()
        mine = (each for each in self._open.values() if _space(each) == namespace)
        return {each.memory.context.name: each for each in mine}

    def close(self, context: Context) -> None:
        """Unpin what was pinned, and forget the steps; context and items stay. Raises MemoryNotFound,
        ContextBusy."""
        self._close(self.get(context))

    # ---- changing

    @contextmanager
    def step(self, each: OpenMemory, verb: str) -> Iterator[None]:
        """Make all inside one step; it is as if it had not been where it takes more than there may
        be. Raises OverQuota, ContextBusy."""
        with each.memory.step(verb):
            yield
            self.check(each)
        self.touch(each)

    def check(self, each: OpenMemory, *sizes: int) -> None:
        """Raise OverQuota unless its namespace may store what it does, and chunks of these sizes more."""
        self.quota.check(self.engine, _space(each), list(sizes))
        self.quota.check_parts(len(each.memory.context.parts))
        if each.n_items > MOST_ITEMS:
            reason = f"there are {each.n_items} items, {MOST_ITEMS} is the most"
            raise InvalidArgument("memory", reason, "delete some")

    def touch(self, each: OpenMemory) -> None:
        """Let it look for work while nobody asks."""
        if each not in self._due:
            self._due.append(each)

    # ---- resting

    def is_due(self) -> bool:
        """Tell whether one of them may have something to do."""
        return bool(self._due)

    def rest(self) -> Task[None]:
        """Do one bounded step of one of them."""
        each, more = self._due[0], False
        try:
            if self._is_there(each):
                more = (yield from each.memory.idling(settle=False)) is not None
        except KVWeaveError as error:
            log.info("a memory of %s could not sleep: %s", each.memory.context.name, error)
        finally:  # in turns; others see it wait as long as it works
            self._due.remove(each)
            self._due += [each] * more

    # ---- inside

    def _is_there(self, each: OpenMemory) -> bool:
        context = each.memory.context
        return self.engine.contexts_of(context.namespace).get(context.name) is context

    def _sweep(self) -> None:
        """Let go of those whose contexts were closed."""
        for each in [each for each in self._open.values() if not self._is_there(each)]:
            self._close(each)

    def _close(self, each: OpenMemory) -> None:
        each.memory.close()
        del self._open[id(each.memory.context)]


def _space(each: OpenMemory) -> str:
    return each.memory.context.namespace
