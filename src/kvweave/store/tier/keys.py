"""What every tier checks before it does anything: keys and ranges."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import Get, Outcome

_KEY = re.compile(r"[a-z0-9._-]{1,200}")


def is_key(text: str) -> bool:
    """Tell whether a value can be called this."""
    return _KEY.fullmatch(text) is not None


def check_key(key: str) -> None:
    """Raise InvalidArgument unless ``key`` is 1 to 200 characters of ``a-z 0-9 . - _``."""
    if not is_key(key):
        hint = "a key is 1 to 200 characters of a-z 0-9 . - _"
        raise InvalidArgument("key", f"{key[:80]!r} is not a key", hint)


def check_keys(keys: Iterable[str]) -> None:
    """Raise InvalidArgument unless all of them are keys."""
    for key in keys:
        check_key(key)


def pages(keys: Sequence[str], n: int) -> Iterator[Sequence[str]]:
    """Cut keys into groups of ``n``, the last one of what is left."""
    return (keys[start : start + n] for start in range(0, len(keys), n))


def n_bytes_of(buffers: Sequence[memoryview]) -> int:
    """Return the bytes of all buffers together."""
    return sum(buffer.nbytes for buffer in buffers)


def outside(get: Get, size: int) -> Outcome | None:
    """Return ``wrong`` if the range of ``get`` leaves a value of ``size`` bytes, else None."""
    end = get.offset + n_bytes_of(get.into)
    if 0 <= get.offset and end <= size:
        return None
    return Outcome("wrong", f"{get.key}: bytes {get.offset} to {end} of a value of {size} bytes")


def absent(key: str) -> Outcome:
    """Return the outcome of a key that is not there."""
    return Outcome("missing", f"{key} is not here")


def present(key: str) -> Outcome:
    """Return the outcome of a put that found a value."""
    return Outcome("exists", f"{key} is here already")
