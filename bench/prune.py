"""Time to first token after an edit: kvweave, full prefill, and prefix caching in one run.

The context is a base and 24 turns of varied lengths, 4k tokens. Each round measures every case
once: an edit of the turns, then a new message of 64 tokens behind them, whose answer's first token
is waited for. Prefix caching is what vLLM does: the longest common prefix is kept, to the token.
Chunks' canonical KV is there beforehand; what it took is reported as `idle`. `own` recomputes the
rows that `auto` has just chosen in the same round, in one pass: what `auto` would cost if it knew.
`passes` is a full prefill too, in kvweave's own passes: where these multiply matrices faster than
transformers does (`kvweave/run/products.py`), what an edit saves is the ratio to it.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from common import (
    Pair,
    compare,
    forward_times,
    full_prefill,
    machine,
    make_engine,
    median,
    model_pair,
    parser,
    progress,
    random_ids,
    report,
    seconds,
    shape_of,
    sync,
    table,
    took,
    turn_sizes,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from kvweave import Engine
from kvweave.run.base import NO_SLOTS, Ints, Steps, Work
from kvweave.run.sample import Sampling
from kvweave.weave.context import Context
from kvweave.weave.passes import Passes
from kvweave.weave.repair import Auto, Strategy, Verdict, Wish

N_TURNS, N_BASE, N_SUFFIX = 24, 64, 64
REPAIRS = (("none", 0.0), ("random", 0.15), ("first_k", 0.15), ("auto", 0.05), ("own", 0.05))
BASELINES = ("full", "passes", "prefix", "plain")
Pace = tuple[float, float]  # seconds of the clock, seconds of all CPUs
FIRST = Sampling(max_tokens=1, ignore_eos=True)


class Shown(Auto):
    """`auto`, of which one sees the rows that it chose."""

    rows: Ints = NO_SLOTS

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Keep what was chosen of rows that were there."""
        verdict = yield from super().repair(passes, wish)
        self.rows = np.setdiff1d(np.union1d(verdict.chosen, passes.ahead), passes.unready)
        return verdict


class Own(Strategy):
    """The rows that another one chose."""

    name = "own"

    def __init__(self, shown: Shown) -> None:
        self.shown = shown

    def repair(self, passes: Passes, wish: Wish) -> Steps[Verdict]:
        """Return them; no pass is needed."""
        yield from ()
        return Verdict(self.shown.rows)


@dataclass
class World:
    """The turns there are, and one context for each way to weave."""

    pair: Pair
    engine: Engine
    base: list[int]
    turns: dict[str, list[int]] = field(default_factory=dict)
    contexts: dict[str, Context] = field(default_factory=dict)
    idle_tokens: int = 0
    idle_s: float = 0.0
    n_suffixes: int = 0

    def put(self, name: str, n: int) -> str:
        """Store a turn with its canonical KV."""
        ids = random_ids(n, self.pair.shape.vocab, 100 + len(self.turns))
        self.turns[name] = ids
        self.idle_s += seconds(lambda: self.engine.put(name, ids), self.pair.device)
        self.idle_tokens += n
        return name

    def suffix(self) -> list[int]:
        """Return a new message."""
        self.n_suffixes += 1
        return random_ids(N_SUFFIX, self.pair.shape.vocab, 10_000 + self.n_suffixes)

    def ids(self, names: list[str]) -> Tensor:
        """Return base and turns [1, token]."""
        whole = self.base + [t for name in names for t in self.turns[name]]
        return torch.tensor([whole], device=self.pair.device)


def stocked(pair: Pair, n_context: int) -> World:
    """Put a base and 24 turns of so many tokens."""
    base = random_ids(N_BASE, pair.shape.vocab, 99)
    world = World(pair, make_engine(pair, base), base)
    for i, n in enumerate(turn_sizes(n_context - N_BASE, N_TURNS)):
        world.put(f"turn/{i}", n)
    return world


def of_turns(world: World, name: str, repair: str | Strategy, share: float) -> Context:
    """Return a new context of all turns."""
    context = world.engine.context(name, repair=repair, share=share, denoise=False)
    with context.edit():
        for i in range(N_TURNS):
            context.append_chunk(f"turn/{i}")
    return context


def make_world(pair: Pair, n_context: int) -> World:
    """Put 24 turns and one to spare, and weave a context of each kind."""
    world = stocked(pair, n_context)
    world.put("other", len(world.turns["turn/12"]))
    shown = Shown()
    mine: dict[str, Strategy] = {"auto": shown, "own": Own(shown)}
    for name, share in REPAIRS:
        world.contexts[name] = of_turns(world, name, mine.get(name, name), share)
    world.contexts["edits"] = world.engine.fork(world.contexts["none"], "edits")
    for context in world.contexts.values():  # rows get their memory before anything is timed
        first_token(world, context, lambda c: None, world.suffix())
    return world


# ---- kvweave


def first_token(
    world: World, context: Context, edit: Callable[[Context], object], suffix: list[int]
) -> dict[str, float]:
    """Edit, append, wait for the first token; return seconds by what they were spent on.

    The context is left as after the edit, without the message and the token.
    """
    device = world.pair.device
    with forward_times(world.pair.runner) as passes:
        sync(device)
        start, cpu = time.perf_counter(), time.process_time()
        edit(context)
        after = context.snapshot()
        context.append(suffix)
        edited = time.perf_counter()
        turn = context.begin(FIRST)
        sync(device)
        prepared = time.perf_counter()
        n_before = len(passes)
        context.session.loop.run(lambda: turn.done)
        sync(device)
        end, cpu_end = time.perf_counter(), time.process_time()
        turn.finish()
        sync(device)
        committed, cpu_committed = time.perf_counter(), time.process_time()
    context.restore(after)
    main = sum(wall for wall, _ in passes[n_before:])
    cpu_passes = sum(busy for _, busy in passes)
    return {
        "total": end - start,
        "cpu": cpu_end - cpu,
        "edit": edited - start,
        "prepare": prepared - edited,
        "pass": main,
        "loop": end - prepared - main,
        "commit": committed - end,
        "cpu_pass": cpu_passes,
        "cpu_outside": cpu_committed - cpu - cpu_passes,
    }


def swap(context: Context, i: int, j: int) -> None:
    """Exchange two parts."""
    order = list(range(len(context.parts)))
    order[i], order[j] = order[j], order[i]
    context.reorder(order)


def exchange(context: Context, i: int, name: str) -> None:
    """Put a stored chunk in the place of a part."""
    with context.edit():
        context.drop(i)
        context.insert_chunk(i, name)


# ---- the baselines


def in_passes(pair: Pair, ids: Tensor) -> None:
    """Compute everything, as kvweave does."""
    n = ids.shape[1]
    rows, slots = pair.runner.new_rows(), np.arange(n)
    rows.reserve(n)
    tokens = ids[0].cpu().numpy()
    (logits,) = pair.runner.forward([Work(rows, tokens, slots, slots, want=slots[-1:])])
    int(logits.argmax())


def behind_prefix(pair: Pair, old: Tensor, cache: DynamicCache, new: Tensor) -> tuple[Pace, int]:
    """Return seconds to the first token of ``new`` with ``old`` cached, and the tokens kept."""
    n = min(old.shape[1], new.shape[1] - 1)
    same = (old[0, :n] == new[0, :n]).long()
    kept = int(same.cumprod(0).sum())
    left = copy.deepcopy(cache)
    if kept < old.shape[1]:
        left.crop(kept - old.shape[1])

    def run() -> None:
        with torch.inference_mode():
            out = pair.plain(new[:, kept:], past_key_values=left, use_cache=True, logits_to_keep=1)
            int(out.logits[0, -1].argmax())

    return took(run, pair.device), kept


# ---- rounds


@dataclass(frozen=True)
class Edit:
    """An edit of the 24 turns: how it is done, and what stands there afterwards."""

    name: str
    before: list[str]
    after: list[str]
    apply: Callable[[Context], object]


def other_edits() -> list[Edit]:
    """Return the edits besides minus one plus one; part 0 is the base."""
    names = [f"turn/{i}" for i in range(N_TURNS)]
    replaced = names[:12] + ["other"] + names[13:]
    swapped = list(names)
    swapped[8], swapped[16] = swapped[16], swapped[8]
    short = names[:4] + names[5:]
    return [
        Edit("replace a middle turn", names, replaced, lambda c: exchange(c, 13, "other")),
        Edit("reorder two turns", names, swapped, lambda c: swap(c, 9, 17)),
        Edit("re-add a dropped turn", short, names, lambda c: c.insert_chunk(5, "turn/4")),
    ]


def run_rounds(world: World, rounds: int) -> dict[str, Any]:
    """Measure every case once a round; return lists of seconds by case."""
    edits = other_edits()
    plain = world.pair
    names = [f"turn/{i}" for i in range(N_TURNS)]
    cache = full_prefill(plain, world.ids(names))  # also warms up
    times: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {}
    parts: dict[str, list[dict[str, float]]] = {}
    kept: dict[str, int] = {}

    def note(case: str, pace: Pace) -> None:
        times.setdefault(case, []).append(pace[0])
        cpu.setdefault(case, []).append(pace[1])

    with progress("prune", rounds * (4 + len(REPAIRS) + len(edits))) as step:
        live = list(names)
        for i in range(rounds):
            spare = world.put(f"new/{i}", len(world.turns[live[0]]))
            left = live[1:]
            suffix = world.suffix()
            new = torch.cat([world.ids(left), torch.tensor([suffix], device=plain.device)], 1)
            for name, _ in REPAIRS:
                context = world.contexts[name]
                split = first_token(world, context, lambda c: c.drop(c.oldest()), suffix)
                context.append_chunk(spare)  # the message, by now a whole turn
                note(f"prune/{name}", (split["total"], split["cpu"]))
                parts.setdefault(name, []).append(split)
                step(name)
            whole = took(lambda x=new: full_prefill(plain, x), plain.device)
            note("prune/full", whole)
            step("full prefill")
            passes = took(lambda x=new: in_passes(plain, x), plain.device)
            note("prune/passes", passes)
            step("full prefill, own passes")
            pace, kept["prune"] = behind_prefix(plain, world.ids(names), cache, new)
            note("prune/prefix", pace)
            step("prefix caching")
            old = world.ids(names)
            grown = torch.cat([old, new[:, -N_SUFFIX:]], 1)
            pace, _ = behind_prefix(plain, old, cache, grown)
            note("suffix/plain", pace)
            step("suffix alone")
            live = [*left, spare]
            for edit in edits:
                note(f"{edit.name}/full", whole)  # as many tokens as in this round's prune
                note(f"{edit.name}/passes", passes)
                _one_edit(world, edit, cache, note, kept)
                step(edit.name)
    return {"times": times, "cpu": cpu, "parts": parts, "kept": kept}


def _one_edit(
    world: World,
    edit: Edit,
    cache: DynamicCache,
    note: Callable[[str, Pace], None],
    kept: dict[str, int],
) -> None:
    """Measure one edit woven and with prefix caching, beginning from the turns as they were."""
    context, pair = world.contexts["edits"], world.pair
    names = [f"turn/{i}" for i in range(N_TURNS)]
    start = context.snapshot()
    if edit.before != names:
        context.drop(5)
    context.weave()
    suffix = world.suffix()
    split = first_token(world, context, edit.apply, suffix)
    note(f"{edit.name}/none", (split["total"], split["cpu"]))
    context.restore(start)
    old = world.ids(edit.before)
    new = torch.cat([world.ids(edit.after), torch.tensor([suffix], device=pair.device)], 1)
    # rows behind the common prefix are never looked at: those of the whole list will do
    cut = copy.deepcopy(cache)
    if old.shape[1] < cut.get_seq_length():
        cut.crop(old.shape[1] - cut.get_seq_length())
    pace, kept[edit.name] = behind_prefix(pair, old, cut, new)
    note(f"{edit.name}/prefix", pace)


# ---- what came out


def where_it_goes(world: World) -> list[dict[str, object]]:
    """Profile one more minus-one-plus-one with `none`: the dearest operators."""
    context = world.contexts["none"]
    activities = [ProfilerActivity.CPU]
    if world.pair.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as seen:
        first_token(world, context, lambda c: c.drop(c.oldest()), world.suffix())
    events = sorted(seen.key_averages(), key=lambda e: -e.self_cpu_time_total)
    return [
        {"op": e.key, "calls": e.count, "self_ms": round(e.self_cpu_time_total / 1000, 2)}
        for e in events[:12]
    ]


def summarise(measured: dict[str, Any]) -> dict[str, Any]:
    """Turn lists of seconds into medians and ratios."""
    times: dict[str, list[float]] = measured["times"]
    cpu: dict[str, list[float]] = measured["cpu"]
    rows = {}
    for case, values in times.items():
        edit, way = case.rsplit("/", 1)
        if way in BASELINES:
            continue
        rows[case] = {
            "seconds": median(values),
            "over_full": compare(times[f"{edit}/full"], values),
            "over_passes": compare(times[f"{edit}/passes"], values),
            "over_prefix": compare(times[f"{edit}/prefix"], values),
            "cpu_seconds": median(cpu[case]),
            "cpu_over_full": compare(cpu[f"{edit}/full"], cpu[case]),
            "cpu_over_passes": compare(cpu[f"{edit}/passes"], cpu[case]),
            "cpu_over_prefix": compare(cpu[f"{edit}/prefix"], cpu[case]),
        }
    baselines = {
        c: {"seconds": median(v), "cpu_seconds": median(cpu[c])}
        for c, v in times.items()
        if c.rsplit("/", 1)[1] in BASELINES
    }
    none = measured["parts"]["none"]
    split = {key: median([p[key] for p in none]) for key in none[0]}
    outside = [p["edit"] + p["prepare"] + p["loop"] + p["commit"] for p in none]
    overhead = {
        "seconds": split,
        "outside_pass_s": median(outside),
        "plain_suffix_pass_s": median(times["suffix/plain"]),
        "share_of_pass": round(median(outside) / split["pass"], 3),
        "cpu_share_of_pass": round(split["cpu_outside"] / split["cpu_pass"], 3),
        "share_of_plain_pass": round(median(outside) / median(times["suffix/plain"]), 3),
    }
    return {
        "cases": rows,
        "baselines": baselines,
        "kept_by_prefix_caching": measured["kept"],
        "overhead_none": overhead,
        "auto_over_its_rows": {
            "seconds": compare(times["prune/auto"], times["prune/own"]),
            "cpu_seconds": compare(cpu["prune/auto"], cpu["prune/own"]),
        },
    }


def bench(pair: Pair, n_context: int, rounds: int) -> dict[str, Any]:
    """Run everything; return the figures."""
    world = make_world(pair, n_context)
    measured = run_rounds(world, rounds)
    result = summarise(measured)
    result["profile_none"] = where_it_goes(world)
    result["idle"] = {"tokens": world.idle_tokens, "seconds": round(world.idle_s, 3)}
    for key in ("times", "cpu"):
        result[f"raw_{key}_s"] = {k: [round(x, 4) for x in v] for k, v in measured[key].items()}
    return result


def tables(result: dict[str, Any]) -> list[Any]:
    """Return what is printed."""
    rows = [
        (
            case, r["seconds"], *(r[f"over_{way}"]["median"] for way in ("full", "passes", "prefix")),
            r["cpu_seconds"], r["cpu_over_full"]["median"], r["cpu_over_passes"]["median"],
        )
        for case, r in result["cases"].items()
    ]  # fmt: skip
    over = result["overhead_none"]
    lines = [*over["seconds"].items(), ("plain suffix pass", over["plain_suffix_pass_s"])]
    lines.append(("outside / pass", over["share_of_pass"]))
    lines.append(("outside / pass, cpu", over["cpu_share_of_pass"]))
    lines.append(("outside / plain pass", over["share_of_plain_pass"]))
    lines.append(("auto / its rows in one pass", result["auto_over_its_rows"]["seconds"]["median"]))
    columns = (
        "edit / repair", "first token s", "x full", "x passes", "x prefix", "cpu s", "x full", "x passes",
    )  # fmt: skip
    profile_rows = [(e["op"], e["calls"], e["self_ms"]) for e in result["profile_none"]]
    return [
        table("time to first token", columns, rows),
        table("minus one plus one, none", ("part", "s"), lines),
        table("operators", ("op", "calls", "self ms"), profile_rows),
    ]


def main() -> None:
    """Parse, measure, report."""
    options: argparse.Namespace = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    about = machine(device)
    pair = model_pair(shape_of(options), options.dtype, options.device, 4 * options.context)
    result = bench(pair, options.context, options.rounds)
    setup = {"dtype": options.dtype, "context": options.context, "rounds": options.rounds}
    shape = vars(shape_of(options))
    whole = {"setup": setup | {"model": shape}, **result, "machine": about}
    report(whole, tables(result), options, "prune")


if __name__ == "__main__":
    main()
