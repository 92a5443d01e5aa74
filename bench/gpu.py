"""An 8 B model's shape on a GPU: full prefill, a suffix, repairs, placing all keys, decoding.

Random weights in bfloat16 (Qwen3-8B's sizes: 36 layers, 32 heads, 8 KV heads of 128). A smoke test
on a CPU: ``--device cpu --layers 2 --context 512 --vocab 1024``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    Pair,
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
)
from decode import N_BASE as N_DECODED
from decode import decode_plain, decode_woven, make_contexts
from torch.autograd.profiler_util import DeviceType
from torch.profiler import ProfilerActivity, profile

from kvweave.run.sample import Sampling
from kvweave.weave.context import Context
from kvweave.weave.repair import FirstK, Strategy, strategy
from kvweave.weave.turn import Turn

N_BASE, N_SUFFIX, PIECE = 64, 64, 512
PROFILED = 8  # steps
WARM = 2  # rounds: passes are recorded when they come for the second time
FIRST = Sampling(max_tokens=1, ignore_eos=True)
WAYS: tuple[tuple[str, Callable[[], Strategy], float], ...] = (
    ("none", lambda: strategy("none"), 0.0),
    ("random 5 %", lambda: strategy("random"), 0.05),
    ("random 15 %", lambda: strategy("random"), 0.15),
    ("first 32 of every 512", lambda: FirstK(32), 0.0625),
    ("auto 5 %", lambda: strategy("auto"), 0.05),
)
COUNTS = (1, 8, 16)  # contexts that decode together


def first_token(context: Context, suffix: list[int]) -> dict[str, float]:
    """Move every chunk by a token or two, weave, and wait for the first token of a message."""
    device = context.session.weaver.backend.device
    before = context.snapshot()
    context.append(suffix)
    context.session.state.woven = []  # nothing counts as woven: all of it is placed again
    found: dict[str, float] = {}
    turns: list[Turn] = []
    with forward_times(context.session.weaver.backend) as passes:
        found["prepare"] = seconds(lambda: turns.append(context.begin(FIRST)), device)
        found["run"] = seconds(lambda: context.session.loop.run(lambda: turns[0].done), device)
    found["pass"] = sum(wall for wall, _ in passes)
    found["total"] = found["prepare"] + found["run"]
    turns[0].finish()
    context.restore(before)
    return found


def suffix_only(context: Context, suffix: list[int]) -> float:
    """Return seconds to the first token of a message behind rows that are kept."""
    device = context.session.weaver.backend.device
    before = context.snapshot()
    context.append(suffix)
    turns: list[Turn] = []

    def run() -> None:
        turns.append(context.begin(FIRST))
        context.session.loop.run(lambda: turns[0].done)

    took = seconds(run, device)
    turns[0].finish()
    context.restore(before)
    return took


def place_all(context: Context) -> float:
    """Return seconds to turn and write every row of the context once more."""
    rows = context.session.state.rows
    shelf = context.session.weaver.shelf
    work = []
    start = 0
    for part in context.parts:
        kv = shelf.get(int(part.id))
        assert kv is not None
        work.append((start, [kv]))
        start += part.n
    positions = np.arange(start)
    return seconds(lambda: rows.place(work, positions), context.session.weaver.backend.device)


def decode(
    pair: Pair, n_context: int, n_new: int, rounds: int, counts: Sequence[int] = COUNTS
) -> dict[str, Any]:
    """Measure tokens a second of contexts that decode together, and of `generate` for as many."""
    engine = make_engine(pair, random_ids(N_DECODED, pair.shape.vocab, 98))
    contexts = make_contexts(pair, engine, n_context, max(counts))
    ids = torch.tensor([contexts[0].tokens()], device=pair.device)
    found: dict[str, Any] = {}
    with progress(f"decode at {n_context}", 2 * len(counts) * (rounds + 1)) as step:
        for n in counts:
            times: dict[str, list[float]] = {"kvweave": [], "generate": []}
            for i in range(rounds + 1):  # the first round warms up
                few = n_new if i else 4
                ours = decode_woven(contexts[:n], few)[0] / few
                step(f"{n} kvweave")
                theirs = decode_plain(pair, ids.expand(n, -1), few)[0] / few
                step(f"{n} generate")
                if i:
                    times["kvweave"].append(ours)
                    times["generate"].append(theirs)
            step_s = {way: median(each) for way, each in times.items()}
            rates = {way: round(n / s, 1) for way, s in step_s.items()}
            found[str(n)] = {"step_s": step_s, "tokens_per_s": rates}
        found["of one step"] = {
            str(n): profiled(
                lambda n=n: decode_woven(contexts[:n], PROFILED), pair.device, PROFILED
            )
            for n in (min(counts), max(counts))
        }
    engine.close()
    return found


def profiled(call: Callable[[], object], device: torch.device, steps: int) -> dict[str, float]:
    """Return what the GPU did in a call, by step: milliseconds busy, launches, waits, copies."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        seconds(call, device)
    events = seen.key_averages()
    busy = sum(e.self_device_time_total for e in events if e.device_type == DeviceType.CUDA)

    def count(*names: str) -> float:
        return round(sum(e.count for e in events if e.key.startswith(names)) / steps, 2)

    return {
        "busy_ms": round(busy / 1000 / steps, 3),
        "launches": count("cudaLaunchKernel", "cuLaunchKernel"),
        "graphs": count("cudaGraphLaunch"),
        "waits": count("cudaStreamSynchronize", "cudaEventSynchronize"),
        "copies": count("cudaMemcpyAsync"),
    }


def limits(pair: Pair) -> dict[str, float]:
    """Measure what copies and products of bfloat16 reach, and count the model's numbers."""
    n = 8192 if pair.device.type == "cuda" else 64
    a, b = (torch.randn(n, n, device=pair.device, dtype=torch.bfloat16) for _ in range(2))
    one = torch.randn(n * n * 4, device=pair.device)
    other = torch.empty_like(one)
    product = median([seconds(lambda: a @ b, pair.device) for _ in range(10)])
    copied = median([seconds(lambda: other.copy_(one), pair.device) for _ in range(10)])
    embedded = pair.plain.model.embed_tokens.weight.numel()
    return {
        "bfloat16_tflop_per_s": round(2 * n**3 / product / 1e12, 1),
        "copy_gb_per_s": round(2 * one.nbytes / copied / 1e9, 1),
        "weights_read_bytes": sum(p.nbytes for p in pair.plain.parameters()) - 2 * embedded,
        "row_bytes": pair.runner.row_bytes,
    }


def to_device(pair: Pair, n_bytes: int) -> float:
    """Return seconds to bring as many bytes as the context's rows from (pinned) host memory."""
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=pair.device.type == "cuda")
    there = torch.empty_like(host, device=pair.device)
    return seconds(lambda: there.copy_(host, non_blocking=True), pair.device)


def bench(pair: Pair, n_context: int, rounds: int) -> dict[str, Any]:
    """Measure one context length; return medians in seconds."""
    vocab = pair.shape.vocab
    engine = make_engine(pair, random_ids(N_BASE, vocab, 99))
    context = engine.context("bench", repair="none", denoise=False)
    sizes = [PIECE] * ((n_context - N_BASE - N_SUFFIX) // PIECE)
    sizes.append(n_context - N_BASE - N_SUFFIX - sum(sizes))
    for i, n in enumerate(s for s in sizes if s):
        engine.put(f"doc/{i}", random_ids(n, vocab, i))
        context.append_chunk(f"doc/{i}")
    ids = torch.tensor([context.tokens() + random_ids(N_SUFFIX, vocab, 5)], device=pair.device)
    times: dict[str, list[float]] = {}
    n_bytes = n_context * pair.runner.row_bytes
    with progress(f"{n_context} tokens", (rounds + WARM) * (len(WAYS) + 1)) as step:
        for i in range(rounds + WARM):
            fresh: dict[str, float] = {}
            for name, make, share in WAYS:
                context.session.strategy = make()
                context.session.settings = replace(context.session.settings, share=share)
                split = first_token(context, random_ids(N_SUFFIX, vocab, 1000 + i))
                fresh |= {f"{name}/{key}": value for key, value in split.items()}
                if name == "none":
                    fresh["suffix over kept rows"] = suffix_only(
                        context, random_ids(N_SUFFIX, vocab, 2000 + i)
                    )
                step(name)
            fresh["place all rows"] = place_all(context)
            fresh["host to device"] = to_device(pair, n_bytes)
            fresh["full prefill"] = seconds(lambda: full_prefill(pair, ids), pair.device)
            step("full prefill")
            for name, value in fresh.items():
                if i >= WARM:
                    times.setdefault(name, []).append(value)
    seen = profiled(lambda: first_token(context, random_ids(N_SUFFIX, vocab, 1)), pair.device, 1)
    engine.close_context("bench")
    engine.close()
    sync(pair.device)
    medians = {name: median(values) for name, values in times.items()}
    return {"kv_bytes": n_bytes, f"of one {WAYS[-1][0]}": seen} | medians


def tables(result: dict[str, Any]) -> list[Any]:
    """Return the tables of medians, with ratios to full prefill and to `generate`."""
    rows: list[tuple[object, ...]] = []
    for n, found in result["contexts"].items():
        for name, value in found.items():
            if isinstance(value, float) and name != "kv_bytes":
                rows.append((n, name, 1000 * value, found["full prefill"] / value))
    columns = ("context", "what", "ms", "x full prefill")
    made = [table("8 B shape", columns, rows)]
    rows = []
    most = result.get("limits", {"copy_gb_per_s": 0.0})
    for n, found in result.get("decode", {}).items():
        for count, f in found.items():
            if count == "of one step":
                continue
            both = f["tokens_per_s"]
            n_bytes = most["weights_read_bytes"] + int(count) * int(n) * most["row_bytes"]
            allowed = int(count) * most["copy_gb_per_s"] * 1e9 / n_bytes
            ratio = both["kvweave"] / both["generate"]
            rows.append((n, count, both["generate"], both["kvweave"], ratio, round(allowed, 1)))
    columns = ("context", "together", "generate t/s", "kvweave t/s", "x", "copy speed allows")
    return [*made, table("decode", columns, rows)] if rows else made


def main() -> None:
    """Parse, measure, report."""
    made = parser(
        __doc__,
        dtype="bfloat16",
        device="cuda" if torch.cuda.is_available() else "cpu",
        layers=36,
        hidden=4096,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffn=12288,
        vocab=151_936,
        context=0,  # 8k and 32k
    )
    made.add_argument("--new", type=int, default=32, help="tokens to decode")
    options: argparse.Namespace = made.parse_args()
    if options.device == "cpu" and options.layers > 4:
        print("gpu.py: no CUDA device here; a smoke test is --layers 2 --context 512")
        return
    torch.set_num_threads(options.threads)
    about = machine(torch.device(options.device))
    given = [options.context] if options.context else [8192, 32768]
    pair = model_pair(shape_of(options), options.dtype, options.device, 2 * max(given))
    result = {
        "contexts": {str(n): bench(pair, n, options.rounds) for n in given},
        "decode": {str(given[0]): decode(pair, given[0], options.new, options.rounds)},
        "limits": limits(pair),
    }
    setup = {"dtype": options.dtype, "model": vars(shape_of(options)), "rounds": options.rounds}
    whole = {"setup": setup, **result, "machine": about}
    if options.device == "cpu" and options.out is None:  # a smoke test is no result
        options.out = Path("/dev/null")
    report(whole, tables(result), options, "gpu")


if __name__ == "__main__":
    main()
