"""The contract of a tier: a place where the bytes of chunks rest.

A tier keeps values by key and knows nothing of tensors; `kvweave.store.record` says what the bytes
mean. A value never changes: it is created once, whole, and is there until it is discarded. So several
engines can use one tier, nothing that is read can be of two minds, and a put that is repeated does no
harm. Add a tier in its own file and give it to the conformance suite, ``tests/store/conformance.py``.

::

    put -> done | exists | full | late | failed       done, exists: whole, from here on
    get -> done | missing | late | wrong | failed
    look -> bytes | missing | late | failed
    discard -> done | late | failed                   done: it is not there (any more)

``missing`` is knowledge, ``late`` and ``failed`` are doubt: the value may well be there, and nobody may
conclude from them that it is not. ``wrong`` is about the bytes that were read. Who may discard: the
engine that owns the tier, and the collector (`kvweave sweep`) where engines share it.

All methods may be called from any thread, and return by their deadline plus half a second whatever the
device or the server does.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import xxhash

OutcomeState = Literal["done", "exists", "missing", "late", "full", "wrong", "failed"]
PAGE = 4096  # bytes: what direct reads want offsets, lengths and addresses to be multiples of


class Outcome(NamedTuple):
    """How one `Put` or `Get` of a batch went."""

    state: OutcomeState
    why: str = ""
    """For people: what happened, unless it is done."""

    @property
    def ok(self) -> bool:
        return self.state == "done"


DONE = Outcome("done")
LATE = Outcome("late", "the deadline has passed")


class Put(NamedTuple):
    """A value to create: the bytes of ``data``, one buffer after the other."""

    key: str
    data: Sequence[memoryview]


class Get(NamedTuple):
    """Bytes to read: ``into`` is filled, one buffer after the other, from ``offset`` on.

    ``sums`` are the xxh3_64 of what each buffer is to hold; None where the caller checks itself.
    Unless the outcome is ``done`` the buffers hold anything.
    """

    key: str
    offset: int
    into: Sequence[memoryview]
    sums: Sequence[int] | None = None


class Tier(Protocol):
    """Keeps values by key. A key is 1 to 200 characters of ``a-z 0-9 . - _``.

    A deadline is a time of `time.monotonic`; what is not there by then is ``late``. Buffers of a `Get`
    that is late may still be written to, those of a `Put` still be read: the caller lets go of them
    and never uses them for anything else. Without a deadline a call still ends: ``failed`` after a
    time of the tier's own.
    """

    name: str
    shared: bool
    """Others may use it too: an engine does not discard here."""

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Create values. Where one of that key is, it stays as it is: ``exists``.

        ``durable`` ones, those that exist included, survive a crash of this machine, as far as the
        tier can promise that. What is ``late`` or ``failed`` may come to be after all.
        """
        ...

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        """Fill the callers' buffers. A range that leaves the value is ``wrong``."""
        ...

    def look(self, keys: Sequence[str], *, deadline: float | None = None) -> list[int | Outcome]:
        """Return the bytes of each value, or why that cannot be told; one round trip for all."""
        ...

    def discard(self, keys: Sequence[str], *, deadline: float | None = None) -> list[Outcome]:
        """Remove values; a reader that has begun gets the old bytes or ``missing``."""
        ...

    def keys(self) -> Iterator[str]:
        """Yield the keys of the values that are there, in any order. Raises StoreError."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes taken where the values rest, those lost to alignment included. Raises StoreError."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        ...

    def close(self) -> None:
        """Let go of files and connections; doing it twice does nothing."""
        ...


def refused(is_closed: bool, deadline: float | None) -> Outcome | None:
    """Return why nothing is begun: the tier is closed, or the deadline has passed."""
    if is_closed:
        return Outcome("failed", "the tier is closed")
    return LATE if deadline is not None and time.monotonic() >= deadline else None


def checked(get: Get) -> Outcome:
    """Return ``done`` if the filled buffers hold what the caller wants, else ``wrong``."""
    for i, (buffer, wanted) in enumerate(zip(get.into, get.sums or (), strict=False)):
        if xxhash.xxh3_64_intdigest(buffer) != wanted:
            return Outcome("wrong", f"{get.key}: the checksum of buffer {i} differs")
    return DONE
