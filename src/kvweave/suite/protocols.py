"""Protocols P1 to P9: seeded documents of named notes, and questions with one right reply.

Statements, all in the words of the little world (`kvweave.demo.vocabulary`):

    Anna's river is cold .               a fact
    now Anna's river is deep .           replaces it
    Anna's ruler Omar .                  a link: the value is an entity
    from Anna's river same Omar's river also .   Omar's river is what Anna's was said to be
                                                 before
    set right .                          from here on values stand for their opposite

A question names an entity and a path of attributes; the reply restates every step:
"what about Anna's ruler's river" -> "Anna's ruler Omar's river is deep .".
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from kvweave.demo.vocabulary import (
    ALSO,
    ASK,
    ATTRIBUTES,
    ENTITIES,
    FILLER,
    FROM,
    NOW,
    OPPOSITE,
    SAME,
    STOP,
    VALUES,
    text,
)

SET, MODES = "set", ("left", "right")
Pair = tuple[str, str]  # entity, attribute


@dataclass(frozen=True)
class Size:
    """How large a case is; ranges are inclusive."""

    notes: tuple[int, int] = (9, 12)
    facts: tuple[int, int] = (2, 4)  # statements in a note
    filler: tuple[int, int] = (8, 20)  # filler words in a note
    entities: tuple[int, int] = (12, 36)
    questions: int = 4
    hops: tuple[int, int] = (3, 4)  # attributes in the path of a P9 question


TEST = Size()


@dataclass(frozen=True)
class Item:
    """A question; ``value`` is the word that decides, ``after`` the notes known when it is asked."""

    question: str
    reply: str
    kind: str
    value: str
    after: int

    def correct(self, reply: str) -> bool:
        """Whether a generated reply equals the expected one, word for word."""
        return reply.split() == self.reply.split()


@dataclass(frozen=True)
class Case:
    """A document: ``notes`` as (name, text) in the order of the context, and its questions.

    ``dropped`` is the index of the note that P5 removes before its questions are asked.
    """

    protocol: str
    notes: tuple[tuple[str, str], ...]
    items: tuple[Item, ...]
    dropped: int | None = None


@dataclass
class Draft:
    """A case in the making."""

    rng: random.Random
    size: Size
    notes: list[list[list[str]]] = field(default_factory=list)
    pairs: list[Pair] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.notes = [[] for _ in range(self.rng.randint(*self.size.notes))]
        entities = self.rng.sample(ENTITIES, self.rng.randint(*self.size.entities))
        attributes = self.rng.sample(ATTRIBUTES, self.rng.randint(6, len(ATTRIBUTES)))
        self.pairs = [(e, a) for e in entities for a in attributes]
        self.rng.shuffle(self.pairs)

    def value(self) -> str:
        """Any value."""
        return self.rng.choice(VALUES)

    def two_notes(self) -> tuple[int, int]:
        """Two different notes, in order."""
        first, second = sorted(self.rng.sample(range(len(self.notes)), 2))
        return first, second

    def add(self, note: int, *words: str) -> None:
        """Add a statement at a random place of a note."""
        said = self.notes[note]
        said.insert(self.rng.randint(0, len(said)), [*words, STOP])

    def fact(self, note: int) -> tuple[str, str, str]:
        """State a new fact."""
        (entity, attribute), value = self.pairs.pop(), self.value()
        self.add(note, entity, attribute, value)
        return entity, attribute, value

    def fill(self) -> None:
        """Add unrelated facts until every note has its number."""
        for note, said in enumerate(self.notes):
            for _ in range(self.rng.randint(*self.size.facts) - len(said)):
                self.fact(note)

    def alias(self, first: int, second: int) -> tuple[Pair, Pair, str]:
        """State a fact in one note and, in a later one, that another entity has the same."""
        entity, attribute, value = self.fact(first)
        other = self.take(lambda p: p[1] == attribute and p[0] != entity)
        self.add(second, FROM, entity, attribute, SAME, *other, ALSO)
        return (entity, attribute), other, value

    def take(self, wanted: Callable[[Pair], bool]) -> Pair:
        """Remove and return an unused pair."""
        for i in range(len(self.pairs) - 1, -1, -1):
            if wanted(self.pairs[i]):
                return self.pairs.pop(i)
        raise LookupError("no such pair is left")

    def text(self, note: int) -> str:
        """The note with filler between its statements."""
        said, total = self.notes[note], self.rng.randint(*self.size.filler)
        cuts = sorted(self.rng.randint(0, total) for _ in said)
        words: list[str] = []
        for statement, begin, end in zip(said, [0, *cuts], cuts, strict=False):
            words += self.rng.choices(FILLER, k=end - begin)
            words += statement
        return text(words + self.rng.choices(FILLER, k=total - (cuts[-1] if cuts else 0)))

    def case(
        self, protocol: str, items: list[Item], dropped: int | None = None, twice: bool = False
    ) -> Case:
        """Render the notes; `twice` repeats one note at a later place."""
        self.rng.shuffle(items)
        notes = [(f"note/{i}", self.text(i)) for i in range(len(self.notes))]
        if twice:
            again = self.rng.randrange(len(notes))
            notes.insert(self.rng.randint(again + 1, len(notes)), notes[again])
        return Case(protocol, tuple(notes), tuple(items), dropped)


def ask(kind: str, entity: str, steps: list[Pair], after: int = 0) -> Item:
    """The question for (attribute, value) `steps` from `entity`, and its reply."""
    question = text([ASK, entity, *(a for a, _ in steps)])
    reply = text([entity, *(word for step in steps for word in step), STOP])
    return Item(question, reply, kind, steps[-1][1], after)


def recall(rng: random.Random, size: Size) -> Case:
    """P1: facts in shuffled notes; nothing crosses a note."""
    draft = Draft(rng, size)
    facts = [draft.fact(rng.randrange(len(draft.notes))) for _ in range(size.questions)]
    draft.fill()
    return draft.case("P1", [ask("recall", e, [(a, v)]) for e, a, v in facts])


def early(rng: random.Random, size: Size) -> Case:
    """P2: a later note takes over a value from an earlier one: its KV must have read that."""
    draft = Draft(rng, size)
    items = []
    for _ in range(size.questions):
        _, (entity, attribute), value = draft.alias(*draft.two_notes())
        items.append(ask("alias", entity, [(attribute, value)]))
    draft.fill()
    return draft.case("P2", items)


def _path(draft: Draft, hops: int, kind: str, backwards: bool) -> Item:
    """A chain of links over different notes that ends in a fact."""
    rng = draft.rng
    spread = len(draft.notes) >= hops
    pick = rng.sample if spread else rng.choices
    where = sorted(pick(range(len(draft.notes)), k=hops)) if backwards else pick(
        range(len(draft.notes)), k=hops
    )  # fmt: skip
    here = draft.pairs.pop()
    first, used = here[0], {here[1]}
    steps: list[Pair] = []
    for i, note in enumerate(where):
        entity, attribute = here
        if i == hops - 1:
            value = draft.value()
        else:
            seen = {first, *(v for _, v in steps)}
            here = draft.take(lambda p, seen=seen: p[0] not in seen and p[1] not in used)  # type: ignore[misc]
            value = here[0]
            used.add(here[1])
        draft.add(note, entity, attribute, value)
        steps.append((attribute, value))
    return ask(kind, first, steps)


def late(rng: random.Random, size: Size) -> Case:
    """P3: two hops whose first is stated before the second: bound by the question (control)."""
    draft = Draft(rng, size)
    items = [_path(draft, 2, "hops", True) for _ in range(size.questions)]
    draft.fill()
    return draft.case("P3", items)


def mode(rng: random.Random, size: Size, headers: int = 1) -> Case:
    """P4: the first note says whether the values of all later facts stand for their opposites."""
    draft = Draft(rng, size)
    last = len(draft.notes)
    starts = [0, *sorted(rng.sample(range(1, last), min(headers, last) - 1))]
    modes = {start: rng.choice(MODES) for start in starts}
    items = []
    for _ in range(size.questions):
        note = rng.randrange(1, last)
        entity, attribute, value = draft.fact(note)
        reversed_ = modes[max(s for s in starts if s <= note)] == MODES[1]
        items.append(ask("mode", entity, [(attribute, OPPOSITE[value] if reversed_ else value)]))
    draft.fill()
    for start, word in modes.items():
        draft.notes[start].insert(0, [SET, word, STOP])
    return draft.case("P4", items)


def erase(rng: random.Random, size: Size) -> Case:
    """P5: one note is dropped: leak questions ask for what it said, or what was taken from it."""
    draft = Draft(rng, size)
    gone = rng.randrange(len(draft.notes) - 1)
    items = []
    for i in range(max(2, size.questions // 2)):
        if i % 2:
            entity, attribute, value = draft.fact(gone)
            items.append(ask("leak-fact", entity, [(attribute, value)]))
        else:
            _, (entity, attribute), value = draft.alias(
                gone, rng.randrange(gone + 1, len(draft.notes))
            )
            items.append(ask("leak-alias", entity, [(attribute, value)]))
    stay = [n for n in range(len(draft.notes)) if n != gone]
    for i in range(size.questions - len(items)):
        if i % 2 and len(stay) > 1:
            first, second = sorted(rng.sample(stay, 2))
            _, (entity, attribute), value = draft.alias(first, second)
        else:
            entity, attribute, value = draft.fact(rng.choice(stay))
        items.append(ask("retained", entity, [(attribute, value)]))
    draft.fill()
    return draft.case("P5", items, dropped=gone)


def twice(rng: random.Random, size: Size) -> Case:
    """P7: one note stands in the context twice, under the same name."""
    draft = Draft(rng, size)
    items = []
    for i in range(size.questions):
        if i % 2:
            _, (entity, attribute), value = draft.alias(*draft.two_notes())
        else:
            entity, attribute, value = draft.fact(rng.randrange(len(draft.notes)))
        items.append(ask("twice", entity, [(attribute, value)]))
    draft.fill()
    return draft.case("P7", items, twice=True)


def order(rng: random.Random, size: Size) -> Case:
    """P8: several notes replace one fact; the last one counts."""
    draft = Draft(rng, size)
    items = []
    for _ in range(size.questions):
        most = min(4, len(draft.notes))
        notes = sorted(rng.sample(range(len(draft.notes)), rng.randint(2, most)))
        entity, attribute = draft.pairs.pop()
        values = rng.sample(VALUES, len(notes))
        for note, value in zip(notes, values, strict=True):
            draft.add(note, NOW, entity, attribute, value)
        items.append(ask("order", entity, [(attribute, values[-1])]))
    draft.fill()
    return draft.case("P8", items)


def chain(rng: random.Random, size: Size) -> Case:
    """P9: a chain of thought over links in shuffled notes; its steps are the milestones."""
    draft = Draft(rng, size)
    items = [
        _path(draft, rng.randint(*size.hops), "chain", False)
        for _ in range(max(1, size.questions // 2))
    ]
    draft.fill()
    return draft.case("P9", items)


PROTOCOLS: dict[str, Callable[[random.Random, Size], Case]] = {
    "P1": recall, "P2": early, "P3": late, "P4": mode, "P5": erase, "P7": twice, "P8": order,
    "P9": chain,
}  # fmt: skip


def cases(protocol: str, seed: int | str, size: Size = TEST) -> Iterator[Case]:
    """An endless seeded stream of cases of one protocol."""
    index = 0
    while True:
        yield PROTOCOLS[protocol](random.Random(f"{seed}/{protocol}/{index}"), size)
        index += 1
