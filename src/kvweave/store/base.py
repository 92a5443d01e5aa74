"""The contract of a tier: a place where a chunk's canonical KV rests."""

from __future__ import annotations

from typing import Protocol

from kvweave.store.kv import KV


class Tier(Protocol):
    """Keeps KV by serial id.

    A tier may lose a chunk; it never returns wrong bytes.
    """

    name: str

    def put(self, key: int, kv: KV) -> int:
        """Store ``kv`` and return its bytes; replaces what was there, or leaves it on an error."""
        ...

    def get(self, key: int) -> KV | None:
        """Return the KV, None when it is not there. Raises CorruptChunk on wrong bytes."""
        ...

    def delete(self, key: int) -> None:
        """Let go of ``key``; unknown keys are ignored."""
        ...

    def __contains__(self, key: int) -> bool: ...

    @property
    def n_bytes(self) -> int:
        """Bytes held."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when the accounting is wrong."""
        ...
