"""What a step of a memory has to put back to be undone: parts, and what names stood for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.table import Table
from kvweave.errors import ChunkNotFound, ContextChanged
from kvweave.memory.items import Bound, Items
from kvweave.memory.zones import Zones
from kvweave.weave.context import Context
from kvweave.weave.parts import Part, Snapshot


@dataclass(slots=True)
class Moment:
    """A context and its names before a step; `close` adds what the step made of the names."""

    label: str
    snapshot: Snapshot
    chunks: dict[ChunkId, Bound]  # of all parts
    version: int  # of the context
    n_said: int  # names that messages of the context had been given
    names: dict[str, Bound | None] = field(default_factory=dict)
    after: dict[str, bytes | None] = field(default_factory=dict)  # digests behind the step
    version_after: int = 0


class Journal:
    """The last steps of one memory, and the way back."""

    def __init__(self, context: Context, items: Items, zones: Zones, most: int) -> None:
        self.context, self.items, self.zones, self.most = context, items, zones, most
        self.moments: list[Moment] = []

    def open(self, label: str) -> Moment:
        """Return the present moment; from here on changed names are noted in it."""
        snapshot = self.context.snapshot()
        chunks = {part.id: self.items.bound(part.id) for part in snapshot.parts}
        version = self.context.history.version
        moment = Moment(label, snapshot, chunks, version, len(self.context.names.made))
        self.items.noted = moment.names
        return moment

    @contextmanager
    def within(self, label: str) -> Iterator[None]:
        """Make a step within the open one: what fails in it alone is put back, the rest goes on."""
        outer = self.items.noted
        assert outer is not None, "no step is open"
        inner = self.open(label)
        try:
            yield
        except BaseException:
            self.fail(inner)
            raise
        finally:
            for name, bound in inner.names.items():
                outer.setdefault(name, bound)
            self.items.noted = outer

    def close(self, moment: Moment) -> None:
        """Keep a moment whose step is done, unless that changed nothing."""
        self._end(moment)
        moment.after = {name: self._digest(name) for name in moment.names}
        before = {n: None if b is None else b.digest for n, b in moment.names.items()}
        if before == moment.after and moment.snapshot.parts == self.context.parts:
            self._stands_at(moment.version)
            return
        moment.version_after = self.context.history.version
        self.moments.append(moment)
        del self.moments[: -self.most]

    def fail(self, moment: Moment) -> None:
        """Put everything back to a moment, with no trace in the history."""
        self._end(moment)
        if moment.names or moment.snapshot.parts != self.context.parts:
            self._return_to(moment, "put back")
        if moment.snapshot.parts == self.context.parts:
            self.context.history.back_to(moment.version)
        self._stands_at(moment.version)

    def undo(self) -> Moment | None:
        """Take back the last step and return what it was, None where there is none.

        Raises ContextChanged where the context or a name was changed since by somebody else.
        """
        if not self.moments:
            return None
        moment, found = self.moments[-1], self.context.history.version
        if found != moment.version_after:
            raise ContextChanged(self.context.name, moment.version_after, found)
        if any(self._digest(name) != digest for name, digest in moment.after.items()):
            raise ContextChanged(self.context.name, moment.version_after, found)
        self._return_to(moment, f"undo {moment.label}")
        self.moments.pop()
        self._stands_at(moment.version)
        return moment

    def _end(self, moment: Moment) -> None:
        """Note no more, and that what was said since had no name before."""
        self.items.noted = None
        for name in self.context.names.made[moment.n_said :]:
            moment.names.setdefault(name, None)

    def _stands_at(self, version: int) -> None:
        """Take the context as it is for what it was at ``version``, where the last step left it there;
        where it did not, somebody else has edited it in between, and that step stays as it is."""
        if self.moments and self.moments[-1].version_after == version:
            self.moments[-1].version_after = self.context.history.version

    def kept(self) -> Callable[[], None]:
        """Return what brings back the steps that can be undone now."""
        moments = [(moment, moment.version_after, dict(moment.after)) for moment in self.moments]

        def put_back() -> None:
            self.moments[:] = [moment for moment, _, _ in moments]
            for moment, version, after in moments:
                moment.version_after, moment.after = version, after

        return put_back

    def renew(self, name: str, before: bytes) -> None:
        """Take what a name stands for now for what steps left there as ``before`` (a digest)."""
        for moment in self.moments:
            if moment.after.get(name) == before:
                moment.after[name] = self._digest(name)

    def _return_to(self, moment: Moment, verb: str) -> None:
        with self.context.edit(verb):
            for name, bound in moment.names.items():
                self.items.put_back(name, bound)
            self._restore(moment)

    def _restore(self, moment: Moment) -> None:
        """Bring back the parts; those whose chunks were freed are made again and placed anew."""
        table, parts = self.items.table, moment.snapshot.parts
        gone = [i for i, part in enumerate(parts) if not _is_there(table, part.id)]
        if not gone:
            self.context.restore(moment.snapshot)
            return
        left = [i for i in range(len(parts)) if i not in set(gone)]
        digests, base = moment.snapshot.digests, moment.snapshot.base
        led = base is not None and gone[0] == 0
        self.context.restore(
            replace(
                moment.snapshot,
                parts=tuple(parts[i] for i in left),
                digests=tuple(digests[i] for i in left),
                base=None if led else base,
            )
        )
        for i in gone:
            self._insert(i, parts[i], moment.chunks[parts[i].id])
        now = self.context.snapshot()
        ids = {old.id: new.id for old, new in zip(parts, now.parts, strict=True)}
        told = tuple(
            replace(
                new, name=p.name, literal=p.literal, amends=p.amends and ids.get(p.amends, p.amends)
            )
            for p, new in zip(parts, now.parts, strict=True)
        )
        self.context.restore(replace(now, parts=told, base=told[0].id if led else now.base))

    def _insert(self, index: int, part: Part, bound: Bound) -> None:
        name = f"#{self.items.again(bound)}"
        if part.n == len(bound.tokens):
            made = self.context.insert_chunk(index, name)
        else:
            made = self.context.insert_slice(index, name, part.start, part.stop)
        self.zones.mark(made, self.zones.of(part))

    def _digest(self, name: str) -> bytes | None:
        record = self.items.find(name)
        return None if record is None else record.digest


def _is_there(table: Table, id: ChunkId) -> bool:
    try:
        table.get(id)
    except ChunkNotFound:
        return False
    return True
