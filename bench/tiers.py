"""Time to first token of a 4k context whose chunks rest on a tier, against a full prefill.

The chunks are put once, then moved away before every trial, so that the weave has to bring them
back. "then woven" waits until all layers are in memory before the pass begins; the others begin when
the first layer is there. Nothing is cached by the operating system: the disk tier reads past it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any
from unittest.mock import patch

import remote
import torch
from common import (
    Pair,
    Shape,
    compare,
    full_prefill,
    machine,
    median,
    model_pair,
    parser,
    progress,
    random_ids,
    report,
    seconds,
    shape_of,
    table,
)
from rich.table import Table

from kvweave import Engine
from kvweave.run.rows import KVRows
from kvweave.store.arriving import Load

CHUNK, QUESTION = 256, 32  # tokens
REPAIRS = ("none", "auto")


class Resting:
    """An engine whose chunks rest on one tier between trials."""

    def __init__(self, pair: Pair, home: str, tier: str, place: str, n_chunks: int) -> None:
        self.place, self.vocab = place, pair.shape.vocab
        tiers = (tier,) if tier else ()
        self.engine = Engine(pair.runner, home=home, tiers=tiers, budget="64GiB", base=[3, 5, 7, 9])
        self.ids = [
            int(self.engine.put(f"d/{i}", random_ids(CHUNK, self.vocab, i)).id)
            for i in range(n_chunks)
        ]

    def leave(self) -> None:
        """Have no chunk in memory, unless that is where they rest."""
        for id in self.ids:
            self.engine.shelf.place(id, self.place)

    def load(self) -> None:
        """Bring all chunks to memory."""
        self.engine.shelf.begin(self.ids)
        for id in self.ids:
            assert self.engine.shelf.get(id) is not None

    def first_token(self, repair: str) -> None:
        """Weave all chunks and a new question, and sample a token."""
        context = self.engine.context("c", repair=repair)
        for id in self.ids:
            context.append_chunk(f"#{id}")
        context.append(random_ids(QUESTION, self.vocab, 999))
        plan = context.generate(max_tokens=1, ignore_eos=True).plan
        self.engine.close_context("c")
        assert plan.prefilled == QUESTION, f"{plan.prefilled} tokens were prefilled"


@contextmanager
def resting(pair: Pair, n_chunks: int) -> Iterator[dict[str, Resting]]:
    """Open an engine for each tier that this machine has."""
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        tiers = {"ram": ("disk", "ram"), "disk": ("disk", "disk"), "files": ("files", "disk")}
        if remote.shutil.which("redis-server"):
            port = stack.enter_context(remote.redis(made))
            tiers["redis"] = (f"redis url=redis://127.0.0.1:{port}", "remote")
        if remote.have("mooncake.store"):
            far = stack.enter_context(remote.mooncake(remote.Space(n_chunks * (2 << 20))))
            tiers["mooncake"] = (f"mooncake master={far.cluster.master}", "remote")
        found = {
            name: Resting(pair, f"{made}/{name}", *how, n_chunks) for name, how in tiers.items()
        }
        yield found
        for each in found.values():
            each.engine.close()


def timeline(tier: Resting) -> dict[str, float]:
    """Return when the pass had placed layer 0, and when the last layer of the last chunk came."""
    begun: list[float] = []
    came: list[float] = []
    settle, add = KVRows.settle, Load.add

    def settled(self: KVRows, layer: int | None = None) -> None:
        settle(self, layer)
        if layer == 0:
            begun.append(time.perf_counter())

    def added(self: Load, *layer: Any) -> None:
        add(self, *layer)
        came.append(time.perf_counter())

    tier.leave()
    with patch.object(KVRows, "settle", settled), patch.object(Load, "add", added):
        start = time.perf_counter()
        tier.first_token("none")
    return {
        "layer_0_placed_s": round(begun[0] - start, 4),
        "last_layer_came_s": round(came[-1] - start, 4),
    }


def bench(options: Any) -> dict[str, Any]:
    """Measure every way in turns; return the figures."""
    pair = model_pair(shape_of(options), options.dtype, options.device, 2 * options.context)
    device, n_chunks = pair.runner.device, options.context // CHUNK
    ids = torch.tensor([random_ids(options.context, pair.shape.vocab, 0)], device=device)
    times: dict[str, list[float]] = {}
    with resting(pair, n_chunks) as tiers:
        calls: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
            "full prefill": (lambda: None, lambda: full_prefill(pair, ids))
        }
        for name, each in tiers.items():
            calls[f"{name}: load"] = (each.leave, each.load)
            for repair in REPAIRS:
                calls[f"{name}: {repair}"] = (
                    each.leave, lambda each=each, repair=repair: each.first_token(repair),
                )  # fmt: skip
            calls[f"{name}: loaded, then woven"] = (
                each.leave, lambda each=each: (each.load(), each.first_token("none")),
            )  # fmt: skip
        with progress("tiers", options.rounds * len(calls)) as step:
            for _ in range(options.rounds):
                for name, (before, call) in calls.items():
                    before()
                    times.setdefault(name, []).append(seconds(call, device))
                    step(name)
        under = {name: timeline(each) for name, each in tiers.items() if name != "ram"}
        counts = {name: dict(each.engine.shelf.mover.counts) for name, each in tiers.items()}
        row_bytes = pair.runner.row_bytes
    assert not any(each["late"] or each["lost"] for each in counts.values()), counts
    full = times["full prefill"]
    return {
        "chunks": n_chunks,
        "kv_bytes": n_chunks * CHUNK * row_bytes,
        "seconds": {name: median(each) for name, each in times.items()},
        "times_as_fast_as_full": {
            name: compare(full, each) for name, each in times.items() if each is not full
        },
        "under_the_pass": under,
        "overlap": {
            name: compare(times[f"{name}: loaded, then woven"], times[f"{name}: none"])
            for name in tiers
        },
    }


def tables(found: dict[str, Any]) -> list[Table]:
    """Return the figures for people."""
    rows = [
        (name, seconds, found["times_as_fast_as_full"].get(name, {}).get("median", 1.0))
        for name, seconds in found["seconds"].items()
    ]
    under = found["under_the_pass"]
    overlap = [(name, found["overlap"][name]["median"], *under[name].values()) for name in under]
    columns = ("tier", "x loading first", "layer 0 placed s", "last layer came s")
    return [
        table("time to first token", ("way", "seconds", "x full prefill"), rows),
        table("loading under the pass", columns, overlap),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse, measure, report."""
    made = parser(__doc__)
    made.add_argument("--quick", action="store_true", help="a tiny model and a short context")
    options = made.parse_args(arguments)
    if options.quick:
        options.context, options.rounds = 2 * CHUNK, 1
        for name, value in asdict(Shape.tiny()).items():
            setattr(options, name, value)
    torch.set_num_threads(options.threads)
    about = machine(torch.device(options.device))
    result = bench(options)
    told = {"context": options.context, "rounds": options.rounds, "dtype": options.dtype}
    told |= {"model": asdict(shape_of(options)), "threads": options.threads}
    report({"setup": told, **result, "machine": about}, tables(result), options, "tiers")


if __name__ == "__main__":
    main()
