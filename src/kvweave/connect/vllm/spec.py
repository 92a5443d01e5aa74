"""What a request says to kvweave: ``kv_transfer_params: {"kvweave": {...}}``.

::

    {"system": 12,                      tokens in front that all chunks are computed after
     "parts": [{"tokens": [12, 300]},   these tokens of the prompt are a chunk of their own
               {"chunk": "docs/a"}],    or: a chunk stored under this name stands there
     "match": true,                     look for other stored chunks as well
     "repair": "auto", "share": 0.05, "max_drift": null, "namespace": ""}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.chunk.identity import check_namespace
from kvweave.errors import InvalidArgument
from kvweave.weave.repair import strategy

KEY = "kvweave"
MOST_PARTS = 512
MOST_TICKET = 64


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A range of the prompt's tokens, or the name of a stored chunk that stands in it."""

    start: int = 0
    stop: int = 0
    chunk: str | None = None


@dataclass(frozen=True, slots=True)
class WeaveSpec:
    """What one request asks for; None leaves it to the engine."""

    system: int = 0
    parts: tuple[PartSpec, ...] = ()
    match: bool = False
    repair: str | None = None
    share: float | None = None
    max_drift: float | None = None
    namespace: str = ""
    ticket: str = ""  # the server's own: what asks for the report of a stream

    def options(self) -> dict[str, object]:
        """Return what was asked for, as options of `Engine.context`."""
        given = {"repair": self.repair, "share": self.share, "max_drift": self.max_drift}
        return {key: value for key, value in given.items() if value is not None}


def spec_of(params: Mapping[str, Any] | None, n_tokens: int | None = None) -> WeaveSpec | None:
    """Return what the transfer parameters of a request say to us; None: nothing.

    ``n_tokens``: of the prompt, where it is known. Raises InvalidArgument.
    """
    said = (params or {}).get(KEY)
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise InvalidArgument(KEY, "it is no object", '{"parts": [...]}')
    known = {"system", "parts", "match", "repair", "share", "max_drift", "namespace", "ticket"}
    unknown = sorted(set(said) - known)
    if unknown:
        raise InvalidArgument(KEY, f"unknown: {', '.join(unknown)}", ", ".join(sorted(known)))
    limit = n_tokens if n_tokens is not None else 1 << 31
    system = _integer("system", said.get("system", 0), 0, limit)
    parts = _parts(said.get("parts", []), system, limit)
    repair = said.get("repair")
    if repair is not None:
        strategy(_text("repair", repair))
    return WeaveSpec(
        system=system,
        parts=parts,
        match=_flag(said.get("match", not parts)),
        repair=repair,
        share=_number("share", said.get("share"), 1.0),
        max_drift=_number("max_drift", said.get("max_drift"), float("inf")),
        namespace=check_namespace(_text("namespace", said.get("namespace", ""))),
        ticket=_text("ticket", said.get("ticket", ""))[:MOST_TICKET],
    )


def _parts(said: Any, at: int, limit: int) -> tuple[PartSpec, ...]:
    if not isinstance(said, list) or len(said) > MOST_PARTS:
        raise InvalidArgument("parts", f"it is no list of at most {MOST_PARTS}")
    found = []
    for each in said:
        if not isinstance(each, Mapping) or len(each) != 1 or not set(each) <= {"tokens", "chunk"}:
            raise InvalidArgument("parts", f"{each!r}", '{"tokens": [0, 99]} or {"chunk": NAME}')
        if "chunk" in each:
            found.append(PartSpec(chunk=_text("chunk", each["chunk"])))
            continue
        span = each["tokens"]
        if not isinstance(span, list) or len(span) != 2:
            raise InvalidArgument("parts", f"tokens: {span!r}", "[start, stop]")
        start = _integer("start", span[0], at, limit)
        at = _integer("stop", span[1], start + 1, limit)
        found.append(PartSpec(start, at))
    return tuple(found)


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgument(name, f"{value!r} is not in {low}..{high}")
    return value


def _number(name: str, value: Any, high: float) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= high:
        raise InvalidArgument(name, f"{value!r} is not in 0..{high}")
    return float(value)


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidArgument(name, f"{value!r} is no text")
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidArgument("match", f"{value!r} is neither true nor false")
    return value
