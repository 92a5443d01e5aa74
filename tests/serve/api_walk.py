"""Every value that a client library's types allow, one field at a time, and what becomes of it.

::

    Walk.go(type, "tools", send)    send a smallest value of each member of a union, of each literal
                                    taken: then it with each further field, as deep as there is
                                    refused, or named as ignored: nothing in it matters
"""

from __future__ import annotations

import collections.abc
import re
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, Literal, NotRequired, Required, Union, get_args, get_origin

from typing_extensions import get_type_hints, is_typeddict

Ignored = list[str] | None  # what an answer names; None for a refusal
Send = Callable[[Any], Ignored]
LISTS = (list, collections.abc.Iterable, collections.abc.Sequence)
DEPTH = 8
PLAIN = {str: "x", int: 1, float: 0.5, bool: True}


class Walk:
    """``taken``: the paths of all that was neither refused nor named; a member of a union is ``<its
    type>``. ``samples``, by a field's name: what is worth more than a smallest value."""

    def __init__(self, samples: Mapping[str, Any]) -> None:
        self.samples = samples
        self.taken: set[str] = set()
        self.n_sent = 0

    def go(self, kind: Any, path: str, send: Send, depth: int = 0) -> None:
        """Try all that ``kind`` allows."""
        kind, name = bare(kind), path.rsplit(".", 1)[-1]
        if name in self.samples or depth > DEPTH:
            self._try(path, self.smallest(kind, name), send)
        elif get_origin(kind) in (Union, types.UnionType):
            for member in get_args(kind):
                if member is not type(None):
                    self.go(member, path, send, depth)
        elif get_origin(kind) is Literal:
            for value in get_args(kind):
                self._try(f"{path}={value}", value, send)
        elif get_origin(kind) in LISTS:
            self.go(get_args(kind)[0], path, lambda value: send([value]), depth + 1)
        elif is_typeddict(kind):
            self._fields(kind, path, send, depth)
        else:
            self._try(path, self.smallest(kind, name), send)

    def _fields(self, kind: Any, path: str, send: Send, depth: int) -> None:
        least, hints = self.smallest(kind, ""), get_type_hints(kind)
        path = f"{path}<{least.get('type') or least.get('role') or kind.__name__.removeprefix('Beta')}>"
        others = (
            {**least, name: self.smallest(member, name)}
            for name in least
            for member in get_args(bare(hints[name]))
            if get_origin(bare(hints[name])) in (Union, types.UnionType)
        )
        # where the first member of a union is refused, another may not be
        taken = next((each for each in (least, *others) if self._try(path, each, send)), None)
        if taken is not None or not least:
            least = taken or least
            for name, inner in hints.items():
                if name not in ("type", "role"):
                    self.go(inner, f"{path}.{name}", _within(send, least, name), depth + 1)

    def _try(self, path: str, value: Any, send: Send) -> bool:
        self.n_sent += 1
        ignored = send(value)
        if ignored is None or names(ignored, path):
            return False
        self.taken.add(path)
        return True

    def smallest(self, kind: Any, name: str) -> Any:
        """Return a value of this type with nothing that may be left out, but for a content."""
        kind = bare(kind)
        if name in self.samples:
            return self.samples[name]
        if get_origin(kind) in (Union, types.UnionType):
            return self.smallest(get_args(kind)[0], name)
        if get_origin(kind) is Literal:
            return get_args(kind)[0]
        if get_origin(kind) in LISTS:
            return [self.smallest(get_args(kind)[0], name)]
        if is_typeddict(kind):
            # what is Required is not known of annotations that are text, but by their own origin
            hints = get_type_hints(kind, include_extras=True)
            needed = [n for n, t in hints.items() if get_origin(t) is Required or n == "content"]
            needed = needed if not kind.__total__ else list(hints)
            return {n: self.smallest(hints[n], n) for n in needed}
        return PLAIN.get(kind, {"a": "b"} if kind is not Any else "x")


def _within(send: Send, least: Mapping[str, Any], name: str) -> Send:
    return lambda value: send({**least, name: value})


def names(ignored: Iterable[str], path: str) -> bool:
    """Tell whether one of these is the path, or what it is in."""
    plain = re.sub(r"<[^>]*>|=.*$", "", path)
    said = {re.sub(r"\.\d+(?=\.|$)", "", each) for each in ignored}
    return any(plain == each or plain.startswith(f"{each}.") for each in said)


def tail(path: str) -> str:
    """Return the end of a path that says which field of which type it is, wherever that stands."""
    found = re.search(r"(\w*<[^<>]*>|<[^<>]*>[.=][^<>]*|^[^<>]*)$", path)
    assert found is not None, path
    return found[1]


def bare(kind: Any) -> Any:
    """Return a type without what is only noted of it."""
    while get_origin(kind) in (Annotated, Required, NotRequired):
        kind = get_args(kind)[0]
    return kind
