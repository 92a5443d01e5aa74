"""Names of the messages of a conversation: by role and number, ``chat/42/u-007``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvweave.chunk.identity import Kind

LETTERS = {"system": "s", "user": "u", "assistant": "a", "thinking": "th", "summary": "sum"}

VECTORS, WORDS = "#vectors/", "#words/"


def holder(name: str, namespace: str) -> str:
    """Return what tells a context from those of all namespaces; ``|`` is in no name."""
    return f"{namespace}|{name}" if namespace else name


def vectors_holder(id: str, namespace: str) -> str:
    """Return what holds vectors, or rows that one is made of: no context's, no name begins with ``#``."""
    return holder(f"{VECTORS}{id}", namespace)


def words_holder(id: str, namespace: str) -> str:
    """Return what holds the words that items are found by; no context's either."""
    return holder(f"{WORDS}{id}", namespace)


def holds_vectors(holder: str) -> bool:
    """Tell whether `vectors_holder` returned it."""
    return holder.rpartition("|")[2].startswith(VECTORS)


def namespace_of(holder: str) -> str:
    """Return the namespace of what `holder` returned."""
    return holder.rpartition("|")[0]


class Names:
    """Numbers the messages of one context, each role by itself."""

    def __init__(self, context: str, is_free: Callable[[str], bool]) -> None:
        self.context, self.is_free = context, is_free
        self._counts: dict[str, int] = {}

    def next(self, kind: Kind) -> str:
        """Return the first free name; a context of this name may have been open before."""
        while True:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
            name = f"{self.context}/{LETTERS.get(kind, kind[0])}-{number:03d}"
            if self.is_free(name):
                return name

    def counts(self) -> dict[str, int]:
        """Return how many names each role has had, for `reset`."""
        return dict(self._counts)

    def reset(self, counts: Mapping[str, int]) -> None:
        """Go on from these counts."""
        self._counts = dict(counts)
