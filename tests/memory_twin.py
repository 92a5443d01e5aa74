"""A memory as lists of tokens: slow, and obviously right. It knows no chunk, no part, no tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

Tokens = tuple[int, ...]


@dataclass
class State:
    """What can be undone: zones as (name, tokens), and the items."""

    anchors: list[tuple[str, Tokens]]
    recalled: list[tuple[str, Tokens]] = field(default_factory=list)
    summaries: list[tuple[str, Tokens]] = field(default_factory=list)
    turns: list[list[tuple[str, Tokens]]] = field(default_factory=list)
    items: dict[str, Tokens] = field(default_factory=dict)

    def tokens(self) -> list[int]:
        zones = [
            *self.anchors,
            *self.recalled,
            *self.summaries,
            *(m for t in self.turns for m in t),
        ]
        return [token for _, tokens in zones for token in tokens]


class Twin:
    """The verbs; ``age`` tells which of two items' chunks is older, which the twin cannot know."""

    def __init__(
        self, base: Tokens, budget, summarise: Callable[[list[Tokens]], Tokens], age
    ) -> None:
        self.now = State([("base", base)])
        self.past: list[State] = []
        self.budget, self.summarise, self.age = budget, summarise, age
        self.counts = {"u": 0, "a": 0, "sum": 0}

    def step(self, verb: str, *args: object) -> None:
        """Do a verb, and remember what was before it, if it changed anything."""
        before = copy.deepcopy(self.now)
        getattr(self, verb)(*args)
        if self.now != before:
            self.past.append(before)

    def undo(self) -> None:
        if self.past:
            self.now = self.past.pop()

    # ---- verbs

    def tell(self, tokens: Tokens, kind: str) -> None:
        self.settle()
        letter = kind[0]
        message = (f"c/{letter}-{self.counts[letter]:03d}", tokens)
        self.counts[letter] += 1
        if kind == "user" or not self.now.turns:
            self.now.turns.append([])
        self.now.turns[-1].append(message)

    def settle(self) -> None:
        now, b = self.now, self.budget

        def size() -> int:
            return sum(len(tokens) for turn in now.turns for _, tokens in turn)

        if size() > b.window or len(now.turns) > b.turns:
            gone = []
            while len(now.turns) > 1 and (
                size() > b.keep * b.window or len(now.turns) > b.keep * b.turns
            ):
                gone += now.turns.pop(0)
            if gone:
                self._sum_up(gone, at=len(now.summaries))
                for name, tokens in gone:
                    now.items[f"memory/{name}"] = tokens
        while sum(len(tokens) for _, tokens in now.summaries) > b.summaries:
            gone = []
            while now.summaries and (
                len(gone) < 2 or sum(len(t) for _, t in now.summaries) + b.summary > b.summaries
            ):
                gone.append(now.summaries.pop(0))
            self._sum_up(gone, at=0)

    def _sum_up(self, gone: list[tuple[str, Tokens]], at: int) -> None:
        made = self.summarise([tokens for _, tokens in gone])
        while f"memory/c/sum-{self.counts['sum']:03d}" in self.now.items:
            self.counts["sum"] += 1
        name = f"memory/c/sum-{self.counts['sum']:03d}"
        self.now.summaries.insert(at, (name, made))
        self.now.items[name] = made

    def write(self, name: str, tokens: Tokens) -> None:
        self.now.items[name] = tokens
        self._everywhere(lambda n, t: (n, tokens) if n == name else (n, t))

    def delete(self, pattern: str) -> None:
        gone = {name for name in self.now.items if fnmatchcase(name, pattern)}
        self.now.items = {n: t for n, t in self.now.items.items() if n not in gone}
        self._everywhere(lambda n, t: None if n in gone else (n, t))

    def rename(self, old: str, new: str) -> None:
        if old == new:
            return
        self.now.items[new] = self.now.items.pop(old)
        self._everywhere(lambda n, t: (new, t) if n == old else (n, t))

    def anchor(self, name: str, tokens: Tokens) -> None:
        self.now.items[name] = tokens
        self.now.anchors.append((name, tokens))

    def recall(self, names: list[str]) -> None:
        """Place those of ``names`` that fit, in this order; the older chunk stands first."""
        now, left, chosen = self.now, self.budget.recalled, {}
        there = {t for _, t in [*now.anchors, *now.summaries, *(m for x in now.turns for m in x)]}
        for name in names:
            tokens = now.items[name]
            if tokens in there or tokens in chosen.values():
                continue
            if len(tokens) <= left:
                left -= len(tokens)
                chosen[name] = tokens
        now.recalled = sorted(chosen.items(), key=lambda item: (self.age(item[0]), item[0]))

    def release(self, pattern: str) -> None:
        self.now.recalled = [m for m in self.now.recalled if not fnmatchcase(m[0], pattern)]

    def matching(self, pattern: str) -> list[str]:
        return sorted(name for name in self.now.items if fnmatchcase(name, pattern))

    def _everywhere(self, change: Callable[[str, Tokens], tuple[str, Tokens] | None]) -> None:
        now = self.now
        for zone in ("anchors", "recalled", "summaries"):
            made = [change(name, tokens) for name, tokens in getattr(now, zone)]
            setattr(now, zone, [each for each in made if each is not None])
