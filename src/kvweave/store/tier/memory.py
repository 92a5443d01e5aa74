"""A tier in the memory of this process, up to a number of bytes."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.tier.base import DONE, Get, Outcome, Put, checked, refused
from kvweave.store.tier.buffers import Bytes, copy_in, copy_out
from kvweave.store.tier.keys import absent, check_keys, n_bytes_of, outside, present


class Memory:
    """Values in memory, up to ``capacity`` bytes; what does not fit is ``full``."""

    name = "ram"
    shared = False

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidArgument("capacity", f"{capacity} bytes", "give 1 or more")
        self.capacity = capacity
        self._lock = threading.Lock()
        self._values: dict[str, Bytes] = {}
        self._n_bytes = 0  # of the values
        self._closed = False

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Create values; ``durable`` changes nothing: they go with the process."""
        check_keys(put.key for put in puts)
        return [refused(self._closed, deadline) or self._put(put) for put in puts]

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        check_keys(get.key for get in gets)
        return [refused(self._closed, deadline) or self._get(get) for get in gets]

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        check_keys(keys)
        return [refused(self._closed, deadline) or self._look(key) for key in keys]

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        """Remove values; memory that a reader copies from goes when it is done."""
        check_keys(keys)
        return [refused(self._closed, deadline) or self._discard(key) for key in keys]

    def keys(self) -> Iterator[str]:
        """Yield the keys of all values. Raises StoreError when closed."""
        self._must_be_open()
        with self._lock:
            return iter(list(self._values))

    @property
    def n_bytes(self) -> int:
        """Bytes of all values. Raises StoreError when closed."""
        self._must_be_open()
        return self._n_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError when the values take other bytes than are counted."""
        with self._lock:
            there = sum(value.size for value in self._values.values())
            assert there == self._n_bytes <= self.capacity, (
                f"{there} bytes, {self._n_bytes} counted"
            )

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._closed = True
            self._values.clear()
            self._n_bytes = 0

    def _put(self, put: Put) -> Outcome:
        n = n_bytes_of(put.data)
        if n == 0:
            return Outcome("failed", f"{put.key}: a value has at least one byte")
        with self._lock:
            if put.key in self._values:
                return present(put.key)
            free = self.capacity - self._n_bytes
            if n > free:
                return Outcome("full", f"{put.key}: {n} bytes, {free} of {self.capacity} are free")
            value = np.empty(n, np.uint8)
            copy_in(put.data, value)
            self._values[put.key] = value
            self._n_bytes += n
        return DONE

    def _get(self, get: Get) -> Outcome:
        value = self._values.get(get.key)
        if value is None:
            return absent(get.key)
        bad = outside(get, value.size)
        if bad is not None:
            return bad
        copy_out(value[get.offset :], get.into)
        return checked(get)

    def _look(self, key: str) -> int | Outcome:
        value = self._values.get(key)
        return absent(key) if value is None else value.size

    def _discard(self, key: str) -> Outcome:
        with self._lock:
            value = self._values.pop(key, None)
            if value is not None:
                self._n_bytes -= value.size
        return DONE

    def _must_be_open(self) -> None:
        if self._closed:
            raise StoreError("the tier in memory is closed", hint="open it again; it is empty then")
