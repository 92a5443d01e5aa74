"""Contexts as they are told: in short, part by part, with what a weave would do."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from kvweave.chunk.identity import Kind, TierName
from kvweave.engine import Engine
from kvweave.serve.state import ServerState
from kvweave.weave.context import Context
from kvweave.weave.parts import Part

_Json = dict[str, Any]


class Summary(BaseModel):
    """One context, in short.

    ``version`` goes up with every edit; ``busy``: an answer, a weave or a check is under way.
    """

    name: str
    version: int
    namespace: str
    n_tokens: int
    n_parts: int
    busy: bool


class SummaryList(BaseModel):
    """Contexts by name; ``next`` is what to give as ``after`` for those that follow."""

    object: Literal["list"] = "list"
    data: list[Summary]
    next: str | None = None


class PartEntry(BaseModel):
    """One part: tokens ``start`` to ``start + n_tokens`` of a chunk, at ``position``.

    ``amends``: the id of the chunk that it is an erratum of.
    From ``how`` on it says what a weave would do now.
    """

    uid: int
    index: int
    name: str
    id: int
    amends: int | None = None
    start: int
    n_tokens: int
    position: int
    kind: Kind
    pinned: bool
    tier: TierName | Literal["-"]
    how: str
    exact: bool
    n_repaired: int
    n_prefilled: int
    moved: int
    saw: list[int]


class ContextView(Summary):
    """One context in full. ``plan``: what the last weave did. ``ledger``: what its answers cost."""

    base: int | None
    parts: list[PartEntry]
    plan: _Json
    ledger: dict[str, float]


def summary_of(the: ServerState, context: Context) -> _Json:
    """Return one context in short."""
    return {
        "name": context.name,
        "version": context.history.version,
        "namespace": context.namespace,
        "n_tokens": context.n_tokens,
        "n_parts": len(context.parts),
        "busy": the.driver.is_busy(context),
    }


def view_of(engine: Engine, the: ServerState, context: Context) -> _Json:
    """Return one context in full."""
    told = {"base": context.snapshot().base, "parts": parts_of(engine, context)}
    return (
        summary_of(the, context)
        | told
        | {
            "plan": context.plan.to_dict(),
            "ledger": context.costs.totals(),
        }
    )


def parts_of(engine: Engine, context: Context) -> list[_Json]:
    """Return the parts with what a weave would do now."""
    spans = context.preview().spans
    told = []
    for index, (part, span) in enumerate(zip(context.parts, spans, strict=True)):
        record = engine.table.get(part.id)
        told.append(
            part_told(part)
            | {"index": index, "kind": record.kind, "pinned": record.pinned}
            | {"position": span.position, "tier": span.tier, "how": span.how, "exact": span.exact}
            | {"n_repaired": span.n_repaired, "n_prefilled": span.n_prefilled}
            | {"moved": span.moved, "saw": list(span.saw)}
        )
    return told


def part_told(part: Part) -> _Json:
    """Return a part as such."""
    return {
        "uid": part.uid, "name": part.name, "id": part.id, "start": part.start, "n_tokens": part.n,
        "amends": part.amends,
    }  # fmt: skip


def part_entry(engine: Engine, context: Context, part: Part) -> _Json:
    """Return one part of a context."""
    return parts_of(engine, context)[context.index(part)]
