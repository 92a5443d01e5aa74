"""Cutting a token list into chunks: without overlap, without loss."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from kvweave.chunk.rolling import as_tokens, rolling
from kvweave.errors import InvalidArgument

_CONTENT = 0xD6E8FEB86659FD93
"""What by_content hashes with. Stored chunks were cut by it, so it stays as it is."""


class TokenRange(NamedTuple):
    """Tokens ``start`` (included) to ``stop`` (not included)."""

    start: int
    stop: int


class Cutter(Protocol):
    """Say where to cut: spans that are not empty, in order, and cover all tokens once."""

    def __call__(self, tokens: Sequence[int]) -> list[TokenRange]: ...


SPANS = "its spans must follow each other, none empty, and cover every token"


def cut(tokens: Sequence[int], cutter: Cutter) -> list[list[int]]:
    """Return the pieces; raise InvalidArgument when the cutter loses or repeats a token."""
    pieces: list[list[int]] = []
    at = 0
    for start, stop in cutter(tokens):
        if start != at or stop <= start or stop > len(tokens):
            raise InvalidArgument(
                "cutter",
                f"span {start}:{stop} after token {at} of {len(tokens)} loses tokens",
                SPANS,
            )
        pieces.append([int(token) for token in tokens[start:stop]])
        at = stop
    if at != len(tokens):
        raise InvalidArgument("cutter", f"tokens {at}:{len(tokens)} are in no span", SPANS)
    return pieces


def by_tokens(n: int) -> Cutter:
    """Cut every ``n`` tokens; the last piece may be shorter."""
    _at_least_one("n", n)

    def cutter(tokens: Sequence[int]) -> list[TokenRange]:
        return [TokenRange(at, min(at + n, len(tokens))) for at in range(0, len(tokens), n)]

    return cutter


def by_boundary(
    is_end: Callable[[int], bool] | Collection[int], max_tokens: int, min_tokens: int = 1
) -> Cutter:
    """Cut after each token that ends something, in pieces of ``min_tokens`` to ``max_tokens``.

    A piece with no end in it is cut at ``max_tokens``; the last piece may be under ``min_tokens``.
    """
    _at_least_one("max_tokens", max_tokens)
    if not 1 <= min_tokens <= max_tokens:
        raise InvalidArgument("min_tokens", f"{min_tokens} is not in 1..{max_tokens} (max_tokens)")
    ends = is_end if callable(is_end) else frozenset(is_end).__contains__

    def cutter(tokens: Sequence[int]) -> list[TokenRange]:
        cuts = _Cuts()
        for at, token in enumerate(tokens, 1):
            n = at - cuts.last
            if n == max_tokens or (n >= min_tokens and ends(token)):
                cuts.add(at)
        return cuts.spans(len(tokens))

    return cutter


def by_paragraph(decode: Callable[[int], str], max_tokens: int) -> Cutter:
    """Cut after blank lines, and at ``max_tokens`` where a paragraph is longer.

    ``decode`` gives the text of one token. More blank lines stay with the paragraph they follow,
    and no piece but the first and last is white space only, unless ``max_tokens`` forces it.
    """
    _at_least_one("max_tokens", max_tokens)

    def cutter(tokens: Sequence[int]) -> list[TokenRange]:
        cuts = _Cuts()
        lines = _Lines()
        visible = False
        for at, token in enumerate(tokens):
            text = decode(token)
            was_blank = lines.ended_blank
            lines.read(text)
            # Wait for the token that goes on after the blank line, so that a third newline
            # does not become a piece of its own.
            paragraph_over = was_blank and visible and not lines.ended_blank
            if paragraph_over or at - cuts.last == max_tokens:
                cuts.add(at)
                visible = False
            visible = visible or (not text.isspace() and text != "")
        return cuts.spans(len(tokens))

    return cutter


def by_message(starts: Sequence[int]) -> Cutter:
    """Cut before each of ``starts``; what stands before the first is a piece of its own."""
    firsts = [int(start) for start in starts]
    if any(b <= a for a, b in pairwise(firsts)) or min(firsts, default=0) < 0:
        raise InvalidArgument("starts", "they must increase, from 0 on")

    def cutter(tokens: Sequence[int]) -> list[TokenRange]:
        if firsts and firsts[-1] >= len(tokens):
            raise InvalidArgument("starts", f"{firsts[-1]} is not before the end, {len(tokens)}")
        cuts = _Cuts()
        for start in firsts:
            cuts.add(start)
        return cuts.spans(len(tokens))

    return cutter


def by_content(
    min_tokens: int = 64, avg_tokens: int = 512, max_tokens: int = 2048, window: int = 8
) -> Cutter:
    """Cut where the last ``window`` tokens say so, wherever they stand: the same text, the same cuts.

    An insertion moves the cuts near it; soon behind it they are those of the text without it.
    Pieces are of ``min_tokens`` to ``max_tokens``, about ``avg_tokens``; the last may be shorter. Where
    nothing says so for ``max_tokens``, the cut is where the hash is least.
    """
    _at_least_one("window", window)
    if not window <= min_tokens < avg_tokens < max_tokens:
        reason = f"{window} (window) <= {min_tokens} < {avg_tokens} < {max_tokens} does not hold"
        raise InvalidArgument("min_tokens", reason)
    limit = np.uint64((1 << 64) // (avg_tokens - min_tokens) - 1)

    def cutter(tokens: Sequence[int]) -> list[TokenRange]:
        n = len(tokens)
        hashes = rolling(as_tokens(tokens), window, _CONTENT)
        places = (np.flatnonzero(hashes <= limit) + window).tolist()
        cuts = _Cuts()
        while n - cuts.last > min_tokens:
            low, high = cuts.last + min_tokens, cuts.last + max_tokens
            i = bisect_left(places, low)
            if i < len(places) and places[i] <= high:
                cuts.add(places[i])
            elif n > high:
                # Of equal ones the last: padding gives few pieces.
                cuts.add(high - int(hashes[low - window : high - window + 1][::-1].argmin()))
            else:
                break
        return cuts.spans(n)

    return cutter


class _Cuts:
    """Where it was cut so far."""

    def __init__(self) -> None:
        self.at = [0]

    @property
    def last(self) -> int:
        return self.at[-1]

    def add(self, at: int) -> None:
        if at > self.at[-1]:
            self.at.append(at)

    def spans(self, n: int) -> list[TokenRange]:
        self.add(n)
        return [TokenRange(a, b) for a, b in pairwise(self.at)]


class _Lines:
    """Knows whether the text read so far ends in a blank line."""

    def __init__(self) -> None:
        self.ended_blank = False
        self._line_is_blank = False  # the first line has no line before it to be set off from

    def read(self, text: str) -> None:
        for character in text:
            newline = character == "\n"
            self.ended_blank = newline and self._line_is_blank
            self._line_is_blank = newline or (self._line_is_blank and character.isspace())


def _at_least_one(argument: str, n: int) -> None:
    if n < 1:
        raise InvalidArgument(argument, f"{n} is less than 1")
