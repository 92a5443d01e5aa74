"""Names the server gives to what its clients say: ``auto/1f3a9c02/u-003``.

They keep chunks for later requests. There are only so many; the oldest go first, and never one that
a client gave.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict

from kvweave.chunk.files import Files
from kvweave.chunk.identity import ChunkId, Kind
from kvweave.chunk.table import Table
from kvweave.weave.naming import Names

MAX_NAMES = 10_000  # of all namespaces
_OURS = re.compile(r"auto/[0-9a-f]{8}/[a-z]+-\d{3,}")


def new_context_name() -> str:
    """Return a name for a context of the server's."""
    return f"auto/{secrets.token_hex(4)}"


def is_context_name(name: str) -> bool:
    """Tell whether it is a name of that kind."""
    return re.fullmatch(r"auto/[0-9a-f]{8}", name) is not None


class AutoNames:
    """The names given here, oldest first; those of an earlier run are the oldest.

    When there are too many, the namespace that has most of them loses its oldest: nobody's names go
    because another one has many.
    """

    def __init__(self, table: Table, most: int = MAX_NAMES) -> None:
        self.table, self.most = table, most
        self._names: dict[str, OrderedDict[str, None]] = {}  # by namespace
        self._n = 0
        for namespace in table.namespaces():
            for name in sorted(filter(_OURS.fullmatch, table.names(namespace))):
                self._add(name, namespace)

    def __len__(self) -> int:
        return self._n

    def counter(self, context: str, namespace: str) -> Names:
        """Return what numbers the messages of one context."""
        return Names(context, lambda name: self.table.lookup(name, namespace) is None)

    def bind(self, names: Names, id: ChunkId, kind: Kind, namespace: str) -> None:
        """Give a chunk the next name."""
        name = names.next(kind)
        self.table.bind(name, id, namespace=namespace)
        self._add(name, namespace)

    def note(self, name: str, namespace: str) -> None:
        """Count a name of this form that was given elsewhere."""
        if _OURS.fullmatch(name):
            self._add(name, namespace)

    def trim(self) -> None:
        """Take away the oldest names over the limit."""
        while self._n > self.most:
            namespace = max(self._names, key=lambda space: len(self._names[space]))
            self._forget(namespace, next(iter(self._names[namespace])))

    def forget_some(self, namespace: str) -> int:
        """Take away the oldest quarter of a namespace's names; return how many."""
        mine = list(self._names.get(namespace, ()))
        gone = mine[: (len(mine) + 3) // 4]
        for name in gone:
            self._forget(namespace, name)
        return len(gone)

    def expire(self, before: float) -> int:
        """Take away names whose chunk was not used since ``before``; return how many."""
        n = 0
        for namespace in list(self._names):
            old = Files(self.table, namespace).find("auto/*/*", pinned=False, unused_since=before)
            for name in [e.name for e in old if e.name in self._names.get(namespace, ())]:
                self._forget(namespace, name)
                n += 1
        return n

    def _add(self, name: str, namespace: str) -> None:
        mine = self._names.setdefault(namespace, OrderedDict())
        self._n += name not in mine
        mine.setdefault(name)

    def _forget(self, namespace: str, name: str) -> None:
        del self._names[namespace][name]
        self._n -= 1
        if not self._names[namespace]:
            del self._names[namespace]
        record = self.table.lookup(name, namespace)
        if record is not None and not record.pinned:
            self.table.unbind(name, namespace)
