"""Items that responses, compactions and conversations hold: each counted once, found by id.

::

    response 1   [a][b]                 hold: a 2, b 2, c 1; let response 1 go: a 1, b 1, c 1
    response 2   [a][b][c]              bytes of a, b and c once, and a pointer for each holder
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvweave.serve.chat.sealed import unseal
from kvweave.serve.responses.items import ResponseItem

POINTER = 8  # bytes that one more holder of an item takes


class ItemFile(Protocol):
    """Where items are written down while somebody holds them."""

    def put(self, text: str) -> int:
        """Write an item, as JSON; return its number."""

    def drop(self, n: int) -> None:
        """Remove it."""


@dataclass(slots=True)
class _Held:
    item: ResponseItem
    id: str
    n_bytes: int
    summaries: tuple[str, ...]
    n: int  # in the file
    n_holders: int = 0


class HeldItems:
    """Items by id, while somebody holds them. Of two with one id, the later one is found."""

    def __init__(self, file: ItemFile | None = None) -> None:
        self.n_bytes = 0
        self._file = file
        self._held: dict[int, _Held] = {}  # by the object: it is here, so its address is its own
        self._by_id: dict[str, dict[int, ResponseItem]] = {}
        self._summaries: Counter[str] = Counter()  # compactions that items lead to

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, items: Sequence[ResponseItem], numbers: Sequence[int] | None = None) -> int:
        """Hold items once more; return the bytes of all of them, whoever holds them too.

        ``numbers``: of those that were read of the file.
        """
        n = POINTER * len(items)
        self.n_bytes += n
        for i, item in enumerate(items):
            held = self._held.get(id(item))
            if held is None:
                known, text = str(item.get("id")), json.dumps(item)
                n_bytes = len(text)
                if numbers is not None:
                    number = numbers[i]
                else:
                    number = 0 if self._file is None else self._file.put(text)
                held = _Held(item, known, n_bytes, tuple(summaries_in(item)), number)
                self._held[id(item)] = held
                self._by_id.setdefault(known, {})[id(item)] = item
                self._summaries.update(held.summaries)
                self.n_bytes += n_bytes
            held.n_holders += 1
            n += held.n_bytes
        return n

    def release(self, items: Sequence[ResponseItem]) -> None:
        """Let go of items that were held; what nobody holds is forgotten."""
        self.n_bytes -= POINTER * len(items)
        for item in items:
            held = self._held[id(item)]
            held.n_holders -= 1
            if held.n_holders:
                continue
            del self._held[id(item)]
            if self._file is not None:
                self._file.drop(held.n)
            self.n_bytes -= held.n_bytes
            same = self._by_id[held.id]
            del same[id(item)]
            if not same:
                del self._by_id[held.id]
            for summary in held.summaries:
                self._summaries[summary] -= 1
                if not self._summaries[summary]:
                    del self._summaries[summary]

    def numbers(self, items: Iterable[ResponseItem]) -> tuple[int, ...]:
        """Return the numbers that held items have in the file."""
        return tuple(self._held[id(item)].n for item in items)

    def numbered(self) -> Iterator[tuple[int, ResponseItem]]:
        """Yield every item with its number."""
        return ((held.n, held.item) for held in self._held.values())

    def find(self, id: str) -> ResponseItem | None:
        """Return an item by its id."""
        same = self._by_id.get(id)
        return None if same is None else same[next(reversed(same))]

    def leads_to(self, compaction: str) -> bool:
        """Tell whether an item that is held is, or has, this summary."""
        return compaction in self._summaries


def summaries_in(item: ResponseItem) -> Iterator[str]:
    """Yield the ids of the compactions that an item, or a message of Anthropic's, has."""
    if item.get("type") == "compaction":
        yield item["id"]
    content = item.get("content")
    for part in content if isinstance(content, list) else ():
        if part.get("type") == "compaction":
            yield str(unseal(part.get("encrypted_content")).get("id"))


def size_of(items: Iterable[ResponseItem]) -> int:
    """Return the bytes that items take when nobody holds them yet."""
    return sum(POINTER + len(json.dumps(item)) for item in items)
