"""A user who does at random what people do with an engine, by its public verbs."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from common import random_ids

from kvweave import Context, Engine, KVWeaveError, Sampling
from kvweave.errors import OverBudget

N_DOCS, N_CONTEXTS = 16, 6  # at most
# how often each operation is drawn
WEIGHTS = {
    "put": 4, "remove": 2, "compose": 3, "open": 3, "ask": 8, "weave": 2, "drop": 5, "replace": 2,
    "insert": 2, "reorder": 2, "fork": 2, "close": 2, "place": 4, "cancel": 3,
}  # fmt: skip


class User:
    """Does what users do, drawn at random; closes its oldest context when memory is refused."""

    def __init__(self, engine: Engine, vocab: int, seed: int) -> None:
        self.engine, self.vocab, self.random = engine, vocab, random.Random(seed)
        self.docs: list[str] = []
        self.n = 0  # operations begun; also what names are made of
        self.done: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def act(self) -> str:
        """Do one operation and return its name."""
        self.n += 1
        name = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        try:
            getattr(self, name)()
            self.done[name] += 1
        except KVWeaveError as error:
            self.refused[type(error).__name__] += 1
            if isinstance(error, OverBudget) and self.engine.contexts:
                self.engine.close_context(next(iter(self.engine.contexts)))
        return name

    def _text(self, least: int, most: int) -> list[int]:
        return random_ids(self.random.randint(least, most), self.vocab, self.random.getrandbits(32))

    def _context(self) -> Context:
        if not self.engine.contexts:
            self.open()
        return self.random.choice(list(self.engine.contexts.values()))

    def _room(self) -> None:
        while len(self.engine.contexts) >= N_CONTEXTS:
            self.close()

    def put(self) -> None:
        if len(self.docs) >= N_DOCS:
            self.remove()
        name = f"docs/{self.n}"
        self.engine.put(name, self._text(8, 64))
        self.docs.append(name)

    def remove(self) -> None:
        if self.docs:
            name = self.random.choice(self.docs)
            self.engine.files.rm(name)
            self.docs.remove(name)

    def compose(self) -> None:
        self._room()
        docs = self.random.sample(self.docs, min(len(self.docs), self.random.randint(1, 3)))
        if docs:
            repair = self.random.choice(["none", "first_k", "auto"])
            context = self.engine.compose("{docs}", docs=docs, repair=repair, share=0.2)
            context.append(self._text(4, 16))
            context.generate(4, ignore_eos=True)

    def open(self) -> None:
        self._room()
        repair = self.random.choice(["none", "first_k", "full", "auto"])
        prune = self.random.choice(["forget", "evict"])
        context = self.engine.context(f"chat-{self.n}", repair=repair, share=0.2, prune=prune)
        for name in self.random.sample(self.docs, min(len(self.docs), 1)):
            context.append_chunk(name)
        for _ in range(self.random.randint(1, 4)):
            context.append(self._text(4, 24))
        context.generate(4, ignore_eos=True)

    def ask(self) -> None:
        context = self._context()
        context.append(self._text(4, 32))
        context.generate(self.random.randint(1, 12), ignore_eos=True)

    def weave(self) -> None:
        self._context().weave(self.random.choice([None, "none", "full"]))

    def drop(self) -> None:
        context = self._context()
        for _ in range(self.random.randint(1, 3)):
            if len(context.parts) > 2:
                context.drop(self.random.choice(context.parts[1:]))
        context.weave()

    def replace(self) -> None:
        context = self._context()
        context.replace(self.random.choice(context.parts), self._text(4, 32))

    def insert(self) -> None:
        context = self._context()
        context.insert(self.random.randint(1, len(context.parts)), self._text(4, 32))
        context.weave()

    def reorder(self) -> None:
        context = self._context()
        first, *rest = range(len(context.parts))
        context.reorder([first, *self.random.sample(rest, len(rest))])
        context.weave()

    def fork(self) -> None:
        self._room()
        twin = self.engine.fork(self._context(), f"twin-{self.n}")
        twin.append(self._text(4, 16))
        twin.generate(2, ignore_eos=True)

    def close(self) -> None:
        if self.engine.contexts:
            self.engine.close_context(self.random.choice(list(self.engine.contexts)))

    def place(self) -> None:
        if self.docs:
            where: Any = self.random.choice(["disk", "disk", "ram", "none"])
            codec = self.random.choice([None, "int8"]) if where == "disk" else None
            self.engine.place(self.random.choice(self.docs), where, codec=codec)

    def cancel(self) -> None:
        """Begin an answer, let it get somewhere while another runs, and call it off."""
        context = self._context()
        others = [each for each in self.engine.contexts.values() if each is not context]
        context.append(self._text(4, 16))
        answer = context.begin(Sampling(max_tokens=32, ignore_eos=True))
        try:
            if others and self.random.random() < 0.6:
                self.random.choice(others).generate(2, ignore_eos=True)
        finally:
            answer.cancel()
