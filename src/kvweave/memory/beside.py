"""A context beside another one, to read or to write in, that nobody else sees and that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count

from kvweave.engine import Engine
from kvweave.weave.context import Context
from kvweave.weave.naming import holder
from kvweave.weave.session import Session
from kvweave.weave.settings import settings_from

_NUMBERS = count(1)


@contextmanager
def beside(engine: Engine, context: Context, what: str, **options: object) -> Iterator[Context]:
    """Yield a context behind the same base, which the engine does not list; close it in the end.

    What is put into it by a name stays, so nothing should be.
    """
    space, name = context.namespace, f"{context.name}.{what}"
    key = f"{holder(context.name, space)}\t{what} {next(_NUMBERS)}"  # several may be under way
    settings = settings_from(engine.config, {"namespace": space, "denoise": False} | options)
    session = Session(key, engine.weaver, engine.maker, engine.loop, settings)
    session.audited = False
    made = Context(name, session)
    try:
        base = context.snapshot().base
        if base is not None:
            made.set_base(base, "base")
        yield made
    finally:
        made.close()
        engine.shelf.ended(key)
