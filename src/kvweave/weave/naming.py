"""Names of the messages of a conversation: by role and number, ``chat/42/u-007``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import get_args

from kvweave.chunk.identity import MAX_NAME, Kind
from kvweave.errors import InvalidName

LETTERS = {"system": "s", "user": "u", "assistant": "a", "thinking": "th", "summary": "sum"}

_MESSAGE = re.compile(
    rf"({'|'.join({LETTERS.get(kind, kind[0]) for kind in get_args(Kind)})})-\d{{3,}}"
)
VECTORS, WORDS = "#vectors/", "#words/"


def is_message(name: str) -> bool:
    """Tell whether a name is one that messages get, of whatever context."""
    return _MESSAGE.fullmatch(name.rpartition("/")[2]) is not None


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
        self.went_by = [context]  # the context was called so when names were given
        self.made: list[str] = []
        self._beside = 0  # characters that a memory puts around the context's name
        self._counts: dict[str, int] = {}

    def make_room(self, beside: int) -> None:
        """Have names of the context leave room for what a memory puts around it. Raises InvalidName."""
        self._beside, before = beside, self._beside
        try:
            self.require(self.context)
        except InvalidName:
            self._beside = before
            raise

    def require(self, context: str) -> None:
        """Raise InvalidName for a name of the context that leaves no room for its memory's items."""
        if (over := len(context) + self._beside - MAX_NAME) > 0:
            raise InvalidName(context, f"its memory's items need {over} characters of it")

    def next(self, kind: Kind) -> str:
        """Return the first free name; a context of this name may have been open before."""
        while True:
            number = self._counts.get(kind, 0)
            self._counts[kind] = number + 1
            name = f"{self.context}/{LETTERS.get(kind, kind[0])}-{number:03d}"
            if self.is_free(name):
                self.made.append(name)
                return name

    def rename(self, context: str) -> None:
        """Give names below another one from here on; the numbers go on."""
        self.context = context
        self.went_by += [context] * (context not in self.went_by)

    def gives(self, name: str) -> bool:
        """Tell whether a name is of the form of those given here."""
        return is_message(name) and name.rpartition("/")[0] in self.went_by

    def counts(self) -> tuple[int, dict[str, int]]:
        """Return how many names there were, and how many each role has had, for `reset`."""
        return len(self.made), dict(self._counts)

    def reset(self, counts: tuple[int, Mapping[str, int]]) -> None:
        """Go on from these counts."""
        del self.made[counts[0] :]
        self._counts = dict(counts[1])
