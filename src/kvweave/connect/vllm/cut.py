"""From a prompt's tokens to pieces: the base, chunks, and new text between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvweave.chunk.identity import ChunkId, chunk_digest
from kvweave.connect.vllm.asks import PromptAsk
from kvweave.connect.vllm.spec import PartSpec
from kvweave.engine import Engine
from kvweave.errors import InvalidArgument
from kvweave.run.base import Ints
from kvweave.serve.reuse.library import Library
from kvweave.serve.reuse.names import new_context_name

NO_DIGEST = b""
EDGE = 4  # tokens at each end of a named chunk that may be others
SHORTEST = 32  # tokens of a run that is reused where nothing was declared; see serve/reuse/find.py


@dataclass(frozen=True, slots=True)
class PromptCut:
    """Tokens [start, stop) of a prompt: new text, or those of a chunk from ``offset`` on.

    A chunk that is declared but not stored yet has a digest and no ``id``.
    """

    start: int
    stop: int
    id: ChunkId | None = None
    digest: bytes = NO_DIGEST
    offset: int = 0
    is_base: bool = False

    @property
    def is_chunk(self) -> bool:
        return self.digest != NO_DIGEST

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Return its tokens, of those of the prompt."""
        return list(tokens[self.start : self.stop])

    def halves(self, at: int) -> tuple[PromptCut, ...]:
        """Return what of it stands before token ``at`` and what behind."""
        if not self.start < at < self.stop:
            return (self,)
        offset = self.offset + at - self.start
        return replace(self, stop=at), replace(self, start=at, offset=offset)


class PromptCutter:
    """Cuts prompts; computes and stores nothing. Used in the host's thread only."""

    def __init__(self, engine: Engine, library: Library) -> None:
        self.engine, self.library = engine, library
        probe = engine.context(new_context_name())
        self.base = probe.parts[0].id if probe.parts else None  # what every context begins with
        engine.close_context(probe.name)

    def cut(self, ask: PromptAsk) -> list[PromptCut]:
        """Return the pieces of a prompt, in order. Raises ChunkNotFound, InvalidArgument."""
        base = self._base(ask)
        at, below = (0, NO_DIGEST) if base is None else (base.stop, base.digest)
        found = [] if base is None else [base]
        for part in ask.spec.parts:
            piece = self._declared(ask, part, at, below)
            found += [*self._gap(ask, at, piece.start), piece]
            at = piece.stop
        return [*found, *self._gap(ask, at, len(ask.tokens))]

    def _base(self, ask: PromptAsk) -> PromptCut | None:
        if ask.spec.system:
            return self._range(ask, 0, ask.spec.system, NO_DIGEST, is_base=True)
        if self.base is None:
            return None
        begin = tuple(self.engine.table.tokens(self.base).tolist())
        if ask.tokens[: len(begin)] != begin or len(begin) == len(ask.tokens):
            return None
        digest = self.engine.table.get(self.base).digest
        return PromptCut(0, len(begin), self.base, digest, is_base=True)

    def _range(
        self, ask: PromptAsk, start: int, stop: int, below: bytes, is_base: bool = False
    ) -> PromptCut:
        """Return the chunk that these tokens are, computed after ``below``."""
        if not start < stop < len(ask.tokens):
            reason = f"tokens [{start}, {stop}) of a prompt of {len(ask.tokens)}"
            raise InvalidArgument("parts", reason, "the last token is the question's")
        engine, space = self.engine, ask.spec.namespace
        tokens = ask.tokens[start:stop]
        digest = chunk_digest(engine.runner.fingerprint, below, tokens, space)
        known = engine.table.find_digest(digest)
        id = None if known is None else known.id
        return PromptCut(start, stop, id, digest, is_base=is_base)

    def _declared(self, ask: PromptAsk, part: PartSpec, at: int, below: bytes) -> PromptCut:
        if part.chunk is not None:
            return self._named(ask, part.chunk, at)
        if part.start < at:
            reason = f"tokens from {part.start} on begin before {at}, where another part ends"
            raise InvalidArgument("parts", reason, "give them in their order")
        return self._range(ask, part.start, part.stop, below)

    def _named(self, ask: PromptAsk, ref: str, at: int) -> PromptCut:
        """Find a stored chunk's tokens in a prompt, the first time they stand there from ``at`` on.

        Text inside other text begins and ends with other tokens than alone: up to `EDGE` of them
        may differ at each end. Of a short chunk so many are its ends only where nothing else is found.
        """
        record = self.engine.table.resolve(ref, ask.spec.namespace)
        tokens = self.engine.table.tokens(record.id).astype(np.int64)
        prompt, n = np.asarray(ask.tokens[:-1], np.int64), len(tokens)
        for edge in sorted({min(EDGE, n // 4), min(EDGE, (n - 1) // 2)}):
            found = _index(prompt[at:], tokens[edge : n - edge])
            if found is None:
                continue
            start, first, last = at + found, edge, n - edge
            while start > at and first and prompt[start - 1] == tokens[first - 1]:
                start, first = start - 1, first - 1
            stop = start + last - first
            while stop < len(prompt) and last < n and prompt[stop] == tokens[last]:
                stop, last = stop + 1, last + 1
            return PromptCut(start, stop, record.id, record.digest, first)
        hint = "its tokens must stand there as they were stored, behind the part before it"
        raise InvalidArgument("parts", f"chunk {ref!r} is not in the prompt", hint)

    def _gap(self, ask: PromptAsk, start: int, stop: int) -> Iterator[PromptCut]:
        """Cut what stands between declared parts: known chunks in it, where they are looked for."""
        at, most = start, min(stop, len(ask.tokens) - 1)
        matches = []
        if ask.spec.match and most - start >= self.library.width:
            tokens = np.asarray(ask.tokens[start:most], np.uint32)
            matches = self.library.find(ask.spec.namespace, tokens)
        for match in matches:
            record = self.engine.table.get(match.id)
            if match.stop - match.start < min(SHORTEST, record.n_tokens):
                continue
            first, last = start + match.start, start + match.stop
            if first > at:
                yield PromptCut(at, first)
            yield PromptCut(first, last, match.id, record.digest, match.offset)
            at = last
        if at < stop:
            yield PromptCut(at, stop)


def as_offered(pieces: Sequence[PromptCut], offered: Sequence[PromptCut]) -> list[PromptCut]:
    """Return pieces, as new text those that were offered as that, whatever is stored by now."""
    if not offered:
        return list(pieces)
    texts = {(piece.start, piece.stop) for piece in offered if not piece.is_chunk}
    found, useful = [], offered[-1].stop
    for piece in pieces:
        at = piece.start, piece.stop
        found.append(PromptCut(*at) if at in texts or piece.start >= useful else piece)
    return found


def _index(tokens: Ints, run: Ints) -> int | None:
    """Return where ``run`` stands in ``tokens`` first."""
    starts = np.flatnonzero(tokens[: max(0, len(tokens) - len(run) + 1)] == run[0])
    for start in starts.tolist():
        if np.array_equal(tokens[start : start + len(run)], run):
            return int(start)
    return None
