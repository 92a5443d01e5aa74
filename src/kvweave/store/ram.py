"""KV in memory, on the model's device."""

from __future__ import annotations

from kvweave.store.kv import KV


class Ram:
    """A dictionary with exact accounting; tensors are shared, not copied."""

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
