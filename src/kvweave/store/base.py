"""The contract of a tier: a place where the bytes of chunks rest.

A tier keeps values by key and knows nothing of tensors; `kvweave.store.record` says what the bytes
mean. It may lose a value or be slow; it never returns wrong bytes: `get` compares what it read with
the checksums that the caller brings, and says ``wrong`` instead of ``done``. Add a tier in its own
file and give it to the conformance suite, ``tests/store/conformance.py``.

::

    put -> done                      from here on the value is whole or missing, never torn
    get -> done | missing | late | wrong | failed
    delete                           at once for us; a reader that has begun gets the old bytes or
                                     ``missing``, never another value's bytes

All methods may be called from any thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, Protocol

import xxhash

OutcomeState = Literal["done", "missing", "late", "full", "wrong", "failed"]
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


class Put(NamedTuple):
    """A value to store: the bytes of ``data``, one buffer after the other."""

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

    A deadline is a time of `time.monotonic`; what is not there by then is ``late``, and its buffers
    are not written any more once the call has returned.
    """

    name: str

    def put(
        self, puts: Sequence[Put], *, durable: bool = False, deadline: float | None = None
    ) -> list[Outcome]:
        """Store values; each replaces the one of its key, or leaves it when it is not ``done``.

        ``durable`` ones survive a crash of this machine, as far as the tier can promise that.
        """
        ...

    def get(self, gets: Sequence[Get], *, deadline: float | None = None) -> list[Outcome]:
        """Fill the callers' buffers. A range that leaves the value is ``wrong``."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Let go of values; unknown keys are ignored."""
        ...

    def size(self, key: str) -> int | None:
        """Return the bytes of a value, None when it is not there."""
        ...

    def keys(self) -> Iterator[str]:
        """Yield the keys of the values that are there, in any order."""
        ...

    @property
    def n_bytes(self) -> int:
        """Bytes taken where the values rest, those lost to alignment included."""
        ...

    def check_integrity(self) -> None:
        """Raise AssertionError when accounting and content differ."""
        ...

    def close(self) -> None:
        """Write what is not written and let go of files and connections."""
        ...


def checked(get: Get) -> Outcome:
    """Return ``done`` if the filled buffers hold what the caller wants, else ``wrong``."""
    for i, (buffer, wanted) in enumerate(zip(get.into, get.sums or (), strict=False)):
        if xxhash.xxh3_64_intdigest(buffer) != wanted:
            return Outcome("wrong", f"{get.key}: the checksum of buffer {i} differs")
    return DONE
