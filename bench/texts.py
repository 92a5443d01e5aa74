"""Contexts, and what agents and retrieval make of them: tokens to look for again.

A chat has a system prompt of 800 tokens and 24 turns of 100-600, in case f 200 of 6-40. Documents have 200-700
tokens, in case e 60-200, and stand between a system prompt of 256 tokens and a question of 40.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
VOCAB = 32_000


class RandomText:
    """Tokens that say nothing about each other."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def part(self, n: int) -> Ids:
        """Return one turn or document."""
        return self.rng.integers(0, VOCAB, n)

    def between(self, low: int, high: int) -> int:
        """Return a size, both ends included."""
        return int(self.rng.integers(low, high + 1))


class ZipfText(RandomText):
    """Tokens as frequent as words, in the frame of a chat template, a fifth in paragraphs seen before."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        weights = 1 / (np.arange(VOCAB) + 2.7)  # Zipf's law as Mandelbrot corrected it
        self.reach = np.cumsum(weights / weights.sum())
        pool = np.random.default_rng(0)  # the same in every trial, as boilerplate is
        self.paragraphs = [self.words(pool.integers(20, 81), pool) for _ in range(40)]

    def words(self, n: int, rng: np.random.Generator) -> Ids:
        """Return tokens of no meaning."""
        return np.minimum(np.searchsorted(self.reach, rng.random(n)), VOCAB - 1) + 10

    def part(self, n: int) -> Ids:
        pieces = [np.array([1, 2 + n % 2, 4])]
        while sum(map(len, pieces)) < n:
            if self.rng.random() < 0.2:
                pieces.append(self.paragraphs[self.rng.integers(len(self.paragraphs))])
            else:
                pieces.append(self.words(50, self.rng))
        return np.concatenate([np.concatenate(pieces)[: n - 2], [5, 6]])


@dataclass
class Case:
    """A context and what became of it: messages, and the parts (turns, documents) they are made of."""

    stored: list[list[Ids]]
    asked: list[list[Ids]]

    @property
    def prompt(self) -> Ids:
        return np.concatenate([part for message in self.asked for part in message])

    @property
    def old(self) -> Ids:
        return np.concatenate([part for message in self.stored for part in message])


def chat(text: RandomText, n: int = 24, sizes: tuple[int, int] = (100, 600)) -> list[list[Ids]]:
    """Return a system prompt of 800 tokens and ``n`` turns."""
    return [[text.part(800)], *([text.part(text.between(*sizes))] for _ in range(n))]


def drop_oldest(text: RandomText) -> Case:
    """Minus one, plus one."""
    old = chat(text)
    return Case(old, [old[0], *old[2:], [text.part(text.between(100, 600))]])


def drop_three(text: RandomText) -> Case:
    """Three turns from the middle go, not beside each other."""
    old = chat(text)
    gone = {5, 11, 17}
    return Case(old, [message for i, message in enumerate(old) if i not in gone])


def insert_five(text: RandomText) -> Case:
    """Five tokens come into the system prompt: a date."""
    old = chat(text)
    at = text.between(50, 750)
    return Case(old, [[np.insert(old[0][0], at, text.part(16)[5:10])], *old[1:]])


def shuffled(text: RandomText, n: int, low: int, high: int) -> Case:
    """Return documents pasted into one message, then in another order with another question."""
    system = [text.part(256)]
    documents = [text.part(text.between(low, high)) for _ in range(n)]
    order = text.rng.permutation(n)
    return Case(
        [system, [*documents, text.part(40)]],
        [system, [*(documents[i] for i in order), text.part(40)]],
    )


def short_chat(text: RandomText) -> Case:
    """Many short messages: the oldest 20 of 200 go, two come."""
    old = chat(text, 200, (6, 40))
    return Case(old, [old[0], *old[21:], *([text.part(text.between(6, 40))] for _ in range(2))])


CASES: dict[str, Callable[[RandomText], Case]] = {
    "a  oldest turn out, one in": drop_oldest,
    "b  three turns out": drop_three,
    "c  5 tokens into the system": insert_five,
    "d  14 documents shuffled": lambda text: shuffled(text, 14, 200, 700),
    "e  40 short ones shuffled": lambda text: shuffled(text, 40, 60, 200),
    "f  20 short messages out": short_chat,
}
