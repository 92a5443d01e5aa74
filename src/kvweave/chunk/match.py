"""Finding token runs of stored chunks again in a prompt, at any offset.

Every ``width``-th window of a chunk, and its last one, is entered under its hash. The hash of the
prompt's window at *every* offset is looked up, and what is found there is compared token by token
and followed to both sides as far as prompt and chunk are equal. So a run is found when it
holds one such window (every run of 2 * width - 1 tokens does, and from width tokens on those at a
chunk's start or end), and then to the token.

What bounds the work: of the chunks that share a window, ``TRIED`` are compared; where a run was found
the search goes on behind it, not at the next token.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.postings import Postings
from kvweave.chunk.rolling import Hashes, Tokens, as_tokens, mixed, rolling
from kvweave.errors import InvalidArgument

SHORTEST = 4
"""Tokens of the shortest chunk that is found; it is one or two words."""


@dataclass(frozen=True, slots=True)
class Match:
    """``prompt[start:stop]`` are the tokens ``offset : offset + stop - start`` of chunk ``id``."""

    start: int
    stop: int
    id: ChunkId
    offset: int


@dataclass(slots=True)
class _Run:
    """A stretch of the prompt; ``shift`` is its place in the prompt less its place in the chunk."""

    start: int
    stop: int
    id: ChunkId
    shift: int
    size: int  # of the chunk, tokens

    @property
    def n(self) -> int:
        return self.stop - self.start


class Matcher:
    """Knows the tokens of one namespace's chunks. Not for several threads at once."""

    def __init__(self, width: int = 16) -> None:
        """Find runs of ``width`` tokens or more; raise InvalidArgument outside 4..256."""
        if not SHORTEST <= width <= 256:
            raise InvalidArgument("width", f"{width} is not in {SHORTEST}..256")
        self.width = width
        self._tokens: dict[ChunkId, Tokens] = {}
        self._n_tokens = 0
        self._windows = Postings()
        # Chunks too short for a window are found as a whole, by way of their first tokens.
        self._wholes = Postings()
        self._heads = Postings()
        # Secret, so that nobody can make tokens with equal hashes; 5 modulo 8, because the powers
        # of such a number repeat as late as those of any.
        self._multiplier = secrets.randbits(64) & ~7 | 5

    def __contains__(self, id: object) -> bool:
        return id in self._tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def n_tokens(self) -> int:
        return self._n_tokens

    def add(self, id: ChunkId, tokens: Sequence[int] | NDArray[np.generic]) -> None:
        """Learn a chunk; a copy of the tokens is kept.

        Raises InvalidArgument for what are no token ids, and for other tokens under a known id.
        """
        copy = as_tokens(tokens)
        known = self._tokens.get(id)
        if known is not None:
            if not np.array_equal(known, copy):
                raise InvalidArgument("tokens", f"#{id} is known with other tokens")
            return
        self._tokens[id] = copy
        self._n_tokens += len(copy)
        for table, entries in self._entries(copy):
            table.add(id, entries)

    def remove(self, id: ChunkId) -> None:
        """Forget a chunk, if it is known."""
        copy = self._tokens.pop(id, None)
        if copy is None:
            return
        self._n_tokens -= len(copy)
        for table, entries in self._entries(copy):
            table.remove(id, entries)

    def find(self, tokens: Sequence[int] | NDArray[np.generic]) -> list[Match]:
        """Return what of the prompt is in known chunks: ordered, not overlapping, never wrong.

        Runs are as long as they can be, except where two overlap: there they meet at an end of one
        of the chunks if it lies in the overlap, else the longer one has it. Runs are of ``width`` tokens
        or more; chunks of 4 to ``width - 1`` tokens are found as a whole, where no run is. The same
        chunk may be found several times.
        """
        prompt = as_tokens(tokens)
        runs = self._runs(prompt)
        runs += self._short_runs(prompt, runs)
        runs.sort(key=lambda run: run.start)
        return [Match(run.start, run.stop, run.id, run.start - run.shift) for run in runs]

    def check_integrity(self) -> None:
        """Raise AssertionError when the tables do not say what the chunks do."""
        assert self._n_tokens == sum(map(len, self._tokens.values()))
        tables = (self._windows, self._wholes, self._heads)
        wanted: list[dict[int, dict[ChunkId, int]]] = [{} for _ in tables]
        for id, tokens in self._tokens.items():
            for table, entries in self._entries(tokens):
                for key, offset in entries.items():
                    wanted[tables.index(table)].setdefault(key, {})[id] = offset
        for table, entered in zip(tables, wanted, strict=True):
            table.check_integrity(entered)

    def _entries(self, tokens: Tokens) -> list[tuple[Postings, dict[int, int]]]:
        """Return hash -> offset for each table this chunk is entered in."""
        n = len(tokens)
        if n < SHORTEST:
            return []
        if n < self.width:
            head = int(rolling(tokens, SHORTEST, self._multiplier)[0])
            whole = int(_of_length(rolling(tokens, n, self._multiplier), n)[0])
            return [(self._heads, {head: 0}), (self._wholes, {whole: 0})]
        hashes = rolling(tokens, self.width, self._multiplier)
        offsets = [*range(0, len(hashes), self.width)]
        if offsets[-1] != len(hashes) - 1:
            offsets.append(len(hashes) - 1)
        # Of windows that repeat in a chunk (padding) the first: from there the run is longest.
        offsets.reverse()
        return [(self._windows, dict(zip(hashes[offsets].tolist(), offsets, strict=True)))]

    def _runs(self, prompt: Tokens) -> list[_Run]:
        hashes = rolling(prompt, self.width, self._multiplier)
        hits = self._windows.passing(hashes)
        starts, keys = hits.tolist(), hashes[hits].tolist()
        overlap = self.width - SHORTEST  # a chunk of ``width`` may begin inside the run before it
        runs: list[_Run] = []
        at = reached = 0
        while at < len(starts):
            places = self._windows.get(keys[at], runs[-1].id if runs else None)
            run = self._best(prompt, starts[at], places, reached) if places else None
            at += 1
            if run is None:
                continue
            if _settle(runs, run, self.width):
                reached = run.stop
                at = bisect_left(starts, reached - overlap, at)
            else:
                at = bisect_left(starts, reached, at)
        return runs

    def _best(
        self, prompt: Tokens, start: int, places: list[tuple[ChunkId, int]], reached: int
    ) -> _Run | None:
        """Return the best run over the window at ``start``, of the chunks and offsets ``places``.

        That is what adds most behind ``reached``; among equal ones the longest, and then the first.
        """
        best: _Run | None = None
        most = (0, 0)
        for id, offset in places:
            chunk, shift = self._tokens[id], start - offset
            if best is not None and not any(
                _same(prompt, chunk, shift, at) for at in (best.stop, best.start - 1)
            ):
                continue  # no longer to either side
            behind = _n_equal(prompt[start:], chunk[offset:])
            if behind < self.width:
                continue  # another window with the same hash
            before = 0
            if start and offset:
                before = _n_equal(prompt[start - 1 :: -1], chunk[offset - 1 :: -1])
            run = _Run(start - before, start + behind, id, shift, len(chunk))
            found = (run.stop - max(run.start, reached), run.n)
            if found > most:
                best, most = run, found
        return best

    def _short_runs(self, prompt: Tokens, runs: list[_Run]) -> list[_Run]:
        """Return the short chunks that stand between ``runs``, longer ones first."""
        if not self._wholes:
            return []
        hashes = rolling(prompt, SHORTEST, self._multiplier)
        at = self._heads.passing(hashes)
        room = _room(at, runs, len(prompt))
        at, room = at[room >= SHORTEST], room[room >= SHORTEST]
        hashes = hashes[at]
        seen: list[tuple[int, NDArray[np.intp], Hashes]] = []
        for n in range(SHORTEST, self.width):
            keys = _of_length(hashes, n)
            known = self._wholes.passing(keys)
            seen.append((n, at[known], keys[known]))
            fits = room > n
            at, room, hashes = at[fits], room[fits], hashes[fits]
            hashes = hashes * np.uint64(self._multiplier)
            hashes += mixed(prompt[at + n], self._multiplier)
        free = np.ones(len(prompt), bool)
        found: list[_Run] = []
        for n, starts, keys in reversed(seen):
            found += self._wholes_at(prompt, free, n, starts, keys)
        return found

    def _wholes_at(
        self, prompt: Tokens, free: NDArray[np.bool_], n: int, at: NDArray[np.intp], keys: Hashes
    ) -> list[_Run]:
        """Return the chunks of ``n`` tokens at these places, and take their tokens from ``free``."""
        # What is taken is no shorter than n, so it holds the first or the last token if any.
        still = free[at] & free[at + (n - 1)]
        starts, hashes = at[still].tolist(), keys[still].tolist()
        found: list[_Run] = []
        i = 0
        while i < len(starts):
            start = starts[i]
            here = prompt[start : start + n].tobytes()
            ids = [id for id, _ in self._wholes.get(hashes[i])]
            i += 1
            for id in ids:
                if self._tokens[id].tobytes() == here:
                    found.append(_Run(start, start + n, id, start, n))
                    free[start : start + n] = False
                    i = bisect_left(starts, start + n, i)
                    break
        return found


def _settle(runs: list[_Run], new: _Run, width: int) -> bool:
    """Append ``new``, which ends behind all ``runs``, unless no ``width`` tokens are left for it.

    It and the run before it are shortened so that they do not overlap; runs that it covers go.
    """
    while runs and runs[-1].stop > new.start:
        last = runs[-1]
        low, high = last.start + width, new.stop - width
        if last.start >= new.start:
            runs.pop()
            continue
        if low > high:
            return False
        seam = last.stop
        if new.start == new.shift or (last.stop != last.shift + last.size and new.n > last.n):
            seam = new.start
        last.stop = new.start = min(max(seam, low), high)
    runs.append(new)
    return True


def _n_equal(a: Tokens, b: Tokens) -> int:
    """Return how many first tokens are equal; looks at few more than these."""
    n = min(len(a), len(b))
    at, step = 0, 1024
    while at < n:
        stop = min(at + step, n)
        differ = a[at:stop] != b[at:stop]
        first = int(differ.argmax())
        if differ[first]:
            return at + first
        at, step = stop, 4 * step
    return n


def _of_length(hashes: Hashes, n: int) -> Hashes:
    """Return hashes of ``n`` tokens as keys of a table that has other lengths too."""
    return hashes + np.uint64(n * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


def _same(prompt: Tokens, chunk: Tokens, shift: int, at: int) -> bool:
    """Tell whether both have a token there, and the same."""
    inside = 0 <= at < len(prompt) and 0 <= at - shift < len(chunk)
    return inside and bool(prompt[at] == chunk[at - shift])


def _room(at: NDArray[np.intp], runs: list[_Run], n: int) -> NDArray[np.intp]:
    """Return how many tokens from each place on are in no run; 0 or less inside a run."""
    stops = np.array([run.stop for run in runs], np.intp)
    starts = np.array([*(run.start for run in runs), n], np.intp)
    return starts[np.searchsorted(stops, at, side="right")] - at
