"""Finding token runs of stored chunks again in a prompt, at any offset.

Every ``width``-th window of a chunk, and its last one, is entered under its hash. The hash of the
prompt's window at *every* offset is looked up, and what is found there is compared token by token
and followed to both sides as far as prompt and chunk are equal. So a run is found when it
holds one such window (every run of 2 * width - 1 tokens does, and from width tokens on those at a
chunk's start or end), and then to the token.

What bounds the work: of the chunks that share a window, ``TRIED`` are compared; where a run was found
the search goes on behind it, not at the next token; and what lies in a long run is not even hashed.
"""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import ChunkId
from kvweave.chunk.postings import Postings
from kvweave.chunk.rolling import Hashes, Tokens, as_tokens, mixed, rolling, widened
from kvweave.errors import InvalidArgument

SHORTEST = 4
"""Tokens of the shortest chunk that is found; it is one or two words."""

BLOCK = 12_288
"""Tokens hashed together: rows of 8 bytes each fit a core's cache, and memory malloc keeps."""


class Match(NamedTuple):
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
        runs, heads = self._runs(prompt)
        runs += self._short_runs(prompt, runs, heads)
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
        hashes = self._wide(rolling(tokens, SHORTEST, self._multiplier))
        offsets = [*range(0, len(hashes), self.width)]
        if offsets[-1] != len(hashes) - 1:
            offsets.append(len(hashes) - 1)
        # Of windows that repeat in a chunk (padding) the first: from there the run is longest.
        offsets.reverse()
        return [(self._windows, dict(zip(hashes[offsets].tolist(), offsets, strict=True)))]

    def _wide(self, hashes: Hashes) -> Hashes:
        """Return the hashes of windows from those of SHORTEST tokens."""
        return widened(hashes, SHORTEST, self.width, self._multiplier)

    def _runs(self, prompt: Tokens) -> tuple[list[_Run], list[tuple[int, Hashes]]]:
        """Return the runs, and the hashes of every SHORTEST tokens between them, in pieces."""
        runs: list[_Run] = []
        heads: list[tuple[int, Hashes]] = []
        overlap = self.width - SHORTEST  # a chunk of ``width`` may begin inside the run before it
        at = reached = 0  # the first window not looked up; where the last run ends
        while self._windows and at + self.width <= len(prompt):
            start = at
            short = rolling(prompt[at : at + BLOCK], SHORTEST, self._multiplier)
            hashes = self._wide(short)
            heads.append((start, short[: len(hashes)]))
            flags = self._windows.flags(hashes)
            while (i := flags.find(1, at - start)) >= 0:
                at = start + i
                places = self._windows.get(hashes.item(i), runs[-1].id if runs else None)
                run = self._best(prompt, at, places, reached) if places else None
                at += 1
                if run is None:
                    continue
                behind = reached
                if _settle(runs, run, self.width):
                    reached = run.stop
                    behind = reached - overlap
                if behind > at:
                    at = behind
            at = max(at, start + len(hashes))
        heads.append((at, rolling(prompt[at:], SHORTEST, self._multiplier)))
        return runs, heads

    def _best(
        self, prompt: Tokens, start: int, places: list[tuple[ChunkId, int]], reached: int
    ) -> _Run | None:
        """Return the best run over the window at ``start``, of the chunks and offsets ``places``.

        That is what adds most behind ``reached``; among equal ones the longest, and then the first.
        """
        best: tuple[int, int, ChunkId, int, int] | None = None  # of a _Run
        most, begin, end, before, behind = (0, 0), 0, 0, -1, -1
        n_prompt = len(prompt)
        for id, offset in places:
            chunk = self._tokens[id]
            shift, size = start - offset, len(chunk)
            if best is not None:  # only what has the token behind or before it, too, is longer
                at = end - shift
                if not (at < size and chunk.item(at) == behind):
                    at = begin - 1 - shift
                    if not (at >= 0 and chunk.item(at) == before):
                        continue
            ahead = prompt[start : shift + size]
            stop = start + _n_equal(ahead, chunk[offset : offset + len(ahead)])
            if stop - start < self.width:
                continue  # another window with the same hash
            first = start
            if start and offset and prompt.item(start - 1) == chunk.item(offset - 1):
                past = prompt[max(0, shift) : start][::-1]
                first -= _n_equal(past, chunk[offset - len(past) : offset][::-1])
            found = (stop - (first if first > reached else reached), stop - first)
            if found > most:
                best, most, begin, end = (first, stop, id, shift, size), found, first, stop
                before = prompt.item(first - 1) if first else -1
                behind = prompt.item(stop) if stop < n_prompt else -1
        return None if best is None else _Run(*best)

    def _short_runs(
        self, prompt: Tokens, runs: list[_Run], heads: list[tuple[int, Hashes]]
    ) -> list[_Run]:
        """Return the short chunks that stand between ``runs``, longer ones first."""
        gaps = _gaps(runs, len(prompt)) if self._wholes else []
        if not gaps:
            return []
        at, room, hashes = self._beginnings(gaps, heads)
        seen: list[tuple[int, NDArray[np.intp], Hashes]] = []
        for n in range(SHORTEST, self.width):
            if not len(at):
                break
            keys = _of_length(hashes, n)
            known = self._wholes.passing(keys)
            seen.append((n, at[known], keys[known]))
            fits = room > n
            at, room, hashes = at[fits], room[fits], hashes[fits]
            hashes = hashes * np.uint64(self._multiplier)
            hashes += mixed(prompt[at + n], self._multiplier)
        free = np.ones(len(prompt) if seen else 0, bool)
        found: list[_Run] = []
        for n, starts, keys in reversed(seen):
            found += self._wholes_at(prompt, free, n, starts, keys)
        return found

    def _beginnings(
        self, gaps: list[tuple[int, int]], heads: list[tuple[int, Hashes]]
    ) -> tuple[NDArray[np.intp], NDArray[np.intp], Hashes]:
        """Return where short chunks may begin, the tokens from there to the gap's end, and hashes."""
        starts, stops = np.array(gaps, np.intp).T
        places, keys = [np.empty(0, np.intp)], [np.empty(0, np.uint64)]
        for start, hashes in heads:
            low = int(stops.searchsorted(start, side="right"))
            high = int(starts.searchsorted(start + len(hashes))) - 1
            if low > high:
                continue  # all of it is in runs
            first = max(start, int(starts[low]))
            wanted = hashes[first - start : int(stops[high]) - start]
            here = self._heads.passing(wanted)
            places.append(here + first)
            keys.append(wanted[here])
        at, hashes = np.concatenate(places), np.concatenate(keys)
        room = stops[starts.searchsorted(at, side="right") - 1] - at
        fits = np.flatnonzero((room >= SHORTEST) & self._heads.known(hashes))
        return at[fits], room[fits], hashes[fits]

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
    """Return how many first tokens of two equally long rows are equal; looks at few more than these."""
    n = len(a)
    at, step = 0, 1024
    while at < n:
        differ = a[at : at + step] != b[at : at + step] if n > step else a != b
        first: int = differ.tobytes().find(1)  # half the time of argmax for few tokens
        if first >= 0:
            return at + first
        at, step = at + step, 4 * step
    return n


def _of_length(hashes: Hashes, n: int) -> Hashes:
    """Return hashes of ``n`` tokens as keys of a table that has other lengths too."""
    return hashes + np.uint64(n * 0x9E3779B97F4A7C15 & (1 << 64) - 1)


def _gaps(runs: list[_Run], n: int) -> list[tuple[int, int]]:
    """Return where no run is, for a short chunk at least."""
    starts = [0, *(run.stop for run in runs)]
    stops = [*(run.start for run in runs), n]
    return [gap for gap in zip(starts, stops, strict=True) if gap[1] - gap[0] >= SHORTEST]
