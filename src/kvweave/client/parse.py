"""From a server's JSON to the same plain objects the engine gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeVar

from kvweave.chunk.files import Entry, Usage
from kvweave.chunk.identity import ChunkId
from kvweave.memory.told import MemoryItem
from kvweave.run.sampling import Choice
from kvweave.weave.answer import Answer
from kvweave.weave.check import Check
from kvweave.weave.history import Cause, Diff, Edit, Why
from kvweave.weave.parts import Part
from kvweave.weave.plan import Plan, Shed, Span

Json = Mapping[str, Any]
T = TypeVar("T")


def entry(found: Json) -> Entry:
    """Return an entry of a listing."""
    return _make(Entry, found)


def item(found: Json) -> MemoryItem:
    """Return an item of a memory."""
    return _make(MemoryItem, found)


def usage(found: Json) -> Usage:
    """Return one group of `du`."""
    return _make(Usage, found)


def plan(found: Json) -> Plan:
    """Return what `Plan.to_dict` made a dict of."""
    spans = tuple(_make(Span, span) for span in found["spans"])
    told = ("drift", "evidence", "drift_by", "coverage")
    known = {key: found.get(key) for key in told}
    shed = None if found.get("shed") is None else _make(Shed, found["shed"])
    return Plan(spans, found["strategy"], alarm=bool(found.get("alarm")), shed=shed, **known)


def check(found: Json) -> Check:
    """Return what `Check.to_dict` made a dict of."""
    return _make(Check, found)


def part(found: Json) -> Part:
    """Return one part of a context."""
    start, n, amends = found.get("start", 0), found["n_tokens"], found.get("amends")
    amended = None if amends is None else ChunkId(amends)
    return Part(found["uid"], ChunkId(found["id"]), n, found["name"], start=start, amends=amended)


def edit(found: Json) -> Edit:
    """Return one line of a log."""
    return _make(Edit, found)


def diff(found: Json) -> Diff:
    """Return what `Diff.to_dict` made a dict of."""
    added, removed, moved = (tuple(map(part, found[key])) for key in ("added", "removed", "moved"))
    return Diff(found["from"], found["to"], added, removed, moved)


def why(found: Json) -> Why:
    """Return what `Why.to_dict` made a dict of."""
    causes = tuple(
        _make(Cause, {**each, "edit": each["edit"] and edit(each["edit"])})
        for each in found["parts"]
    )
    return _make(Why, {**found, "parts": causes})


def answer(found: Json) -> Answer:
    """Return a finished answer."""
    choices = (
        Choice(c["token"], c["logprob"], tuple((t, p) for t, p in c["top"]))
        for c in found.get("choices", ())
    )
    return Answer(
        found["text"],
        tuple(found["tokens"]),
        found["finish"],
        tuple(choices),
        plan(found["plan"]),
        dict(found["usage"]),
        found.get("stopped_by"),
    )


def told(found: Json, *keys: str) -> dict[str, Any]:
    """Return an object as it was sent. Raises KeyError or TypeError where it is none, or lacks a key."""
    for key in keys:
        _ = found[key]
    return dict(found)


def _make(kind: type[T], found: Json) -> T:
    """Return a dataclass from the fields it knows, so that a newer server may tell more."""
    known = {f.name for f in fields(kind)}  # type: ignore[arg-type]
    return kind(
        **{k: tuple(v) if isinstance(v, list) else v for k, v in found.items() if k in known}
    )
