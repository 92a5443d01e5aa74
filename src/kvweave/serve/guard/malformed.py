"""What is wrong with a body that is of no form: which field, what it is, and what it may be.

pydantic tells of a union what is wrong for each of its members::

    tool_choice     literal['none','auto','required']    Input should be 'none', 'auto' or 'required'
                    NamedTool, function, name            Field required
                    AllowedTools, type                   Input should be 'allowed_tools'
    {"type": "function", "function": {}}  ->  tool_choice.function.name: Field required

What is told is of the member that is meant: the one whose ``type``, or else whose kind of value, it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SHOWN = 64  # characters of a value
TELLING = ("type", "role")  # fields that say which member is meant
KINDS = {
    "string": "a string", "list": "a list", "dict": "an object", "model": "an object",
    "bool": "true or false", "int": "a whole number", "float": "a number", "none": "null",
}  # fmt: skip
_Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong."""

    path: str  # as it stands in the body
    tagged: str  # the same with the types of what it goes through, as Anthropic's API writes it
    message: str


@dataclass(frozen=True, slots=True)
class _Found:
    """An error of pydantic's, and what the parts of its place are: of the body, or names of members."""

    error: _Json
    parts: tuple[tuple[bool, str | int], ...]  # whether it is of the body

    def path(self, until: int | None = None) -> tuple[str | int, ...]:
        return tuple(part for of_body, part in self.parts[:until] if of_body)


def faults(errors: Iterable[_Json], body: object, skip: int = 0) -> list[Fault]:
    """Return what is wrong, each field once; ``skip``: parts in front of places that are not the body's."""
    found = [_Found(error, _parts(error, body, skip)) for error in errors]
    return [_told(each) for each in _meant(found, 0)]


def _parts(error: _Json, body: object, skip: int) -> tuple[tuple[bool, str | int], ...]:
    place = tuple(error["loc"][skip:])
    marks = _marks(body, place, error)
    return tuple(zip(marks or (True,) * len(place), place, strict=True))


def _marks(value: Any, place: Sequence[str | int], error: _Json) -> tuple[bool, ...] | None:
    """Tell which parts of a place lead into the body: the others are names of members of unions."""
    if not place:
        given = error["input"]
        return () if value is given or value == given or not _is_plain(given) else None
    part, rest = place[0], place[1:]
    if not rest and error["type"] == "missing":
        return (True,)
    inner: Any = None
    there = isinstance(value, dict) and part in value
    if there or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
        inner = _marks(value[part], rest, error)
        if inner is not None:
            return (True, *inner)
    inner = _marks(value, rest, error) if isinstance(part, str) else None
    return None if inner is None else (False, *inner)


def _is_plain(given: object) -> bool:
    return given is None or isinstance(given, str | int | float | dict | list)


def _meant(found: Sequence[_Found], at: int) -> list[_Found]:
    """Return the errors of the members that are meant; the first ``at`` parts of all are the same."""
    groups: dict[Any, list[_Found]] = {}
    for each in found:
        groups.setdefault(each.parts[at] if at < len(each.parts) else None, []).append(each)
    members = [group for key, group in groups.items() if key is not None and not key[0]]
    chosen = min(members, key=lambda group: _unlike(group, at + 1)) if len(members) > 1 else None
    made: list[_Found] = []
    for key, group in groups.items():
        if key is None:
            made += group
        elif chosen is None or key[0]:
            made += _meant(group, at + 1)
        elif group is chosen:
            unlike = _unlike(group, at + 1)[0]
            if unlike:
                made.append(_any_of(members, at, unlike))
            else:
                own = [_Found(e.error, (*e.parts[:at], *e.parts[at + 1 :])) for e in group]
                made += _meant(own, at)
    return made


def _unlike(group: Sequence[_Found], at: int) -> tuple[Any, ...]:
    """Return how unlike a value is to a member of a union: by its kind, by its type, by how early it
    is wrong."""
    score = 0
    for each in group:
        rest, error = each.path()[len(each.path(at)) :], each.error
        wrong_kind = error["type"].endswith("_type") or (
            error["type"] == "literal_error" and not isinstance(error["input"], str)
        )
        if not rest and wrong_kind:
            return (2,)
        if len(rest) == 1 and rest[0] in TELLING and error["type"] == "literal_error":
            score = 1
    far = max(each.path()[len(each.path(at)) :] for each in group[:1])
    return (score, -len(far), *(-part if isinstance(part, int) else 0 for part in far), len(group))


def _any_of(members: Sequence[Sequence[_Found]], at: int, unlike: int) -> _Found:
    """Return what is wrong where no member is meant: all that it may be."""
    error, allowed = members[0][0].error, []
    parts = members[0][0].parts[:at]
    for each in (each for group in members for each in group):
        rest = each.path()[len(each.path(at)) :]
        if unlike == 2 and not rest:
            allowed.append(_kind(each.error))
        elif len(rest) == 1 and rest[0] in TELLING and each.error["type"] == "literal_error":
            error, parts = each.error, (*parts[:at], (True, rest[0]))
            allowed.append(each.error["ctx"]["expected"])
    message = f"Input should be {' or '.join(dict.fromkeys(allowed))}"
    return _Found({**error, "type": "any_of", "msg": message}, parts)


def _kind(error: _Json) -> str:
    expected = error.get("ctx", {}).get("expected")
    kind = error["type"].removesuffix("_type")
    return str(expected) if expected else KINDS.get(kind, kind)


def _told(found: _Found) -> Fault:
    error, kind = found.error, found.error["type"]
    message, given = str(error["msg"]).removeprefix("Value error, "), error["input"]
    path, tagged = list(found.path()), [part for _, part in found.parts]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        about = error["ctx"]
        field = about["discriminator"].strip("'")
        if kind == "union_tag_invalid":
            message, given = f"Input should be {about['expected_tags']}", given[field]
        elif isinstance(given, Mapping):
            message = "Field required"
        else:
            message, field = "Input should be an object", ""
        path, tagged = ([*each, field] if field else each for each in (path, tagged))
    elif kind == "model_type":
        message = "Input should be an object"
    if "should be" in message[:16]:
        message += f", not {shown(given)}"
    elif kind == "string_too_long":
        message += f", not {len(given):,}"
    return Fault(_joined(path), _joined(tagged), message)


def shown(given: object) -> str:
    """Return a value, or its beginning."""
    text = repr(given)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _joined(parts: Iterable[str | int]) -> str:
    return ".".join(map(str, parts))
