"""KV in memory, on the model's device, with exact accounting: counted when it comes and goes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from kvweave.store.kv import KV

# What KV was computed after: (id, its position minus ours, and, of chunks, which tokens)
Stretches = tuple[tuple[int, ...], ...]  # what KV was computed after


class Sized(Protocol):
    """What takes memory."""

    @property
    def n_bytes(self) -> int:
        """Bytes it takes."""
        ...


class Exact(NamedTuple):
    """In-context KV, and what it was computed after."""

    seen: Stretches
    kv: KV

    @property
    def n_bytes(self) -> int:
        return self.kv.n_bytes


K = TypeVar("K")
T = TypeVar("T", bound=Sized)


class Ram(Generic[K, T]):
    """What is kept of each chunk, by key; tensors are shared, not copied."""

    def __init__(self) -> None:
        self._held: dict[K, T] = {}
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: object) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[K]:
        return iter(self._held)

    def get(self, key: K) -> T | None:
        """Return what is kept under ``key``."""
        return self._held.get(key)

    def put(self, key: K, value: T) -> None:
        """Keep ``value`` under ``key``, in its old place in the order if it has one."""
        old = self._held.get(key)
        self._held[key] = value
        self.n_bytes += value.n_bytes - (0 if old is None else old.n_bytes)

    def pop(self, key: K) -> int:
        """Let go of ``key``, if it is here, and return the bytes freed."""
        found = self._held.pop(key, None)
        freed = 0 if found is None else found.n_bytes
        self.n_bytes -= freed
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError when bytes do not add up."""
        found = sum(value.n_bytes for value in self._held.values())
        assert found == self.n_bytes, f"{found} bytes held, {self.n_bytes} counted"
