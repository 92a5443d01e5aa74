"""The memory of one conversation: what stands in its context, what rests, and how each gets there."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

from kvweave.chunk.identity import ChunkId, Kind
from kvweave.chunk.record import Record
from kvweave.errors import NameTaken
from kvweave.memory.items import ANCHORS
from kvweave.memory.steps import MemorySteps
from kvweave.memory.told import RANKED, By, MemoryItem, Slept, Zone
from kvweave.run.loop import Task
from kvweave.verbs import FromZero, checked
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.parts import Part, TextOrTokens

T = TypeVar("T")


@checked
class Memory(MemorySteps):
    """Schedules what one context holds; every verb is one step, made wholly or not at all.

    Args:
        engine: whose context and chunks these are.
        context: an open context or its name; parts of kind ``system`` at its front are anchors.
        root: items are the chunks below this name in the context's namespace.
        budget: tokens of each zone.
        summarise: makes a text of turns; by default the model itself is asked.
        embed: makes vectors to recall by; by default words and pairs of words are compared.
        compress: called with the name of an item before its KV goes down a tier.

    Raises ContextNotFound, InvalidName, InvalidArgument; NameTaken where another one over this context
    was not closed.
    """

    # ---- reading

    @property
    def root(self) -> str:
        """The name all items are below."""
        return self.items_below.root

    def zone(self, zone: Zone) -> list[Part]:
        """Return the parts of a zone: ``anchor``, ``recalled``, ``summary`` or ``turn``."""
        self._ground.learn()
        return self._ground.parts(zone)

    def items(self, pattern: str = "**") -> list[MemoryItem]:
        """Return the items that match, by name. A name is whole, or what stands below the root.
        Raises ChunkNotFound for a name that is not there."""
        here = {part.id for part in self.context.parts}
        found = [(n, self.items_below.get(n)) for n in self.items_below.names(pattern)]
        return [_item(name, record, record.id in here) for name, record in found]

    def read(self, name: str) -> str:
        """Return what an item says. Raises ChunkNotFound."""
        return self.items_below.text(self.items_below.full(name))

    # ---- talking

    def ask(
        self,
        content: str,
        max_tokens: int = 256,
        *,
        recall: By | None = "embedding",
        question: str | None = None,
        **options: object,
    ) -> Answer:
        """Make room, recall what the message (or ``question``) calls for, and answer it.

        With ``recall=None`` what is recalled stays as it is. Options: as of `Context.ask`. Raises
        what the summariser raises, and then nothing was said.
        """
        with self.step("ask"):
            room = self._making_room(content if question is None else question, recall)
            self._finish(room)
            return self.context.ask(content, max_tokens, **options)

    def stream(
        self,
        content: str,
        max_tokens: int = 256,
        *,
        recall: By | None = "embedding",
        question: str | None = None,
        **options: object,
    ) -> Generator[str]:
        """As `ask`, and yield the answer's text as it comes; until its end no other verb is taken.

        Room is made and the message said before this returns. Closing the iterator cancels: what was
        generated stays, and `undo` takes all of it back. Raises what `ask` raises, ContextBusy.
        """
        asked = request_from(max_tokens, options)
        return self._finish(self.beginning(content, asked, recall, question)).stream()

    def tell(self, content: TextOrTokens, kind: Kind = "user") -> Part:
        """Make room, and add a message of ``user``, ``assistant`` or ``tool`` without an answer."""
        return self._finish(self.telling(content, kind))

    def settle(self) -> list[str]:
        """Bring window and summaries under their budgets now; return the names of new items."""
        return self._finish(self.settling())

    # ---- recalling

    def search(
        self, question: TextOrTokens, by: By = "embedding", n: FromZero = RANKED
    ) -> list[tuple[str, float]]:
        """Return up to ``n`` names of items and scores, the best first, and change nothing."""
        return self._finish(self.searching(question, by, n))

    def recall(
        self, question: TextOrTokens, by: By = "embedding", n: FromZero | None = None
    ) -> list[str]:
        """Let items that ``question`` calls for stand between anchors and summaries, in place of what
        was recalled before; return their names in the order they stand.

        By ``name``: a name or a glob. Up to ``n`` that fit ``budget.recalled``, the best first.
        """
        return self._finish(self.recalling(question, by, n))

    def release(self, pattern: str = "**") -> list[str]:
        """Take recalled items out of the context; they stay items. Return their names."""
        with self.step("release"), self.context.edit("release"):
            return self._recaller.release(pattern)

    # ---- writing

    def anchor(self, label: str, content: TextOrTokens) -> str:
        """Pin a text in front of all but other anchors; return its name. Raises NameTaken."""
        items, name = self.items_below, self.items_below.new(f"{ANCHORS}/{label}")
        with self.step("anchor"), self.context.edit("anchor"):
            if items.find(name) is not None:
                raise NameTaken(name, items.get(name).id)
            items.bind(name, self._make(content, "memory"))
            items.pin(name)
            anchors = self.zone("anchor")
            index = self.context.index(anchors[-1]) + 1 if anchors else 0
            self._ground.place(index, name, "anchor")
        return name

    def write(self, name: str, content: TextOrTokens, *, replace: bool = True) -> str:
        """Write an item, in the context too where it stands there; return its whole name.

        Raises NameTaken without ``replace``, InvalidName, InvalidArgument.
        """
        name = self.items_below.new(name)
        with self.step("write"), self.context.edit("write"):
            id = self._make(content, "memory")
            self.items_below.bind(name, id, replace=replace)
            self._ground.refresh()
        self._sleep.wrote(name)
        return name

    def delete(self, pattern: str) -> list[str]:
        """Remove items, from the context too; return their names. Raises ChunkNotFound."""
        with self.step("delete"), self.context.edit("delete"):
            names = self.items_below.names(self.items_below.some(pattern))
            for name in names:
                self.items_below.unbind(name)
            self._ground.refresh()
            return names

    def rename(self, name: str, to: str) -> str:
        """Give an item, or all below a ``directory/``, another name; return the whole new name.
        Raises ChunkNotFound, NameTaken, InvalidName."""
        items = self.items_below
        old, new = items.some(name), items.some(to)
        with self.step("rename"), self.context.edit("rename"):
            tree = old.endswith("/")
            stem = new.rstrip("/") + "/" if tree else new
            for each in items.names(old):
                self._move(each, stem + each[len(old) :] if tree else stem)
        return new

    # ---- resting

    def idle(self, *, settle: bool = True) -> Slept | None:
        """Do one bounded step of what can wait, None where nothing does: settle, compute canonical
        KV of what was written, lay an item down that was not used for long; then look which of
        256 items were edited under their names. While an answer is read nothing waits."""
        return self._finish(self.idling(settle=settle))

    # ---- inside

    def _finish(self, task: Task[T]) -> T:
        return self._ground.engine.loop.finish(task)

    def _make(self, content: TextOrTokens, kind: Kind) -> ChunkId:
        items = self.items_below
        return items.make(items.encode(content, "user"), kind, self._ground.base)

    def _move(self, old: str, new: str) -> None:
        """Rename one item, and the part that stands for it."""
        items, ground = self.items_below, self._ground
        if old == new:
            return
        items.move(old, new)
        for part in self.context.parts:
            if part.name == old and ground.zones.of(part) != "turn":
                index, zone = self.context.index(part), ground.zones.of(part)
                self.context.drop(part)
                ground.place(index, new, zone)


def _item(name: str, record: Record, here: bool) -> MemoryItem:
    return MemoryItem(
        name, record.id, record.kind, record.n_tokens, record.tier, record.pinned, here
    )
