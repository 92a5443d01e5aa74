"""Many reads under way at once, against reads of the same files one after the other.

python -m pytest tests/store/test_aio.py
"""

from __future__ import annotations

import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash

from kvweave.store.pages import buffer
from kvweave.store.tier import aio
from kvweave.store.tier.base import PAGE, Get, Outcome, Put
from kvweave.store.tier.disk import Disk

FILES = 50
SIZES = (1, 100, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE, 16 * PAGE, 700 * PAGE, 700 * PAGE + 5)
Call = Callable[..., int]

if not aio.works():
    pytest.skip(
        "no asynchronous reads here: they are made one after the other", allow_module_level=True
    )


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Disk, dict[str, bytes]]]:
    disk, rng = Disk(tmp_path_factory.mktemp("aio")), random.Random(1)
    values = {f"v{i}": rng.randbytes(SIZES[i % len(SIZES)]) for i in range(FILES)}
    for key, value in values.items():
        assert disk.put([Put(key, [memoryview(value)])])[0].ok
    yield disk, values
    disk.close()


def drawn(values: dict[str, bytes], rng: random.Random) -> tuple[Get, str]:
    """Draw a read, and what becomes of it."""
    if rng.random() < 0.05:
        return Get("none", 0, [buffer(PAGE)]), "missing"
    key = rng.choice(list(values))
    size = len(values[key])
    start = rng.randrange(size + 1) if rng.random() < 0.5 else 0
    if rng.random() < 0.7:
        start -= start % PAGE
    n = rng.randrange(size - start + 1) if rng.random() < 0.3 else size - start
    parts, left = [], n
    while left:
        part = min(left, rng.choice((left, PAGE, 10, 5 * PAGE)))
        parts.append(part)
        left -= part
    if rng.random() < 0.5:  # one after the other in memory
        whole = buffer(n)
        into = [whole[sum(parts[:i]) :][:part] for i, part in enumerate(parts)]
    else:
        into = [buffer(part) for part in parts]
    at, sums = start, []
    for part in parts:
        sums.append(xxhash.xxh3_64_intdigest(values[key][at : at + part]))
        at += part
    state = "done"
    if rng.random() < 0.05 and sums:
        sums[rng.randrange(len(sums))] ^= 1
        state = "wrong"
    elif rng.random() < 0.05:
        into.append(buffer(1))
        sums.append(0)
        start, state = (start + 1 if n == 0 else start), "wrong"
    return Get(key, start, into, sums if rng.random() < 0.9 or state == "wrong" else None), state


def refuses(rng: random.Random) -> Call:
    """Return the system's call as one that takes fewer than it is asked for, or none."""
    real = aio._call

    def call(number: int, *values: int) -> int:
        if number == aio._SUBMIT and rng.random() < 0.5:
            if rng.random() < 0.5:
                return -errno.EAGAIN
            return real(number, values[0], rng.randint(1, values[1]), values[2])
        return real(number, *values)

    return call


@pytest.mark.parametrize("way", ["all", "some refused", "none", "without a cache to pass"])
def test_batches_are_as_one_read_after_the_other(
    values: tuple[Disk, dict[str, bytes]], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, content = values
    rng = random.Random(way)
    if way == "some refused":
        monkeypatch.setattr(aio, "_call", refuses(rng))
    if way == "none":
        monkeypatch.setattr(aio, "_taken", lambda: None)
    if way == "without a cache to pass":
        disk = Disk(disk.directory, direct=False)
    for _ in range(30):
        drew = [drawn(content, rng) for _ in range(rng.choice((1, 2, 7, 40, 150)))]
        outcomes = disk.get([get for get, _ in drew])
        for (get, state), outcome in zip(drew, outcomes, strict=True):
            assert outcome.state == state, (get.key, get.offset, outcome.why)
            if state == "done":
                read = b"".join(get.into)
                assert read == content[get.key][get.offset :][: len(read)]
    if way != "none":
        assert all(not queue._begun for queue in aio._idle)
    assert len(aio._idle) <= aio.KEPT


def test_an_error_of_one_read_is_not_the_others(
    values: tuple[Disk, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the file that ended meanwhile, and by the device."""
    disk, content = values
    disk.put([Put("cut", [memoryview(bytes(8 * PAGE))])])
    keys = [key for key, value in content.items() if len(value) % PAGE == 0]
    gets = [Get(key, 0, [buffer(len(content[key]))]) for key in ("cut", *keys) if key in content]
    cut = Get("cut", 0, [buffer(8 * PAGE)])
    assert all(o.ok for o in disk.get([cut, *gets]))
    os.truncate(disk.path("cut"), 3 * PAGE)
    first, *rest = disk.get([cut, *gets])
    assert first.state == "failed" and "shorter" in first.why and all(o.ok for o in rest)
    real = aio._Queue._done
    monkeypatch.setattr(
        aio._Queue, "_wait", lambda self: iter([(real(self, next(iter(self._begun))), -errno.EIO)])
    )
    failed = disk.get(gets[:3])
    assert {o.state for o in failed} == {"failed"} and "Input/output" in failed[0].why
    aio._idle.clear()  # the system would tell the next reads what it was not asked here


def test_memory_outlives_whoever_is_interrupted(values: tuple[Disk, dict[str, bytes]]) -> None:
    """Else the device would write to what others have by then."""
    disk, content = values
    ended: list[int] = []

    def stopped(get: Get) -> Outcome:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvweave.store.tier.disk.checked", stopped)
        real = aio._libc.syscall

        def syscall(number: int, *values: object) -> int:
            if number == aio._DESTROY:
                ended.append(number)
            return int(real(number, *values))

        patch.setattr(aio._libc, "syscall", syscall)
        aio._idle.clear()
        gc.collect()
        ended.clear()
        with pytest.raises(KeyboardInterrupt):
            disk.get(
                [
                    Get(key, 0, [buffer(len(value) + PAGE)[: len(value)]])
                    for key, value in content.items()
                ]
            )
        gc.collect()
        assert ended and not aio._idle, "a queue with reads under way is for nobody else"
    key = next(key for key, value in content.items() if len(value) == 700 * PAGE)
    assert disk.get([Get(key, 0, [buffer(len(content[key]))])])[0].ok


def after(call: int, do: Callable[[], object]) -> Callable[..., int]:
    """Return the system's calls, with ``do`` called once behind one of ``call``."""
    real, left = aio._libc.syscall, [do]

    def syscall(number: int, *values: object) -> int:
        result = int(real(number, *values))
        if number == call and left:
            left.pop()()
        return result

    return syscall


def raises(error: type[BaseException]) -> Callable[[], None]:
    def handler() -> None:
        raise error("a signal's handler")

    return handler


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError, MemoryError])
@pytest.mark.parametrize("call", [aio._SETUP, aio._SUBMIT, aio._WAIT])
def test_when_an_error_is_heard_of_no_read_is_under_way(
    values: tuple[Disk, dict[str, bytes]],
    monkeypatch: pytest.MonkeyPatch,
    call: int,
    error: type[BaseException],
) -> None:
    """TimeoutError, which many a handler raises, is an OSError; it is not the system's refusal."""
    disk, content = values
    aio._idle.clear()
    monkeypatch.setattr(aio._libc, "syscall", after(call, raises(error)))
    made: list[aio._Queue] = []
    real = aio._Queue.read
    monkeypatch.setattr(
        aio._Queue, "read", lambda self, pieces: (made.append(self), real(self, pieces))[1]
    )
    with pytest.raises(error, match="handler"):
        disk.get([Get(key, 0, [buffer(len(value))]) for key, value in content.items()])
    assert not aio._held and not aio._idle and not any(queue.is_open for queue in made)


def test_who_is_interrupted_twice_lets_go_of_what_has_ended_only(
    values: tuple[Disk, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the second, while the first has the reads under way waited for."""
    disk, content = values
    aio._idle.clear()
    destroyed = after(aio._DESTROY, raises(KeyboardInterrupt))
    monkeypatch.setattr(aio._libc, "syscall", destroyed)
    monkeypatch.setattr(aio._libc, "syscall", after(aio._SUBMIT, raises(KeyboardInterrupt)))
    gets = [Get(key, 0, [buffer(len(value))]) for key, value in content.items()]
    with pytest.raises(KeyboardInterrupt):
        disk.get(gets)
    assert aio._held, "nobody knows that they have ended: their memory is for nobody"
    aio._held.clear()
    assert all(o.ok for o in disk.get(gets))


def test_where_the_system_does_not_say_they_are_read_again(
    values: tuple[Disk, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, content = values
    aio._idle.clear()
    real = aio._call
    monkeypatch.setattr(
        aio, "_call", lambda n, *v: -errno.EINVAL if n == aio._WAIT else real(n, *v)
    )
    gets = [Get(key, 0, [buffer(len(value))]) for key, value in content.items()]
    assert all(o.ok for o in disk.get(gets)) and not aio._idle and not aio._held
    assert [bytes(get.into[0]) for get in gets] == list(content.values())


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_read_only_is_not_written_to(values: tuple[Disk, dict[str, bytes]], n: int) -> None:
    disk, content = values
    key = next(key for key, value in content.items() if len(value) == PAGE)
    into = buffer(PAGE)
    into[:] = bytes(PAGE)
    with pytest.raises(BufferError, match="read-only"):
        disk.get([Get(key, 0, [into.toreadonly()])] * n)
    with pytest.raises(BufferError, match="read-only"):
        disk.get([Get(key, 0, [into.toreadonly()[:10], into.toreadonly()[10:]])] * n)
    assert into == bytes(PAGE)


def test_signals_break_no_read_off(values: tuple[Disk, dict[str, bytes]]) -> None:
    disk, content = values
    large = [key for key, value in content.items() if len(value) == 700 * PAGE]
    heard: list[int] = []
    old = signal.signal(signal.SIGALRM, lambda *_: heard.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    try:
        for _ in range(20):
            into = [buffer(700 * PAGE) for _ in large]
            gets = [Get(key, 0, [to]) for key, to in zip(large, into, strict=True)]
            assert all(o.ok for o in disk.get(gets))
            assert all(to == content[key] for key, to in zip(large, into, strict=True))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert heard


def test_threads_have_queues_of_their_own(values: tuple[Disk, dict[str, bytes]]) -> None:
    disk, content = values
    wrong: list[object] = []

    def reads(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(15):
            drew = [drawn(content, rng) for _ in range(20)]
            states = [o.state for o in disk.get([get for get, _ in drew])]
            if states != [state for _, state in drew]:
                wrong.append((states, drew))

    threads = [threading.Thread(target=reads, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKED = """
import os, sys
from pathlib import Path
from kvweave.store.pages import buffer
from kvweave.store.tier import aio
from kvweave.store.tier.base import Get, Put
from kvweave.store.tier.disk import Disk

disk = Disk(Path(sys.argv[1]))
for i in range(9):
    disk.put([Put(f"v{i}", [memoryview(bytes([i]) * 8192)])])

def good():
    into = [buffer(8192) for _ in range(9)]
    found = disk.get([Get(f"v{i}", 0, [to]) for i, to in enumerate(into)])
    return all(o.ok for o in found) and all(to == bytes([i]) * 8192 for i, to in enumerate(into))

assert good() and aio._idle
child = os.fork()
if not child:
    os._exit(0 if good() else 1)
assert os.waitpid(child, 0)[1] == 0
assert good()
real, forked = aio._libc.syscall, []

def syscall(number, *values):
    result = real(number, *values)
    if number == aio._SUBMIT and not forked:
        forked.append(os.fork())
    return result

aio._libc.syscall = syscall  # a signal's handler forks while reads are under way
is_good = good()
if not forked[0]:
    os._exit(0 if is_good else 1)
assert is_good and os.waitpid(forked[0], 0)[1] == 0
"""


def test_a_fork_reads_by_queues_of_its_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, tmp_path], check=True, timeout=60)


FEW = """
import os, resource, sys
from pathlib import Path
from kvweave.store.pages import buffer
from kvweave.store.tier.base import Get, Put
from kvweave.store.tier.disk import Disk

disk, n = Disk(Path(sys.argv[1])), 200
values = [bytes([i]) * (8192 if i % 3 else 9000) for i in range(n)]
for i in range(n):
    disk.put([Put(f"v{i}", [memoryview(values[i])])])
assert all(o.ok for o in disk.get([Get(f"v{i}", 0, [buffer(len(values[i]))]) for i in range(n)]))
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
assert disk.put([Put("new", [memoryview(values[1])])])[0].ok
for _ in range(3):
    into = [buffer(len(value)) for value in values]
    found = disk.get([Get(f"v{i}", 0, [to]) for i, to in enumerate(into)])
    assert all(o.ok for o in found) and into == values, next(o.why for o in found if not o.ok)
"""


@pytest.mark.parametrize(
    "limit", ["100", "20"]
)  # files: some more than are read at once, and fewer
def test_files_that_nobody_reads_are_closed_for_those_that_are_wanted(
    tmp_path: Path, limit: str
) -> None:
    subprocess.run([sys.executable, "-c", FEW, tmp_path, limit], check=True, timeout=60)
