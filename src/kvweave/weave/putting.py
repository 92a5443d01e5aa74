"""Chunks stored while others are answered: computed slice by slice, named all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from kvweave.chunk.files import Entry, Files
from kvweave.chunk.identity import ChunkId, Kind
from kvweave.keep.tokens.spec import Keep
from kvweave.run.loop import Task
from kvweave.verbs import checked
from kvweave.weave.maker import Maker, TriedError

PUTTING = "|put"  # who holds chunks that have no name yet; ``|`` is in no name


@checked
@dataclass(frozen=True, slots=True)
class NewChunk:
    """Tokens to store under a name."""

    name: str
    tokens: Sequence[int]
    kind: Kind = "document"


@contextmanager
def naming(
    maker: Maker,
    items: Sequence[NewChunk],
    base: ChunkId | None,
    namespace: str = "",
    replace: bool = False,
    then: Callable[[Sequence[ChunkId]], None] = lambda ids: None,
) -> Iterator[list[ChunkId]]:
    """Give chunks ids, and names once the block has computed them: all of them, or none.

    The block is in no transaction of this: what it makes room for can be told to the index, and other
    engines need not wait for it. Names are bound only if ``then``, which is called right before, lets them.
    """
    table = maker.table

    def bind() -> None:
        for item, id in zip(items, held, strict=True):
            table.bind(item.name, id, namespace=namespace, replace=replace)

    held: list[ChunkId] = []
    try:
        for item in items:
            with table.transaction():
                id = maker.add(
                    item.tokens, kind=item.kind, base=base, namespace=namespace, name=item.name
                )
                table.hold(id, PUTTING)
            held.append(id)
        with suppress(TriedError), table.transaction():  # what cannot be named is not computed
            bind()
            raise TriedError
        yield held
        with table.transaction():
            then(held)
            bind()
    finally:
        with table.transaction():
            for id in held:
                table.release(id, PUTTING)


def putting(
    maker: Maker,
    items: Sequence[NewChunk],
    base: ChunkId | None,
    namespace: str = "",
    replace: bool = False,
    then: Callable[[Sequence[ChunkId]], None] = lambda ids: None,
) -> Task[list[ChunkId]]:
    """Store chunks with their canonical KV: all of them or none, as a task of the loop.

    Names are bound as `naming` says. Raises as `Engine.put`.
    """
    with naming(maker, items, base, namespace, replace, then) as held:
        for id in dict.fromkeys(held):
            yield from maker.computing(id, namespace)
    return list(held)


def compressing(
    maker: Maker, ref: str, keep: Keep, to: str | None, namespace: str = ""
) -> Task[Entry]:
    """Leave of a chunk what a token policy keeps, as a task of the loop. Raises as `Engine.compress`."""
    maker.compress(ref, keep, to, namespace, dry_run=True)  # what cannot be named is not computed
    table = maker.table
    with table.transaction():
        id = maker.left_of(table.resolve(ref, namespace).id, keep, compute=False)
        table.hold(id, PUTTING)
    try:
        yield from maker.computing(id, namespace)
        name = maker.compress(ref, keep, to, namespace, dry_run=False).name
    finally:
        table.release(id, PUTTING)
    return Files(table, namespace).stat(name)  # not counted who held it
