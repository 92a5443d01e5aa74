"""How much of the memory for KV holds what no later token sees, by the mix of a model's layers?

Published mixes of layers, their widths divided so that many contexts fit this machine; contexts come
with the lengths of a trace, decode and go, so many alive at a time. Allocated, side by side:

    uniform   pages of one size for all layers, 16 rows of the widest; nothing is freed before the end
    slabs     pages a kind of layer, in slabs of their least common multiple (Jenga: arXiv 2503.18292,
              section 4); what no later token sees is freed
    edits     the rows of this engine as they are by default: any part of a context can be edited
    full      the same under ``keep="full"``: what no later token sees is freed, where that is possible
    pooled    ``full`` where all contexts share one buffer a layer, as on a GPU; ``alive`` is a mean, and
              while a buffer is packed it is there twice, one layer at a time

The waste is the share of it that no later token sees. For the first two the allocator is modelled
here; the others are rows of the engine, asked for their bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from common import machine, parser, progress, report, table

from kvweave.run.base import ALL, LayerInfo, Mask
from kvweave.run.layers import RawRows
from kvweave.run.mixer import Mixer
from kvweave.run.pool import PooledRows, Pools
from kvweave.run.rotary import STATIC
from kvweave.run.rows import KVRows
from kvweave.run.states import StateRows
from kvweave.store.kv import LayerShape

PAGE = 16  # rows
EVERY = 64  # tokens decoded before rows are freed again
BYTES = 2  # a value
IMAGE, TEXT = 6193, 43  # mean tokens of MMMU-pro as Jenga counts them
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """Layers that keep the same of a context."""

    count: int
    width: int  # values of a row that a later token sees
    window: int | None = None
    rate: int = 1  # tokens to a row
    state: int = 0  # values, instead of rows
    of: str = "all"  # or of "text" or "image" only
    kept: int = 0  # values that this engine keeps a token, 0: as wide as the row

    def rows(self, n: int, seen: bool) -> int:
        """Return how many rows there are of ``n`` tokens; with ``seen`` those that a later one sees."""
        if self.of != "all":
            n = min(n, IMAGE) if self.of == "image" else max(0, n - IMAGE)
        n = n if not seen or self.window is None else min(n, self.window - 1)
        return -(-n // self.rate)

    def seen(self, n: int) -> int:
        """Return the values that a token behind ``n`` others sees, of all these layers."""
        return self.count * (self.state or self.rows(n, True) * self.width)


@dataclass(frozen=True)
class Mix:
    """The layers of a model, their widths divided by ``scale``."""

    scale: int
    kinds: tuple[Kind, ...]
    frees: bool = True  # whether rows can be freed one by one
    multimodal: bool = False

    def seen(self, n: int) -> int:
        """Return the bytes that a token behind ``n`` others sees."""
        return BYTES * sum(kind.seen(n) for kind in self.kinds)


MIXES = {
    # 16 heads of 128; google/gemma-3-27b: every sixth layer sees all
    "Gemma 3 27B": Mix(2048, (Kind(52, 2, window=1024), Kind(10, 2))),
    # 8 heads of 128; every fifth layer attends to the image
    "Llama 3.2 11B Vision": Mix(
        1024, (Kind(32, 2, of="text"), Kind(8, 2, of="image")), multimodal=True
    ),
    # 2 heads of 256; states of 32 heads of 128 x 128 and the tails of 8192 convolutions; rows of 2048
    "Qwen3-Next 80B": Mix(512, (Kind(12, 2), Kind(36, 0, state=1072, kept=4)), frees=False),
    # windows in all layers; half of them see the rest pooled by 4, with an index, half by 128
    "DeepSeek-V4-like": Mix(
        128,
        (
            Kind(43, 4, window=128),
            Kind(21, 4, rate=4, kept=16),
            Kind(21, 1, rate=4, kept=4),
            Kind(22, 4, rate=128, kept=8),
        ),
        frees=False,
    ),
}


@dataclass
class Slabs:
    """Pages of unequal size, by kind, in slabs of their least common multiple."""

    sizes: Sequence[int]  # bytes of a page, by kind
    slab: int = 0
    n_slabs: int = 0
    free: list[list[tuple[int, int]]] = field(default_factory=list)  # by kind: (slab, page)
    used: dict[int, int] = field(default_factory=dict)  # slab -> pages in use

    def __post_init__(self) -> None:
        self.slab = math.lcm(*self.sizes)
        self.free = [[] for _ in self.sizes]

    def take(self, kind: int, n: int) -> list[tuple[int, int]]:
        """Return ``n`` pages of a kind."""
        taken = []
        for _ in range(n):
            if not self.free[kind]:
                pages = self.slab // self.sizes[kind]
                self.free[kind] += [(self.n_slabs, i) for i in range(pages)]
                self.used[self.n_slabs] = 0
                self.n_slabs += 1
            page = self.free[kind].pop()
            self.used[page[0]] += 1
            taken.append(page)
        return taken

    def give(self, kind: int, pages: Sequence[tuple[int, int]]) -> None:
        """Take pages back; slabs that nobody uses may become another kind's."""
        for page in pages:
            self.used[page[0]] -= 1
        self.free[kind] += pages
        empty = {slab for slab, _ in pages if not self.used[slab]}
        if empty:
            self.free[kind] = [page for page in self.free[kind] if page[0] not in empty]
            for slab in empty:
                del self.used[slab]

    @property
    def n_bytes(self) -> int:
        return self.slab * len(self.used)


class Uniform:
    """Contexts in pages of one size."""

    def __init__(self, mix: Mix) -> None:
        self.mix = mix
        self.page = BYTES * PAGE * max(kind.width for kind in mix.kinds)

    def n_bytes(self, lengths: Sequence[int]) -> int:
        """Return what contexts of ``lengths`` tokens have allocated."""
        n = 0
        for kind in self.mix.kinds:
            if kind.state:
                n += len(lengths) * kind.count * -(-BYTES * kind.state // self.page)
            else:
                rows = [-(-length // kind.rate) for length in lengths]  # every layer, every token
                n += kind.count * sum(-(-r // PAGE) for r in rows)
        return n * self.page


class Paged:
    """Contexts in slabs."""

    def __init__(self, mix: Mix) -> None:
        self.kinds = mix.kinds
        sizes = [BYTES * (kind.state or PAGE * kind.width) for kind in mix.kinds]
        self.slabs = Slabs(sizes)
        self.pages: dict[int, list[list[tuple[int, int]]]] = {}

    def grow(self, who: int, n: int) -> None:
        """Have a context at ``n`` tokens: new pages behind, those in front back that nobody sees."""
        held = self.pages.setdefault(who, [[] for _ in self.kinds])
        for i, (kind, own) in enumerate(zip(self.kinds, held, strict=True)):
            if kind.state:
                wanted = kind.count
            else:
                # a window begins within a page: one more
                seen = -(-kind.rows(n, True) // PAGE) + (kind.rows(n, True) < kind.rows(n, False))
                wanted = kind.count * seen
            if wanted >= len(own):
                own += self.slabs.take(i, wanted - len(own))
            else:
                self.slabs.give(i, own[wanted:])
                del own[wanted:]

    def end(self, who: int) -> None:
        """Take all pages of a context back."""
        for i, own in enumerate(self.pages.pop(who)):
            self.slabs.give(i, own)


class Woven:
    """Contexts of this engine."""

    def __init__(self, mix: Mix, frees: bool, pooled: bool = False) -> None:
        self.mix, self.frees = mix, frees
        self.layers = [(kind, info) for kind in mix.kinds for info in [_info(kind)] * kind.count]
        infos = [info for _, info in self.layers]
        self.pools = Pools(infos, torch.bfloat16, CPU) if pooled else None
        self.rows: dict[int, KVRows] = {}
        self.most = 0

    def _new(self) -> KVRows:
        infos = [info for _, info in self.layers]
        if self.pools is not None:
            return KVRows(infos, self.pools.new_rows(), CPU)
        layers = [
            RawRows.empty(info.shape, torch.bfloat16, CPU)
            if info.mixer is None
            else StateRows.of(info.mixer, torch.bfloat16, CPU)
            for info in infos
        ]
        return KVRows(infos, layers, CPU)

    def grow(self, who: int, n: int, ahead: int) -> None:
        """Have a context at ``n`` tokens, room for those ``ahead`` that come before rows go again."""
        rows = self.rows.setdefault(who, self._new()) if who in self.rows else self._new()
        self.rows[who] = rows
        rows.reserve(n)
        rows.positions[:n], rows.n = np.arange(n), n
        if self.frees:
            for layer, (kind, info) in enumerate(self.layers):
                slots = np.arange(n)
                if kind.of != "all":
                    slots = slots[:IMAGE] if kind.of == "image" else slots[IMAGE:]
                if kind.window is not None:
                    slots = slots[max(0, n - kind.window + 1) :]
                if len(slots) < len(rows.kept(layer)[0]):
                    rows.keep(layer, [slots] * info.shape.k_heads)
            rows.reserve(n + ahead, exact=True)

    def end(self, who: int) -> None:
        """Let go of a context."""
        del self.rows[who]

    @property
    def n_bytes(self) -> int:
        own = sum(
            layer.n_bytes
            for rows in self.rows.values()
            for layer in rows.layers
            if not isinstance(layer, PooledRows)
        )
        shared = () if self.pools is None else self.pools.layers
        return own + sum(pool.k.nbytes + pool.v.nbytes for pool in shared)


def _info(kind: Kind) -> LayerInfo:
    """Return what the engine keeps of a layer."""
    width = kind.kept or kind.width
    shape = LayerShape(1, width // 2, 1, width - width // 2)
    mask = ALL if kind.window is None else Mask(window=kind.window)
    mixer = None
    if kind.state:
        mixer = Mixer(
            forward=lambda: None, number=0, n_states=1, places=(0,), widths=(width,),
            n_bytes=BYTES * kind.state, border=3,
        )  # fmt: skip
    return LayerInfo(shape, STATIC, mask, mixer=mixer)


def lengths(path: Path | None, n: int, multimodal: bool) -> Iterator[tuple[int, int]]:
    """Yield prompts and answers in tokens, of a trace in Mooncake's format, or drawn like it."""
    draw = np.random.default_rng(0)
    if multimodal:
        for _ in range(n):
            yield IMAGE + int(draw.poisson(TEXT)), int(draw.integers(1, 512))
    elif path is None:
        for _ in range(n):
            yield int(draw.lognormal(8.9, 0.9)) + 1, int(draw.integers(1, 700))
    else:
        with path.open() as lines:
            for _, line in zip(range(n), lines, strict=False):
                row = json.loads(line)
                yield row["input_length"], row["output_length"]


def measured(
    mix: Mix, requests: Sequence[tuple[int, int]], alive: int
) -> dict[str, dict[str, float]]:
    """Return by allocator the bytes that contexts take, on the mean, and which share no later token
    sees."""
    woven = {"edits": Woven(mix, frees=False)}
    if mix.frees:
        woven["full"] = Woven(mix, frees=True)
        woven["pooled"] = Woven(mix, frees=True, pooled=True)
    uniform, paged = Uniform(mix), Paged(mix)
    found: dict[str, list[int]] = {name: [] for name in ("seen", "uniform", "slabs", *woven)}
    now: dict[int, int] = {}
    last: dict[int, int] = {}
    for new, (prompt, answer) in enumerate(requests):
        if len(now) == alive:  # the oldest one goes
            gone = next(iter(now))
            del now[gone], last[gone]
            for each in (paged, *woven.values()):
                each.end(gone)
        last[new] = prompt + answer
        for who in (*now, new):  # all others decode, each at its own pace
            more = max(1, (last[who] - now.get(who, 0)) // alive) if who in now else prompt
            now[who] = min(last[who], now.get(who, 0) + more)
            paged.grow(who, now[who])
            for each in woven.values():
                each.grow(who, now[who], min(EVERY, last[who] - now[who]))
        if len(now) < alive:
            continue
        found["seen"].append(sum(map(mix.seen, now.values())))
        found["uniform"].append(uniform.n_bytes(list(now.values())))
        found["slabs"].append(paged.slabs.n_bytes)
        for name, kept in woven.items():
            found[name].append(kept.n_bytes)
    seen = float(np.mean(found.pop("seen")))
    means = {name: float(np.mean(each)) for name, each in found.items()}
    return {
        name: {"bytes_per_seen": round(mean / seen, 3), "waste": round(1 - seen / mean, 4)}
        for name, mean in means.items()
    }


def main() -> None:
    """Run all mixes, write bench/results/waste.json."""
    own = parser(__doc__)
    own.add_argument("--trace", type=Path, default=None, help="Mooncake's format; drawn if none")
    own.add_argument("--n", type=int, default=96, help="contexts")
    own.add_argument("--alive", type=int, default=16, help="at a time")
    options = own.parse_args()
    found = {}
    with progress("mixes", len(MIXES)) as step:
        for name, mix in MIXES.items():
            requests = list(lengths(options.trace, options.n, mix.multimodal))
            found[name] = {
                "scale": mix.scale,
                "slab_bytes": mix.scale * Paged(mix).slabs.slab,
                "mean_tokens": round(float(np.mean([a + b for a, b in requests]))),
                **measured(mix, requests, options.alive),
            }
            step(name)
    columns = ("uniform", "slabs", "edits", "full", "pooled")
    rows = [
        [name, *(f"{100 * at[c]['waste']:.1f} %" if c in at else "-" for c in columns)]
        for name, at in found.items()
    ]
    result = {
        "machine": machine(CPU),
        "trace": options.trace.name if options.trace else "drawn",
        "contexts": options.n,
        "alive": options.alive,
        "mixes": found,
    }
    report(
        result,
        [table("memory that no later token sees", ["mix", *columns], rows)],
        options,
        "waste",
    )


if __name__ == "__main__":
    main()
