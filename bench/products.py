"""Matrix products by oneDNN against torch's own choice, on this machine's CPU.

Layers of several sizes and numbers of rows; attention of some rows over many; then a model's full
prefill and decoding in kvweave's passes with either, and in plain transformers. All alternate.
`faster` says what `kvweave/run/products.py` takes on this machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import (
    Pair,
    full_prefill,
    machine,
    model_pair,
    parser,
    progress,
    random_ids,
    report,
    shape_of,
    table,
    took,
)
from decode import decode_woven, make_contexts
from prune import in_passes
from torch.nn.functional import linear

from kvweave import Engine
from kvweave.run import products
from kvweave.run.part import Piece
from kvweave.run.written import Scaling, VisibleKV, in_place

CPU = torch.device("cpu")
SIZES = ((1024, 2816), (2816, 1024), (1024, 512), (128, 352))  # inputs and outputs of a layer
ROWS = (1, 6, 32, 126, 1024, 4096)
ATTENDING, KEYS = (8, 24, 48, 126, 256), 4096
N_NEW, BYTES = (
    16,
    1 << 27,
)  # tokens decoded; of weights that a case goes over, so that no cache holds them

Ways = dict[str, Callable[[], object]]


def race(ways: Ways, rounds: int) -> dict[str, Any]:
    """Return each way's median seconds, and how many times the first takes longer than the others."""
    times: dict[str, list[float]] = {way: [] for way in ways}
    for call in ways.values():
        call()
    for _ in range(rounds):
        for way, call in ways.items():
            times[way].append(took(call, CPU)[0])
    middle = {way: statistics.median(each) for way, each in times.items()}
    first = next(iter(middle.values()))
    return {
        "seconds": {way: float(f"{x:.4g}") for way, x in middle.items()},
        "times_as_fast": {way: round(first / x, 2) for way, x in list(middle.items())[1:]},
    }


@torch.inference_mode()
def layer(n_in: int, n_out: int, rows: int, rounds: int) -> dict[str, Any]:
    """Return what as many layers take as fill memory."""
    count = max(1, min(64, BYTES // (4 * n_in * n_out) if rows <= 128 else 2))
    weights = [torch.randn(n_out, n_in) for _ in range(count)]
    x = torch.randn(1, rows, n_in)
    wide = linear(x.double(), weights[0].double())
    ways: Ways = {
        "torch": lambda: [linear(x, w) for w in weights],
        "oneDNN": lambda: [products.product(x, w) for w in weights],
    }
    errors = [(call(x, weights[0]) - wide).abs().max() for call in (linear, products.product)]
    found = {"inputs": n_in, "outputs": n_out, "rows": rows, "layers": count}
    found["error"] = [float(f"{float(e / wide.abs().max()):.2g}") for e in errors]
    return found | race(ways, rounds)


@torch.inference_mode()
def attention(n: int, rounds: int) -> dict[str, Any]:
    """Return what attention of ``n`` rows takes, 16 heads over 8 of keys."""
    query = torch.randn(n, 16, 64)
    keys, values = (torch.randn(8, KEYS, 64) for _ in range(2))
    bias = torch.zeros(n, KEYS)
    bias[:, -n:] = torch.full((n, n), -torch.inf).triu_(1)
    seen = VisibleKV(keys, values, bias, False, Piece(0, n, 0, KEYS, False, False, clear=KEYS - n))

    def way(faster: bool) -> Callable[[], object]:
        return lambda: chosen(faster, lambda: in_place(query, seen, Scaling(0.125, None), False))

    return {"rows": n, "keys": KEYS} | race({"torch": way(False), "oneDNN": way(True)}, rounds)


def chosen(faster: bool, call: Callable[[], object]) -> object:
    """Call with products made one way or the other."""
    before, products.faster = products.faster, faster
    try:
        return call()
    finally:
        products.faster = before


def models(pair: Pair, other: Pair, n: int, rounds: int) -> dict[str, Any]:
    """Return what a prefill of ``n`` tokens and `N_NEW` decoded behind them take; ``pair`` multiplies by
    oneDNN, ``other`` does not."""
    ids = torch.tensor([random_ids(n, pair.shape.vocab, 1)])
    prefill: Ways = {
        "transformers": lambda: full_prefill(pair, ids),
        "torch": lambda: chosen(False, lambda: in_passes(other, ids)),
        "oneDNN": lambda: chosen(True, lambda: in_passes(pair, ids)),
    }
    decode: Ways = {}
    for name, each in (("torch", other), ("oneDNN", pair)):
        engine = Engine(each.runner, base=[1, 2], budget="64GiB")
        contexts = make_contexts(each, engine, n, 1)
        decode[name] = lambda c=contexts, f=name == "oneDNN": chosen(
            f, lambda: decode_woven(c, N_NEW)
        )
    return {
        "tokens": n,
        "decoded": N_NEW,
        "prefill": race(prefill, rounds),
        "decode": race(decode, rounds),
    }


def bench(
    make: Callable[[], Pair], context: int, rounds: int, sizes: Sequence[tuple[int, int]]
) -> dict[str, Any]:
    """Run everything; return the figures."""
    with progress("products", len(sizes) * len(ROWS) + len(ATTENDING) + 1) as step:
        layers = []
        for n_in, n_out in sizes:
            for rows in ROWS:
                layers.append(layer(n_in, n_out, rows, rounds))
                step(f"{n_in} to {n_out}")
        attending = []
        for n in ATTENDING:
            attending.append(attention(n, rounds))
            step(f"attention of {n} rows")
        fast = chosen(True, make)
        slow = chosen(False, make)
        assert isinstance(fast, Pair) and isinstance(slow, Pair)
        whole = models(fast, slow, context, rounds)
        step("models")
    return {"faster": products.faster, "layers": layers, "attention": attending, "model": whole}


def tables(result: dict[str, Any]) -> list[Any]:
    """Return what is printed."""
    layers = [
        (f"{x['inputs']} to {x['outputs']}", x["rows"], x["times_as_fast"]["oneDNN"], *x["error"])
        for x in result["layers"]
    ]
    attending = [(f"{x['rows']} rows", x["times_as_fast"]["oneDNN"]) for x in result["attention"]]
    whole = [
        (what, way, seconds)
        for what in ("prefill", "decode")
        for way, seconds in result["model"][what]["seconds"].items()
    ]
    return [
        table("layers", ("layer", "rows", "x", "error, torch", "error, oneDNN"), layers),
        table("attention", ("over 4,096 keys", "x"), attending),
        table("model", ("", "products", "s"), whole),
    ]


def main() -> None:
    """Parse, measure, report."""
    options = parser(__doc__).parse_args()
    torch.set_num_threads(options.threads)
    about = machine(CPU)

    def make() -> Pair:
        return model_pair(shape_of(options), "float32", "cpu", 4 * options.context)

    result = bench(make, options.context, options.rounds, SIZES)
    report(result | {"machine": about}, tables(result), options, "products")


if __name__ == "__main__":
    main()
