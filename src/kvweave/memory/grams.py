"""Which items have to do with a question: by the rare words, and pairs of words, they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nlargest
from itertools import pairwise
from math import log
from typing import Protocol

from kvweave.chunk.identity import ChunkId

COMMON = 0.25  # a gram in more of the items says nothing, once there are enough
ENOUGH = 32  # items
PAIR = 1 << 32  # a pair of tokens is first * PAIR + second + PAIR
# bytes at most, with what tables take while they grow: of a gram with its list, of a row in such a list, of
# a row, of a name besides its letters, and of the tables when anything is in them
GRAM, FOUND, ROW, NAME, TABLES = 240, 24, 832, 256, 2048


class Ranking(Protocol):
    """Knows items by name and tokens, and ranks them by a question. Higher is nearer."""

    def add(self, name: str, id: ChunkId, tokens: Sequence[int]) -> None:
        """Know an item, or what it says now."""
        ...

    def remove(self, name: str) -> None:
        """Forget an item; one that is not known is none."""
        ...

    def known(self) -> dict[str, ChunkId]:
        """Return the items and the chunks they were when they were added; not to be changed."""
        ...

    def rank(self, question: Sequence[int], n: int) -> list[tuple[str, float]]:
        """Return up to ``n`` items above 0, the nearest first."""
        ...


class GramRanking:
    """A bag of tokens and pairs of tokens, weighed by how rare they are (BM25 without counts).

    It needs no model and no tensor, finds names, numbers and whatever is said in the same words,
    and is blind to what is said in others: "a car" does not find "an automobile". A gram that more
    than a quarter of the items has is not looked at, so a question costs the same however many
    items there are, as long as what it asks for is rare among them.
    """

    def __init__(self, charge: Callable[[int], None] = lambda n_bytes: None) -> None:
        """``charge`` is told the bytes of all of it before they grow, and may refuse them."""
        self.charge = charge
        self._known: dict[str, ChunkId] = {}
        self._rows: dict[ChunkId, int] = {}  # names of one chunk share a row, and count once
        self._names: list[dict[str, None]] = []  # by row, in the order they came; none: removed
        self._sizes: list[int] = []  # by row: grams
        self._rows_of: dict[int, list[int]] = {}  # gram -> rows, removed ones too
        self._total = 0  # grams of the rows there are
        self._n_found, self._letters = 0, 0  # rows in all lists; of all names

    @property
    def n_bytes(self) -> int:
        """Bytes of what is known, at most; rows of removed items count until they are let go of."""
        tables = GRAM * len(self._rows_of) + FOUND * self._n_found + ROW * len(self._names)
        names = NAME * len(self._known) + 4 * self._letters
        return tables + names + TABLES * bool(self._known)

    def add(self, name: str, id: ChunkId, tokens: Sequence[int]) -> None:
        """Know an item, or what it says now. Raises OverBudget, and then knows what it knew."""
        if self._known.get(name) == id:
            return
        found = set() if id in self._rows else grams(tokens)
        fresh = sum(gram not in self._rows_of for gram in found)
        more = GRAM * fresh + FOUND * len(found) + ROW * bool(found) + NAME + 4 * len(name) + TABLES
        self.charge(self.n_bytes + more)
        self.remove(name)
        self._put(name, id, found)
        self.charge(self.n_bytes)

    def _put(self, name: str, id: ChunkId, found: set[int]) -> None:
        self._known[name], self._letters = id, self._letters + len(name)
        if id in self._rows:
            self._names[self._rows[id]][name] = None
            return
        row, self._n_found = len(self._names), self._n_found + len(found)
        self._rows[id] = row
        self._names.append({name: None})
        self._sizes.append(len(found))
        self._total += len(found)
        for gram in found:
            self._rows_of.setdefault(gram, []).append(row)

    def remove(self, name: str) -> None:
        """Forget an item; one that is not known is none."""
        id = self._known.pop(name, None)
        if id is None:
            return
        row, self._letters = self._rows[id], self._letters - len(name)
        del self._names[row][name]
        if not self._names[row]:
            del self._rows[id]
            self._total -= self._sizes[row]
            if not self._rows or len(self._names) > max(64, 2 * len(self._rows)):
                self._rebuild()
        self.charge(self.n_bytes)

    def known(self) -> dict[str, ChunkId]:
        """Return the items and the chunks they were."""
        return self._known

    def rank(self, question: Sequence[int], n: int) -> list[tuple[str, float]]:
        """Return up to ``n`` items that share a gram that is not common, one of each chunk."""
        n_items = len(self._rows)
        mean = self._total / n_items if n_items else 0.0
        scores: dict[int, float] = {}
        for gram in sorted(grams(question)):  # in one order: sums of floats are the same again
            rows = self._rows_of.get(gram, ())
            if not rows or (n_items > ENOUGH and len(rows) > COMMON * n_items):
                continue
            weight = log(1 + (n_items - len(rows) + 0.5) / (len(rows) + 0.5)) if n_items else 0.0
            for row in rows:
                scores[row] = scores.get(row, 0.0) + max(weight, 1e-3)
        found = []
        for row, score in scores.items():
            if self._names[row]:
                name = next(iter(self._names[row]))
                found.append((name, score / (0.5 + 0.5 * self._sizes[row] / mean)))
        return nlargest(n, found, key=lambda item: (item[1], item[0]))

    def _rebuild(self) -> None:
        """Let go of the rows of removed items."""
        rows = [row for row, names in enumerate(self._names) if names]
        place = {row: i for i, row in enumerate(rows)}
        self._names = [self._names[row] for row in rows]
        self._sizes = [self._sizes[row] for row in rows]
        self._rows = {id: place[row] for id, row in self._rows.items()}
        for found in self._rows_of.values():  # list by list: both tables are there for a moment
            found[:] = [place[row] for row in found if row in place]
        self._rows_of = {gram: found for gram, found in self._rows_of.items() if found}
        self._n_found = sum(map(len, self._rows_of.values()))
        known = dict(self._known)  # a table does not shrink by what is taken out
        self._known.clear()
        self._known.update(known)


def grams(tokens: Sequence[int]) -> set[int]:
    """Return the tokens and the pairs of neighbours, as numbers."""
    ids = [int(t) for t in tokens]
    pairs = (a * PAIR + b + PAIR for a, b in pairwise(ids))
    return {*ids, *pairs}
