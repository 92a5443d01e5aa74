"""KV in memory, on the model's device, with exact accounting: counted when it comes and goes."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator

from kvweave.store.kv import KV

# What KV was computed after: (id, its position minus ours, and, of chunks, which tokens)
Seen = tuple[tuple[int, ...], ...]


class Ram:
    """Canonical KV by chunk; tensors are shared, not copied."""

    name = "ram"

    def __init__(self) -> None:
        self._held: dict[int, KV] = {}
        self._bytes = 0

    def put(self, key: int, kv: KV) -> int:
        """Keep ``kv`` under ``key`` and return its bytes."""
        self.delete(key)
        self._held[key] = kv
        self._bytes += kv.n_bytes
        return kv.n_bytes

    def get(self, key: int) -> KV | None:
        """Return the KV kept under ``key``."""
        return self._held.get(key)

    def delete(self, key: int) -> None:
        """Let go of ``key``."""
        kv = self._held.pop(key, None)
        self._bytes -= kv.n_bytes if kv is not None else 0

    def __contains__(self, key: int) -> bool:
        return key in self._held

    @property
    def n_bytes(self) -> int:
        return self._bytes

    def check_integrity(self) -> None:
        """Raise AssertionError when bytes do not add up."""
        found = sum(kv.n_bytes for kv in self._held.values())
        assert found == self._bytes, f"{found} bytes held, {self._bytes} counted"


class InContext:
    """Exact in-context KV, the latest of each chunk, and what that was computed after."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Seen, KV]] = {}
        self.n_bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: int) -> bool:
        return key in self._held

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def items(self) -> ItemsView[int, tuple[Seen, KV]]:
        """Return keys with what their KV had seen, and it."""
        return self._held.items()

    def get(self, key: int) -> tuple[Seen, KV] | None:
        """Return what is kept under ``key``."""
        return self._held.get(key)

    def put(self, key: int, seen: Seen, kv: KV) -> None:
        """Keep ``kv`` under ``key``, in its old place in the order if it has one."""
        old = self._held.get(key)
        self._held[key] = (seen, kv)
        self.n_bytes += kv.n_bytes - (0 if old is None else old[1].n_bytes)

    def pop(self, key: int) -> int:
        """Let go of ``key``, if it is here, and return the bytes freed."""
        found = self._held.pop(key, None)
        freed = 0 if found is None else found[1].n_bytes
        self.n_bytes -= freed
        return freed

    def check_integrity(self) -> None:
        """Raise AssertionError when bytes do not add up."""
        found = sum(kv.n_bytes for _, kv in self._held.values())
        assert found == self.n_bytes, f"{found} bytes in context, {self.n_bytes} counted"
