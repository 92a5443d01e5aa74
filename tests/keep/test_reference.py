"""What R-KV, TriAttention and LazyEviction keep of random keys and queries, by their authors' code.

`bench/golden/reference_golden.py` made tests/golden/reference.npz with it. What differs, and is
taken out here by options:

- TriAttention adds up angles of 65536 radians in float32, which are .004 apart, in another order
  than ours: scores differ by 5e-5 of the largest (`FAR`), and the rows that stay do not.
- It pins the prompt and nothing else, and can leave out the normal form of scores.
- LazyEviction keeps the newest rows of one interval, here 8; its prompt counts as looked at in step
  0, since it watches steps that decode only. It was run with one query head to a kv head: how it
  joins those of a group is not told by this file. Ours is the most any of them pays.
- R-KV leaves out the newest 8 rows, ours too (``window``), before the softmax as well.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from keep.views import best, pinned
from torch import Tensor

from kvweave.keep.tokens.base import LayerView
from kvweave.keep.tokens.lazy import Lazy, Recurrence
from kvweave.keep.tokens.rkv import RKV
from kvweave.keep.tokens.triattention import TriAttention
from kvweave.run.base import LayerInfo
from kvweave.run.rotary import STATIC, Rotation
from kvweave.store.kv import LayerShape

FILE = Path(__file__).parents[1] / "golden" / "reference.npz"
FAR = 1e-4
DIM, KEEP, PROMPT, ALPHA, THETA = 16, 60, 40, 0.02, 10000.0
TURNS = Rotation(DIM, False, THETA ** (-torch.arange(0, DIM, 2) / DIM))


@cache
def golden() -> dict[str, Tensor]:
    found = {key: torch.from_numpy(a) for key, a in np.load(FILE).items()}
    return {key: a.float() if a.dtype == torch.float16 else a for key, a in found.items()}


def info(rotation: Rotation) -> list[LayerInfo]:
    return [LayerInfo(LayerShape(2, DIM, 2, DIM), rotation)]


def shown(keys: Tensor, layer: LayerInfo, watch) -> LayerView:
    """Return all rows of a layer, at positions 0 and on."""
    every = torch.arange(keys.shape[1]).expand(keys.shape[0], -1)
    there = torch.ones_like(every, dtype=torch.bool)
    return LayerView(0, layer, every, there, every, keys, values=keys, watch=watch)


def keeps(policy, view: LayerView) -> Tensor:
    return best(pinned(policy, view, policy.scores(view)), KEEP)


def test_rkv_keeps_what_its_code_keeps():
    policy, layers = RKV(), info(STATIC)
    watch = policy.watch(layers, torch.device("cpu"))
    queries = golden()["rkv/queries"].transpose(0, 1)
    for row in range(len(queries)):
        watch.begin()
        watch.ask(0, row, queries[row : row + 1])
        watch.end()
    view = shown(golden()["rkv/keys"], layers[0], watch)
    assert torch.equal(keeps(policy, view), golden()["rkv/kept"])


def test_triattention_scores_and_keeps_as_its_code_does():
    policy, layers = TriAttention(sinks=0, window=0), info(TURNS)
    watch = policy.watch(layers, torch.device("cpu"))
    queries = golden()["triattention/queries"].transpose(0, 1)
    for first in range(0, len(queries), 50):
        watch.begin()
        watch.ask(0, first, queries[first : first + 50])
        watch.end()
    keys = golden()["triattention/keys"].transpose(0, 1)
    turned = TURNS.apply(keys, TURNS.angles(torch.arange(len(keys)))).transpose(0, 1)
    view = shown(turned, layers[0], watch)
    assert torch.equal(keeps(policy, view), golden()["triattention/kept"])
    plain = TriAttention(normal=False).scores(view)
    wanted = golden()["triattention/scores"].view(2, 2, -1).amax(1)
    assert (plain - wanted).abs().max() < FAR * wanted.abs().max()


def test_lazy_remembers_and_keeps_as_its_code_does():
    policy, layers = Lazy(window=8, alpha=ALPHA), info(STATIC)
    watch = policy.watch(layers, torch.device("cpu"))
    keys, queries = golden()["lazy/keys"], golden()["lazy/queries"]
    steps = queries.shape[1]
    for step in range(steps):
        weights = queries[:, step : step + 1] @ keys[:, : PROMPT + step + 1].transpose(1, 2)
        watch.begin()
        watch.see(0, step, 0, (weights / DIM**0.5).softmax(-1))
        watch.end()
        if step == steps - 2:
            looks = watch.tally
            assert isinstance(looks, Recurrence)
            assert torch.equal(looks.last[0].written, golden()["lazy/last"])
            assert torch.equal(looks.gap[0].written, golden()["lazy/gap"])
    assert torch.equal(keeps(policy, shown(keys, layers[0], watch)), golden()["lazy/kept"])
