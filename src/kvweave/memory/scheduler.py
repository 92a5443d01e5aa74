"""The memory of one conversation: what stands in its context, what rests, and how each gets there."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager

from kvweave.chunk.identity import ChunkId, Kind
from kvweave.chunk.record import Record
from kvweave.engine import Engine
from kvweave.errors import ContextBusy, InvalidArgument, NameTaken
from kvweave.memory.asking import Asking
from kvweave.memory.dense import Embedder, counted
from kvweave.memory.ground import Ground
from kvweave.memory.items import ANCHORS, Items
from kvweave.memory.journal import Journal
from kvweave.memory.limits import MemoryBudget
from kvweave.memory.recall import Recaller
from kvweave.memory.settle import Settling
from kvweave.memory.sleep import Compress, Sleep
from kvweave.memory.summaries import AskModel, Summariser
from kvweave.memory.told import RANKED, By, MemoryItem, Slept, Zone
from kvweave.memory.zones import Zones
from kvweave.run.sampling import Sampling
from kvweave.verbs import FromZero, checked
from kvweave.weave.answer import Answer, request_from
from kvweave.weave.context import Context
from kvweave.weave.parts import Part, TextOrTokens

MOST_STEPS = 64  # that can be undone


@checked
class Memory:
    """Schedules what one context holds; every verb is one step, made wholly or not at all.

    Args:
        engine: whose context and chunks these are.
        context: an open context or its name; parts of kind ``system`` at its front are anchors.
        root: items are the chunks below this name in the context's namespace.
        budget: tokens of each zone.
        summarise: makes a text of turns; by default the model itself is asked.
        embed: makes vectors to recall by; by default words and pairs of words are compared.
        compress: called with the name of an item before its KV goes down a tier.

    Raises ContextNotFound, InvalidName, InvalidArgument.
    """

    def __init__(
        self,
        engine: Engine,
        context: Context | str,
        *,
        root: str = "memory",
        budget: MemoryBudget | None = None,
        summarise: Summariser | None = None,
        embed: Embedder | None = None,
        compress: Compress | None = None,
    ) -> None:
        context = engine.get_context(context) if isinstance(context, str) else context
        if engine.contexts_of(context.namespace).get(context.name) is not context:
            reason = f"{context.name!r} is closed, or of another engine"
            raise InvalidArgument("context", reason, "open it in this engine")
        self.context, self.gate, self.budget = context, context.gate, budget or MemoryBudget()
        self.items_below = items = Items(context, engine.table, engine.maker, root)
        self._ground = Ground(engine, context, items, Zones.of_context(context), self.budget)
        self._ground.require_ordered()
        self._journal = Journal(context, items, self._ground.zones, MOST_STEPS)
        self._settling = Settling(self._ground, summarise or AskModel(engine, context))
        self._recaller = Recaller(self._ground, counted(engine, context, embed))
        self._compress = compress
        self._sleep = Sleep(self._ground, None if compress is None else self._compressed)
        self._depth = 0
        self._streaming = False  # a step is open while somebody reads an answer
        self._pinned: list[str] = []
        self._adopt()

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
            self._settle()
            if recall is not None:
                self._recall(question if question is not None else content, recall, None)
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
        return self.begin(content, request_from(max_tokens, options), recall, question).stream()

    def begin(
        self,
        content: str,
        asked: tuple[Sampling, float | None],
        recall: By | None = "embedding",
        question: str | None = None,
    ) -> Asking:
        """As `stream`, for who drives the loop himself: the step is open until `Asking.end`."""
        with ExitStack() as step:
            step.enter_context(self.step("ask"))
            self._settle()
            if recall is not None:
                self._recall(question if question is not None else content, recall, None)
            self.context.message("user", content)
            turn = self.context.begin(*asked, chat=True)
            self._streaming = True
            step.callback(self._quiet)
            return Asking(turn, step.pop_all())

    def tell(self, content: TextOrTokens, kind: Kind = "user") -> Part:
        """Make room, and add a message of ``user``, ``assistant`` or ``tool`` without an answer."""
        if kind not in ("user", "assistant", "tool"):
            raise InvalidArgument("kind", f"{kind!r} is none of user, assistant, tool")
        with self.step("tell"):
            self._settle()
            if isinstance(content, str):
                return self.context.message(kind, content)
            return self.context.answer_part(kind, content)

    def settle(self) -> list[str]:
        """Bring window and summaries under their budgets now; return the names of new items."""
        with self.step("settle"):
            return self._settle()

    # ---- recalling

    def search(
        self, question: TextOrTokens, by: By = "embedding", n: FromZero = RANKED
    ) -> list[tuple[str, float]]:
        """Return up to ``n`` names of items and scores, the best first, and change nothing."""
        return self._rank(question, by)[:n]

    def recall(
        self, question: TextOrTokens, by: By = "embedding", n: FromZero | None = None
    ) -> list[str]:
        """Let items that ``question`` calls for stand between anchors and summaries, in place of what
        was recalled before; return their names in the order they stand.

        By ``name``: a name or a glob. Up to ``n`` that fit ``budget.recalled``, the best first.
        """
        with self.step("recall"):
            return self._recall(question, by, n)

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
        self._pinned.append(name)
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

    # ---- steps

    @property
    def n_steps(self) -> int:
        """How many `undo` can take back."""
        return len(self._journal.moments)

    @contextmanager
    def step(self, label: str) -> Iterator[None]:
        """Make all verbs inside one step: all of it happens, or what an error leaves is as before; a
        verb whose error is caught in the block is put back alone. Raises ContextBusy."""
        self._require_quiet()
        if self._depth:
            with self._journal.within(label):
                yield
            return
        self._ground.learn()
        self._noted()
        moment, self._depth = self._journal.open(label), 1
        try:
            yield
            self._journal.close(moment)
        except BaseException:
            self._journal.fail(moment)
            raise
        finally:
            self._depth = 0
            self._recaller.forget(moment.names)

    def undo(self) -> str | None:
        """Take back the last step: parts, names and items are as before it. Return what it was, or
        None. Raises ContextChanged where somebody else has edited the same since, ContextBusy."""
        self._require_quiet()
        self._noted()
        moment = self._journal.undo()
        if moment is None:
            return None
        self._recaller.forget(moment.names)
        return moment.label

    def idle(self, *, settle: bool = True) -> Slept | None:
        """Do one bounded step of what can wait, None where nothing does: settle, compute canonical
        KV of what was written, lay an item down that was not used for long; then look which of
        256 items were edited under their names. While an answer is read nothing waits."""
        if self._streaming:
            return None
        if settle and self._settling.is_due:
            names = self.settle()
            return Slept("settle", ", ".join(names), sum(self._n_tokens(n) for n in names))
        slept = self._sleep.step()
        if slept is None:
            self._recaller.look_through()
        return slept

    def close(self) -> None:
        """Unpin what was pinned here, let go of what is known to recall by; items and context stay."""
        for name in self._pinned:
            record = self.items_below.find(name)
            if record is not None and record.pinned:
                self.items_below.table.update(record.id, pinned=False)
        self._pinned.clear()
        self._recaller.forget([*self._recaller.ranking.known()])

    # ---- inside

    @property
    def closed(self) -> bool:
        """Whether its context is."""
        return self.context.closed

    def _noted(self) -> None:
        """Have what is known here be as now again where an edit around the next step fails."""
        table, recaller = self.items_below.table, self._recaller
        if table.is_changing:
            table.if_undone(self._journal.kept())
            table.if_undone(lambda: recaller.forget([*recaller.ranking.known()]))

    def _quiet(self) -> None:
        self._streaming = False

    def _require_quiet(self) -> None:
        """Raise ContextBusy while an answer of `stream` is read."""
        if self._streaming:
            raise ContextBusy(self.context.name)

    def _compressed(self, name: str) -> None:
        """Call the hook; the chunk it binds stands for what the steps before it made."""
        assert self._compress is not None
        before = self.items_below.get(name).digest
        self._compress(name)
        self._journal.renew(name, before)
        self._recaller.forget([name])

    def _adopt(self) -> None:
        """Know what stands where, and pin what is anchored."""
        for part in self.zone("anchor"):
            record = self.items_below.table.get(part.id)
            if self.items_below.find(part.name) is record and not record.pinned:
                self.items_below.pin(part.name)
                self._pinned.append(part.name)

    def _settle(self) -> list[str]:
        names = self._settling.settle()
        for name in names:
            self._sleep.wrote(name)
        return names

    def _recall(self, question: TextOrTokens, by: By, n: int | None) -> list[str]:
        with self.context.edit("recall"):
            self._ground.refresh()
        names = [name for name, _ in self._rank(question, by)]
        with self.context.edit("recall"):
            placed = self._recaller.place(names if n is None else names[:n])
        for name in placed:
            self._sleep.used(name)
        return placed

    def _rank(self, question: TextOrTokens, by: By) -> list[tuple[str, float]]:
        self._ground.learn()
        found = self._recaller.rank(question, by)
        for name, _ in found if by == "attention" else ():
            self._sleep.used(name)  # the question looked at its KV
        return found

    def _make(self, content: TextOrTokens, kind: Kind) -> ChunkId:
        items = self.items_below
        return items.make(items.encode(content, "user"), kind, self._ground.base)

    def _move(self, old: str, new: str) -> None:
        """Rename one item, and the part that stands for it."""
        items, ground = self.items_below, self._ground
        id = items.get(old).id
        if old == new:
            return
        items.bind(new, id)
        items.unbind(old)
        for part in self.context.parts:
            if part.name == old and ground.zones.of(part) != "turn":
                index, zone = self.context.index(part), ground.zones.of(part)
                self.context.drop(part)
                ground.place(index, new, zone)

    def _n_tokens(self, name: str) -> int:
        record = self.items_below.find(name)
        return 0 if record is None else record.n_tokens


def _item(name: str, record: Record, here: bool) -> MemoryItem:
    return MemoryItem(
        name, record.id, record.kind, record.n_tokens, record.tier, record.pinned, here
    )
