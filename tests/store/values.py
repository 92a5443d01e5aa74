"""Values of which every eight bytes tell whose they are, and ways to store, read and compare them."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import xxhash

from kvweave.store.tier.base import PAGE, Get, Outcome, Put, Tier

PATIENCE = 30.0  # seconds after which a call counts as hanging
SLACK = 0.5  # seconds a call may return behind its deadline


def content(key: str, n: int, version: int = 0) -> bytes:
    """Return ``n`` bytes of which every eight tell the key, the version and where they stand."""
    seed = xxhash.xxh3_64_intdigest(f"{key}/{version}".encode())
    words = np.arange(n // 8 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (words ^ np.uint64(seed)).tobytes()[:n]


def aligned(n: int, shift: int = 0) -> memoryview:
    """Return ``n`` writable bytes that begin ``shift`` bytes behind a page boundary, all 0xA5."""
    space = np.full(n + 2 * PAGE, 0xA5, np.uint8)
    start = -space.ctypes.data % PAGE + shift
    return memoryview(space[start : start + n])  # type: ignore[arg-type]


def cut(data: bytes, sizes: Sequence[int]) -> list[memoryview]:
    """Return ``data`` as buffers of these sizes, the rest in a last one."""
    ends = np.cumsum([0, *sizes])
    assert ends[-1] <= len(data)
    parts = [data[a:b] for a, b in itertools.pairwise(ends)]
    return [memoryview(part) for part in [*parts, data[ends[-1] :]] if part]


def put_one(tier: Tier, key: str, data: bytes, **options: object) -> Outcome:
    (outcome,) = tier.put([Put(key, [memoryview(data)])], **options)  # type: ignore[arg-type]
    return outcome


def store(tier: Tier, key: str, data: bytes, **options: object) -> None:
    outcome = put_one(tier, key, data, **options)
    assert outcome.ok, outcome


def asking(key: str, data: bytes, offset: int = 0, n: int | None = None, shift: int = 0) -> Get:
    """Return a `Get` of ``n`` bytes that hopes for those of ``data``, with their checksum."""
    n = len(data) - offset if n is None else n
    wanted = xxhash.xxh3_64_intdigest(data[offset : offset + n])
    return Get(key, offset, [aligned(n, shift)], [wanted])


def filled(get: Get) -> bytes:
    return b"".join(bytes(buffer) for buffer in get.into)


def assert_holds(tier: Tier, key: str, data: bytes) -> None:
    """The whole value is ``data``; read with checksums, and compared here too."""
    get = asking(key, data)
    (outcome,) = tier.get([get])
    assert outcome.ok, (key, outcome)
    assert filled(get) == data, key
    assert tier.look([key]) == [len(data)], key


def assert_gone(tier: Tier, key: str) -> None:
    """Nothing is there, and the tier knows."""
    (outcome,) = tier.get([Get(key, 0, [aligned(10)])])
    assert outcome.state == "missing" and key in outcome.why, outcome
    (found,) = tier.look([key])
    assert isinstance(found, Outcome) and found.state == "missing", found


@contextlib.contextmanager
def ends_by(deadline: float) -> Iterator[None]:
    """What is inside ends half a second behind its deadline, a time of `time.monotonic`."""
    yield
    behind = time.monotonic() - deadline
    assert behind < SLACK, f"{behind:.2f} s behind the deadline"


def in_time(call: Callable[[], object]) -> object:
    """Return what ``call`` returns; fail if it raises or takes longer than anybody would wait."""
    result: list[object] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    assert not thread.is_alive(), "the call hangs"
    assert not errors, f"the call raised {errors[0]!r}"
    return result[0]


def together(calls: Sequence[Callable[[], None]]) -> None:
    """Run the calls in a thread each and raise what one of them raised."""
    errors: list[BaseException] = []

    def guard(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guard, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * PATIENCE)
        assert not thread.is_alive(), "a thread hangs"
    if errors:
        raise errors[0]


def assert_untouched(gets: Sequence[Get], seconds: float = 0.8) -> None:
    """What the buffers hold now is what they hold a while later."""
    before = [filled(get) for get in gets]
    time.sleep(seconds)
    assert [filled(get) for get in gets] == before, "written after the call returned"


def small_device(patch: pytest.MonkeyPatch, directory: Path, capacity: int) -> None:
    """Have the device of a directory of values take no more than so many bytes, in pages."""
    pwrite = os.pwrite

    def write(file: int, data: memoryview, at: int) -> int:
        sizes = [path.stat().st_size for path in directory.glob("*.kv")]
        if sum(-(-n // PAGE) * PAGE for n in [*sizes, at + len(data)]) > capacity:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data, at)

    patch.setattr(os, "pwrite", write)
