"""What a memory is asked and tells: plain data, without torch, for clients too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from kvweave.chunk.identity import ChunkId, Kind, TierName

By = Literal["name", "embedding", "attention"]
WAYS: tuple[By, ...] = get_args(By)
Zone = Literal["anchor", "recalled", "summary", "turn"]
ZONES: tuple[Zone, ...] = get_args(Zone)  # front to back
RANKED = 24  # items that are ranked, of which the first that fit are placed
BLOCK_LIMIT = 5000  # characters of a memory block


@dataclass(frozen=True, slots=True)
class MemoryItem:
    """One item: a name and the chunk it stands for."""

    name: str
    id: ChunkId
    kind: Kind
    n_tokens: int
    tier: TierName
    pinned: bool
    in_context: bool


@dataclass(frozen=True, slots=True)
class Slept:
    """What one step did: ``settle``, ``denoise`` (canonical KV computed), ``place`` (laid on a lower
    tier, behind the hook) or ``compress`` (the hook thinned it: `Engine.compress`), with the item
    and its tokens."""

    what: str
    name: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class MemoryBlock:
    """One block; ``value`` is what its chunk says now."""

    label: str
    value: str
    limit: int
    description: str = ""


@dataclass(frozen=True, slots=True)
class ToolReply:
    """What goes back to the model as the result of a call of the memory tool."""

    text: str
    is_error: bool = False
