"""What is known to lie on a tier: the records of chunks, those of no chunk we know, and their bytes."""

from __future__ import annotations

import threading
from typing import NamedTuple

from kvweave.keep.base import Policy
from kvweave.store.record.transfer import digest_of


class Held(NamedTuple):
    """A chunk on a level."""

    key: str  # of its record
    n_bytes: int


class Book:
    """Records by chunk id. A record may be that of several chunks, one after the other: the same
    text, forgotten and put again. ``lock`` guards it."""

    def __init__(self, policy: Policy, lock: threading.RLock) -> None:
        self.policy, self._lock = policy, lock
        self.held: dict[int, Held] = {}
        self.n_bytes = 0  # of all that is known to be there
        self.strays: dict[str, dict[str, int]] = {}  # digest -> key -> bytes: of no chunk we know
        self.users: dict[str, set[int]] = {}  # key -> chunks it is the record of

    def note(self, id: int, key: str, n_bytes: int, *, strays: bool) -> None:
        """A chunk has this record now; an older one of it is a stray, if ``strays``."""
        with self._lock:
            old = self.held.get(id)
            if old is not None and old.key != key:
                self.forget(id, as_stray=strays)
                old = None
            if old is None:
                self.policy.missed(id, n_bytes)
            self.unstray(key)
            self.n_bytes += n_bytes - (old.n_bytes if old is not None else 0)
            self.held[id] = Held(key, n_bytes)
            self.users.setdefault(key, set()).add(id)
            self.policy.used(id, n_bytes)

    def forget(self, id: int, *, as_stray: bool = False) -> Held | None:
        """Do not know any more that a chunk is here; return what was known."""
        with self._lock:
            held = self.held.pop(id, None)
            if held is None:
                return None
            self.n_bytes -= held.n_bytes
            users = self.users[held.key]
            users.discard(id)
            if not users:
                del self.users[held.key]
                if as_stray:
                    self.stray(held.key, held.n_bytes)
            self.policy.dropped(id)
            return held

    def stray(self, key: str, n: int) -> None:
        """Note a record of no chunk we know."""
        with self._lock:
            self.unstray(key)
            self.strays.setdefault(digest_of(key), {})[key] = n
            self.n_bytes += n

    def unstray(self, key: str) -> None:
        """Do not know a stray any more."""
        with self._lock:
            keys = self.strays.get(digest_of(key), {})
            self.n_bytes -= keys.pop(key, 0)
            if not keys:
                self.strays.pop(digest_of(key), None)

    def others(self, key: str) -> set[str]:
        """Do not know other records of a record's chunk any more, in another codec; return them."""
        with self._lock:
            gone = set(self.strays.get(digest_of(key), ()))
            for each in gone:
                self.unstray(each)
            return gone

    def clear(self, n_bytes: int | None = None) -> tuple[set[str], int]:
        """Do not know strays any more, of up to so many bytes; return their keys and bytes."""
        with self._lock:
            gone, freed = set(), 0
            for key, n in [item for keys in self.strays.values() for item in keys.items()]:
                if n_bytes is not None and freed >= n_bytes:
                    break
                self.unstray(key)
                gone.add(key)
                freed += n
            return gone, freed

    def check_integrity(self) -> None:
        """Raise AssertionError when bytes or users do not add up."""
        strays = sum(n for keys in self.strays.values() for n in keys.values())
        total = sum(held.n_bytes for held in self.held.values()) + strays
        assert total == self.n_bytes, f"{total} bytes held, {self.n_bytes} counted"
        users = {(key, id) for key, ids in self.users.items() for id in ids}
        assert users == {(held.key, id) for id, held in self.held.items()}, "users of records"
