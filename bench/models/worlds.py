"""Little worlds of facts in several wordings: what the models of the bench are trained and asked on.

A document states facts, changes them, speaks of what was named before ("it"), and takes values over
from others; then it asks. Each wording has its own words, order and reply: one token, the whole
sentence, the value first, or every step of a path. None is the bundled model's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

PAD, BOS, END = "<pad>", "<bos>", "<end>"
SPECIALS = (PAD, BOS, END)
CONSONANTS, VOWELS = "bcdfghjklmnprstvwz", "aeiou"


@dataclass(frozen=True)
class Wording:
    """How one world speaks. Capitals are slots: E an entity, A its attribute, V the value, F the
    other entity of an alias, and P in a reply the steps from E over attributes to the value."""

    fact: str
    pronoun: str  # of the entity of the sentence before
    change: str
    alias: str  # the value of E's A is that of F's A
    ask: str
    reply: str
    aliased: str = ""  # the reply about a value taken over; "" as any other
    step: str = ""  # of a path: the values are entities then
    seed: int = 0
    entities: int = 60
    attributes: int = 6
    values: int = 60
    filler: tuple[str, ...] = ()
    hops: int = 1

    def words(self) -> tuple[str, ...]:
        """Return every word, the special ones first."""
        rng = random.Random(self.seed)
        n = self.entities + self.attributes + (0 if self.step else self.values)
        made: dict[str, None] = {}
        while len(made) < n:
            made["".join(rng.choice(s) for s in (CONSONANTS, VOWELS) * rng.choice((2, 3)))] = None
        said = " ".join(
            (self.fact, self.pronoun, self.change, self.alias, self.ask, self.reply, self.aliased, self.step)
        )  # fmt: skip
        own = [w for w in said.split() if w not in "EAVFP"]
        return (*SPECIALS, *made, *dict.fromkeys([*own, *self.filler]))

    def parts(self) -> tuple[list[str], list[str], list[str]]:
        """Return entities, attributes and values."""
        words = list(self.words()[len(SPECIALS) :])
        entities, attributes = words[: self.entities], words[self.entities :][: self.attributes]
        if self.step:
            return entities, attributes, entities
        return entities, attributes, words[self.entities + self.attributes :][: self.values]


@dataclass(frozen=True)
class Size:
    """How hard a document is."""

    sentences: int
    one_key: bool  # an entity has one attribute
    pronoun: float = 0.15
    change: float = 0.15
    alias: float = 0.15
    filler: float = 0.2


@dataclass
class Fact:
    """What holds of an (entity, attribute): its value, how it was said, and whose it was."""

    value: str
    kind: str
    of: str = ""


@dataclass
class World:
    """A document that grows: ``sentences`` of words, and the facts that hold after them."""

    wording: Wording
    size: Size
    rng: random.Random
    sentences: list[list[str]] = field(default_factory=list)
    facts: dict[tuple[str, str], Fact] = field(default_factory=dict)
    last: str = ""

    def __post_init__(self) -> None:
        entities, attributes, self.values = self.wording.parts()
        self.rng.shuffle(entities)
        if self.size.one_key:
            self.fresh = [(e, self.rng.choice(attributes)) for e in entities]
        else:
            few = max(3, self.size.sentences // 4)
            self.fresh = [(e, a) for e in entities[:few] for a in attributes]
            self.rng.shuffle(self.fresh)

    def say(self) -> None:
        """Add a sentence."""
        draw, size = self.rng.random(), self.size
        if self.facts and self.wording.filler and self.rng.random() < size.filler:
            n = self.rng.randint(2, 7)
            self.sentences.append([self.rng.choice(self.wording.filler) for _ in range(n)])
            return
        if self.facts and draw < size.change:
            key = self.rng.choice(list(self.facts))
            return self._state(self.wording.change, key, "change")
        if self.last and draw < size.change + size.pronoun:
            key = next((k for k in self.fresh if k[0] == self.last), None)
            if key is not None and not size.one_key:
                self.fresh.remove(key)
                return self._state(self.wording.pronoun, key, "pronoun")
        if not self.fresh:
            return self._state(self.wording.change, self.rng.choice(list(self.facts)), "change")
        key = self.fresh.pop()
        if self.facts and draw > 1 - size.alias:
            whose = [k for k, f in self.facts.items() if f.kind != "alias"]
            others = [k for k in whose if size.one_key or k[1] == key[1]]
            if others:
                other = self.rng.choice(others)
                key = (key[0], other[1])
                if key not in self.facts:
                    return self._state(self.wording.alias, key, "alias", other[0])
        self._state(self.wording.fact, key, "recall")

    def _state(self, how: str, key: tuple[str, str], kind: str, of: str = "") -> None:
        value = self.facts[of, key[1]].value if of else self.rng.choice(self.values)
        self.facts[key] = Fact(value, kind, of)
        self.last = key[0]
        self.sentences.append(fill(how, E=key[0], A=key[1], V=value, F=of))

    def question(self, kind: str | None = None) -> tuple[str, list[str], list[str]] | None:
        """Return a kind, what is asked, and the reply with its end; None where nothing fits."""
        if self.wording.hops > 1 and (kind == "path" or (kind is None and self.rng.random() < 0.4)):
            return self._path()
        known = [k for k, f in self.facts.items() if kind in (None, f.kind)]
        if kind is None:  # every kind as often
            kinds = sorted({f.kind for f in self.facts.values()})
            pick = self.rng.choice(kinds)
            known = [k for k, f in self.facts.items() if f.kind == pick]
        if not known:
            return None
        e, a = self.rng.choice(known)
        fact = self.facts[e, a]
        reply = self.wording.aliased if fact.of and self.wording.aliased else self.wording.reply
        slots = {"E": e, "A": a, "V": fact.value, "F": fact.of}
        if "P" in reply.split():
            slots["P"] = " ".join(fill(self.wording.step, **slots))
        return fact.kind, fill(self.wording.ask, **slots), [*fill(reply, **slots), END]

    def _path(self) -> tuple[str, list[str], list[str]] | None:
        for e, a in self.rng.sample(list(self.facts), len(self.facts)):
            steps, names, at, via = [], [a], e, a
            while True:
                value = self.facts[at, via].value
                steps += fill(self.wording.step, E=at, A=via, V=value)
                more = [k[1] for k in self.facts if k[0] == value]
                if len(names) == self.wording.hops or not more:
                    break
                at, via = value, self.rng.choice(more)
                names.append(via)
            if len(names) > 1:
                asked = fill(self.wording.ask, E=e, A=" ".join(names))
                reply = fill(self.wording.reply, P=" ".join(steps), V=value, E=e, A=a)
                return "path", asked, [*reply, END]
        return None


def fill(template: str, **slots: str) -> list[str]:
    """Return the words of a template."""
    return [w for part in template.split() for w in slots.get(part, part).split()]


def document(wording: Wording, size: Size, n_questions: int, seed: str) -> tuple[list[str], list[tuple[int, int, str]]]:  # fmt: skip
    """Return the words of a document to train on, and where its replies are: (start, end, kind)."""
    world = World(wording, size, random.Random(seed))
    for _ in range(size.sentences):
        world.say()
    words = [BOS, *(w for s in world.sentences for w in s)]
    replies = []
    for _ in range(n_questions):
        asked = world.question()
        if asked is not None:
            words += asked[1]
            replies.append((len(words), len(words) + len(asked[2]), asked[0]))
            words += asked[2]
    return words, replies


@dataclass(frozen=True)
class Case:
    """Notes that were put apart, and questions after all of them, as words."""

    notes: tuple[tuple[str, ...], ...]
    questions: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]


def case(wording: Wording, size: Size, n_notes: int, n_questions: int, seed: str) -> Case:
    """Return a document cut into notes at sentences, and questions about it, every kind in turn."""
    world = World(wording, size, random.Random(seed))
    for _ in range(size.sentences):
        world.say()
    cuts = [round(i * len(world.sentences) / n_notes) for i in range(n_notes + 1)]
    notes = tuple(tuple(w for s in world.sentences[a:b] for w in s) for a, b in pairwise(cuts))
    kinds: Sequence[str] = ("recall", "pronoun", "change", "alias", *(["path"] if wording.hops > 1 else []))  # fmt: skip
    asked = [world.question(kinds[i % len(kinds)]) for i in range(n_questions)]
    found = {q[0] + " ".join(q[1]): q for q in asked if q is not None}
    return Case(notes, tuple((k, tuple(a), tuple(r)) for k, a, r in found.values()))
