"""A context beside another one, to read or to write in, that leaves nothing behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvweave.engine import Engine
from kvweave.weave.context import Context


@contextmanager
def beside(engine: Engine, context: Context, what: str, **options: object) -> Iterator[Context]:
    """Yield a context named ``CONTEXT.WHAT`` behind the same base; close it in the end.

    What is put into it by a name stays, so nothing should be. Raises NameTaken.
    """
    name, space = f"{context.name}.{what}", context.namespace
    made = engine.context(name, namespace=space, **({"denoise": False} | options))  # type: ignore[arg-type]
    try:
        base = context.snapshot().base
        if made.parts:
            made.drop(0)
        if base is not None:
            made.set_base(base, "base")
        made.session.audited = False
        yield made
    finally:
        engine.close_context(name, space)
