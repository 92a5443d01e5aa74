"""Two backends of one model, driven through the same random works, stay the same."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from run.backend import ACROSS, MODELS, Recorder, computed, ids, off, reference, transformers

from kvweave.run.base import Backend, Ints, Rows, Work
from kvweave.store.kv import KV

STEPS, ROOM = 60, 90


@dataclass(slots=True)
class Pair:
    """The rows of one context in both backends, and what the test knows of them."""

    rows: list[Rows]
    tokens: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    freed: set[tuple[int, int, int]] = field(default_factory=set)  # (layer, head, slot)

    @property
    def n(self) -> int:
        return self.rows[0].n

    def untouched(self) -> Ints:
        """Slots of which nothing was freed."""
        return np.setdiff1d(np.arange(self.n), [slot for *_, slot in self.freed])


class Story:
    """Random verbs for a few contexts, the same for both backends."""

    def __init__(self, backends: list[Backend], seed: int, moves: bool = False) -> None:
        self.backends, self.rng = backends, np.random.default_rng(seed)
        self.moves = moves
        self.pairs = [self._new() for _ in range(2)]
        self.chunks = [
            [computed(b, ids(n, n)) for b in backends] for n in (3, 8, 11)
        ]  # [chunk][backend]

    def _new(self) -> Pair:
        return Pair([b.new_rows(moves=self.moves) for b in self.backends])

    def _next(self, pair: Pair, n: int) -> Ints:
        """Return positions for ``n`` more rows, with a gap now and then."""
        last = int(pair.rows[0].positions[pair.n - 1]) if pair.n else -1
        steps = np.where(self.rng.random(n) < 0.1, self.rng.integers(2, 9, n), 1)
        return last + np.cumsum(steps)

    def _reserve(self, pair: Pair, n: int) -> None:
        for rows in pair.rows:
            rows.reserve(n)

    def _grown(self, pair: Pair, n: int) -> tuple[Ints, Ints]:
        """Return tokens and positions of the context with ``n`` more rows, which are reserved."""
        self._reserve(pair, pair.n + n)
        tokens = np.concatenate((pair.tokens, self.rng.integers(3, 101, n)))
        old = pair.rows[0].positions[: pair.n]
        return tokens, np.concatenate((old, self._next(pair, n)))

    def compute(self) -> None:
        """One pass: new rows and some of the old ones, of one context or of both."""
        chosen = [self.pairs[i] for i in self.rng.permutation(2)[: self.rng.integers(1, 3)]]
        works: list[list[Work]] = [[], []]
        for pair in chosen:
            n, new = pair.n, int(self.rng.integers(1, 9))
            tokens, positions = self._grown(pair, new)
            old = pair.untouched()
            again = self.rng.choice(old, min(len(old), int(self.rng.integers(0, 12))), False)
            slots = np.sort(np.concatenate((again, np.arange(n, n + new))).astype(np.int64))
            want = np.flatnonzero(self.rng.random(len(slots)) < 0.5)
            for mine, rows, backend in zip(works, pair.rows, self.backends, strict=True):
                seen, raw = Recorder(), backend.new_kv(len(slots))
                args = (rows, tokens[slots], slots, positions[slots], want, raw, seen)
                mine.append(Work(*args))
            pair.tokens = tokens
        a, b = (backend.forward(w) for backend, w in zip(self.backends, works, strict=True))
        for (x, y), one, two in zip(zip(a, b, strict=True), *works, strict=True):
            assert off(y, x) < ACROSS
            self._same_work(one, two)

    def _same_work(self, one: Work, two: Work) -> None:
        assert one.raw is not None and two.raw is not None
        pairs = zip((*two.raw.k, *two.raw.v), (*one.raw.k, *one.raw.v), strict=True)
        assert max(off(b, a) for b, a in pairs) < ACROSS
        n = int(one.slots[-1]) + 1
        for layer in range(len(self.backends[0].layers)):
            a, b = (w.observer.shown(layer, n)[1].double() for w in (one, two))  # type: ignore[union-attr]
            assert off(b, a) < 1e-6

    def place(self) -> None:
        """A chunk at the end, at times behind a gap that is computed at once."""
        pair = self._one()
        gap = int(self.rng.integers(0, 4))
        chunk = self.chunks[self.rng.integers(len(self.chunks))]
        n = pair.n
        tokens, positions = self._grown(pair, gap + chunk[0].n_tokens)
        slots = np.arange(n, n + gap)
        for rows, kv, backend in zip(pair.rows, chunk, self.backends, strict=True):
            rows.place([(n + gap, [kv])], positions)
            if gap:
                backend.forward([Work(rows, tokens[slots], slots, positions[slots])])
        pair.tokens = tokens

    def replace(self) -> None:
        """A chunk over rows that are there, freed or not."""
        pair, chunk = self._one(), self.chunks[self.rng.integers(len(self.chunks))]
        n = chunk[0].n_tokens
        if pair.n >= n:
            at = int(self.rng.integers(0, pair.n - n + 1))
            for rows, kv in zip(pair.rows, chunk, strict=True):
                rows.place([(at, [kv])], rows.positions[: pair.n].copy())
            pair.freed = {each for each in pair.freed if not at <= each[2] < at + n}

    def put(self) -> None:
        """Some rows of a chunk, over rows that are there."""
        pair, chunk = self._one(), self.chunks[1]
        n = min(pair.n, int(self.rng.integers(1, 6)))
        slots = np.sort(self.rng.choice(pair.n, n, False)) if n else np.arange(0)
        for rows, kv in zip(pair.rows, chunk, strict=True):
            rows.put(slots, KV([t[:n] for t in kv.k], [t[:n] for t in kv.v]))

    def free(self) -> None:
        """Some rows of one layer and head; the last ones stay."""
        pair = self._one()
        if pair.n > 12:
            layer = int(self.rng.integers(len(self.backends[0].layers)))
            head = int(self.rng.integers(self.backends[0].layers[layer].shape.k_heads))
            slots = np.sort(self.rng.choice(pair.n - 8, int(self.rng.integers(1, 5)), False))
            for rows in pair.rows:
                rows.free(layer, head, slots)
            pair.freed |= {(layer, head, int(slot)) for slot in slots}

    def keep(self) -> None:
        """As many rows of each head of a layer, each its own; the last ones stay."""
        pair = self._one()
        if pair.n <= 12:
            return
        layer = int(self.rng.integers(len(self.backends[0].layers)))
        kept = pair.rows[0].kept(layer)
        assert [k.tolist() for k in pair.rows[1].kept(layer)] == [k.tolist() for k in kept]
        last = np.arange(pair.n - 8, pair.n)
        n, chosen = min(int(self.rng.integers(1, 9)), *(len(slots) - 8 for slots in kept)), []
        if n < 1 or any(slots[-8] != last[0] for slots in kept):
            return
        for head, slots in enumerate(kept):
            some = self.rng.choice(slots[:-8], n, False)
            chosen.append(np.sort(np.concatenate((some, last))))
            pair.freed |= {(layer, head, int(s)) for s in np.setdiff1d(slots, chosen[-1])}
        for rows in pair.rows:
            rows.keep(layer, chosen)

    def move(self) -> None:
        """Some rows go, and the others stand elsewhere."""
        pair = self._one()
        if pair.n:
            n = int(self.rng.integers(1, pair.n + 1))
            kept = np.sort(self.rng.choice(pair.n, n, False))
            positions = np.cumsum(self.rng.integers(1, 4, n)) - 1
            for rows in pair.rows:
                rows.move(kept, positions)
            pair.tokens = pair.tokens[kept]

    def truncate(self) -> None:
        pair = self._one()
        n = int(self.rng.integers(pair.n // 2, pair.n + 1))
        for rows in pair.rows:
            rows.truncate(n)
        pair.tokens = pair.tokens[:n]
        pair.freed = {each for each in pair.freed if each[2] < n}

    def fork(self) -> None:
        """One context becomes a copy of the other."""
        pair = self._one()
        twin = Pair([rows.clone() for rows in pair.rows], pair.tokens.copy(), set(pair.freed))
        self.pairs = [pair, twin]

    def _one(self) -> Pair:
        return self.pairs[self.rng.integers(2)]

    def check(self) -> None:
        for pair in self.pairs:
            a, b = pair.rows
            assert a.n == b.n == len(pair.tokens)
            assert a.positions[: a.n].tolist() == b.positions[: b.n].tolist()
            assert a.n_freed == b.n_freed == len(pair.freed)
            for layer in range(len(self.backends[0].layers)):
                if self.moves and a.n:
                    x, y = a.unrotated(layer), b.unrotated(layer)
                    assert x is not None and y is not None and off(y, x) < ACROSS
                kept = a.kept(layer)
                assert [k.tolist() for k in b.kept(layer)] == [k.tolist() for k in kept]
                for x, y in zip(a.packed(layer), b.packed(layer), strict=True):
                    for head, slots in enumerate(kept):
                        assert off(y[head, : len(slots)], x[head, : len(slots)]) < ACROSS
                for x, y in zip(a.read(layer), b.read(layer), strict=True):
                    for where, head, slot in pair.freed:
                        if where == layer:
                            x[slot, head] = y[slot, head] = 0
                    assert off(y, x) < ACROSS
            for rows in pair.rows:
                rows.check_integrity()


@pytest.mark.parametrize("moves", [False, True])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_any_works_in_any_order(name: str, seed: int, moves: bool) -> None:
    story = Story([reference(name), transformers(name)], seed, moves)
    verbs = [story.compute] * 4 + [story.place, story.replace, story.put]
    verbs += [story.move] * 2 if moves else [story.free, story.keep, story.keep]
    verbs += [story.truncate, story.fork]
    for _ in range(STEPS):
        if max(pair.n for pair in story.pairs) > ROOM:
            story.pairs = [story._new() for _ in range(2)]
        verbs[story.rng.integers(len(verbs))]()
        story.check()
