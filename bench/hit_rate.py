"""How much of a changed prompt is found again in the store, and how long does looking take?

A context is stored, changed as agents and retrieval change theirs (texts.py), and asked for again. Given is
the share of the new prompt's tokens that need no prefill, by what finds them:

prefix-16       blocks of 16 tokens from the start on, to the first that differs (vLLM)
fixed-256       blocks of 256 of the stored prompt, looked for at every offset (LMCache)
undeclared      each message a chunk, long ones cut by content, `Matcher.find` on the new prompt
names           each turn and document is a named chunk; a changed one is computed again
names + find    the same, and `Matcher.find` on what changed
ceiling         what is in the store at all: kept parts, and runs of 16 tokens that also stand there
"""

from __future__ import annotations

import argparse
import statistics
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import machine, progress, report, table, took
from numpy.typing import NDArray
from rich.table import Table
from texts import CASES, Case, Ids, RandomText, ZipfText

from kvweave.chunk.cut import by_content, cut
from kvweave.chunk.identity import ChunkId
from kvweave.chunk.match import BLOCK, Matcher
from kvweave.chunk.rolling import as_tokens, rolling

Mask = NDArray[np.bool_]
CPU = torch.device("cpu")
LONG = 2048  # tokens of a message above which it is cut
WIDTH = 16
ODD = 0x2545F4914F6CDD1D
GOAL = 5e-3  # seconds to find what is known of 131,072 tokens
Times = dict[str, list[tuple[float, float]]]


def by_prefix(case: Case) -> Mask:
    """Blocks of 16 up to the first that differs."""
    old, prompt = case.old, case.prompt
    n = min(len(old), len(prompt))
    differ = np.flatnonzero(old[:n] != prompt[:n])
    same = int(differ[0]) if len(differ) else n
    return np.arange(len(prompt)) < same // 16 * 16


def by_blocks(case: Case, n: int = 256) -> Mask:
    """Blocks of the stored prompt wherever they stand."""
    known = rolling(as_tokens(case.old), n, ODD)[::n]
    prompt = case.prompt
    covered, end = np.zeros(len(prompt), bool), 0
    for at in np.flatnonzero(np.isin(rolling(as_tokens(prompt), n, ODD), known)):
        if at >= end:
            end = at + n
            covered[at:end] = True
    return covered


class Store:
    """Chunks in a matcher, on top of what it already knows."""

    def __init__(self, known: Sequence[Ids] = ()) -> None:
        self.matcher = Matcher(WIDTH)
        self.sizes: dict[ChunkId, int] = {}
        for tokens in known:
            self.add(tokens)

    def add(self, tokens: Sequence[int] | Ids) -> ChunkId:
        """Enter a chunk under the next id."""
        id = ChunkId(max(self.sizes, default=0) + 1)
        self.matcher.add(id, tokens)
        self.sizes[id] = len(tokens)
        return id

    def find(self, chunks: Sequence[Sequence[int] | Ids], prompt: Ids) -> Mask:
        """Return what of ``prompt`` is found with ``chunks`` in the store, which are removed again."""
        ids = [self.add(tokens) for tokens in chunks]
        covered = np.zeros(len(prompt), bool)
        for match in self.matcher.find(prompt):
            n = match.stop - match.start
            if n >= WIDTH or n == self.sizes[match.id]:
                covered[match.start : match.stop] = True
        for id in ids:
            self.matcher.remove(id)
            del self.sizes[id]
        return covered


def as_served(case: Case) -> Iterator[Sequence[int] | Ids]:
    """Yield what a server keeps of the old context that knows messages and no more."""
    cutter = by_content()
    for message in case.stored:
        tokens = np.concatenate(message)
        yield from cut(tokens, cutter) if len(tokens) > LONG else [tokens]


def named_parts(case: Case) -> tuple[list[Ids], Mask]:
    """Return all named chunks, and where the new prompt names them."""
    parts = [part for message in case.stored for part in message]
    known = {id(part) for part in parts}
    asked = [part for message in case.asked for part in message]
    return parts, np.concatenate([np.full(len(part), id(part) in known) for part in asked])


def by_names_and_find(case: Case, store: Store) -> Mask:
    """Names first; what changed is looked for in the named chunks."""
    parts, covered = named_parts(case)
    edges = np.flatnonzero(np.diff(~covered, prepend=False, append=False))
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        covered[start:stop] |= store.find(parts, case.prompt[start:stop])
    return covered


def ceiling(case: Case) -> Mask:
    """What is in the store: kept parts, and runs of 16 tokens that also stand in the old prompt."""
    covered = named_parts(case)[1]
    known = rolling(as_tokens(case.old), WIDTH, ODD)
    for at in np.flatnonzero(np.isin(rolling(as_tokens(case.prompt), WIDTH, ODD), known)):
        covered[at : at + WIDTH] = True
    return covered


def shares(case: Case, store: Store) -> dict[str, float]:
    """Return the share of the prompt each method finds."""
    masks = {
        "prefix-16": by_prefix(case),
        "fixed-256": by_blocks(case),
        "undeclared": store.find([*as_served(case)], case.prompt),
        "names": named_parts(case)[1],
        "names + find": by_names_and_find(case, store),
        "ceiling": ceiling(case),
    }
    return {name: float(mask.mean()) for name, mask in masks.items()}


def interval(values: Sequence[float], n: int = 2000) -> list[float]:
    """Return the mean and its bootstrapped 95 % interval."""
    each = np.array(values)
    picks = np.random.default_rng(0).integers(0, len(each), (n, len(each)))
    low, high = np.quantile(each[picks].mean(1), (0.025, 0.975))
    return [round(float(x), 5) for x in (each.mean(), low, high)]


def streams(n_other: int) -> dict[str, tuple[type[RandomText], Store]]:
    """Return the kinds of text, each with the store it is kept in."""
    text = ZipfText(1_000_003)
    others = [text.part(text.between(100, 600)) for _ in range(n_other // 350)]
    return {
        "random tokens": (RandomText, Store()),
        "like text": (ZipfText, Store()),
        "like text, full store": (ZipfText, Store(others)),
    }


def hit_rates(
    n_trials: int, n_other: int
) -> dict[str, dict[str, dict[str, dict[str, list[float]]]]]:
    """Return for each stream and case the shares, and their part of the ceiling."""
    found: dict[str, dict[str, dict[str, dict[str, list[float]]]]] = {}
    kinds = streams(n_other)
    with progress("hit rate", len(kinds) * len(CASES)) as step:
        for stream, (make, store) in kinds.items():
            found[stream] = {}
            for number, (name, change) in enumerate(CASES.items()):
                trials = [shares(change(make(1000 * number + i)), store) for i in range(n_trials)]
                found[stream][name] = {
                    method: {
                        "share": interval([trial[method] for trial in trials]),
                        "of_ceiling": interval([t[method] / t["ceiling"] for t in trials]),
                    }
                    for method in trials[0]
                }
                step(f"{stream}, {name}")
    return found


def timed(matcher: Matcher, prompts: dict[str, Ids], n_rounds: int) -> dict[str, Times]:
    """Return seconds of each step, of the clock and of the CPU; every round does each once."""
    times: dict[str, Times] = {}
    for _ in range(n_rounds):
        for name, prompt in prompts.items():
            tokens = as_tokens(prompt)
            starts = range(0, len(tokens) - WIDTH + 1, BLOCK - WIDTH + 1)
            blocks = [tokens[at : at + BLOCK] for at in starts]
            hashes = [rolling(block, WIDTH, matcher._multiplier) for block in blocks]
            runs, heads = matcher._runs(tokens)
            steps: dict[str, Callable[[], object]] = {
                "hash": lambda b=blocks: [rolling(x, WIDTH, matcher._multiplier) for x in b],
                "look up": lambda h=hashes: [matcher._windows.flags(x) for x in h],
                "runs": lambda t=tokens: matcher._runs(t),
                "short": lambda t=tokens, r=runs, h=heads: matcher._short_runs(t, r, h),
                "find": lambda p=prompt: matcher.find(p),
            }
            for step, call in steps.items():
                times.setdefault(name, {}).setdefault(step, []).append(took(call, CPU))
    return times


def summary(times: Times) -> dict[str, dict[str, float]]:
    """Return ms of each step: medians of clock and CPU, and the least the CPU took."""
    found = {}
    for which, middle, clock in (
        ("clock", statistics.median, 0),
        ("cpu", statistics.median, 1),
        ("least cpu", min, 1),
    ):
        ms = {step: 1e3 * middle(t[clock] for t in all) for step, all in times.items()}
        ms["compare"] = max(0.0, ms.pop("runs") - ms["hash"] - ms["look up"])
        found[which] = {step: round(t, 3) for step, t in ms.items()}
    return found


def over(times: Times) -> dict[str, float]:
    """Return the share of runs of ``find`` that took more than GOAL, by the clock and by the CPU."""
    each = times["find"]
    return {
        which: round(sum(t[clock] > GOAL for t in each) / len(each), 3)
        for which, clock in (("clock", 0), ("cpu", 1))
    }


def speed(text: RandomText, n_store: int, n_prompt: int, n_rounds: int) -> dict[str, object]:
    """Time a matcher of ``n_store`` tokens; a tenth of its chunks are short ones."""
    n_chunks = max(4, n_store // 500)
    chunks = [text.part(text.between(100, 900)) for _ in range(n_chunks)]
    short = [text.part(text.between(4, 15)) for _ in range(n_chunks // 10)]
    tracemalloc.start()
    full = Store([*chunks, *short])
    n_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    adding = took(lambda: Store(chunks[: n_chunks // 4]), CPU)
    order = text.rng.permutation(n_chunks)
    known = np.resize(np.concatenate([chunks[i] for i in order]), n_prompt)
    unknown = text.part(n_prompt)
    half = np.concatenate([x for i in order for x in (chunks[i], text.part(len(chunks[i])))])
    prompts = {
        "all of it new": unknown,
        "half of it known": np.resize(half, n_prompt),
        "all of it known, shuffled": known,
    }
    times = timed(full.matcher, prompts, n_rounds)
    n_matches = {name: len(full.matcher.find(prompt)) for name, prompt in prompts.items()}
    as_list = unknown.tolist()
    converting = [took(lambda: as_tokens(as_list), CPU) for _ in range(n_rounds)]
    return {
        "store_tokens": full.matcher.n_tokens,
        "store_chunks": len(full.matcher),
        "prompt_tokens": n_prompt,
        "bytes_per_token": round(n_bytes / full.matcher.n_tokens, 1),
        "add_us_per_chunk": round(1e6 * adding[1] / (n_chunks // 4), 1),
        "list_to_array_ms": round(1e3 * statistics.median(t[1] for t in converting), 3),
        "matches": n_matches,
        "times": {name: summary(of) for name, of in times.items()},
        "over_5_ms": {name: over(of) for name, of in times.items()},
    }


def worst(n: int, n_rounds: int) -> dict[str, dict[str, float]]:
    """Time what the matcher likes least."""
    text = RandomText(8)
    zeros, header, line = np.zeros(n, np.int64), text.part(64), text.part(n)
    cases: dict[str, tuple[list[Ids], Ids]] = {
        "padding, in 1,000 chunks": ([zeros[: 16 + 4 * i] for i in range(1000)], zeros),
        "padding, in short chunks": ([zeros[:i] for i in range(4, 16)], zeros),
        "one header in 5,000 chunks": (
            [np.concatenate([header, text.part(100)]) for _ in range(5000)],
            np.resize(header, n),
        ),
        "a chunk every 16 tokens": ([line[i : i + 16] for i in range(0, n - 16, 16)], line),
        "a chunk of 16 every 4 tokens": ([line[i : i + 16] for i in range(0, n - 16, 4)], line),
    }
    found = {}
    for name, (chunks, prompt) in cases.items():
        matcher = Store(chunks).matcher
        times = [took(lambda m=matcher, p=prompt: m.find(p), CPU) for _ in range(n_rounds)]
        found[name] = {
            "clock_ms": round(1e3 * statistics.median(t[0] for t in times), 2),
            "cpu_ms": round(1e3 * statistics.median(t[1] for t in times), 2),
            "matches": len(matcher.find(prompt)),
        }
    return found


def plus_minus(found: list[float]) -> str:
    """Return a mean and half of its interval, in percent."""
    mean, low, high = found
    return f"{100 * mean:.1f} ±{50 * (high - low):.1f}"


def tables(result: dict[str, Any]) -> list[Table]:
    """Return what is printed."""
    made = []
    for stream, cases in result["hit_rate"].items():
        methods = [*next(iter(cases.values()))]
        rows: list[list[object]] = [
            [name, *(plus_minus(by[method]["share"]) for method in methods)]
            for name, by in cases.items()
        ]
        made.append(table(f"% of tokens not prefilled, {stream}", ["", *methods], rows))
    for stream, found in result["speed"].items():
        steps = [*next(iter(found["times"].values()))["cpu"]]
        rows = [
            [f"{name}, {which}", *ms.values(), found["matches"][name]]
            for name, times in found["times"].items()
            for which, ms in times.items()
        ]
        sizes = f"{found['prompt_tokens']:,} tokens, {found['store_tokens']:,} in the store"
        made.append(table(f"ms for {sizes}, {stream}", ["prompt", *steps, "matches"], rows))
        rows = [[name, *shares.values()] for name, shares in found["over_5_ms"].items()]
        made.append(table(f"Share of runs over 5 ms, {stream}", ["prompt", "clock", "CPU"], rows))
    rows = [[name, *times.values()] for name, times in result["worst"].items()]
    made.append(table("Worst cases", ["", "clock ms", "CPU ms", "matches"], rows))
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, print tables, and write bench/results/hit_rate.json."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--trials", type=int, default=40, help="of each case")
    parser.add_argument("--rounds", type=int, default=25, help="each times every prompt once")
    parser.add_argument("--quick", action="store_true", help="small, to see that it runs")
    parser.add_argument("--json", action="store_true", help="print JSON, not tables")
    parser.add_argument("--out", type=Path, help="where to write the result")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    n_trials, n_rounds = (2, 2) if options.quick else (options.trials, options.rounds)
    n_store, n_prompt = (20_000, 4096) if options.quick else (1_000_000, 131_072)
    result = {
        "hit_rate": hit_rates(n_trials, n_store // 2),
        "speed": {
            "random tokens": speed(RandomText(7), n_store, n_prompt, n_rounds),
            "like text": speed(ZipfText(7), n_store, n_prompt, n_rounds),
        },
        "worst": worst(n_prompt, max(3, n_rounds // 5)),
        "trials": n_trials,
        "rounds": n_rounds,
        "machine": machine(CPU),
    }
    report(result, tables(result), options, "hit_rate")


if __name__ == "__main__":
    main()
