"""Does the page-tier simulator say how long a decode waits? One trace, played twice.

`kvweave.probe.tiers.Residence` decides which pages are in memory, step by step. The simulator has a clock of its
own: so long a fetch, so long a page, so many bytes a second. The other player moves the pages: records of one
page of one head on the disk tier, read by the engine's own mover (`Mover.load`: heads, checksums, the thread
that reads), and the clock on the wall says how long a step waited until they were there.

The simulator's three numbers are fitted to fetches of other sizes, and of numbers of pages drawn at random:
nothing that a trace asks for is used. A fit's fetch follows each step, so that a machine that becomes busier does so for
both, and both come after the pause in which a step is computed: without it a fetch takes two thirds. The heads of all records
were read before, as they are of what was used lately, and pages are on the disk before they can go.

Of a step's waits the median of the rounds counts, as of the fetches of a fit; the interval of the ratio is a
bootstrap over runs of steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from numpy.typing import NDArray
from study import score

from kvweave import Sampling
from kvweave.keep import POLICIES
from kvweave.probe import PageBudget, PageTrace, Recording, record
from kvweave.probe.recalling import ranking
from kvweave.probe.tiers import Residence, Setting, SlowTier, play
from kvweave.probe.trace import Bools
from kvweave.store.codec import parse
from kvweave.store.kv import KV, LayerShape
from kvweave.store.level import Level
from kvweave.store.mover import Mover
from kvweave.store.record.transfer import Expected
from kvweave.store.tier.disk import Disk
from kvweave.store.tier.guarded import Guarded

KIB = 1 << 10
TOKENS = 16  # of a page
TRACES = (("qwen3", "program"), ("gemma3", "walk"))
SIZES = (16, 32, 128)  # KiB of a page, in the fit; traces have others
COUNTS = (1, 3, 8, 20, 50, 120)  # pages of a fetch, in the fit
ASKED = (64,)  # KiB of a page, of traces
WAYS = {
    "recent": {},
    "milestone, ahead": {"ahead": True},
    "milestone, by a deadline": {"ahead": True, "deadline": 1.0},  # of a step
}
FIRST = 150  # fetches of the first fit
BLOCK = 20  # steps of a run that is drawn
DRAWS = 2000
Floats = NDArray[np.float64]


class Pages:
    """Records of pages of one size on the disk tier, and the mover over them."""

    def __init__(self, folder: Path, n_bytes: int, n: int) -> None:
        width = n_bytes // (TOKENS * 2 * 2)  # keys and values in half precision
        self.shape, self.n_bytes = (LayerShape(1, width, 1, width),), n_bytes
        level = Level(Guarded(Disk(folder)), parse("raw"), "model", POLICIES["lru"](1 << 40))
        self.mover, self.level = Mover([level], self.about), level
        kv = KV.empty(self.shape, TOKENS, torch.float16, torch.device("cpu"))
        for tensor in (*kv.k, *kv.v):
            tensor.normal_()
        for id in range(n):
            self.mover.save(id, kv)
        self.warm(n)

    def about(self, id: int) -> Expected:
        """Return what the record of a page is of."""
        return Expected(f"{id:032x}", TOKENS, self.shape, torch.float16)

    def warm(self, n: int) -> None:
        """Have the heads of the first ``n`` records read."""
        heads = self.level.heads({id: self.about(id) for id in range(n)}, time.monotonic() + 60)
        assert all(not isinstance(head, tuple) for head in heads.values())

    def fetch(self, ids: list[int]) -> Callable[[], None]:
        """Begin to read pages; what is returned waits for them."""
        coming = self.mover.load(ids)
        assert len(coming) == len(ids)

        def wait() -> None:
            for each in coming.values():
                each.whole()

        return wait

    def seconds(self, ids: list[int]) -> float:
        """Return how long a fetch is waited for."""
        begun = time.perf_counter()
        self.fetch(ids)()
        return time.perf_counter() - begun

    def close(self) -> None:
        """Let go of the files."""
        self.mover.close()


def fitted(cells: dict[tuple[int, int], list[float]], each: bool = True) -> SlowTier:
    """Return the tier whose times are nearest, relatively, to the medians of ``cells`` {(bytes, pages): seconds};
    without ``each`` one in which a page costs nothing but its bytes."""
    took = np.array([statistics.median(each) for each in cells.values()])
    rows = np.array([[1.0, n, n * size] for size, n in cells]) / took[:, None]
    left, found = np.array([True, each, True]), np.zeros(3)
    while True:  # none is less than nothing: what would be is left out, and the rest fitted again
        found[:] = 0
        found[left] = np.linalg.lstsq(rows[:, left], np.ones(len(took)), rcond=None)[0]
        if (found >= 0).all():
            break
        left &= found > 0
    latency, a_page, a_byte = found.tolist()
    return SlowTier("disk", 1 / max(a_byte, 1e-15), latency, a_page)


def played(
    trace: PageTrace, pages: Pages, name: str, how: tuple[SlowTier, Setting, Callable[[], None]]
) -> Floats:
    """Return the seconds that each step waits while the engine's tiers bring its pages; behind each something
    else is called."""
    tier, setting, behind = how
    each = ranking(name, len(trace.header.heads), trace.n_pages)
    fast = Residence(trace.n_pages, each, tier, setting, len(trace.header.heads))
    stalls = []
    for mass, access in trace.each():
        begun = time.perf_counter()
        coming = pages.fetch(numbers(fast.brings(access.shape[1]), trace.n_pages))
        ahead = 0.0
        if setting.ahead:
            time.sleep(max(0.0, setting.decode - (time.perf_counter() - begun)))  # the step before
            begun = time.perf_counter()
            coming()
            ahead = time.perf_counter() - begun
        missing = numbers(fast.misses(access), trace.n_pages)
        stalls.append(ahead + (pages.seconds(missing) if missing else 0.0))
        fast.ends(mass, access)
        behind()
    return np.array(stalls)


def numbers(which: Bools, n_pages: int) -> list[int]:
    """Return the records of some pages [head, page]."""
    heads, at = np.nonzero(which)
    found: list[int] = (heads * n_pages + at).tolist()
    return found


def ratio(simulated: Floats, measured: Floats, seed: int = 0) -> list[float]:
    """Return simulated over measured seconds, in all, with its interval of 95 %."""
    runs = np.array_split(np.arange(len(measured)), max(1, len(measured) // BLOCK))
    sums = np.array([[simulated[run].sum(), measured[run].sum()] for run in runs])
    drawn = sums[np.random.default_rng(seed).integers(0, len(sums), (DRAWS, len(sums)))].sum(1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], [2.5, 97.5])
    return [round(float(x), 3) for x in (simulated.sum() / measured.sum(), low, high)]


@contextmanager
def traces(options: argparse.Namespace, folder: Path) -> Iterator[dict[str, PageTrace]]:
    """Record what the study's models read while they think."""
    found = {}
    for model, family in TRACES[: options.traces]:
        (task,) = score.tasks(family, 1, options.words, "stalls")
        with score.opened(model) as engine:
            words = score.ids(engine, task.words)
            sampling = Sampling(max_tokens=options.words, ignore_eos=True)
            path = folder / f"{model}.kvt"
            how = Recording(page=8)
            found[f"{model} {family}"] = record(engine, words[: task.start], path, sampling, how)
    yield found


class Stalls:
    """Traces and pages of each size; a round fits, and plays every trace in every way."""

    def __init__(
        self, options: argparse.Namespace, folder: Path, some: dict[str, PageTrace]
    ) -> None:
        self.options, self.some = options, some
        self.n = max(len(t.header.heads) * t.n_pages for t in some.values())
        self.fits = {k: Pages(folder / f"f{k}", k * KIB, self.n) for k in SIZES}
        self.pages = {k: Pages(folder / f"p{k}", k * KIB, self.n) for k in ASKED}
        self.cells: dict[tuple[int, int], list[float]] = {}
        self.waits: dict[tuple[str, str, int], list[Floats]] = {}
        self.rng = np.random.default_rng(0)
        self.settings: dict[tuple[str, int], Setting] = {}
        self.tier = SlowTier()

    def fetch(self) -> None:
        """Fetch some pages of a size that no trace has."""
        size, n = int(self.rng.choice(SIZES)), int(self.rng.choice(COUNTS))
        ids = self.rng.permutation(self.n)[:n].tolist()
        self.cells.setdefault((size * KIB, n), []).append(self.fits[size].seconds(ids))

    def set_out(self) -> None:
        """Say what the ways are, by a first fit: a step of decoding takes as long as eight pages."""
        for _ in range(FIRST):
            time.sleep(0.005)
            self.fetch()
        self.tier = fitted(self.cells)
        for way, more in WAYS.items():
            for size in ASKED:
                decode = self.tier.seconds(8 * size * KIB, 8)
                deadline = more.get("deadline") and decode
                ahead = bool(more.get("ahead"))
                budget = PageBudget(self.options.budget)
                self.settings[way, size] = Setting(size * KIB, decode, 0.0, ahead, deadline, budget)

    def round(self, step: Callable[[str], None]) -> None:
        """Play everything once."""
        for label, trace in self.some.items():
            for (way, size), how in self.settings.items():
                name = way.split(",")[0]
                found = played(trace, self.pages[size], name, (self.tier, how, self.fetch))
                self.waits.setdefault((label, way, size), []).append(found)
                step(f"{label}, {way}")

    def rows(self) -> list[dict[str, Any]]:
        """Return what came out, a trace and way each, by all fetches of the fit."""
        found, self.tier, plain = [], fitted(self.cells), fitted(self.cells, False)
        for (label, way, size), each in self.waits.items():
            trace, name = self.some[label], way.split(",")[0]
            said = play(trace, name, self.tier, self.settings[way, size])
            measured = np.median(each, axis=0)
            both = ratio(said.stalls, measured)
            bytes_only = play(trace, name, plain, self.settings[way, size]).stalls
            again = [ratio(said.stalls, one)[0] for one in each]
            found.append({
                "trace": label, "way": way, "page_kib": size, "steps": trace.n_steps,
                "misses_per_step": round(float(said.misses.mean()), 2),
                "measured_ms": round(1e3 * float(measured.mean()), 4),
                "simulated_ms": round(1e3 * said.stall, 4),
                "ratio": both, "rounds": again, "bytes_only": ratio(bytes_only, measured)[0],
                "correlation": round(float(np.corrcoef(said.stalls, measured)[0, 1]), 3),
                "within": bool(abs(both[0] - 1) <= 0.2),
            })  # fmt: skip
        return found

    def close(self) -> None:
        """Let go of the files."""
        for each in (*self.fits.values(), *self.pages.values()):
            each.close()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return the result."""
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        with traces(options, folder) as some:
            stalls = Stalls(options, folder, some)
            stalls.set_out()
            total = options.rounds * len(some) * len(stalls.settings)
            with common.progress("plays", total) as step:
                for _ in range(options.rounds):
                    stalls.round(step)
            rows, tier = stalls.rows(), stalls.tier
            residual = [
                tier.seconds(n * size, n) / statistics.median(took) - 1
                for (size, n), took in stalls.cells.items()
            ]
            stalls.close()
    return {
        "setup": {
            "words": options.words, "rounds": options.rounds, "budget": options.budget, "fit_kib": SIZES,
            "fit_pages": COUNTS, "fits": sum(map(len, stalls.cells.values())),
        },
        "tier": {
            "latency_us": round(1e6 * tier.latency, 1), "each_us": round(1e6 * tier.each, 1),
            "gb_per_s": round(tier.bandwidth / 1e9, 3),
            "fit_error": round(float(np.abs(residual).mean()), 3),
        },
        "rows": rows,
        "machine": common.machine(torch.device("cpu")),
    }  # fmt: skip


def main() -> None:
    """Read the command line."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--words", type=int, default=400, help="of a recorded chain")
    made.add_argument("--rounds", type=int, default=5, help="each plays everything once")
    made.add_argument("--traces", type=int, default=len(TRACES))
    made.add_argument("--budget", type=float, default=0.4, help="share of pages in memory")
    made.add_argument("--dir", type=Path, help="on the disk to measure")
    made.add_argument("--json", action="store_true", help="print JSON, not a table")
    made.add_argument("--out", type=Path, help="where to write the result")
    options = made.parse_args()
    torch.set_num_threads(1)
    found = measure(options)
    head = ["trace", "way", "misses a step", "measured, ms", "simulated, ms", "ratio"]
    body = [
        [
            r["trace"], r["way"], r["misses_per_step"], r["measured_ms"], r["simulated_ms"],
            "{} [{}, {}]".format(*r["ratio"]),
        ]
        for r in found["rows"]
    ]  # fmt: skip
    title = f"stalls; the tier: {json.dumps(found['tier'])}"
    common.report(found, [common.table(title, head, body)], options, "stalls")


if __name__ == "__main__":
    main()
