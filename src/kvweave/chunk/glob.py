"""Globs as automata: a name is read once, whatever the pattern, so nobody can write a slow one."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import re2  # type: ignore[import-untyped]

from kvweave.errors import InvalidArgument

LAST = 0x10FFFF
MAX_MEMORY = 2 << 20  # bytes of one pattern's automaton; its states are dropped when it is full
NOTHING = r"[^\x{0}-\x{10FFFF}]"


@lru_cache(maxsize=32)
def matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that tells whether a whole name matches a glob.

    Raises InvalidArgument for a bracket that is open or closes nothing, a range that runs backwards,
    and a pattern of thousands of characters.
    """
    text = _Translation(pattern).regex()
    options = re2.Options()
    options.log_errors, options.dot_nl, options.max_mem = False, True, MAX_MEMORY
    # a set of one: its objects answer yes or no at a tenth of the price of a match object
    found = re2.Set.FullMatchSet(options)
    try:
        found.Add(text)
        found.Compile()
    except re2.error as error:
        raise InvalidArgument("pattern", "it is too long", "write ** for a part of it") from error
    match: Callable[[str], object] = found.Match
    return match


class _Translation:
    """A glob read from left to right into a regular expression."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern + "**" if pattern.endswith("/") else pattern
        self.at = 0
        self.depth = 0

    def regex(self) -> str:
        parts = []
        while self.at < len(self.pattern):
            parts.append(self._next())
        if self.depth:
            raise self._error("'{' is not closed")
        return "".join(parts)

    def _next(self) -> str:
        if self.pattern.startswith("**", self.at):
            # "**/x" also means "x": no part at all is as good as some
            starts_part = self.at == 0 or self.pattern[self.at - 1] in "/{,"
            if self.pattern.startswith("**/", self.at) and starts_part:
                self.at += 3
                return "(?:.*/)?"
            self.at += 2
            return ".*"
        character = self.pattern[self.at]
        if character == "[":
            return self._set()
        self.at += 1
        if character == "{":
            self.depth += 1
            return "(?:"
        if character == "}" and not self.depth:
            raise self._error("'}' closes nothing")
        if character in "},":
            if self.depth:
                self.depth -= character == "}"
                return ")" if character == "}" else "|"
        if character == "]":
            raise self._error("']' closes nothing")
        return {"*": "[^/]*", "?": "[^/]"}.get(character) or _code(ord(character))

    def _set(self) -> str:
        negated = self.pattern.startswith("[!", self.at)
        start = self.at + 1 + negated
        end = self.pattern.find("]", start + 1)
        if end < 0:
            raise self._error("'[' is not closed")
        self.at = end + 1
        ranges = self._ranges(self.pattern[start:end])
        ranges = _complement(sorted([*ranges, (47, 47)])) if negated else _without_slash(ranges)
        inside = "".join(f"{_code(first)}-{_code(last)}" for first, last in ranges)
        return f"[{inside}]" if inside else NOTHING

    def _ranges(self, inside: str) -> list[tuple[int, int]]:
        """Return first and last code point of each range; a '-' at the end is one itself."""
        ranges, at = [], 0
        while at < len(inside):
            first = last = inside[at]
            if inside[at + 1 : at + 2] == "-" and at + 2 < len(inside):
                last = inside[at + 2]
                at += 2
            if last < first:
                raise self._error(f"the range {first}-{last} runs backwards")
            ranges.append((ord(first), ord(last)))
            at += 1
        return ranges

    def _error(self, reason: str) -> InvalidArgument:
        return InvalidArgument("pattern", f"{self.pattern!r}: {reason}")


def _code(point: int) -> str:
    return f"\\x{{{point:x}}}"


def _complement(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what lies between ranges, which are sorted and may overlap."""
    between, at = [], 0
    for first, last in ranges:
        if at < first:
            between.append((at, first - 1))
        at = max(at, last + 1)
    return [*between, (at, LAST)] if at <= LAST else between


def _without_slash(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return ranges less '/': no wildcard but '**' crosses parts."""
    kept = []
    for first, last in ranges:
        kept += [(first, min(last, 46)), (max(first, 48), last)]
    return [(first, last) for first, last in kept if first <= last]
