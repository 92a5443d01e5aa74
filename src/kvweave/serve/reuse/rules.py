"""A rule by which a client edits its history, inferred from the requests in which it did.

::

    items   [o0][o1][o2][o3][o4]     what stood there whole, the newest last
    gone     **  **                  what the client took out in this request
    rule    all but the newest 3, as soon as 2 would go, each as "[cleared]"

A rule is one that does what the last two edits did, and has a bound that explains why nothing was done in
the requests around them. Sizes are characters: clients count tokens of their own, so a bound is only
known to lie between what was not enough and what was.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

WINDOW = 32  # edits that are remembered of one habit, and requests without
MOST_ITEMS = 256  # of a request; longer ones teach nothing
ROUNDS = 5  # from edit to edit, the most that are tried
WRONG = 2  # guesses in a row that came to nothing: then none is made until the next edit
SLACK = 1.05  # characters that were not enough, of those that were: clients count tokens
LINES, CHARS = "\0lines\0", "\0chars\0"  # in a mark, for what the text had that it stands for


class EditItem(NamedTuple):
    """What a rule may take: an output, or a message."""

    size: int | None  # characters; None for what nobody knows yet
    again: bool = False  # the same was called for later


_Items = Sequence[EditItem]
Measure = Literal["number", "size", "since", "total"]
MEASURES: dict[Measure, str] = {
    "number": "once there are more than {} of it",
    "size": "once it has more than {} characters",
    "since": "once more than {} came since the last time",
    "total": "once all there is has more than {} characters",
}


class BeforeEdit(NamedTuple):
    """What there is before an edit."""

    items: _Items
    since: int  # items that came since the last edit
    total: int  # characters of all messages, of what was taken out too


class Mark(NamedTuple):
    """What stands there instead; numbers of the text it stands for as `LINES` and `CHARS`."""

    role: str
    text: str

    @staticmethod
    def of(role: str, text: str, n_lines: int, n_chars: int) -> Mark:
        """Return the mark that ``text`` is, of what had so many lines and characters."""

        def field(found: re.Match[str]) -> str:
            known = {str(n_lines): LINES, str(n_chars): CHARS}
            return known.get(found[0], found[0])

        return Mark(role, re.sub(r"\d+", field, text))

    def filled(self, n_lines: int, n_chars: int) -> str:
        """Return the text for what has so many lines and characters."""
        return self.text.replace(LINES, str(n_lines)).replace(CHARS, str(n_chars))


class EditEvidence(NamedTuple):
    """What one request tells of a habit."""

    there: BeforeEdit
    gone: frozenset[int]  # of the items
    mark: Mark | None  # of what went; None: it left nothing


@dataclass(frozen=True, slots=True)
class Selector:
    """Which items go, if any do: all but the ``n`` newest, all but the newest of ``n`` characters (the
    very newest is not counted), or those that were called for again. None of ``short`` or fewer
    characters goes."""

    kind: Literal["again", "number", "size"]
    n: int = 0
    short: int = -1

    def goes(self, items: _Items) -> frozenset[int]:
        """Return the indices of those that go."""
        there = [i for i, item in enumerate(items) if item.size is None or item.size > self.short]
        if self.kind == "again":
            return frozenset(i for i in there if items[i].again)
        if self.kind == "number":
            return frozenset(there[: max(0, len(there) - self.n)])
        total, gone = 0, set()
        for i in reversed(there[:-1]):
            total += items[i].size or 0
            if total > self.n:
                gone.add(i)
        return frozenset(gone)

    def __str__(self) -> str:
        short = f", none of {self.short} characters or fewer" if self.short >= 0 else ""
        if self.kind == "again":
            return f"what is called for again{short}"
        what = f"{self.n}" if self.kind == "number" else f"about {self.n} characters"
        return f"all but the newest {what}{short}"


@dataclass(frozen=True, slots=True)
class EditRule:
    """What goes, and when: as soon as a measure is above a bound."""

    which: Selector
    measure: Measure
    above: int
    mark: Mark | None

    def gone(self, there: BeforeEdit) -> frozenset[int]:
        """Return the indices of those that go now; none before there is enough."""
        found = self.which.goes(there.items)
        enough = _amount(self.measure, there, found) > self.above
        return found if found and enough else frozenset()

    def __str__(self) -> str:
        return f"{self.which}, {MEASURES[self.measure].format(self.above)}"


class Habit:
    """The requests of one agent, as far as they tell when and what it edits."""

    def __init__(self) -> None:
        self._n = 0
        self._edits: deque[tuple[int, EditEvidence]] = deque(maxlen=WINDOW)
        self._calm: dict[tuple[bytes, int], tuple[int, EditEvidence]] = {}
        self._rule: EditRule | None = None
        self._known = True
        self.n_wrong = 0

    def note(self, request: EditEvidence, since: tuple[bytes, int], *, guessed: bool) -> None:
        """Learn of one more. ``since``: a conversation, and how many edits it had; of those between two edits
        the last is remembered, when there was most. ``guessed``: an edit was foreseen in it."""
        if len(request.there.items) > MOST_ITEMS:
            return
        self._n += 1
        if request.gone:
            self._edits.append((self._n, request))
        else:
            self._calm.pop(since, None)
            self._calm[since] = self._n, request
            if len(self._calm) > WINDOW:
                del self._calm[next(iter(self._calm))]
        self._known = False
        self.n_wrong = 0 if request.gone else self.n_wrong + guessed

    @property
    def rule(self) -> EditRule | None:
        """The rule that fits; None where none does, or the last guesses were wrong."""
        if not self._known:
            in_order = sorted([*self._edits, *self._calm.values()])
            self._rule, self._known = infer([request for _, request in in_order]), True
        return self._rule if self.n_wrong < WRONG else None


def infer(requests: Sequence[EditEvidence]) -> EditRule | None:
    """Return the simplest rule that fits the last two edits, and when it holds; None for none."""
    places = [i for i, request in enumerate(requests) if request.gone]
    if len(places) < 2:
        return None
    one, two = (requests[i] for i in places[-2:])
    if one.mark != two.mark:
        return None
    edits = [requests[i] for i in places]
    fits: dict[int, list[Selector]] = {}
    for which in _selectors(requests, edits):
        fits.setdefault(_explained(which, edits), []).append(which)
    # what explains most of the edits, back from the last
    for n in sorted((n for n in fits if n > 1), reverse=True):
        # all that is known where a bound explains it, else fewer rounds: the first may begin otherwise
        for start in (0, *(place + 1 for place in places[-1 - ROUNDS : -1])):
            for which, measure in itertools.product(fits[n], MEASURES):
                if (above := _above(which, requests[start:], measure)) is not None:
                    return EditRule(which, measure, above, two.mark)
    return None


def _explained(which: Selector, edits: Sequence[EditEvidence]) -> int:
    """Return how many of the edits, back from the last, took what this would."""
    n = 0
    for request in reversed(edits):
        if which.goes(request.there.items) != request.gone:
            break
        n += 1
    return n


def _selectors(
    requests: Sequence[EditEvidence], edits: Sequence[EditEvidence]
) -> Iterator[Selector]:
    """Yield what may have chosen in the last two edits, the simplest first."""
    last = edits[-2:]
    every = sorted({-1, *_shorts(requests, edits), *_shorts(last, last)})
    yield from (Selector("again", short=short) for short in every)
    for short in every:
        yield Selector("number", len(_behind(last[-1], short)), short)
        bounds = [_protected(request, short) for request in edits]
        for known in (bounds, bounds[-2:]):
            most, least = max(n for n, _ in known), min(n for _, n in known)
            if most < least:
                yield Selector("size", (most + least - 1) // 2, short)


def _protected(request: EditEvidence, short: int) -> tuple[int, int]:
    """Return the characters that stayed, the newest left out, and those with one more: too many."""
    kept = sum(item.size or 0 for item in _behind(request, short)[:-1])
    return kept, kept + (request.there.items[max(request.gone)].size or 0)


def _shorts(requests: Sequence[EditEvidence], edits: Sequence[EditEvidence]) -> Iterator[int]:
    """Yield how short an item may be to be spared: as the longest that was, or the longest of all that
    never went, where longer ones did."""
    least = min(request.there.items[i].size or 0 for request in edits for i in request.gone)
    for known in (edits, requests):
        sizes = [n for request in known for n in _spared(request) if n < least]
        if sizes:
            yield max(sizes)


def _spared(request: EditEvidence) -> list[int]:
    """Return the sizes of what stayed in front of the last that went; of all where none did."""
    before = enumerate(request.there.items[: max(request.gone, default=None)])
    return [item.size or 0 for i, item in before if i not in request.gone]


def _behind(request: EditEvidence, short: int) -> list[EditItem]:
    return [
        item for item in request.there.items[max(request.gone) + 1 :] if (item.size or 0) > short
    ]


def _above(which: Selector, requests: Sequence[EditEvidence], measure: Measure) -> int | None:
    """Return how much was never enough, where less than at any edit; else None."""
    enough = min(_amount(measure, r.there, r.gone) for r in requests if r.gone)
    most = 0
    for there in (r.there for r in requests if not r.gone):
        if (gone := which.goes(there.items)) or measure in ("number", "size"):
            most = max(most, _amount(measure, there, gone))
        if most >= enough * (SLACK if measure in ("size", "total") else 1):
            return None
    return min(most, enough - 1)


def _amount(measure: Measure, there: BeforeEdit, gone: frozenset[int]) -> int:
    if measure == "size":
        return sum(there.items[i].size or 0 for i in gone)
    return {"number": len(gone), "since": there.since, "total": there.total}[measure]
