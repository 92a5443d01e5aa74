"""Names the server gives to what its clients say: ``auto/1f3a9c02/u-003``.

They keep chunks for later requests. There are only so many; the oldest go first, and never one that
a client gave.
"""

from __future__ import annotations

import re
import secrets
from collections import OrderedDict

from kvweave.chunk.identity import ChunkId, Kind
from kvweave.chunk.table import Table
from kvweave.weave.naming import Names

MAX_NAMES = 10_000  # of all namespaces
_OURS = re.compile(r"auto/[0-9a-f]{8}/[a-z]+-\d{3,}")


def new_context_name() -> str:
    """Return a name for a context of the server's."""
    return f"auto/{secrets.token_hex(4)}"


class AutoNames:
    """The names given here, oldest first; those of an earlier run are the oldest."""

    def __init__(self, table: Table, most: int = MAX_NAMES) -> None:
        self.table, self.most = table, most
        self._names: OrderedDict[tuple[str, str], None] = OrderedDict()
        for namespace in table.namespaces():
            for name in sorted(filter(_OURS.fullmatch, table.names(namespace))):
                self._names[namespace, name] = None

    def __len__(self) -> int:
        return len(self._names)

    def counter(self, context: str, namespace: str) -> Names:
        """Return what numbers the messages of one context."""
        return Names(context, lambda name: self.table.lookup(name, namespace) is None)

    def bind(self, names: Names, id: ChunkId, kind: Kind, namespace: str) -> None:
        """Give a chunk the next name."""
        name = names.next(kind)
        self.table.bind(name, id, namespace=namespace)
        self._names[namespace, name] = None

    def note(self, name: str, namespace: str) -> None:
        """Count a name of this form that was given elsewhere."""
        if _OURS.fullmatch(name):
            self._names.setdefault((namespace, name))

    def trim(self) -> None:
        """Take away the oldest names over the limit."""
        while len(self._names) > self.most:
            self._forget(*next(iter(self._names)))

    def forget_some(self, namespace: str) -> int:
        """Take away the oldest quarter of a namespace's names; return how many."""
        mine = [name for space, name in self._names if space == namespace]
        gone = mine[: (len(mine) + 3) // 4]
        for name in gone:
            self._forget(namespace, name)
        return len(gone)

    def _forget(self, namespace: str, name: str) -> None:
        del self._names[namespace, name]
        record = self.table.lookup(name, namespace)
        if record is not None and not record.pinned:
            self.table.unbind(name, namespace)
