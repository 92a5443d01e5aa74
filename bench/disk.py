"""How fast is the disk tier, against bare O_DIRECT reads of the same files, and what does it cost?"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import sqlite3
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
import xxhash

from kvweave.store.tier.base import PAGE, Get, Put
from kvweave.store.tier.extents import Extents
from kvweave.store.tier.memory import Arena
from kvweave.store.tier.slab import Slab
from kvweave.store.tier.slab_segments import aligned

KIB, MIB, GB = 1 << 10, 1 << 20, 1e9
BLOCKS = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
THREADS = (1, 4)
BATCH = 16  # requests of one call of `get`


class Store:
    """A slab full of values of one size, and where they lie, for reading them without it."""

    def __init__(self, directory: Path, block: int, total: int) -> None:
        self.block = block
        self.n = max(8, total // block)
        self.slab = Slab(directory, 3 * total + (64 << 20), segment=256 << 20)
        self.value = aligned(block)
        self.value[:] = np.random.default_rng(0).integers(0, 255, block, dtype=np.uint8)
        self.sum = xxhash.xxh3_64_intdigest(self.value)
        self.put_all()
        slots = [self.slab._index[key] for key in self.keys]
        self.places = [(slot.segment.file, (slot.page + 1) * PAGE) for slot in slots]

    @property
    def keys(self) -> list[str]:
        return [f"v{i}" for i in range(self.n)]

    def put_all(self) -> None:
        """Write every value, and wait until all is on the disk."""
        data = [self.value.data]
        for key in self.keys:
            (outcome,) = self.slab.put([Put(key, data)])
            assert outcome.ok, outcome
        assert self.slab.flush() == ""

    def write_bare(self) -> None:
        """Write the same bytes to the same places, without the slab."""
        for file, position in self.places:
            os.pwritev(file, [self.value], position)
        for file in {file for file, _ in self.places}:
            os.fdatasync(file)


Share = tuple[list[int], np.ndarray]  # numbers of values, and memory for a batch of them
Work = Callable[[], None]


def ways_to_read(store: Store) -> dict[str, Callable[[Share], Work]]:
    """Return what prepares a thread's reads; the work that comes out of it is what is timed."""
    block, slab = store.block, store.slab

    def bare(share: Share) -> Work:
        into = [share[1][:block].data]
        places = [store.places[i] for i in share[0]]

        def work() -> None:
            for file, position in places:
                assert os.preadv(file, into, position) == block

        return work

    def one_by_one(share: Share, sums: list[int] | None = None) -> Work:
        into = [share[1][:block].data]
        batches = [[Get(f"v{i}", 0, into, sums)] for i in share[0]]

        def work() -> None:
            for batch in batches:
                assert slab.get(batch)[0].ok

        return work

    def in_batches(share: Share) -> Work:
        chosen, memory = share
        into = [[memory[j * block : (j + 1) * block].data] for j in range(BATCH)]
        batches = [
            [Get(f"v{i}", 0, into[j]) for j, i in enumerate(chosen[first : first + BATCH])]
            for first in range(0, len(chosen), BATCH)
        ]

        def work() -> None:
            for batch in batches:
                assert all(outcome.ok for outcome in slab.get(batch))

        return work

    return {
        "bare": bare,
        "slab": one_by_one,
        "slab, checked": partial(one_by_one, sums=[store.sum]),
        "slab, batches": in_batches,
    }


def run(works: Sequence[Work]) -> None:
    """Run each in a thread."""
    if len(works) == 1:
        works[0]()
        return
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure_reads(store: Store, n_threads: int, rounds: int, total: int) -> dict[str, Any]:
    """Read ``total`` bytes in random order by every way, one after the other, ``rounds`` times."""
    ways = ways_to_read(store)
    if n_threads > 1:
        del ways["slab, batches"]  # one caller's batch is read by four threads anyway
    memory = [aligned(BATCH * store.block) for _ in range(n_threads)]
    for space in memory:
        space[:] = 1  # the pages are there before the clock runs
    count = max(n_threads * 4, total // store.block)
    clock: dict[str, list[float]] = {way: [] for way in ways}
    cpu: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(rounds + 1):
        rng = random.Random(turn)
        shares = [
            ([rng.randrange(store.n) for _ in range(count // n_threads)], space) for space in memory
        ]
        names = list(ways)
        for way in names[turn % len(names) :] + names[: turn % len(names)]:
            works = [ways[way](share) for share in shares]
            took = common.took(partial(run, works), torch.device("cpu"))
            if turn:  # the first one only warms up
                clock[way].append(took[0])
                cpu[way].append(took[1])
    n_bytes = count // n_threads * n_threads * store.block
    return {
        "gb_per_s": {way: common.median([n_bytes / GB / t for t in clock[way]]) for way in ways},
        "of_bare": {way: ratio(clock["bare"], clock[way]) for way in ways if way != "bare"},
        "cpu_s_per_gb": {way: common.median([t * GB / n_bytes for t in cpu[way]]) for way in ways},
    }


def ratio(bare: Sequence[float], ours: Sequence[float]) -> dict[str, float]:
    """Return our speed over the bare one, round by round: median, and the two quartiles."""
    each = sorted(b / o for b, o in zip(bare, ours, strict=True))
    n = len(each)
    return {
        "median": round(statistics.median(each), 3),
        "low": round(each[n // 4], 3),
        "high": round(each[(3 * n) // 4 if n > 1 else 0], 3),
    }


def measure_writes(store: Store, rounds: int) -> dict[str, Any]:
    """Write all values and sync, bare and through the slab, in turns."""
    clock: dict[str, list[float]] = {"bare": [], "slab": []}
    cpu: dict[str, list[float]] = {"bare": [], "slab": []}
    device = torch.device("cpu")
    for turn in range(rounds):
        ways = {"bare": store.write_bare, "slab": store.put_all}
        for way in sorted(ways, reverse=bool(turn % 2)):
            times = common.took(ways[way], device)
            clock[way].append(times[0])
            cpu[way].append(times[1])
        slots = [store.slab._index[key] for key in store.keys]
        store.places = [(slot.segment.file, (slot.page + 1) * PAGE) for slot in slots]
    gb = store.n * store.block / GB
    return {
        "gb_per_s": {way: common.median([gb / t for t in clock[way]]) for way in clock},
        "of_bare": ratio(clock["bare"], clock["slab"]),
        "cpu_s_per_gb": {way: common.median([t / gb for t in cpu[way]]) for way in cpu},
    }


def microseconds(times_ns: Sequence[int]) -> dict[str, float]:
    ordered = sorted(times_ns)
    at = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: ordered[min(len(ordered) - 1, int(len(ordered) * q))] / 1000 for name, q in at.items()
    }


def measure_deletes(directory: Path, n: int) -> dict[str, Any]:
    """Delete values one by one, while the rows' removals are committed behind it."""
    slab = Slab(directory, n * 2 * PAGE + (1 << 20), segment=256 << 20)
    keys = [f"k{i}" for i in range(n)]
    data = [memoryview(bytes(PAGE))]
    assert all(outcome.ok for outcome in slab.put([Put(key, data) for key in keys]))
    assert slab.flush() == ""
    random.Random(0).shuffle(keys)
    times = []
    for key in keys:
        start = time.perf_counter_ns()
        slab.delete((key,))
        times.append(time.perf_counter_ns() - start)
    start = time.perf_counter()
    assert slab.flush() == ""
    flushed = time.perf_counter() - start
    assert slab.n_bytes == 0
    slab.check_integrity()
    slab.close()
    return {"n": n, "delete_us": microseconds(times), "flush_after_s": round(flushed, 4)}


def measure_restart(directory: Path, n: int, rounds: int) -> dict[str, Any]:
    """Open a slab of ``n`` values; their rows are true, their bytes are not read by opening."""
    n_pages = 3
    with contextlib.closing(Slab(directory, 3 * n * n_pages * PAGE)) as slab:
        assert slab.put([Put("first", [memoryview(b"1")])])[0].ok
        per_segment = next(iter(slab._space._segments.values())).n_pages // n_pages - 1
    rows = []
    for i in range(n):
        segment, place = divmod(i, per_segment)
        rows.append((f"{i:032x}", segment + 1, (place + 1) * n_pages, 2 * PAGE, i + 2))
    for number in range(2, rows[-1][1] + 1):
        first = directory / "seg-000001.slab"
        with (directory / f"seg-{number:06d}.slab").open("wb") as file:
            file.truncate(first.stat().st_size)
    with contextlib.closing(sqlite3.connect(directory / "slab.sqlite")) as db, db:
        db.executemany("INSERT INTO slots VALUES(?,?,?,?,?)", rows)
    times = []
    for _ in range(rounds):
        start, cpu = time.perf_counter(), time.process_time()
        slab = Slab(directory, 3 * n * n_pages * PAGE)
        times.append((time.perf_counter() - start, time.process_time() - cpu))
        assert sum(1 for _ in slab.keys()) == n + 1
        assert slab.n_bytes == n * n_pages * PAGE + 2 * PAGE
        slab.close()
    return {
        "n": n,
        "open_s": common.median([t for t, _ in times]),
        "open_cpu_s": common.median([c for _, c in times]),
    }


def measure_accounting(n: int) -> dict[str, Any]:
    """Put and delete ``n`` tiny values at random: what is counted is what is there."""
    rng = random.Random(0)
    arena, held, taken = Arena(64 << 20, segment=4 << 20), [], 0
    data = memoryview(bytes(1024))
    sizes: dict[str, int] = {}
    start = time.perf_counter()
    for i in range(n):
        if held and rng.random() < 0.5:
            j = rng.randrange(len(held))
            held[j], held[-1] = held[-1], held[j]
            key = held.pop()
            arena.delete((key,))
            taken -= sizes.pop(key)
        else:
            key, size = f"k{i}", rng.randrange(1, 1025)
            assert arena.put([Put(key, [data[:size]])])[0].ok
            held.append(key)
            sizes[key] = -(-size // 64) * 64
            taken += sizes[key]
        if i % 50_000 == 0:
            assert arena.n_bytes == taken
    each = (time.perf_counter() - start) / n * 1e6
    arena.check_integrity()
    arena.delete(held)
    arena.check_integrity()
    left = arena.n_bytes
    assert left == 0 and arena.stats()["largest_hole"] <= 4 << 20
    extents, starts = Extents(), []
    extents.grow(1 << 24)
    for _ in range(min(n, 200_000)):
        units = rng.choice((17, 65, 129, 257, 1025))
        offset = extents.allocate(units)
        if offset is not None:
            starts.append((offset, units))
    rng.shuffle(starts)
    cpu = time.process_time()
    for offset, units in starts:
        extents.free(offset, units)
    extents.merge()
    freed = (time.process_time() - cpu) / max(1, len(starts)) * 1e6
    assert extents.largest_hole == 1 << 24
    return {"n": n, "bytes_left": left, "each_us": round(each, 2), "free_us_cpu": round(freed, 2)}


def fio(path: Path, block: int, jobs: int, seconds: float) -> float | None:
    """Return GB/s of random reads by fio, for information; None without fio."""
    found = shutil.which("fio")
    if found is None:
        return None
    command = [
        found, "--name=r", f"--filename={path}", "--readonly", "--rw=randread", "--direct=1",
        "--ioengine=psync", f"--bs={block}", f"--numjobs={jobs}", "--thread", "--group_reporting",
        "--time_based", f"--runtime={seconds}", "--output-format=json",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    return common.median([json.loads(done.stdout)["jobs"][0]["read"]["bw_bytes"] / GB])


@contextlib.contextmanager
def folder(under: Path | None) -> Iterator[Path]:
    """Lend an empty directory."""
    with tempfile.TemporaryDirectory(dir=under, prefix="kvweave-disk-") as name:
        yield Path(name)


def bench(options: argparse.Namespace) -> dict[str, Any]:
    """Return every figure."""
    quick, total, rounds = options.quick, options.mib * MIB, options.rounds
    blocks = BLOCKS[:1] if quick else BLOCKS
    found: dict[str, Any] = {"read": {}, "write": {}, "fio_gb_per_s": {}}
    with common.progress("disk", len(blocks) * (len(THREADS) + 1) + 3) as step:
        for block in blocks:
            name = f"{block // KIB} KiB"
            with folder(options.dir) as directory:
                store = Store(directory, block, 8 * total)
                for n_threads in THREADS:
                    key = f"{name}, {n_threads} thread{'s' * (n_threads > 1)}"
                    found["read"][key] = measure_reads(store, n_threads, rounds, total)
                    path = next(directory.glob("seg-*"))
                    speed = None if quick else fio(path, block, n_threads, 1.5)
                    if speed is not None:
                        found["fio_gb_per_s"][key] = speed
                    step(key)
                found["write"][name] = measure_writes(store, 2 if quick else max(3, rounds // 3))
                step(f"write {name}")
                direct = not store.slab.stats()["buffered"]
                store.slab.close()
        parts: dict[str, Callable[[Path], dict[str, Any]]] = {
            "delete": lambda d: measure_deletes(d, 200 if quick else 20_000),
            "restart": lambda d: measure_restart(d, 500 if quick else 100_000, 1 if quick else 5),
            "accounting": lambda d: measure_accounting(2_000 if quick else 1_000_000),
        }
        for part, call in parts.items():
            with folder(options.dir) as directory:
                found[part] = call(directory)
            step(part)
    return found | {"direct": direct, "rounds": rounds, "mib_each": options.mib}


def tables(found: dict[str, Any]) -> list[Any]:
    """Return what is printed."""
    reads = [
        (
            key,
            each["gb_per_s"]["bare"],
            *(each["of_bare"].get(way, {"median": "-"})["median"] for way in
              ("slab", "slab, checked", "slab, batches")),
            *(each["cpu_s_per_gb"][way] for way in ("bare", "slab", "slab, checked")),
            found["fio_gb_per_s"].get(key, "-"),
        )
        for key, each in found["read"].items()
    ]  # fmt: skip
    columns = ("reads past the page cache", "bare GB/s", "slab / bare", "checked", "batches",
               "bare CPU s/GB", "slab", "checked", "fio GB/s")  # fmt: skip
    writes = [
        (key, each["gb_per_s"]["bare"], each["of_bare"]["median"], *each["cpu_s_per_gb"].values())
        for key, each in found["write"].items()
    ]
    deletes, restart, counted = found["delete"], found["restart"], found["accounting"]
    others = [
        ("delete, us: p50, p99", deletes["delete_us"]["p50"], deletes["delete_us"]["p99"]),
        (f"opening {restart['n']:,} values, s: clock, CPU", restart["open_s"], restart["open_cpu_s"]),
        (f"{counted['n']:,} puts and deletes: bytes left, us each", counted["bytes_left"], counted["each_us"]),
        ("freeing an extent, merged, us of CPU", counted["free_us_cpu"], ""),
    ]  # fmt: skip
    return [
        common.table("Reading", columns, reads),
        common.table(
            "Writing, synced; the slab's with checksum",
            ("", "bare GB/s", "slab / bare", "bare CPU s/GB", "slab CPU s/GB"),
            writes,
        ),
        common.table("Other", ("", "", ""), others),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, print tables, and write bench/results/disk.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11, help="each measures every way once")
    parser.add_argument("--mib", type=int, default=64, help="read by each way in each round")
    parser.add_argument(
        "--dir", type=Path, help="on the disk to measure (default: for temporary files)"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.mib = 1, 1
    machine = common.machine(torch.device("cpu"))
    result = bench(options) | {"machine": machine}
    common.report(result, tables(result), options, "disk")


if __name__ == "__main__":
    main()
