"""Claims about attention that adds up bytes: what it gives is what the bits say, computed in float64."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from kvweave.keep.tokens.sums import AttentionSums
from kvweave.keep.tokens.watch import BySlot
from kvweave.run import bags, lanes, packed
from kvweave.run.packed import ENDS, FORMS, CodedLevel, PackedRows
from kvweave.run.tabled import TabledRows
from kvweave.run.written import Scaling, VisibleKV

pytestmark = pytest.mark.skipif(not bags.there, reason="torch has no FBGEMM here")


def decoded(rows: PackedRows) -> Tensor:
    """The values of all rows [row, dim] in float64, byte by byte: channel ``c`` is in byte ``c % width``,
    at the bits of its part, and is scale * (symbol - half) + middle of its group."""
    width, size = rows.q.shape[1], rows.dim // rows.grids.shape[1]
    half = ((1 << rows.bits) - 1) / 2
    q, (scale, middle) = rows.q.numpy().astype(np.int64), rows.grids.double().numpy()
    if rows.tiles is not None:
        every = [tile[:, :256].t().numpy().astype(np.int64) for tile in rows.tiles]
        q = np.concatenate([*every, q])
    made = np.zeros((len(q), rows.dim))
    for channel in range(rows.dim):
        symbols = (q[:, channel % width] >> (rows.bits * (channel // width))) & (2**rows.bits - 1)
        group = channel // size
        made[:, channel] = scale[group] * (symbols - half) + middle[group]
    return torch.from_numpy(made)


def read(rows: TabledRows) -> Tensor:
    """The same of values: symbol ``i`` of a grid is at the bits of its place, and scale and first value are the
    last two numbers of its bytes."""
    wide = "f4" if rows.bits == 8 else "f2"
    groups, each = rows.q.shape[1], 8 // rows.bits
    size, made = rows.dim // groups, np.zeros((len(rows.q), rows.dim))
    for row, grids in enumerate(rows.q.numpy()):
        for group, some in enumerate(grids):
            scale, first = some.view(wide)[-2:].astype(np.float64)
            for i in range(size):
                symbol = (int(some[i // each]) >> (rows.bits * (i % each))) & (2**rows.bits - 1)
                made[row, group * size + i] = (scale * symbol + first) * rows.unit
    return torch.from_numpy(made)


class Case:
    """Coded rows of which each head has as many as it likes, raw ones behind them, and queries."""

    def __init__(self, seed: int, forms: tuple[str, ...], dim: int, n: int, most: int) -> None:
        rng = np.random.default_rng(seed)
        generator = torch.Generator().manual_seed(seed)
        self.heads, self.group, self.n, self.dim = int(rng.integers(1, 5)), 2, n, dim
        self.levels: list[CodedLevel] = []
        self.keys: list[list[Tensor]] = [[] for _ in range(self.heads)]
        self.values: list[list[Tensor]] = [[] for _ in range(self.heads)]

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        for form in forms:
            sizes = rng.integers(0, most, self.heads)
            sizes[rng.integers(self.heads)] = most  # and one has some
            k = [random(size, dim) for size in sizes]
            v = [random(size, dim) + 1 for size in sizes]
            level = CodedLevel.of(form, [np.arange(size) for size in sizes], k, v)
            self.levels.append(level)
            for own, every in ((self.keys, decoded(level.k)), (self.values, read(level.v))):
                for head, part in enumerate(every.split(sizes.tolist())):
                    own[head].append(part)
        # rows that rest as they are: of all heads as many, or of each as many as it likes
        raw = rng.integers(n, n + 9, self.heads) if rng.random() < 0.5 else rng.integers(n, n + 9)
        self.seen: list[VisibleKV] = []
        for some in np.atleast_1d(raw).tolist():
            each = self.heads // np.size(raw)
            k, v = random(each, some, dim), random(each, some, dim)
            for head in range(each):
                self.keys[len(self.seen) + head].append(k[head].double())
                self.values[len(self.seen) + head].append(v[head].double())
            bias = None if n == 1 else torch.zeros(n, some)
            if bias is not None:
                bias[:, -n:].fill_(-torch.inf).triu_(1)
            self.seen.append(VisibleKV(k, v, bias))
        self.query = random(n, self.heads * self.group, dim)
        self.sinks = random(self.heads * self.group)

    def slowly(self, how: Scaling) -> Tensor:
        """Attention [row, head, dim] in float64, row by row."""
        made = torch.zeros(self.query.shape, dtype=torch.float64)
        for row in range(self.n):
            for head in range(self.heads * self.group):
                own = head // self.group
                keys, values = torch.cat(self.keys[own]), torch.cat(self.values[own])
                unseen = self.n - 1 - row
                keys, values = keys[: len(keys) - unseen], values[: len(values) - unseen]
                scores = keys @ self.query[row, head].double() * how.scale
                if how.softcap is not None:
                    scores = torch.tanh(scores / how.softcap) * how.softcap
                shares = scores.exp()
                whole = shares.sum() + (0 if how.sinks is None else how.sinks[head].double().exp())
                made[row, head] = shares @ values / whole
        return made

    def found(self, how: Scaling) -> tuple[Tensor, Tensor]:
        assert bags.suit(self.levels, self.query, self.heads)
        return bags.attended(self.query, self.levels, self.seen, how)


@pytest.fixture(autouse=True)
def however_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bags, "LEAST", 0)


@pytest.fixture(params=[(1 << 14, 1), (1 << 14, 1 << 12), (512, 1), (512, 1 << 12)])
def block(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Rows that are done at once; and from how many on keys rest in tiles."""
    for module in (bags, lanes):
        monkeypatch.setattr(module, "BLOCK", request.param[0])
    monkeypatch.setattr(packed, "TILED", request.param[1])
    lanes._lanes.cache_clear()
    yield request.param[0]
    lanes._lanes.cache_clear()


@pytest.mark.parametrize("forms", [("k8v4",), ("int8", "k4v2"), ("k8v4", "int4", "k4v2")])
@pytest.mark.parametrize("dim", [64, 128, 32, 20, 16])
@pytest.mark.sampled
def test_it_is_attention_over_what_the_bits_say(
    forms: tuple[str, ...], dim: int, block: int
) -> None:
    for seed, n in enumerate((1, 3, 1)):
        case = Case(seed + dim, forms, dim, n, (40, 300, 700)[seed])
        for how in (
            Scaling(dim**-0.5, None),
            Scaling(dim**-0.5, 3.0, case.sinks),
        ):
            out, weights = case.found(how)
            assert (out.double() - case.slowly(how)).abs().max() < 3e-6
            assert (weights >= 0).all()
            if how.sinks is None:
                assert (weights.sum(-1) - 1).abs().max() < 1e-5


def test_weights_stand_where_slots_are_said_to(block: int) -> None:
    case = Case(5, ("k8v4", "k4v2"), 64, 1, 600)
    for i, level in enumerate(case.levels):
        for own in level.slots:
            own += 1 + 1000 * i  # numbers that no other row has
    _, weights = case.found(Scaling(1.0, None))
    at = lanes.lanes_of(case.levels)
    slots = at.slots(case.levels)
    for head in range(case.heads):
        scores = torch.cat(case.keys[head]) @ case.query[0, 2 * head].double()
        wanted = (scores - scores.logsumexp(0)).exp()
        of = np.concatenate([level.slots[head] for level in case.levels])
        shown = weights[2 * head, 0, : at.n]
        there = np.flatnonzero(shown.numpy() > 0)
        found = dict(zip(slots[head, there].tolist(), shown[there].tolist(), strict=True))
        assert len(found) == len(there) and set(found) <= set(of.tolist())
        for slot, value in zip(of.tolist(), wanted.tolist(), strict=False):
            assert abs(found.get(slot, 0.0) - value) < 1e-5


def test_what_others_left_does_not_count() -> None:
    case, how = Case(3, ("int8", "k8v4", "k4v2"), 64, 1, 500), Scaling(0.1, None)
    out, weights = case.found(how)
    for room in vars(bags._mine).values():
        is_table = room.dtype == torch.uint8  # behind each row a scale of 1 and a first value of 0
        some = room[..., :-ENDS] if is_table else room
        some.fill_(255 if is_table else torch.nan)
    again = case.found(how)
    assert torch.equal(out, again[0]) and torch.equal(weights, again[1])


@pytest.mark.parametrize("loudest", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_kept_rows_are_counted_as_all_would_be(loudest: bool, n: int) -> None:
    """Attention of each head's own rows, in any order, padded: the same sums as over all slots."""
    rng, stop, heads = np.random.default_rng(n), 50, 3
    kept = [rng.permutation(stop)[: 20 + 5 * head] for head in range(heads)]
    slots = torch.zeros(heads, 30, dtype=torch.int64)
    packed, wide = torch.zeros(heads, 2, n, 30), torch.zeros(heads, 2, n, stop)
    for head, own in enumerate(kept):
        slots[head, : len(own)] = torch.from_numpy(own)
        some = torch.rand(2, n, len(own)) * (torch.rand(2, n, len(own)) > 0.4)
        packed[head, ..., : len(own)] = some
        wide[head][..., own] = some
    tallies = [AttentionSums([], ages=True, loudest=loudest) for _ in range(2)]
    for tally in tallies:
        tally.total, tally.seen_by, tally.n_rows = [BySlot()], [BySlot()], [0]
    for _ in range(2):
        tallies[0].add(0, tallies[0].of_attention(0, 0, wide))
        tallies[1].add(0, tallies[1].of_kept(0, stop, packed, slots))
    a, b = tallies
    assert a.n_rows == b.n_rows == [2 * n]
    assert torch.allclose(a.total[0].written, b.total[0].written)
    assert torch.equal(a.seen_by[0].written, b.seen_by[0].written)
    assert 0 < int(a.seen_by[0].written.min()) or float(a.seen_by[0].written.max()) <= 2 * n


def test_what_does_not_suit_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [torch.randn(9, 6)]
    for form in FORMS:
        level = CodedLevel.of(form, [np.arange(9)], rows, rows)
        assert not bags.suit([level], torch.randn(1, 2, 6), 1)  # a group of 6 channels
    level = CodedLevel.of("k8v4", [np.arange(9)], [torch.randn(9, 64)], [torch.randn(9, 64)])
    assert bags.suit([level], torch.randn(1, 2, 64), 1)
    assert not bags.suit([level], torch.randn(9, 2, 64), 1)  # many rows
    assert not bags.suit([level], torch.randn(1, 2, 64).double(), 1)
    monkeypatch.setattr(bags, "LEAST", 10)
    assert not bags.suit([level], torch.randn(1, 2, 64), 1)  # few coded rows
