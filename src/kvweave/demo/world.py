"""The little world of the bundled model: facts, overrides, questions, and its tokenizer.

A conversation states facts ("pude river ludi ."), replaces some of them ("now pude river
kegu ."), wraps them in filler and asks for one at the end of a turn ("ask pude river").
The expected reply restates the fact, so that answering is matching and copying.
Training, evaluation and the demonstration all draw their text from here.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

VOCABULARY = 2048
MAX_POSITIONS = 4096
BOS, END, PAD = "<|bos|>", "<|end|>", "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIALS = (PAD, BOS, END, *(f"<|{role}|>" for role in ROLES))

SYSTEM = "keep the notes ."
NO_QUESTION = "ok"
STOP, NOW, AGAIN, ASK = ".", "now", "again", "ask"
FROM, ALSO, SAME = "from", "also", "same"
_ATTRIBUTES = "river metal ruler song tree bird stone food game cloth drink town"
_FILLER = (
    "so well then we saw it was a day of rain and some more light on way there as he said "
    "she went home with them for long time but nobody came back until very late or maybe not "
    "just because all they had to do is wait here by that old door while I read my book"
)
ATTRIBUTES = tuple(_ATTRIBUTES.split())
FILLER = tuple(_FILLER.split())

# One jinja line; each message renders by itself, so renderings concatenate. The bos belongs
# to the system message.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role: ' + message['role']) }}{% endif %}"
    "{% if message['role'] == 'system' %}{{ '<|bos|>' }}{% endif %}"
    "{{ '<|' + message['role'] + '|> ' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def _nonsense(count: int) -> tuple[str, ...]:
    """Distinct consonant-vowel-consonant-vowel words, the same on every machine."""
    parts = [c + v for c in "bdfghjklmnprstvz" for v in "aeiou"]
    real = {*ATTRIBUTES, *FILLER, "data", "date", "file", "line", "name", "note", "type", "code"}
    words = [a + b for a in parts for b in parts if a + b not in real]
    return tuple(random.Random(20261121).sample(words, count))


_NONSENSE = _nonsense(240)
ENTITIES, VALUES = _NONSENSE[:120], _NONSENSE[120:]
WORDS = (
    *ENTITIES,
    *VALUES,
    *ATTRIBUTES,
    *FILLER,
    *(STOP, NOW, AGAIN, ASK, NO_QUESTION),
    *("keep", "the", "notes"),
)
# Tokens of their own already in the tokenizer that the words above and the prose give.
LATER = (FROM, ALSO, SAME, "set", "left", "right")


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
        words = reply.split()
        return self.value is not None and len(words) >= 3 and words[2] == self.value


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
        words: list[str] = []
        if self._left > 0 or not asking:
            words = self._wrap(self._statements(index, live))
            live = [f for f in self.facts.values() if f.stands({*kept, index})]
            asking = [f for f in live if f.asked is None or f.asked not in kept]
            if not asking or self._rng.random() >= self.spec.asks:
                return Exchange(index, " ".join(words), NO_QUESTION)
        fact = self._pick(asking)
        fact.asked = index
        words += [ASK, fact.entity, fact.attribute]
        return Exchange(
            index,
            " ".join(words),
            f"{fact.entity} {fact.attribute} {fact.value} {STOP}",
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
                fact, words = found
                fact.stated = index
                said.append(words)
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
                words = [FROM, source.entity, attribute, SAME, entity, attribute, ALSO, STOP]
                return fact, words
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
        words: list[str] = []
        done = 0
        for statement, cut in zip(said, cuts, strict=True):
            words += self._rng.choices(FILLER, k=cut - done)
            done = cut
            words += statement
        return words + self._rng.choices(FILLER, k=total - done)


def build_tokenizer(prose: Iterator[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer in which every word of the world is one token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def corpus() -> Iterator[str]:
        yield from prose
        line = "".join(f" {word}" for word in WORDS)
        for _ in range(5000):
            yield line

    tokenizer.train_from_iterator(corpus(), trainer)
    split = [w for w in WORDS if len(tokenizer.encode(f" {w}").ids) != 1]
    if split or tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"not one token each: {split}; {tokenizer.get_vocab_size()} entries")
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer with its chat template, ready for save_pretrained."""
    from transformers import PreTrainedTokenizerFast

    make: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast  # untyped upstream
    return make(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[f"<|{role}|>" for role in ROLES],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITIONS,
    )
