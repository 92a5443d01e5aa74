"""The wrong mask: scattered rows repaired under a causal mask aligned to the bottom right.

Reference implementations gather the rows to repair and let the i-th of n see keys up to N - n + i,
which is right for a contiguous suffix only: a row then sees its own future. Here both masks repair
the same rows of the same contexts; this is the only place where the wrong one exists.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from common import RESULTS, machine, progress, table
from fidelity import MODEL
from rich.console import Console
from torch import Tensor

from kvweave.run.base import Mask
from kvweave.run.batch import Batch, BatchPart, Piece
from kvweave.run.model import Runner
from kvweave.suite import report
from kvweave.suite.method import Method
from kvweave.suite.run import Suite

PROTOCOLS = ("P2", "P4", "P7")
STRATEGIES = ("random", "first_k", "deviation:v@1", "query")
SHARES = (0.15, 0.30)


@contextmanager
def bottom_right() -> Iterator[None]:
    """Let scattered rows see keys by their rank among the rows of the pass."""
    right, cut = Batch.bias_of, BatchPart._cut

    def bias_of(
        batch: Batch, slots: Tensor, part: BatchPart, piece: Piece, mask: Mask, dtype: torch.dtype
    ) -> Tensor:
        if part.contiguous:
            return right(batch, slots, part, piece, mask, dtype)
        last = part.rows.n - part.n + torch.arange(piece.first, piece.last)[:, None]
        bias = torch.zeros(len(last), len(slots), dtype=dtype)
        return bias.masked_fill_(slots > last, float("-inf"))

    def whole(part: BatchPart, mask: Mask, *watched: int) -> list[Piece]:
        pieces = cut(part, mask, *watched)
        if not part.contiguous:  # a row may see keys that come after its own
            part.stop = part.rows.n
            for piece in pieces:
                piece.begin, piece.stop, piece.clear = 0, part.rows.n, 0
        return pieces

    with patch.object(Batch, "bias_of", bias_of), patch.object(BatchPart, "_cut", whole):
        yield


def rows_of(model: str, n: int) -> list[report.Row]:
    """Return a row for every protocol, method and mask."""
    methods = [Method("none"), *(Method(s, share) for s in STRATEGIES for share in SHARES)]
    suite, found = Suite(Runner.load(model, device="cpu"), n), []
    with progress("masks", 2 * len(PROTOCOLS)) as step:
        for protocol in PROTOCOLS:
            for name in ("exact", "bottom-right"):
                step(f"{protocol} {name}")
                units = range(suite.units(protocol))
                if name == "exact":
                    outcomes = [o for unit in suite.run(protocol, methods, units) for o in unit]
                else:
                    with bottom_right():
                        outcomes = [o for unit in suite.run(protocol, methods, units) for o in unit]
                found += [row | {"mask": name} for row in report.summarise(outcomes, methods)]
    suite.close()
    return found


def main() -> None:
    """Parse, run, write, print."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--model", default=str(MODEL))
    made.add_argument("--n", type=int, default=100, help="questions a protocol")
    made.add_argument("--out", type=Path, default=RESULTS / "mask.json")
    options = made.parse_args()
    torch.set_num_threads(1)
    found = {"machine": machine(torch.device("cpu")), "setup": {"n": options.n}}
    rows = rows_of(options.model, options.n)
    options.out.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")
    for title, part in report.tables(rows).items():
        cells = [(r["mask"], *report.cells(r)) for r in part]
        Console(width=140).print(table(title, ("mask", *report.head(part[0])), cells))


if __name__ == "__main__":
    main()
