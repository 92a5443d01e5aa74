"""The little world of the bundled model: facts, overrides, questions.

A conversation states facts ("Anna's river is cold ."), replaces some of them ("now Anna's river
is deep ."), wraps them in filler and asks for one at the end of a turn ("what about Anna's river").
The expected reply restates the fact, so that answering is matching and copying.
Training, evaluation and the demonstration all draw their text from here.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from kvweave.demo.vocabulary import (
    AGAIN,
    ALSO,
    ASK,
    ATTRIBUTES,
    ENTITIES,
    FILLER,
    FROM,
    NO_QUESTION,
    NOW,
    SAME,
    STOP,
    VALUES,
    text,
    words,
)

SYSTEM = "keep the notes ."


@dataclass(frozen=True)
class Spec:
    """How hard a conversation is; ranges are inclusive and drawn once or per turn."""

    facts: tuple[int, int] = (3, 5)  # statements in a turn
    filler: tuple[int, int] = (32, 60)  # filler words in a turn
    entities: tuple[int, int] = (20, 60)  # different entities in the conversation
    budget: tuple[int, int] = (10_000, 10_000)  # statements before question-only turns
    one_key: bool = False  # each entity has a single attribute
    asks: float = 0.92  # share of turns with statements that end in a question
    override: float = 0.15  # share of statements that replace an earlier value
    overrides: int = 1  # at most so many per fact
    again: float = 0.04  # share of statements that repeat an earlier one
    ask_overridden: float = 0.4  # share of questions about replaced values, where any is left
    alias: float = 0.0  # share of statements that take a value over from an earlier turn


CONVERSATION = Spec()  # the shape in which the model is used and measured


@dataclass
class Fact:
    """The present state of one (entity, attribute)."""

    entity: str
    attribute: str
    value: str
    stated: int  # turn of the latest statement
    overrides: int = 0
    asked: int | None = None  # turn in which the present value was last asked and restated
    needs: int | None = None  # turn of the statement from which this one took its value

    def stands(self, kept: Collection[int]) -> bool:
        """Whether all that it rests on is in the kept turns."""
        return self.stated in kept and (self.needs is None or self.needs in kept)


@dataclass(frozen=True)
class Exchange:
    """A user message and the reply it should get."""

    index: int
    user: str
    reply: str
    entity: str | None = None
    attribute: str | None = None
    value: str | None = None
    stated: int | None = None  # index of the turn that holds the latest statement
    kind: str = "none"  # "none", "recall", "override" or "alias"

    @property
    def asks(self) -> bool:
        """Whether the turn ends in a question."""
        return self.kind != "none"

    def messages(self) -> list[dict[str, str]]:
        """The turn as chat messages, with the expected reply."""
        return [
            {"role": "user", "content": self.user},
            {"role": "assistant", "content": self.reply},
        ]

    def correct(self, reply: str) -> bool:
        """Whether a generated reply names the expected value."""
        said = words(reply)
        return self.value is not None and len(said) >= 3 and said[2] == self.value


class Conversation:
    """An endless conversation; the caller says which turns are still in the context."""

    def __init__(self, seed: int | str, spec: Spec = CONVERSATION) -> None:
        self.spec = spec
        self.facts: dict[tuple[str, str], Fact] = {}
        self._rng = random.Random(seed)
        self._index = 0
        count = self._rng.randint(*spec.entities)
        self._entities = self._rng.sample(ENTITIES, count)
        self._attributes = self._rng.sample(ATTRIBUTES, self._rng.randint(6, len(ATTRIBUTES)))
        self._left = self._rng.randint(*spec.budget)
        self._fresh: list[tuple[str, str]] = []
        self._refill()

    def _refill(self) -> None:
        """Lay out which (entity, attribute) pairs will be stated, in random order."""
        if self.spec.one_key:
            pairs = [(e, self._rng.choice(self._attributes)) for e in self._entities]
        else:
            pairs = [(e, a) for e in self._entities for a in self._attributes]
        self._rng.shuffle(pairs)
        self._fresh = [pair for pair in pairs if pair not in self.facts]

    def turn(self, window: Collection[int] | None = None) -> Exchange:
        """The next turn. `window`: indexes of earlier turns in context (default: all)."""
        index = self._index
        self._index += 1
        kept = range(index) if window is None else window
        live = [f for f in self.facts.values() if f.stands(kept)]
        asking = [f for f in live if f.asked is None or f.asked not in kept]
        said: list[str] = []
        if self._left > 0 or not asking:
            said = self._wrap(self._statements(index, live))
            live = [f for f in self.facts.values() if f.stands({*kept, index})]
            asking = [f for f in live if f.asked is None or f.asked not in kept]
            if not asking or self._rng.random() >= self.spec.asks:
                return Exchange(index, text(said), NO_QUESTION)
        fact = self._pick(asking)
        fact.asked = index
        said += [ASK, fact.entity, fact.attribute]
        return Exchange(
            index,
            text(said),
            text([fact.entity, fact.attribute, fact.value, STOP]),
            fact.entity,
            fact.attribute,
            fact.value,
            fact.stated,
            "override" if fact.overrides else "recall" if fact.needs is None else "alias",
        )

    def _pick(self, asking: list[Fact]) -> Fact:
        changed = [f for f in asking if f.overrides]
        if changed and self._rng.random() < self.spec.ask_overridden:
            return self._rng.choice(changed)
        return self._rng.choice([f for f in asking if not f.overrides] or changed)

    def _statements(self, index: int, live: list[Fact]) -> list[list[str]]:
        """State, replace or repeat facts; those of earlier turns only, each once a turn."""
        said: list[list[str]] = []
        for _ in range(self._rng.randint(*self.spec.facts)):
            draw = self._rng.random()
            old = [f for f in live if f.stated < index]
            open_ = [f for f in old if f.overrides < self.spec.overrides]
            if draw < self.spec.override and open_:
                fact, mark = self._replace(self._rng.choice(open_)), [NOW]
            elif draw < self.spec.override + self.spec.alias and (found := self._alias(old)):
                fact, taken = found
                fact.stated = index
                said.append(taken)
                continue
            elif draw > 1 - self.spec.again and old:
                fact, mark = self._rng.choice(old), [AGAIN]
            else:
                fact, mark = self._new()
            fact.stated = index
            said.append([*mark, fact.entity, fact.attribute, fact.value, STOP])
        self._left -= len(said)
        return said

    def _alias(self, old: list[Fact]) -> tuple[Fact, list[str]] | None:
        """A new fact whose value an earlier turn states; None if there is no pair for it."""
        sources = {f.attribute: f for f in old if f.needs is None}
        for i in range(len(self._fresh) - 1, -1, -1):
            entity, attribute = self._fresh[i]
            if attribute in sources:
                del self._fresh[i]
                source = sources[attribute]
                fact = Fact(entity, attribute, source.value, -1, needs=source.stated)
                self.facts[entity, attribute] = fact
                taken = [FROM, source.entity, attribute, SAME, entity, attribute, ALSO, STOP]
                return fact, taken
        return None

    def _replace(self, fact: Fact) -> Fact:
        fact.value = self._rng.choice([v for v in VALUES if v != fact.value])
        fact.overrides, fact.asked, fact.needs = fact.overrides + 1, None, None
        return fact

    def _new(self) -> tuple[Fact, list[str]]:
        if not self._fresh:
            self._entities = [e for e in ENTITIES if e not in self._entities]
            self._refill()
        if not self._fresh:  # a very long conversation has named everything: replace the oldest
            return self._replace(min(self.facts.values(), key=lambda f: f.stated)), [NOW]
        entity, attribute = self._fresh.pop()
        fact = Fact(entity, attribute, self._rng.choice(VALUES), -1)
        self.facts[entity, attribute] = fact
        return fact, []

    def _wrap(self, said: list[list[str]]) -> list[str]:
        """Spread filler before, between and after the statements."""
        total = self._rng.randint(*self.spec.filler)
        cuts = sorted(self._rng.randint(0, total) for _ in said)
        made: list[str] = []
        done = 0
        for statement, cut in zip(said, cuts, strict=True):
            made += self._rng.choices(FILLER, k=cut - done)
            done = cut
            made += statement
        return made + self._rng.choices(FILLER, k=total - done)
