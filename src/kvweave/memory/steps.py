"""The steps of a memory: what they work on, how they are taken back, and those that need the model, as tasks
of the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from weakref import WeakKeyDictionary, ref

from kvweave.chunk.identity import Kind
from kvweave.engine import Engine
from kvweave.errors import ContextBusy, InvalidArgument, NameTaken
from kvweave.memory.asking import Asking
from kvweave.memory.dense import Embedder, counted
from kvweave.memory.ground import Ground
from kvweave.memory.items import Items
from kvweave.memory.journal import Journal
from kvweave.memory.limits import MemoryBudget
from kvweave.memory.recall import Recaller
from kvweave.memory.settle import Settling
from kvweave.memory.sleep import Compress, Sleep
from kvweave.memory.summaries import AskModel, Summariser
from kvweave.memory.told import RANKED, By, Slept
from kvweave.memory.zones import Zones
from kvweave.run.loop import Task
from kvweave.run.sampling import Sampling
from kvweave.verbs import FromZero, checked
from kvweave.weave.context import Context
from kvweave.weave.parts import Part, TextOrTokens

MOST_STEPS = 64  # that can be undone
_OPEN: WeakKeyDictionary[Context, ref[MemorySteps]] = WeakKeyDictionary()


@checked
class MemorySteps:
    """One memory, for who drives the loop: what its verbs wait for goes on beside others. Until a
    task of one step ends, the memory and its context take no other step (ContextBusy)."""

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
        if _open_over(context) is not None:  # each would unpin, and take back, what is the other's
            raise NameTaken(context.name, 0, "memory of")
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
        self._adopt()
        _OPEN[context] = ref(self)

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

    def close(self) -> None:
        """Unpin what was pinned here, let go of what is known to recall by; items and context stay."""
        self.items_below.unpin()
        self._recaller.forget([*self._recaller.ranking.known()])
        if _open_over(self.context) is self:
            del _OPEN[self.context]

    # ---- as tasks

    def beginning(
        self,
        content: str,
        asked: tuple[Sampling, float | None],
        recall: By | None = "embedding",
        question: str | None = None,
    ) -> Task[Asking]:
        """As `Memory.stream`: the step is open until `Asking.end`."""
        with ExitStack() as step:
            step.enter_context(self.step("ask"))
            yield from self._making_room(content if question is None else question, recall)
            self.context.message("user", content)
            turn = self.context.begin(*asked, chat=True)
            self._streaming = True
            step.callback(self._quiet)
            return Asking(turn, step.pop_all())

    def telling(self, content: TextOrTokens, kind: Kind = "user") -> Task[Part]:
        """As `Memory.tell`."""
        if kind not in ("user", "assistant", "tool"):
            raise InvalidArgument("kind", f"{kind!r} is none of user, assistant, tool")
        with self.step("tell"):
            yield from self._settled()
            if isinstance(content, str):
                return self.context.message(kind, content)
            return self.context.answer_part(kind, content)

    def settling(self) -> Task[list[str]]:
        """As `Memory.settle`."""
        with self.step("settle"):
            return (yield from self._settled())

    def searching(
        self, question: TextOrTokens, by: By = "embedding", n: FromZero = RANKED
    ) -> Task[list[tuple[str, float]]]:
        """As `Memory.search`; what it looks at may be edited meanwhile."""
        return (yield from self._ranking(question, by))[:n]

    def recalling(
        self, question: TextOrTokens, by: By = "embedding", n: FromZero | None = None
    ) -> Task[list[str]]:
        """As `Memory.recall`."""
        with self.step("recall"):
            return (yield from self._recalling(question, by, n))

    def idling(self, *, settle: bool = True) -> Task[Slept | None]:
        """As `Memory.idle`."""
        if self._is_busy:
            return None
        if settle and self._settling.is_due:
            names = yield from self.settling()
            return Slept("settle", ", ".join(names), sum(self._n_tokens(n) for n in names))
        with self._ground.away() if self._depth else nullcontext():
            slept = yield from self._sleep.stepping()
        if slept is None and self._sleep.notice(self._recaller.look_through()):
            slept = yield from self._sleep.stepping()
        return slept

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

    @property
    def _is_busy(self) -> bool:
        return self._streaming or self.context.session.held

    def _require_quiet(self) -> None:
        """Raise ContextBusy while an answer of `stream` is read, or a task of a step waits."""
        if self._is_busy:
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
        self._ground.learn()
        for part in self._ground.parts("anchor"):
            record = self.items_below.table.get(part.id)
            if self.items_below.find(part.name) is record:
                self.items_below.pin(part.name)

    def _making_room(self, question: TextOrTokens, recall: By | None) -> Task[None]:
        """Settle, and recall what the question calls for. Inside a step."""
        yield from self._settled()
        if recall is not None:
            yield from self._recalling(question, recall, None)

    def _settled(self) -> Task[list[str]]:
        names = yield from self._settling.settling()
        for name in names:
            self._sleep.wrote(name)
        return names

    def _recalling(self, question: TextOrTokens, by: By, n: int | None) -> Task[list[str]]:
        with self.context.edit("recall"):
            self._ground.refresh()
        with self._ground.away():
            found = yield from self._ranking(question, by)
        names = [name for name, _ in found if self.items_below.find(name)]  # others may remove some
        with self.context.edit("recall"):
            placed = self._recaller.place(names if n is None else names[:n])
        for name in placed:
            self._sleep.used(name)
        return placed

    def _ranking(self, question: TextOrTokens, by: By) -> Task[list[tuple[str, float]]]:
        self._ground.learn()
        found = yield from self._recaller.ranking_by(question, by)
        for name, _ in found if by == "attention" else ():
            self._sleep.used(name)  # the question looked at its KV
        return found

    def _n_tokens(self, name: str) -> int:
        record = self.items_below.find(name)
        return 0 if record is None else record.n_tokens


def _open_over(context: Context) -> MemorySteps | None:
    """Return the memory that was opened over a context, and neither closed nor let go of."""
    found = _OPEN.get(context)
    return None if found is None else found()
