"""How fast is the disk tier against bare O_DIRECT reads and writes of the same bytes, what does a load
of an engine cost, and how long does a tier that takes its time hold the engine's thread?"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
import xxhash
from rich.table import Table

from kvweave.keep import POLICIES
from kvweave.keep.base import Facts
from kvweave.store.codec import parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.pages import buffer
from kvweave.store.record.transfer import Expected
from kvweave.store.tier.base import Get, Outcome, Put
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.guarded import Guarded
from kvweave.store.tier.memory import Memory

KIB, MIB, GB = 1 << 10, 1 << 20, 1e9
BLOCKS = (64 * KIB, 256 * KIB, MIB, 4 * MIB)
BATCH = 16  # reads in one call, as an engine's loads have them
SHAPES = (LayerShape(8, 64, 8, 64),) * 16  # 32 KiB a token in float16, as of a 1 B model
Work = Callable[[], None]


def cpu() -> float:
    """Return CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(work: Work, n_bytes: int) -> dict[str, float]:
    """Return GB/s and CPU seconds a GB of moving so many bytes."""
    begun, used = time.perf_counter(), cpu()
    work()
    took, used = time.perf_counter() - begun, cpu() - used
    return {"gb_per_s": n_bytes / took / GB, "cpu_s_per_gb": used / (n_bytes / GB)}


def compared(ways: dict[str, Work], n_bytes: int, rounds: int) -> dict[str, Any]:
    """Time ways in turns; the first is what the others are divided by."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, work in ways.items():
            runs[name].append(timed(work, n_bytes))
    first = next(iter(ways))
    found: dict[str, Any] = {}
    for name, each in runs.items():
        found[name] = {
            key: round(statistics.median(run[key] for run in each), 3)
            for key in ("gb_per_s", "cpu_s_per_gb")
        }
        ratios = [a["gb_per_s"] / b["gb_per_s"] for a, b in zip(each, runs[first], strict=True)]
        found[name]["of_bare"] = round(statistics.median(ratios), 3)
    return found


def reads(directory: Path, block: int, total: int, rounds: int) -> dict[str, Any]:
    """Read values of one size: bare, one a call, and in batches, every checksum compared."""
    n = max(BATCH, total // block)
    disk = Disk(directory / str(block))
    tier = Guarded(disk, disk.apart)
    value = buffer(block)
    value[:] = os.urandom(block)
    total_sum = xxhash.xxh3_64_intdigest(value)
    for i in range(n):
        assert tier.put([Put(f"v{i}", [value])])[0].ok
    files = [os.open(disk.path(f"v{i}"), os.O_RDONLY | os.O_DIRECT) for i in range(n)]
    memory = [buffer(block) for _ in range(BATCH)]
    for each in memory:
        each[:] = bytes(block)  # faults are taken before the clock runs

    def bare() -> None:
        for i, file in enumerate(files):
            assert os.preadv(file, [memory[i % BATCH]], 0) == block

    def get(i: int) -> Get:
        return Get(f"v{i}", 0, [memory[i % BATCH]], [total_sum])

    def single() -> None:
        for i in range(n):
            assert tier.get([get(i)], deadline=time.monotonic() + 60)[0].ok

    def batches() -> None:
        for start in range(0, n, BATCH):
            gets = [get(i) for i in range(start, min(start + BATCH, n))]
            assert all(o.ok for o in tier.get(gets, deadline=time.monotonic() + 60))

    found = compared({"bare": bare, "one a call": single, "batches": batches}, n * block, rounds)
    for file in files:
        os.close(file)
    tier.discard([f"v{i}" for i in range(n)])
    tier.close()
    return found


def writes(directory: Path, block: int, total: int, rounds: int) -> dict[str, Any]:
    """Create files of one size: bare, and values."""
    n = max(8, total // block)
    place = directory / f"w{block}"
    disk = Disk(place)
    value = buffer(block)
    value[:] = os.urandom(block)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_DIRECT

    def bare() -> None:
        for i in range(n):
            file = os.open(place / f"b{i}", flags, 0o600)
            assert os.pwrite(file, value, 0) == block
            os.close(file)

    def values() -> None:
        for i in range(n):
            assert disk.put([Put(f"v{i}", [value])])[0].ok

    runs: dict[str, list[dict[str, float]]] = {"bare": [], "values": []}
    for _ in range(rounds):
        for name, work in (("bare", bare), ("values", values)):
            runs[name].append(timed(work, n * block))
            for path in place.iterdir():
                path.unlink()
    disk.close()
    ratios = [
        a["gb_per_s"] / b["gb_per_s"] for a, b in zip(runs["values"], runs["bare"], strict=True)
    ]
    return {
        name: {"gb_per_s": round(statistics.median(run["gb_per_s"] for run in each), 3)}
        for name, each in runs.items()
    } | {"of_bare": round(statistics.median(ratios), 3)}


def rows(n: int) -> KV:
    """Return KV of ``n`` tokens."""
    made = KV.empty(SHAPES, n, torch.float16, torch.device("cpu"))
    for tensor in (*made.k, *made.v):
        tensor.normal_()
    return made


def about(n: int) -> Callable[[int], Expected]:
    """Return what is expected of chunks of ``n`` tokens."""
    return lambda id: Expected(f"{id:032x}", n, SHAPES, torch.float16)


def loads(directory: Path, n_tokens: int, n: int, rounds: int) -> dict[str, Any]:
    """Load chunks as an engine does, heads, checksums and all, against bare reads of their files."""
    disk = Disk(directory / f"l{n_tokens}")
    level = Level(Guarded(disk, disk.apart), parse("raw"), "model", POLICIES["lru"](1 << 40))
    mover = Mover([level], about(n_tokens))
    kv = rows(n_tokens)
    for id in range(n):
        mover.save(id, kv)
    size = level.n_bytes
    files = [
        os.open(disk.path(held.key), os.O_RDONLY | os.O_DIRECT) for held in level.held.values()
    ]
    memory = buffer(size // n)
    memory[:] = bytes(size // n)

    def bare() -> None:
        for file in files:
            assert os.preadv(file, [memory], 0) == size // n

    def load() -> None:
        level.records._heads.clear()
        for each in mover.load(range(n)).values():
            each.k[len(SHAPES) - 1]

    found = compared({"bare": bare, "loaded": load}, size, rounds)
    for file in files:
        os.close(file)
    mover.close()
    return found


class Slow(Memory):
    """A tier a network away."""

    def _wait(self) -> None:
        time.sleep(0.005)

    def get(self, gets: list[Get], *, deadline: float | None = None) -> list[Outcome]:
        self._wait()
        return super().get(gets, deadline=deadline)

    def look(self, keys: list[str], *, deadline: float | None = None) -> list[int | Outcome]:
        self._wait()
        return super().look(keys, deadline=deadline)


class SlowShared(Slow):
    """One that others use, too, so that what it has is not known."""

    shared = True


def waits(n: int, rounds: int) -> dict[str, float]:
    """Return how long the engine's thread is held by ``n`` chunks of a tier that takes 5 ms a call."""
    tier, kv = SlowShared(1 << 30), rows(16)
    first = Level(tier, parse("raw"), "model", POLICIES["lru"](1 << 40))
    for id in range(n):
        assert first.put(id, about(16)(id), kv).ok
    times = []
    for _ in range(rounds):
        mover = Mover([Level(tier, parse("raw"), "model", POLICIES["lru"](1 << 40))], about(16))
        begun = time.perf_counter()
        mover.find(range(n))
        arriving = mover.load(range(n))
        times.append(time.perf_counter() - begun)
        assert len(arriving) == n
        for each in arriving.values():
            each.k[len(SHAPES) - 1]
    return {"n": n, "ms": round(1e3 * statistics.median(times), 2)}


def victims(n_groups: int, rounds: int) -> dict[str, float]:
    """Return what the default policy takes to say who goes, for each chunk that comes."""
    policy = POLICIES["declared"](1 << 40)
    n = 10 * n_groups

    def comes(i: int) -> None:
        kind = ("document", "memory", "turn")[i % 3]
        policy.missed(i, 1000 + i % n)
        policy.used(i, 1000 + i % n, Facts(0.01, kind, f"s{i % n_groups}"))

    for i in range(n):
        comes(i)
    took, all_at_once = 0.0, []
    for i in range(n, n + rounds * 200):
        begun = time.perf_counter()
        goes = next(iter(policy.victims()))
        took += time.perf_counter() - begun
        policy.evicted(goes)
        comes(i)
        if i % 20 == 0:
            begun = time.perf_counter()
            list(policy.victims())
            all_at_once.append((time.perf_counter() - begun) / n)
    each = {"us": took / (rounds * 200), "us_all_at_once": statistics.median(all_at_once)}
    return {"groups": n_groups} | {name: round(1e6 * s, 2) for name, s in each.items()}


def tables(found: dict[str, Any]) -> list[Table]:
    """Return what was found, for people."""
    made = []
    for what, title in (("read", "Reading values"), ("load", "Loading chunks, as an engine does")):
        lines = [
            (name, way, x["gb_per_s"], x["of_bare"], x["cpu_s_per_gb"])
            for name, ways in found[what].items()
            for way, x in ways.items()
        ]
        made.append(common.table(title, ("", "way", "GB/s", "of bare", "CPU s/GB"), lines))
    lines = [
        (f"writing {n}", f"{ways['of_bare']} of bare writes") for n, ways in found["write"].items()
    ]
    n, ms = found["waits"]["n"], found["waits"]["ms"]
    lines.append((f"{n} chunks that are 5 ms away", f"{ms} ms of the engine's thread"))
    lines.append((f"{found['victims']['groups']} groups", f"{found['victims']['us']} us a victim"))
    return [*made, common.table("Other", ("", ""), lines)]


def main(arguments: list[str] | None = None) -> None:
    """Run it, print tables, and write bench/results/disk.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="each measures every way once")
    parser.add_argument(
        "--dir", type=Path, help="on the disk to measure (default: for temporary files)"
    )
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    rounds, total = (1, 4 * MIB) if options.quick else (options.rounds, 256 * MIB)
    blocks = BLOCKS[:1] if options.quick else BLOCKS
    sizes = ((64, 4),) if options.quick else ((64, 64), (512, 16))  # tokens, chunks
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        place = Path(name)
        result: dict[str, Any] = {
            "read": {f"{b // KIB} KiB": reads(place, b, total, rounds) for b in blocks},
            "write": {f"{b // KIB} KiB": writes(place, b, total // 4, rounds) for b in blocks},
            "load": {
                f"{n} chunks of {tokens} tokens": loads(place, tokens, n, rounds)
                for tokens, n in sizes
            },
            "waits": waits(20 if options.quick else 200, rounds),
            "victims": victims(300, rounds),
            "machine": common.machine(torch.device("cpu")),
        }
    common.report(result, tables(result), options, "disk")


if __name__ == "__main__":
    main()
