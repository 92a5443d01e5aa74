"""Tokens a second while decoding: one context against `model.generate`, and eight together.

Both sides run the same number of one-token passes, greedily, over a context that is there already:
kvweave over its rows, transformers over a DynamicCache (SDPA). The two alternate.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import (
    Pair,
    compare,
    machine,
    make_engine,
    median,
    model_pair,
    parser,
    progress,
    random_ids,
    report,
    shape_of,
    table,
    took,
)
from transformers import DynamicCache

from kvweave import Engine
from kvweave.run.sample import Sampling
from kvweave.weave.context import Context
from kvweave.weave.turn import Turn

N_BASE, PIECE = 16, 512
Pace = tuple[float, float]  # seconds of the clock, seconds of all CPUs


def make_contexts(pair: Pair, engine: Engine, n_tokens: int, count: int) -> list[Context]:
    """Weave ``count`` contexts of ``n_tokens``: the same chunks, rows of their own."""
    made = []
    for i in range(count):
        context = engine.context(f"{n_tokens}/{i}", repair="none", denoise=False)
        for start in range(N_BASE, n_tokens, PIECE):
            n = min(PIECE, n_tokens - start)
            name = f"{n_tokens}/{start}"
            if i == 0:
                engine.put(name, random_ids(n, pair.shape.vocab, start))
            context.append_chunk(name)
        context.weave()
        made.append(context)
    return made


def decode_woven(contexts: list[Context], n_new: int) -> Pace:
    """Return seconds to decode ``n_new`` tokens in each; the contexts stay as they were."""
    sampling = Sampling(max_tokens=n_new, ignore_eos=True)
    before = [c.snapshot() for c in contexts]
    loop = contexts[0].session.loop
    turns: list[Turn] = []

    def run() -> None:
        turns.extend(c.begin(sampling) for c in contexts)
        loop.run(lambda: all(t.done for t in turns))

    pace = took(run, contexts[0].session.weaver.backend.device)
    for turn in turns:
        answer = turn.finish()
        assert len(answer.tokens) == n_new
    for context, snapshot in zip(contexts, before, strict=True):
        context.restore(snapshot)
    return pace


def filled_cache(pair: Pair, n: int, batch: int = 1) -> DynamicCache:
    """Return random rows: what they hold does not change how long decoding takes."""
    cache = DynamicCache(config=pair.plain.config)
    s = pair.shape
    for layer in range(s.layers):
        size = (2, batch, s.kv_heads, n, s.head_dim)
        rows = torch.randn(size, dtype=pair.runner.dtype, device=pair.device)
        cache.update(rows[0].clone(), rows[1].clone(), layer)
    return cache


def decode_plain(pair: Pair, ids: torch.Tensor, n_new: int) -> Pace:
    """Return seconds `generate` takes for ``n_new`` tokens with all but the last token cached."""
    cache = filled_cache(pair, ids.shape[1] - 1, len(ids))

    def run() -> None:
        out = pair.plain.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=n_new,
            min_new_tokens=n_new,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == ids.shape[1] + n_new

    return took(run, pair.device)


def roofline(pair: Pair, n_tokens: int, gb_per_s: float) -> float:
    """Return tokens a second if each weight and row were read once at copy speed."""
    weights = sum(p.numel() * p.element_size() for p in pair.plain.parameters())
    embedding = pair.plain.model.embed_tokens.weight
    weights -= embedding.numel() * embedding.element_size()  # one row of it is read
    rows = n_tokens * pair.runner.row_bytes
    return gb_per_s * 1e9 / (weights + rows)


def bench(pair: Pair, lengths: list[int], n_new: int, together: int, rounds: int) -> dict[str, Any]:
    """Measure every length; return the figures."""
    engine = make_engine(pair, random_ids(N_BASE, pair.shape.vocab, 99))
    found: dict[str, Any] = {}
    with progress("decode", len(lengths) * (3 * rounds + 1)) as step:
        for n_tokens in lengths:
            contexts = make_contexts(pair, engine, n_tokens, together)
            ids = torch.tensor([contexts[0].tokens()], device=pair.device)
            step(f"{n_tokens}: warming up")
            decode_woven(contexts, 2)
            decode_plain(pair, ids, 2)
            one, many, plain = [], [], []
            for _ in range(rounds):
                one.append(decode_woven(contexts[:1], n_new))
                step("kvweave")
                plain.append(decode_plain(pair, ids, n_new))
                step("generate")
                many.append(decode_woven(contexts, n_new))
                step(f"{together} together")
            found[str(n_tokens)] = {
                "clock": _figures([[p[0] for p in x] for x in (one, plain, many)], n_new, together),
                "cpu": _figures([[p[1] for p in x] for x in (one, plain, many)], n_new, together),
            }
            for context in contexts:
                engine.close_context(context.name)
    return {"lengths": found}


def _figures(times: list[list[float]], n_new: int, together: int) -> dict[str, Any]:
    """Turn seconds of one, `generate`, and several into rates and ratios."""
    one, plain, many = times
    return {
        "kvweave_tokens_per_s": median([n_new / t for t in one]),
        "generate_tokens_per_s": median([n_new / t for t in plain]),
        "together_tokens_per_s": median([together * n_new / t for t in many]),
        "over_generate": compare(plain, one),
        "together_over_one": compare([together * t for t in one], many),
        "raw_s": {"one": one, "generate": plain, "together": many},
    }


def main() -> None:
    """Parse, measure, report."""
    made = parser(__doc__)
    made.add_argument("--lengths", type=int, nargs="+", default=[1024, 4096])
    made.add_argument("--new", type=int, default=32, help="tokens to decode")
    made.add_argument("--together", type=int, default=8, help="contexts that decode together")
    options: argparse.Namespace = made.parse_args()
    torch.set_num_threads(options.threads)
    about = machine(torch.device(options.device))
    limit = 2 * max(options.lengths)
    pair = model_pair(shape_of(options), options.dtype, options.device, limit)
    result = bench(pair, options.lengths, options.new, options.together, options.rounds)
    speed = float(statistics.mean([about["copy_gb_per_s"]]))  # type: ignore[list-item]
    for n, figures in result["lengths"].items():
        figures["copy_speed_limit_tokens_per_s"] = round(roofline(pair, int(n), speed), 2)
    setup = {"dtype": options.dtype, "new": options.new, "together": options.together}
    whole = {
        "setup": setup | {"rounds": options.rounds, "model": vars(shape_of(options))},
        **result,
        "machine": about,
    }
    rows = [
        (
            n, clock, f["generate_tokens_per_s"], f["kvweave_tokens_per_s"],
            f["over_generate"]["median"], f["together_tokens_per_s"],
            f["together_over_one"]["median"], both["copy_speed_limit_tokens_per_s"],
        )
        for n, both in result["lengths"].items()
        for clock, f in both.items()
        if clock in ("clock", "cpu")
    ]  # fmt: skip
    columns = (
        "context", "seconds of", "generate t/s", "kvweave t/s", "x", f"{options.together} together t/s",
        "x one", "copy speed allows t/s",
    )  # fmt: skip
    report(whole, [table("decode", columns, rows)], options, "decode")


if __name__ == "__main__":
    main()
