"""Text with ``{holes}``: literal text around chunk references and values.

::

    "Answer from {docs}.\\nQ: {question}"    docs=["wiki/oslo", "#17"], question="Is it wet?"
     -> Text("Answer from ") Ref("wiki/oslo") Ref("#17") Text(".\\nQ: Is it wet?")

A list fills a hole with chunks, a string with literal text; a hole that nothing fills is itself
the name of a chunk, as in ``{docs/faq}`` or ``{#17}``. ``{{`` and ``}}`` are literal braces.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby

from kvweave.errors import HoleNotFilled, InvalidArgument, nearest
from kvweave.verbs import checked
from kvweave.weave.special import PlainText

_NAME = re.compile(r"#\d+|\w[\w.\-@:+=~]*(/[\w.\-@:+=~]+)*")
_BRACE = re.compile(r"\{\{|\}\}|\{|\}")


@dataclass(frozen=True, slots=True)
class Literal:
    """Text of the template itself, braces already unescaped."""

    text: str


@dataclass(frozen=True, slots=True)
class Hole:
    """A place in the template: an identifier, a chunk path or ``#id``."""

    name: str


@dataclass(frozen=True, slots=True)
class Text:
    """Text to prefill as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Ref:
    """A chunk by name or ``#id``."""

    name: str


_Piece = Text | Ref


@checked
class Template:
    """A parsed template; raises InvalidArgument with the position of a wrong brace or hole."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._parts = _parse(text)

    @property
    def holes(self) -> tuple[str, ...]:
        """The names of the holes, each once, in order of first use."""
        return tuple(dict.fromkeys(part.name for part in self._parts if isinstance(part, Hole)))

    def parse(self) -> tuple[Literal | Hole, ...]:
        """Return the template's literals and holes in order; no literal is empty."""
        return self._parts

    @classmethod
    def of(cls, template: str | Template) -> Template:
        """Return a template, parsed if it is not."""
        return template if isinstance(template, Template) else cls(template)

    def fill(self, values: Mapping[str, object], resolve: Callable[[str], bool]) -> list[_Piece]:
        """Return text and references in order, neighbouring texts as one.

        ``resolve(name)`` says whether a chunk has that name; it is asked only for holes without
        a value. Raises HoleNotFilled, or InvalidArgument for a value of a wrong type or a name
        that is no hole.
        """
        known, is_plain = set(self.holes), isinstance(self.text, PlainText)
        for name in values:
            if name not in known:
                raise InvalidArgument(name, "the template has no such hole", self._suggest(name))
        pieces: list[_Piece] = []
        for part in self._parts:
            if isinstance(part, Literal):
                pieces.append(Text(PlainText(part.text) if is_plain else part.text))
            elif part.name in values:
                pieces.extend(_pieces(part.name, values[part.name]))
            elif resolve(part.name):
                pieces.append(Ref(part.name))
            else:
                raise HoleNotFilled(part.name)
        return _merged(pieces)

    def _suggest(self, name: str) -> str:
        names = nearest(name, self.holes) or self.holes
        listed = " or ".join(f"{{{name}}}" for name in names)
        return f"did you mean {listed}?" if names else "it has no holes at all"


def _parse(text: str) -> tuple[Literal | Hole, ...]:
    parts: list[Literal | Hole] = []
    literal, at = "", 0
    while brace := _BRACE.search(text, at):
        literal += text[at : brace.start()]
        if brace[0] == "}":
            raise _wrong(text, brace.start(), "'}' closes nothing", "write '}}' for a brace")
        if brace[0] != "{":
            literal, at = literal + brace[0][0], brace.end()
            continue
        name = _NAME.match(text, brace.end())
        end = name.end() if name else brace.end()
        if text[end : end + 1] != "}":
            raise _wrong(text, brace.start(), *_explain(text, brace.end()))
        if name is None:
            raise _wrong(text, brace.start(), "a hole without a name", "write '{{}}' for braces")
        if literal:
            parts.append(Literal(literal))
        parts.append(Hole(name[0]))
        literal, at = "", end + 1
    literal += text[at:]
    if literal:
        parts.append(Literal(literal))
    return tuple(parts)


def _explain(text: str, start: int) -> tuple[str, str]:
    """Say what is wrong with the hole whose name should begin at ``start``."""
    end = _BRACE.search(text, start)
    if end is None or end[0][0] == "{":
        return "'{' is never closed", "write '{{' for a literal brace"
    name = text[start : end.start()]
    return f"{name!r} is not a hole's name", "write '{{' and '}}' for literal braces"


def _wrong(text: str, at: int, reason: str, hint: str) -> InvalidArgument:
    line = text.count("\n", 0, at) + 1
    column = at - (text.rfind("\n", 0, at) + 1) + 1
    reason = f"{reason}, at character {at} (line {line}, column {column})"
    return InvalidArgument("template", reason, hint)


def _pieces(hole: str, value: object) -> list[_Piece]:
    if isinstance(value, str):
        return [Text(value)]
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, list | tuple):
        return [_reference(hole, item) for item in value]
    raise InvalidArgument(
        hole, f"cannot be {type(value).__name__}", "give a str of text or a list of chunk names"
    )


def _reference(hole: str, item: object) -> Ref:
    if isinstance(item, Ref):
        return item
    if isinstance(item, str) and item:
        return Ref(item)
    raise InvalidArgument(
        hole, f"{item!r} is not a chunk reference", "a list holds chunk names; text is a plain str"
    )


def _merged(pieces: list[_Piece]) -> list[_Piece]:
    """Join neighbouring texts, so that they are tokenized as the one text they read as."""
    merged: list[_Piece] = []
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, Text)):
        if not is_text:
            merged += run
            continue
        texts = [piece.text for piece in run if isinstance(piece, Text)]
        text = "".join(texts)
        if text:
            merged.append(
                Text(PlainText(text) if any(isinstance(t, PlainText) for t in texts) else text)
            )
    return merged
