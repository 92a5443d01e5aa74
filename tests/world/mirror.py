"""What should be there, in plain lists: nothing here knows how kvweave does it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvweave import Context, Plan
from kvweave.weave.turn import Turn

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A chunk: its tokens, and those of the base its canonical KV was computed after."""

    tokens: Tokens
    base: Tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """One part of a context: tokens ``[start, stop)`` of a chunk."""

    chunk: Stored
    start: int
    stop: int
    position: int | None = None  # where it stays; None is right behind the piece before

    @property
    def tokens(self) -> Tokens:
        return self.chunk.tokens[self.start : self.stop]


def whole(tokens: Sequence[int], base: Tokens) -> Piece:
    """All of a chunk."""
    return Piece(Stored(tuple(tokens), base), 0, len(tokens))


def starts(pieces: Sequence[Piece]) -> list[int]:
    """The first position of each piece."""
    found, position = [], 0
    for piece in pieces:
        position = position if piece.position is None else piece.position
        found.append(position)
        position += len(piece.tokens)
    return found


def positions(pieces: Sequence[Piece]) -> list[int]:
    """The position of each token."""
    pairs = zip(starts(pieces), pieces, strict=True)
    return [first + i for first, piece in pairs for i in range(len(piece.tokens))]


def flat(pieces: Sequence[Piece]) -> list[int]:
    """The tokens in order."""
    return [token for piece in pieces for token in piece.tokens]


@dataclass(slots=True)
class Open:
    """An answer asked for: what it is over, and how."""

    turn: Turn | None  # None where nobody drives it by hand
    pieces: list[Piece]  # what it is over, the header of a chat included
    before: list[Piece]  # without the header
    strategy: str
    chat: bool
    n_most: int
    is_greedy: bool
    preview: Plan | None = None


@dataclass(slots=True)
class Chat:
    """The mirror of one context."""

    context: Context
    pieces: list[Piece]
    base: Tokens  # what its own text is computed after; () for nothing
    keeps_positions: bool = False
    evicts: bool = False
    thins: bool = False  # a token policy lets go of rows
    open: Open | None = None
    repair: str | None = None  # by which it is woven, since a weave said so
    was_woven: bool = False  # so that its plan is that of a weave, not of the next one
    saved: list[tuple[Any, list[Piece], Tokens]] = field(default_factory=list)  # snapshots
    versions: list[tuple[int, list[Piece], Tokens]] = field(default_factory=list)
    answered: tuple[object, int, int] | None = (
        None  # parts, first row and number of the last answer
    )

    uids: dict[int, object] = field(default_factory=dict)  # what each means, as long as it is open

    def may(self, strategies: Sequence[str], not_if_thin: Sequence[str]) -> list[str]:
        """Return those of ``strategies`` that it can be woven by."""
        return [each for each in strategies if not (self.thins and each in not_if_thin)]

    @property
    def first(self) -> int:
        """Where its own pieces begin: behind the base, if it has one."""
        return 1 if self.base else 0

    @property
    def tokens(self) -> list[int]:
        return flat(self.pieces)

    @property
    def end(self) -> int:
        """The first position behind all pieces."""
        places = positions(self.pieces)
        return places[-1] + 1 if places else 0

    def drop(self, gone: Sequence[int]) -> None:
        """Take pieces out; where positions are kept, all stay where they are."""
        if self.keeps_positions and gone:
            pairs = zip(starts(self.pieces), self.pieces, strict=True)
            self.pieces = [replace(piece, position=at) for at, piece in pairs]
        self.pieces = [piece for i, piece in enumerate(self.pieces) if i not in gone]
