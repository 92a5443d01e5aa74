"""Contexts whose rows are made exact while nobody asks (`Config.refine`)."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

from kvweave.engine import Engine
from kvweave.errors import KVWeaveError
from kvweave.run.loop import Task
from kvweave.serve.reuse.names import is_context_name
from kvweave.weave.context import Context

log = logging.getLogger("kvweave.serve")


class IdleRefining:
    """Finds a context with rows to refine. Touched in the driver's thread only."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._which = engine, engine.config.refine
        self._failed: WeakKeyDictionary[Context, int] = WeakKeyDictionary()  # in which version
        self.is_due = False
        """Whether there may be one."""

    def touched(self) -> None:
        """Look again: something was done."""
        self.is_due = self._which != "never"

    def next(self) -> Task[None] | None:
        """Return what refines a context, the one opened last first; None where there is none."""
        for space in {"", *self._engine.table.namespaces()} if self.is_due else ():
            for context in reversed([*self._engine.contexts_of(space).values()]):
                if self._failed.get(context) == context.history.version:
                    continue
                if self._which != "all" and not is_context_name(context.name):
                    continue
                if context.session.refinable(context.parts):
                    return self._refined(context)
        self.is_due = False
        return None

    def _refined(self, context: Context) -> Task[None]:
        version = context.history.version
        try:
            yield from context.refining()
        except Exception as error:  # nobody waits for it; rows are as right as they were
            self._failed[context] = version
            known = isinstance(error, KVWeaveError)
            log.log(logging.INFO if known else logging.ERROR, "rows were not refined: %s", error)
