"""An 8 B model's shape on a GPU: full prefill, a suffix, repairs, and placing all keys.

Random weights in bfloat16 (Qwen3-8B's sizes: 36 layers, 32 heads, 8 KV heads of 128). A smoke test
on a CPU: ``--device cpu --layers 2 --context 512 --vocab 1024``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
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

from kvweave.run.sample import Sampling
from kvweave.weave.context import Context
from kvweave.weave.repair import FirstK, Strategy, strategy
from kvweave.weave.turn import Turn

N_BASE, N_SUFFIX, PIECE = 64, 64, 512
FIRST = Sampling(max_tokens=1, ignore_eos=True)
WAYS: tuple[tuple[str, Callable[[], Strategy], float], ...] = (
    ("none", lambda: strategy("none"), 0.0),
    ("random 5 %", lambda: strategy("random"), 0.05),
    ("random 15 %", lambda: strategy("random"), 0.15),
    ("first 32 of every 512", lambda: FirstK(32), 0.0625),
)


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
    with progress(f"{n_context} tokens", (rounds + 1) * (len(WAYS) + 1)) as step:
        for i in range(rounds + 1):  # the first round warms up
            fresh: dict[str, float] = {}
            for name, make, share in WAYS:
                context.session.strategy = make()
                context.settings = replace(context.settings, share=share)
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
                if i:
                    times.setdefault(name, []).append(value)
    engine.close_context("bench")
    engine.close()
    sync(pair.device)
    return {"kv_bytes": n_bytes} | {name: median(values) for name, values in times.items()}


def tables(result: dict[str, Any]) -> list[Any]:
    """Return the table of medians, with ratios to full prefill."""
    rows = []
    for n, found in result["contexts"].items():
        for name, value in found.items():
            if name != "kv_bytes":
                rows.append((n, name, 1000 * value, found["full prefill"] / value))
    columns = ("context", "what", "ms", "x full prefill")
    return [table("8 B shape", columns, rows)]


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
    options: argparse.Namespace = made.parse_args()
    if options.device == "cpu" and options.layers > 4:
        print("gpu.py: no CUDA device here; a smoke test is --layers 2 --context 512")
        return
    torch.set_num_threads(options.threads)
    about = machine(torch.device(options.device))
    given = [options.context] if options.context else [8192, 32768]
    pair = model_pair(shape_of(options), options.dtype, options.device, 2 * max(given))
    result = {"contexts": {str(n): bench(pair, n, options.rounds) for n in given}}
    setup = {"dtype": options.dtype, "model": vars(shape_of(options)), "rounds": options.rounds}
    whole = {"setup": setup, **result, "machine": about}
    if options.device == "cpu" and options.out is None:  # a smoke test is no result
        options.out = Path("/dev/null")
    report(whole, tables(result), options, "gpu")


if __name__ == "__main__":
    main()
