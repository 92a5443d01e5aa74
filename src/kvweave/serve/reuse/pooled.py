"""A context that answers one request after another, and what it may be used for again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from kvweave.chunk.identity import ChunkId
from kvweave.serve.options import ReuseMode
from kvweave.weave.context import Context
from kvweave.weave.naming import Names
from kvweave.weave.parts import Part


@dataclass(frozen=True, slots=True)
class WeaveOptions:
    """How a request wants to be woven; None leaves it to the engine."""

    repair: str | None = None
    share: float | None = None
    max_drift: float | None = None
    keep: str | None = None
    bases: str | None = None

    def options(self) -> dict[str, object]:
        """Return what was asked for, as options of `Engine.context`."""
        return {key: value for key, value in asdict(self).items() if value is not None}


@dataclass(eq=False, slots=True)
class PooledContext:
    """A context of the pool, and what it may be used for again."""

    context: Context
    how: WeaveOptions
    reuse: ReuseMode
    names: Names
    n_base: int  # parts in front that stay: 1 where there is a base
    base: ChunkId | None
    n_computed: int = 0  # tokens of the base computed for the present request
    n_completed: int = 0  # tokens of other chunks, whose canonical KV was computed for it
    n_asked: int = 0  # parts in front of the present answer
    given_back: float = 0.0  # time.time()
    private: bool = False  # nothing that came with its request is kept
    # of one edited for a request to come: tokens of parts, by uid, that are computed only for that
    ahead: Mapping[int, int] | None = None
    rule: str = ""  # what it was edited by, until a request has gone on from it
    instead: PooledContext | None = None  # the other one of the two of which one will be used


@dataclass(frozen=True, slots=True)
class Common:
    """What a context and a prompt have in common at the front, the base left out."""

    n_parts: int  # whole parts, the base with them
    n_tokens: int  # of these and of the beginning of the next
    cut: tuple[Part, int] | None  # the next part, and how many of its tokens
