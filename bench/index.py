"""Measure the chunk index: load, stat, rm and memory with many chunks, journal on disk."""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np

from kvweave.chunk.files import Files
from kvweave.chunk.identity import ChunkId, ModelFingerprint, chunk_digest
from kvweave.chunk.table import Table

RESULTS = Path(__file__).parent / "results" / "index.json"
FINGERPRINT = ModelFingerprint("bench", "w", "t", "float32", "default")
ADDED_TOGETHER = 10_000


def resident_bytes() -> int:
    """Return the memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def progress(text: str) -> None:
    """Tell on stderr what is being done."""
    print(text, file=sys.stderr, flush=True)


def name_of(i: int) -> str:
    """Return the i-th name: a thousand chats of many turns."""
    return f"chat/{i % 1000:03d}/u-{i // 1000:06d}"


def fill(path: Path, n: int, n_tokens: int) -> float:
    """Put ``n`` chunks of ``n_tokens`` and return the seconds it took."""
    rows = np.random.default_rng(0)
    start = time.perf_counter()
    with Table(path) as table:
        for first in range(0, n, ADDED_TOGETHER):
            tokens = rows.integers(0, 150_000, (ADDED_TOGETHER, n_tokens), dtype=np.uint32)
            with table.transaction():
                for i in range(first, min(first + ADDED_TOGETHER, n)):
                    row = tokens[i - first]
                    digest = chunk_digest(FINGERPRINT, b"", row)
                    id, _ = table.add(row, digest=digest, kind="user", n_bytes=4096, tier="disk")
                    table.bind(name_of(i), id)
            if first % (20 * ADDED_TOGETHER) == 0:
                progress(f"  put {first:,} of {n:,}")
    return time.perf_counter() - start


def microseconds(call: Callable[[int], object], indices: list[int]) -> dict[str, float]:
    """Return median, 99th percentile and maximum of the calls, in microseconds."""
    times = []
    for i in indices:
        start = time.perf_counter_ns()
        call(i)
        times.append((time.perf_counter_ns() - start) / 1000)
    times.sort()
    return {
        "median": round(statistics.median(times), 2),
        "p99": round(times[len(times) * 99 // 100], 2),
        "max": round(times[-1], 2),
    }


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    call()
    return round(time.perf_counter() - start, 3)


def measure(path: Path, n: int, n_calls: int) -> dict[str, object]:
    """Load the index at ``path`` and return every figure."""
    gc.collect()
    before = resident_bytes()
    start, cpu_start = time.perf_counter(), time.process_time()
    table = Table(path)
    load_s, load_cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    gc.collect()
    memory = resident_bytes() - before
    progress(f"  loaded in {load_s:.2f} s")
    with table:
        files = Files(table)
        chosen = random.Random(1).sample(range(n), min(4 * n_calls, n))
        part = len(chosen) // 4
        some, added = chosen[:part], chosen[part : 2 * part]
        digests = [os.urandom(16) for _ in range(n_calls)]

        def put(i: int) -> None:
            with table.transaction():
                id, _ = table.add([i, 1, 2], digest=digests.pop())
                table.bind(f"new/{i}", id)

        figures: dict[str, object] = {
            "load_s": round(load_s, 3),
            "load_cpu_s": round(load_cpu_s, 3),
            "bytes_per_entry": round(memory / n),
            "stat_us": microseconds(lambda i: files.stat(name_of(i)), some),
            "tokens_us": microseconds(lambda i: table.tokens(ChunkId(i + 1)), some),
            "get_us": microseconds(lambda i: table.get(ChunkId(i + 1)), some),
            "get_again_us": microseconds(lambda i: table.get(ChunkId(i + 1)), some),
            "lookup_us": microseconds(lambda i: table.lookup(name_of(i)), some),
            "lookup_none_us": microseconds(lambda i: table.lookup(f"none/{i}"), some),
            "tier_us": microseconds(lambda i: table.update(ChunkId(i + 1), tier="ram"), some),
            "touch_us": microseconds(lambda i: table.touch([ChunkId(i + 1)]), some),
            "put_us": microseconds(put, added),
            "cp_us": microseconds(lambda i: files.cp(name_of(i), f"copy/{i}"), some),
            "mv_us": microseconds(lambda i: files.mv(f"copy/{i}", f"moved/{i}"), some),
            "pin_us": microseconds(lambda i: files.pin(name_of(i)), some),
            "rm_us": microseconds(lambda i: files.rm(name_of(i)), chosen[2 * part : 3 * part]),
            "iterate_us_each": round(1e6 * seconds(lambda: deque(table, 0)) / n, 2),
            "ls_glob_s": seconds(lambda: files.ls("chat/42?/u-*1", limit=100)),
            "ls_prefix_s": seconds(lambda: files.ls("chat/421/")),
            "du_by_tier_s": seconds(files.du),
            "du_below_s": seconds(lambda: files.du("chat/", by="dir")),
        }
    return figures


def machine() -> dict[str, object]:
    """Return what the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    load = os.getloadavg()[0]
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    git = ["git", "rev-parse", "HEAD"]
    here = Path(__file__).parent
    commit = subprocess.run(git, capture_output=True, text=True, cwd=here, check=False)
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "load_average": round(load, 2),
        "python": platform.python_version(),
        "commit": commit.stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Run it, print a table, and write bench/results/index.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=1_000_000, help="how many chunks")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each chunk")
    parser.add_argument("--calls", type=int, default=5000, help="calls each figure is made of")
    parser.add_argument("--json", action="store_true", help="print JSON, not a table")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where to write the result")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "index.sqlite"
        # In another process, so that what filling leaves behind is not counted as memory of load.
        progress(f"putting {options.n:,} chunks of {options.tokens} tokens")
        child = os.fork()
        if child == 0:
            took = fill(path, options.n, options.tokens)
            (Path(directory) / "took").write_text(str(took))
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit("filling failed")
        fill_s = float((Path(directory) / "took").read_text())
        size = path.stat().st_size
        progress("measuring")
        figures = measure(path, options.n, options.calls)
    figures = {"put_many_us_each": round(1e6 * fill_s / options.n, 2), **figures}
    figures["file_bytes_per_entry"] = round(size / options.n)
    result = {"n": options.n, "tokens": options.tokens, **figures, "machine": machine()}
    text = json.dumps(result, indent=2)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(text + "\n")
    if options.json:
        print(text)
        return
    print(f"{options.n:,} chunks of {options.tokens} tokens")
    for key, value in figures.items():
        shown = (
            "  ".join(f"{k} {v:g}" for k, v in value.items()) if isinstance(value, dict) else value
        )
        print(f"  {key:22} {shown}")


if __name__ == "__main__":
    main()
