"""R-KV's choices, found again from the choice before: what comparing all pairs each time keeps."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvweave.keep.tokens.alike import ROW_BYTES, marked
from kvweave.keep.tokens.base import LayerView
from kvweave.keep.tokens.queries import Latest
from kvweave.keep.tokens.rkv import RKV
from kvweave.keep.tokens.spec import Keep
from kvweave.keep.tokens.watch import TokenWatch
from kvweave.run.base import Ints, LayerInfo
from kvweave.run.rotary import STATIC
from kvweave.store.kv import LayerShape

HEADS, DIM, LAYERS, PAGE = 2, 6, 2, 8
INFOS = [LayerInfo(LayerShape(HEADS, DIM, HEADS, DIM), STATIC)] * LAYERS
CPU = torch.device("cpu")


def redundancy(keys: Tensor, there: Tensor, alike: float) -> Tensor:
    """All pairs at once, as the authors' code has it."""
    units = keys / (keys.norm(dim=-1, keepdim=True) + 1e-8)
    cosines = units @ units.transpose(1, 2)
    cosines.diagonal(dim1=1, dim2=2).zero_()
    like = (cosines > alike) & there[:, None]
    front = there.int().argmax(-1)[:, None, None]
    last = torch.where(like, torch.arange(keys.shape[1]), front).amax(-1, keepdim=True)
    mean = cosines.scatter(-1, last, 0).sum(1) / there.sum(-1, keepdim=True)
    return mean.masked_fill(~there, float("-inf")).softmax(-1)


def plain(policy: RKV, view: LayerView) -> Tensor:
    keys = view.wide(view.keys)
    alike = redundancy(keys, view.there, policy.alike)
    return policy.mix * policy._importance(view, keys) - (1 - policy.mix) * alike


@dataclass
class Context:
    """Rows of `LAYERS` layers, of which each head keeps its own; keys come from a few directions,
    so that many are alike, and of those that are alike some are kept and some go."""

    keep: Keep
    seed: int
    watch: TokenWatch | None = None
    keys: Tensor = field(default_factory=lambda: torch.empty(LAYERS, HEADS, 0, DIM).double())
    kept: list[list[Ints]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.draw = torch.Generator().manual_seed(self.seed)
        self.watch = self.keep.policy.watch(INFOS, CPU)
        self.kept = [[np.arange(0)] * HEADS for _ in range(LAYERS)]
        self.centres = self._random(LAYERS, HEADS, 12, DIM)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.draw, dtype=torch.float64)

    def drawn(self, n: int) -> Tensor:
        which = torch.randint(12, (n,), generator=self.draw)
        return self.centres[:, :, which] + 0.7 * self._random(LAYERS, HEADS, n, DIM)

    def come(self, n: int) -> None:
        """Decode ``n`` rows."""
        assert self.watch is not None
        before = self.keys.shape[2]
        self.keys = torch.cat([self.keys, self.drawn(n)], 2)
        new = np.arange(before, before + n)
        self.kept = [[np.r_[each, new] for each in layer] for layer in self.kept]
        self.watch.begin()
        for layer in range(LAYERS):
            self.watch.ask(layer, before, self._random(n, 2 * HEADS, DIM))
        self.watch.end()

    def cut(self, n: int) -> None:
        """Forget the rows from slot ``n`` on."""
        assert self.watch is not None
        self.keys = self.keys[:, :, :n]
        self.kept = [[each[each < n] for each in layer] for layer in self.kept]
        self.watch.compact(np.arange(n))

    def place(self, slots: Ints) -> None:
        """Write other rows to ``slots``, in every head, those that were freed too."""
        self.keys[:, :, slots] = self.drawn(len(slots))
        self.kept = [[np.union1d(each, slots) for each in layer] for layer in self.kept]

    def close_up(self, kept: Ints) -> None:
        """Let go of all slots but ``kept`` and renumber these."""
        assert self.watch is not None
        self.keys = self.keys[:, :, kept]
        self.kept = [[np.flatnonzero(np.isin(kept, each)) for each in layer] for layer in self.kept]
        self.watch.compact(kept)

    def choose(self) -> None:
        """Let rows go, and hold what stays against comparing all pairs."""
        policy = self.keep.policy
        assert isinstance(policy, RKV)
        n = self.keys.shape[2]
        for layer, kept in enumerate(self.kept):
            slots = np.zeros((HEADS, max(map(len, kept))), np.int64)
            there = np.zeros(slots.shape, bool)
            for head, own in enumerate(kept):
                slots[head, : len(own)], there[head, : len(own)] = own, True
            at = torch.from_numpy(slots)
            keys = self.keys[layer].gather(1, at[..., None].expand(-1, -1, DIM))
            view = LayerView(
                layer, INFOS[layer], at, torch.from_numpy(there), at, keys, keys, self.watch
            )
            target = self.keep.of_layer(self.keep.target(n, 1), layer, LAYERS)
            safe = (at >= n - 2) & view.there
            both = [
                self.keep.choose(view, found(policy, view), target, safe)
                for found in (RKV.scores, plain)
            ]
            for mine, wanted in zip(*both, strict=True):
                assert mine.tolist() == wanted.tolist()
            self.kept[layer] = both[0]


@pytest.mark.parametrize(
    "spec", ["rkv:40", "rkv:40,alike=0.9", "rkv:40,alike=-0.2", "rkv:0.1,heads=ada", "rkv:9,window=2",
             "rkv:60,heads=ada,layers=pyramid", "rkv:40,mix=0.0"],
)  # fmt: skip
@pytest.mark.sampled
@pytest.mark.slow
def test_hundreds_of_choices_are_those_of_all_pairs(spec: str) -> None:
    context = Context(Keep.parse(spec), 1)
    context.come(90)
    for _ in range(200):
        context.choose()
        context.come(PAGE)
    assert len({len(each) for layer in context.kept for each in layer}) > ("ada" in spec)


@pytest.mark.parametrize("spec", ["rkv:40", "rkv:0.2,heads=ada"])
def test_they_are_whatever_becomes_of_the_rows(spec: str) -> None:
    """Cut and decoded on, placed anew where they stood or had been freed, renumbered, copied."""
    context = Context(Keep.parse(spec), 2)
    context.come(120)
    rng = np.random.default_rng(3)
    for turn in range(120):
        context.choose()
        n = context.keys.shape[2]
        what = turn % 6
        if what == 1:
            context.cut(int(rng.integers(n // 2, n)))
        elif what == 2:
            context.place(np.sort(rng.choice(n, 7, replace=False)))
        elif what == 3:
            context.close_up(np.sort(rng.choice(n, n - 20, replace=False)))
        elif what == 4:
            twin = deepcopy(context)
            twin.draw = torch.Generator().manual_seed(turn)
            for _ in range(3):
                twin.come(PAGE)
                twin.choose()
        elif what == 5:
            context.cut(n - 30)
            context.place(np.arange(5))
        context.come(int(rng.integers(1, 40)))


class Products(TorchDispatchMode):
    """Counts the products of two numbers that products of matrices take."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.bmm.default and args[1].shape[-1] > 1:
            self.n += args[0].numel() * args[1].shape[-1]
        return func(*args, **(kwargs or {}))


def test_a_page_more_is_no_comparison_of_all_pairs() -> None:
    """Rows that have nothing like them: no row has to be looked at again when others go."""
    policy, n = RKV(), 1024
    watch = policy.watch(INFOS[:1], CPU)
    keys = torch.randn(1, n + 64, 64, generator=torch.Generator().manual_seed(1))
    every = torch.arange(n + 64)[None]
    taken = []
    for left in (every[:, :n], torch.cat([every[:, 64:n], every[:, n:]], 1)):
        there = torch.ones_like(left, dtype=torch.bool)
        view = LayerView(0, INFOS[0], left, there, left, keys[:, left[0]], None, watch)
        with Products() as counted:
            policy.scores(view)
        taken.append(counted.n)
    assert taken[1] * n == taken[0] * 64


def test_marks_tell_keys_apart_by_their_bits() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        keys = torch.randn(3, 200, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
        marks = marked(keys)
        assert torch.equal(marks, marked(keys.clone()))
        assert len(marks.unique()) == marks.numel()
        other = keys.clone()
        other[1, 5, 3] *= 1 + 2 * torch.finfo(dtype).eps
        assert ((marked(other) != marks).nonzero().tolist()) == [[1, 5]]


def test_what_is_known_of_rows_takes_twelve_bytes_each() -> None:
    context = Context(Keep.parse("rkv:40"), 4)
    context.come(500)
    context.choose()
    context.come(PAGE)
    context.choose()
    assert context.watch is not None and isinstance(context.watch.tally, Latest)
    for known in context.watch.tally.known:
        assert known is not None
        assert sum(t.nbytes for t in known.tensors) == ROW_BYTES * HEADS * (40 + PAGE)
