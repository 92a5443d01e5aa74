"""Patterns over names, and what a mistyped name may have meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from string import ascii_lowercase, digits

from kvweave.chunk.identity import MAX_NAME
from kvweave.errors import InvalidArgument, nearest

_GLOB = re.compile(r"[*?\[\]{}]")
RECENT = 400
"""How many of the newest names a suggestion looks at: comparing costs about 10 us each."""


def has_glob(pattern: str) -> bool:
    """Return whether ``pattern`` has glob characters; names never have."""
    return _GLOB.search(pattern) is not None


def literal_prefix(pattern: str) -> str:
    """Return what every matching name starts with."""
    found = _GLOB.search(pattern)
    return pattern[: found.start()] if found else pattern


def matching(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names a glob or a ``directory/`` matches, in the order given.

    ``*`` and ``?`` stay within a part, ``**`` crosses parts, ``[a-z]``, ``[!a-z]``, ``{a,b}``.
    A trailing '/' means everything below. Takes one pass over the names; raises InvalidArgument
    for a pattern with an open bracket.
    """
    prefix = literal_prefix(pattern)
    if pattern in (prefix + "**", prefix) and prefix[-1:] in ("", "/"):
        return [name for name in names if name.startswith(prefix)] if prefix else list(names)
    match = _matcher(pattern)
    return [name for name in names if name.startswith(prefix) and match(name)]


@lru_cache(maxsize=256)
def _matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that tells whether a name matches; raise InvalidArgument."""
    try:
        return re.compile(_Translation(pattern).regex(), re.DOTALL).fullmatch
    except re.error as error:
        raise InvalidArgument("pattern", f"{pattern!r}: {error}") from error


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
        rest = self.pattern[self.at :]
        if rest.startswith("**"):
            # "**/x" also means "x": no part at all is as good as some
            starts_part = self.at == 0 or self.pattern[self.at - 1] in "/{,"
            if rest.startswith("**/") and starts_part:
                self.at += 3
                return "(?:.*/)?"
            self.at += 2
            return ".*"
        if rest[0] == "[":
            return self._set(rest)
        self.at += 1
        if rest[0] == "{":
            self.depth += 1
            return "(?:"
        if rest[0] in "},":
            if rest[0] == "}" and not self.depth:
                raise self._error("'}' closes nothing")
            if self.depth:
                self.depth -= rest[0] == "}"
                return ")" if rest[0] == "}" else "|"
        if rest[0] == "]":
            raise self._error("']' closes nothing")
        return {"*": "[^/]*", "?": "[^/]"}.get(rest[0]) or re.escape(rest[0])

    def _set(self, rest: str) -> str:
        end = rest.find("]", 3 if rest[1:2] == "!" else 2)
        if end < 0:
            raise self._error("'[' is not closed")
        self.at += end + 1
        inside = rest[1:end]
        negated = inside.startswith("!")
        inside = re.sub(r"([\\\[\]^&|~])", r"\\\1", inside[negated:])
        return f"(?!/)[{'^' if negated else ''}{inside}]"

    def _error(self, reason: str) -> InvalidArgument:
        return InvalidArgument("pattern", f"{self.pattern!r}: {reason}")


def suggest(
    name: str, among: Callable[[Sequence[str]], list[str]], recent: Sequence[str]
) -> tuple[str, ...]:
    """Return up to three known names that ``name`` may have meant.

    The work is bounded however many names there are: ``among`` tells which of the names one edit
    away there are, and only ``recent`` ones are compared.
    """
    if len(name) > MAX_NAME + 1:
        return ()
    return nearest(name, dict.fromkeys([*among(list(_one_edit_away(name))), *recent]))


def _one_edit_away(name: str) -> Collection[str]:
    letters = ascii_lowercase + digits + "-_/."
    edits: dict[str, None] = {}
    for at in range(len(name) + 1):
        head, tail = name[:at], name[at:]
        if tail:
            edits[head + tail[1:]] = None
        if len(tail) > 1:
            edits[head + tail[1] + tail[0] + tail[2:]] = None
        for letter in letters:
            edits[head + letter + tail] = None
            if tail:
                edits[head + letter + tail[1:]] = None
    return edits


def directory_of(name: str, pattern: str) -> str:
    """Return the directory ``name`` is in, at most one part below the directory of ``pattern``.

    "." is the top, and "#" stands for chunks without names.
    """
    if name.startswith("#"):
        return "#"
    prefix = literal_prefix(pattern)
    top = prefix[: prefix.rfind("/") + 1]
    part, slash, _ = name[len(top) :].partition("/")
    return top + part + slash if slash else top or "."
