"""Patterns over names, and what a mistyped name may have meant."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from string import ascii_lowercase, digits

from kvweave.chunk.glob import matcher
from kvweave.chunk.identity import MAX_NAME
from kvweave.errors import nearest

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
    A trailing '/' means everything below. Takes one pass over the names, each in time linear in its
    length whatever the pattern is. Raises InvalidArgument as `matcher`.
    """
    prefix = literal_prefix(pattern)
    if pattern in (prefix + "**", prefix) and prefix[-1:] in ("", "/"):
        return [name for name in names if name.startswith(prefix)] if prefix else list(names)
    match = matcher(pattern)
    return [name for name in names if name.startswith(prefix) and match(name)]


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
