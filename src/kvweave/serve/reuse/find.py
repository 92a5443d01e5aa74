"""From segments of a prompt to pieces: whole chunks, slices of chunks, and new text.

::

    segment   user: Use these. <page about Oslo> <page about Bergen> Which is rainier?
    pieces    [new 6][docs/oslo 0:212][new 2][docs/bergen 31:180][new 7]

Messages of the history are whole chunks where they are known; everything else is looked for by
runs of tokens. New input is prefilled, and so exact, wherever it is not a long known run.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvweave.chunk.cut import by_content
from kvweave.chunk.identity import ChunkId, Kind, chunk_digest
from kvweave.chunk.match import Match
from kvweave.chunk.rolling import Tokens
from kvweave.engine import Engine
from kvweave.errors import ContextTooLong
from kvweave.serve.guard.text import tokens_of_mixed
from kvweave.serve.options import ReuseMode
from kvweave.serve.reuse.library import Library
from kvweave.serve.reuse.render import PromptSegment
from kvweave.weave.special import Extent

SEAM = 4  # tokens on both sides of a gap that are looked at to say why it is one
MAX_CACHED = 1 << 20  # tokens of texts that are remembered
NOT_STORED = ChunkId(-1)  # a base that is new; None is no base at all
FRONT = 12  # characters of an answer by which its place in a rendered message is found
LONGEST_SEAM = 64  # tokens; a longer gap is new text

NEW, SEAM_WHY, MEASURED = "new text", "tokenised differently at the seam", "reuse is limited"


@dataclass(frozen=True, slots=True)
class PromptPiece:
    """Tokens of a prompt: ``id`` from token ``start`` on, or new text where ``id`` is None."""

    kind: Kind
    tokens: Tokens  # [n]
    label: str
    id: ChunkId | None = None
    start: int = 0

    @property
    def n(self) -> int:
        return len(self.tokens)

    def behind(self, n: int) -> PromptPiece:
        """Return what is left without the first ``n`` tokens."""
        return replace(self, tokens=self.tokens[n:], start=self.start + n if self.id else 0)


@dataclass(slots=True)
class Wanted:
    """What a context must hold. ``base`` None: what the engine begins every context with."""

    namespace: str
    base: PromptPiece | None
    pieces: list[PromptPiece] = field(default_factory=list)
    reasons: list[dict[str, object]] = field(default_factory=list)

    def tokens(self) -> Tokens:
        """Return the tokens of all pieces, without the base."""
        return np.concatenate([np.zeros(0, np.uint32), *(p.tokens for p in self.pieces)])


@dataclass(slots=True)
class _Cut:
    """The tokens of a text, and when they were asked for."""

    tokens: Tokens
    used: float


class Assembler:
    """Finds the known parts of prompts. Used in the driver's thread only."""

    def __init__(self, engine: Engine, library: Library, *, min_match: int = 32) -> None:
        """``min_match``: tokens of the shortest run that is reused inside a message."""
        self.engine, self.library, self.min_match = engine, library, min_match
        self.cutter = by_content(64, 256, 1024)
        self._tokens: OrderedDict[tuple[str, str, tuple[Extent, ...]], _Cut] = OrderedDict()
        self._n_cached = 0

    def assemble(
        self,
        segments: Sequence[PromptSegment],
        namespace: str,
        engine_base: ChunkId | None,
        reuse: ReuseMode = "all",
    ) -> Wanted:
        """Return the pieces of a prompt; ``engine_base`` is what a context without system message
        begins with. Raises ChunkNotFound for a chunk that is named and not there, ContextTooLong.
        """
        table = self.engine.table
        begin = [] if engine_base is None else [int(t) for t in table.tokens(engine_base)]
        base, rest = self._base(segments, begin, namespace)
        wanted = Wanted(namespace, base)
        if base is not None:
            wanted.reasons.append(_reason(base.label, 0, base.n, ""))
        below, base_id = self._below(base, engine_base, namespace)
        n, limit = 0, self.engine.runner.limit
        for segment in rest:
            finder = _Finder(self, namespace, below, base_id, reuse)
            pieces = finder.pieces(segment)
            wanted.pieces += pieces
            wanted.reasons.append(finder.reason)
            n += sum(piece.n for piece in pieces)
            if n > limit:  # what follows would take long, and change nothing
                raise ContextTooLong(n, limit)
        return wanted

    def _base(
        self, segments: Sequence[PromptSegment], begin: list[int], namespace: str
    ) -> tuple[PromptPiece | None, Sequence[PromptSegment]]:
        """Split off the system message; None where it is what the engine begins with anyway."""
        first = segments[0] if segments else None
        if first is None or first.kind != "system" or first.chunk is not None:
            return None, segments
        tokens = self.tokens(first, namespace)
        if not len(tokens) or tokens.tolist() == begin:
            return None, segments[1:]
        return PromptPiece("system", tokens, first.label), segments[1:]

    def _below(
        self, base: PromptPiece | None, engine_base: ChunkId | None, namespace: str
    ) -> tuple[bytes, ChunkId | None]:
        """Return digest and id of what chunks here are computed after; None: after nothing."""
        table = self.engine.table
        if base is None:
            return (
                (b"", None) if engine_base is None else (table.get(engine_base).digest, engine_base)
            )
        digest = chunk_digest(self.engine.runner.fingerprint, b"", base.tokens.tolist(), namespace)
        known = table.find_digest(digest)
        return digest, NOT_STORED if known is None else known.id

    def tokens(self, segment: PromptSegment, namespace: str) -> Tokens:
        """Return the token ids of a segment's text.

        A conversation comes again and again, so they are remembered, unless it is private: for each
        namespace by itself, or the time would tell what others said.
        """
        if segment.tokens is not None:
            return np.asarray(self.engine.maker.tokens(segment.tokens), dtype=np.uint32)
        key = (namespace, segment.text, segment.plain)
        known = self._tokens.get(key)
        if known is not None:
            known.used = time.time()
            self._tokens.move_to_end(key)
            return known.tokens
        ids = tokens_of_mixed(self.engine, segment.text, segment.plain)
        made = np.asarray(ids, dtype=np.uint32)
        made.flags.writeable = False
        if segment.private:
            return made
        self._tokens[key] = _Cut(made, time.time())
        self._n_cached += len(made)
        while self._n_cached > MAX_CACHED:
            self._forget_oldest()
        return made

    def expire(self, before: float) -> None:
        """Forget the texts that were not used since ``before``."""
        while self._tokens and next(iter(self._tokens.values())).used < before:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        self._n_cached -= len(self._tokens.popitem(last=False)[1].tokens)

    def text(self, tokens: Sequence[int] | Tokens) -> str:
        """Return tokens as text, special ones included."""
        tokenizer = self.engine.runner.tokenizer
        if tokenizer is None:
            return ""
        ids = [int(token) for token in tokens]
        return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class _Finder:
    """Finds one segment, and says what came of it."""

    def __init__(
        self,
        assembler: Assembler,
        namespace: str,
        below: bytes,
        base: ChunkId | None,
        reuse: ReuseMode,
    ) -> None:
        self.assembler, self.namespace, self.reuse = assembler, namespace, reuse
        self.below, self.base = below, base
        self.table, self.library = assembler.engine.table, assembler.library
        self.reason: dict[str, object] = {}

    def pieces(self, segment: PromptSegment) -> list[PromptPiece]:
        """Return the pieces of a segment, in order."""
        found = list(self._find(segment))
        n_new = sum(p.n for p in found if p.id is None)
        why = self._why(found) if n_new else ""
        self.reason = _reason(segment.label, sum(p.n for p in found) - n_new, n_new, why)
        return found

    def _find(self, segment: PromptSegment) -> Iterator[PromptPiece]:
        if segment.chunk is not None:
            yield self._named(segment, segment.chunk)
            return
        tokens = self.assembler.tokens(segment, self.namespace)
        if self.reuse != "all":
            if len(tokens):
                yield PromptPiece(segment.kind, tokens, segment.label)
            return
        if not segment.is_new:
            # an answer's text may have the special tokens that this one only spells
            text = None if segment.plain else segment.text
            known = (text and self.library.find_answer(self.namespace, self.base, text)) or ()
            if not known and (stored := self._stored(tokens)) is not None:
                known = (stored,)
            for id in known:
                yield PromptPiece(segment.kind, self.table.tokens(id), segment.label, id)
            if known:
                return
            written = self._written(segment)
            yield from written
            if written:
                return
        at = 0
        for match in self.library.find(self.namespace, tokens):
            if not self._counts(match, segment.is_new):
                continue
            yield from self._gap(segment, tokens[at : match.start])
            run = tokens[match.start : match.stop]
            yield PromptPiece(segment.kind, run, segment.label, match.id, match.offset)
            at = match.stop
        yield from self._gap(segment, tokens[at:])

    def _written(self, segment: PromptSegment) -> list[PromptPiece]:
        """Return the pieces of an answer that came back, as the model wrote it; [] for none.

        Of one that the template leaves the thinking out of, the rest behind the template's front.
        """
        if segment.said is None:
            return []
        found = self.library.said.find(self.namespace, self.base, segment.said)
        if found is None or not all(self.library.is_here(self.namespace, id) for id in found[1]):
            return []
        said, ids = found
        pieces = [PromptPiece(segment.kind, self.table.tokens(id), segment.label, id) for id in ids]
        thinks = [self.table.get(id).kind == "thinking" for id in ids]
        if not any(thinks):
            return pieces if said.reasoning in segment.text else []
        text, engine = self.assembler.text, self.assembler.engine
        end = engine.maker.chat.think_end
        if end is not None and text([end]) in segment.text:
            kept = segment.said.reasoning == said.reasoning and said.reasoning in segment.text
            return pieces if kept else []
        rest = [piece for piece, thought in zip(pieces, thinks, strict=True) if not thought]
        while rest and rest[0].n and not text(rest[0].tokens[:1]).strip():
            rest[0] = rest[0].behind(1)
        whole = text(rest[0].tokens) if rest else ""
        space, first = whole[: -len(whole.lstrip()) or None], whole.lstrip()[:FRONT]
        at = segment.text.find(space + first) if first else -1
        at = segment.text.find(first) if first and at < 0 else at
        if at < 0:
            return []
        front = replace(segment, text=segment.text[:at], plain=(), said=None)
        tokens = self.assembler.tokens(front, self.namespace)
        return [PromptPiece(segment.kind, tokens, segment.label), *rest]

    def _named(self, segment: PromptSegment, ref: str) -> PromptPiece:
        """Return the chunk a content part names; as text where nothing may be reused."""
        record = self.table.resolve(ref, self.namespace)
        tokens = self.table.tokens(record.id)
        return PromptPiece(segment.kind, tokens, ref, record.id if self.reuse == "all" else None)

    def _counts(self, match: Match, is_new: bool) -> bool:
        """Tell whether a run is taken. Short chunks in new input are prefilled: that is exact."""
        n = match.stop - match.start
        whole = n == self.table.get(match.id).n_tokens
        shortest = self.library.width if is_new else 1
        return n >= self.assembler.min_match or (whole and n >= shortest)

    def _gap(self, segment: PromptSegment, tokens: Tokens) -> Iterator[PromptPiece]:
        """Yield what stands between runs; long text is cut, so that its pieces can be pruned."""
        for start, stop in self.assembler.cutter(tokens.tolist()):
            piece = tokens[start:stop]
            known = None if segment.is_new else self._stored(piece)
            yield PromptPiece(segment.kind, piece, segment.label, known)

    def _stored(self, tokens: Tokens) -> ChunkId | None:
        """Return the chunk of exactly these tokens after this base."""
        if not len(tokens):
            return None
        fingerprint = self.assembler.engine.runner.fingerprint
        digest = chunk_digest(fingerprint, self.below, tokens.tolist(), self.namespace)
        record = self.table.find_digest(digest)
        return None if record is None else record.id

    def _why(self, found: list[PromptPiece]) -> str:
        """Say why some of a segment is new."""
        if self.reuse != "all":
            return MEASURED
        for i, piece in enumerate(found):
            if piece.id is None and piece.n <= LONGEST_SEAM and self._is_seam(found, i):
                return SEAM_WHY
        return NEW

    def _is_seam(self, found: list[PromptPiece], i: int) -> bool:
        """Tell whether a gap's text, with what stands around it, is in a chunk found beside it."""
        before = found[i - 1] if i else None
        after = found[i + 1] if i + 1 < len(found) else None
        around = [
            before.tokens[-SEAM:] if before is not None else found[i].tokens[:0],
            found[i].tokens,
            after.tokens[:SEAM] if after is not None else found[i].tokens[:0],
        ]
        text = self.assembler.text(np.concatenate(around))
        most = len(text.encode(errors="replace"))  # tokens of it, however it was cut
        beside = []
        if before is not None and before.id is not None:
            end = before.start + before.n
            beside.append(self.table.tokens(before.id)[max(0, end - SEAM) : end + most])
        if after is not None and after.id is not None:
            start = after.start
            beside.append(self.table.tokens(after.id)[max(0, start - most) : start + SEAM])
        return any(text in self.assembler.text(tokens) for tokens in beside)


def _reason(label: str, found: int, new: int, why: str) -> dict[str, object]:
    return {"segment": label, "found": found, "new": new, "why": why}
