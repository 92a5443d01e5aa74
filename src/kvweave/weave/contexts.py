"""The open contexts of an engine: each namespace has its own, by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count

from kvweave.chunk.identity import normal_name
from kvweave.errors import ContextNotFound, InvalidArgument, NameTaken, nearest
from kvweave.run.loop import Loop, Task
from kvweave.run.sampling import Sampling
from kvweave.weave.context import Context
from kvweave.weave.maker import Maker
from kvweave.weave.naming import holder
from kvweave.weave.session import Session
from kvweave.weave.settings import Settings
from kvweave.weave.turn import Turn
from kvweave.weave.weaver import Weaver


class Contexts:
    """Contexts by namespace and name; two namespaces may use one name and never see each other."""

    def __init__(self) -> None:
        self._spaces: dict[str, dict[str, Context]] = {"": {}}
        self._n_composed: Counter[str] = Counter()  # by namespace

    def __iter__(self) -> Iterator[Context]:
        return iter([c for space in self._spaces.values() for c in space.values()])

    def of(self, namespace: str) -> dict[str, Context]:
        """Return the contexts of one namespace by name."""
        return self._spaces.get(normal_name(namespace), {})

    def get(self, name: str, namespace: str = "") -> Context:
        """Return a context. Raises ContextNotFound."""
        mine, known = self.of(namespace), normal_name(name)
        if known not in mine:
            raise ContextNotFound(name, nearest(known, mine))
        return mine[known]

    def require_own(self, *contexts: Context) -> None:
        """Raise InvalidArgument for a context that is not, or no longer, one of these."""
        for context in contexts:
            if self.of(context.namespace).get(context.name) is not context:
                reason = f"{context.name!r} is closed, or of another engine"
                raise InvalidArgument("context", reason, "open it here")

    def require_free(self, name: str, namespace: str) -> None:
        """Raise NameTaken if there is a context of that name."""
        if name in self.of(namespace):
            raise NameTaken(name, 0)

    def next_composed(self, namespace: str) -> str:
        """Return a name for a context that was composed without one, which no other has."""
        while True:
            self._n_composed[namespace] += 1
            name = f"compose-{self._n_composed[namespace]}"
            if name not in self.of(namespace):
                return name

    def new_key(self, name: str, namespace: str) -> str:
        """Return what tells a new context from all others, also from one that had its name once."""
        known = {context.session.key for context in self}
        keys = (holder(name, namespace) + (f"\t{i}" if i else "") for i in count())
        return next(key for key in keys if key not in known)

    def new(
        self, name: str, settings: Settings, weaver: Weaver, maker: Maker, loop: Loop
    ) -> Context:
        """Return a context that is not here yet. Raises NameTaken, and what its settings do not allow."""
        self.require_free(name, settings.namespace)
        key = self.new_key(name, settings.namespace)
        return Context(name, Session(key, weaver, maker, loop, settings))

    def add(self, context: Context) -> None:
        """Add a context under its own name and namespace, as long as what it is opened in happens."""
        self._put(context)
        context.session.weaver.table.if_undone(partial(self._ended, context))

    def opening(self, context: Context, system: str) -> Task[Context]:
        """Add a context, and its first message once the canonical KV of that is computed. Nobody may
        use it until then; what fails leaves nothing."""
        session, table, id = context.session, context.session.weaver.table, None
        maker = session.maker
        try:
            with table.transaction():
                tokens = maker.message("system", system)
                id = maker.add(tokens, kind="system", namespace=context.namespace)
                table.hold(id, session.key)
            self.add(context)
            session.held = True
            yield from maker.computing(id, context.namespace)
            session.held = False
            context.message("system", system)
        except BaseException:
            context.close()
            raise
        finally:
            session.held = False
            if id is not None:
                table.release(id, session.key)
        return context

    def _put(self, context: Context) -> None:
        self._spaces.setdefault(context.namespace, {})[context.name] = context
        context.session.ended = partial(self._ended, context)

    def _ended(self, context: Context) -> None:
        if context in self:
            self.remove(context)
            context.session.weaver.shelf.ended(context.session.key)
            context.session.weaver.table.called.pop(context.session.key, None)

    def rename(self, context: Context, name: str) -> None:
        """Let a context go by another name, and its next messages begin with it. Raises NameTaken, InvalidName."""
        context.names.require(name)
        self.require_free(name, context.namespace)
        old, table = context.name, context.session.weaver.table

        def move(to: str) -> None:
            if context in self:
                self.remove(context)
                context.name = to
                context.names.rename(to)
                table.called[context.session.key] = to
                self._put(context)

        move(name)
        table.if_undone(partial(move, old))

    def remove(self, context: Context) -> None:
        """Forget a context."""
        mine = self._spaces[context.namespace]
        del mine[context.name]
        if not mine and context.namespace:
            del self._spaces[context.namespace]


def begin_all(
    contexts: Sequence[Context], sampling: Sampling, max_drift: float | None
) -> list[Turn]:
    """Queue an answer of each, or of none. Raises InvalidArgument for one that is there twice."""
    if len({id(context) for context in contexts}) < len(contexts):
        raise InvalidArgument("contexts", "one of them is there twice", "name each once")
    turns: list[Turn] = []
    try:
        for context in contexts:
            turns.append(context.begin(sampling, max_drift))
    except BaseException:
        for turn in turns:
            turn.abandon()
        raise
    return turns
