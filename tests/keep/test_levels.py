"""Policies that divide rows among forms and places: each by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import tiny
from keep.views import compute, view
from torch import Tensor

from kvweave import Engine
from kvweave.errors import InvalidArgument
from kvweave.keep.tokens.base import LayerView
from kvweave.keep.tokens.diffkv import DiffKV
from kvweave.keep.tokens.flexicache import FlexiCache, _ends
from kvweave.keep.tokens.queries import Latest
from kvweave.keep.tokens.spec import Amount, Keep
from kvweave.run.base import LayerInfo
from kvweave.run.rotary import STATIC, Rotation
from kvweave.store.kv import LayerShape

CPU = torch.device("cpu")
TOKENS = np.random.default_rng(3).integers(3, 101, 70)


def shown(kind, keys: Tensor, queries: Tensor, rotation: Rotation = STATIC) -> LayerView:
    """Return a view of ``keys`` [head, row, dim] behind which ``queries`` [row, head, dim] asked."""
    heads, n, dim = keys.shape
    info = LayerInfo(LayerShape(heads, dim, heads, dim), rotation)
    watch = kind.watch([info], CPU)
    for at in range(0, len(queries), 5):  # in passes of five
        watch.begin()
        watch.ask(0, n - len(queries) + at, queries[at : at + 5])
        watch.end()
    every = torch.arange(n).expand(heads, n)
    return LayerView(0, info, every, every >= 0, every, keys, keys, watch)


def test_ends_of_pages_are_those_of_their_rows_whatever_heads_have() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        n, page = int(rng.integers(1, 40)), int(rng.integers(1, 9))
        own = [np.sort(rng.choice(60, rng.integers(1, n + 1), False)) for _ in range(3)]
        there, positions = torch.zeros(3, n, dtype=torch.bool), torch.zeros(3, n, dtype=torch.int64)
        for head, some in enumerate(own):
            there[head, : len(some)], positions[head, : len(some)] = True, torch.from_numpy(some)
        keys = torch.randn(3, n, 4)
        names, numbers = torch.unique(
            (positions // page).masked_fill(~there, 0), return_inverse=True
        )
        low, high, empty = _ends(keys, numbers, there)
        for head, some in enumerate(own):
            for i, name in enumerate(names.tolist()):
                mine = keys[head, : len(some)][torch.from_numpy(some // page == name)]
                assert empty[head, i] == (not len(mine))
                if len(mine):
                    assert torch.equal(low[head, i], mine.amin(0))
                    assert torch.equal(high[head, i], mine.amax(0))


@pytest.mark.parametrize(
    "rotation", [STATIC, Rotation(8, False, torch.tensor([1.0, 0.1, 0.01, 0.001]))]
)
def test_a_page_is_worth_no_less_than_any_of_its_rows(rotation: Rotation) -> None:
    kind = FlexiCache(page=4, recent=12)
    keys, queries = torch.randn(2, 30, 8), torch.randn(14, 4, 8)
    one = shown(kind, keys, queries, rotation)
    _, by_query = kind._pages(one)
    assert by_query is not None and by_query.shape == (2, 12, 8)
    at = torch.arange(30 - 12, 30)
    turned = rotation.apply(queries[-12:], rotation.angles(at))
    for head in range(2):
        for i in range(12):
            for page in range(8):
                rows = keys[head, 4 * page : 4 * page + 4]
                asked = turned[i, 2 * head : 2 * head + 2]
                low, high = rows.amin(0), rows.amax(0)
                bound = torch.maximum(asked * low, asked * high).sum(-1).mean()
                assert torch.isclose(by_query[head, i, page], bound, atol=1e-5)
                assert bound >= (rows @ asked.T).mean(1).max() - 1e-5
    worth = by_query.mean(1).repeat_interleave(4, 1)[:, :30]
    assert torch.allclose(kind.scores(one), worth)


def test_a_head_is_stable_that_looks_at_the_same_pages() -> None:
    """Head 0 asks for page 1 all the time, head 1 for page 1 and then for page 5."""
    kind = FlexiCache(page=4, recent=8, top=0.2)
    keys = torch.zeros(2, 32, 8)
    for page in range(8):
        keys[:, 4 * page : 4 * page + 4, page] = 1.0
    queries = torch.zeros(8, 2, 8)
    queries[:, 0, 1] = queries[:4, 1, 1] = queries[4:, 1, 5] = 1.0
    one = shown(kind, keys, queries)
    scores, whole = kind.judged(one)
    assert whole.tolist() == [False, True] and scores[0].argmax() // 4 == 1
    other = FlexiCache(page=4, recent=8, top=0.2, overlap=0.0)
    assert other.judged(one)[1].tolist() == [False, False]


def test_nothing_is_known_before_the_first_query() -> None:
    kind = FlexiCache()
    one = shown(kind, torch.randn(2, 30, 8), torch.zeros(0, 2, 8))
    scores, whole = kind.judged(one)
    assert whole is None and not scores.any() and scores.shape == (2, 30)


def test_pages_are_found_once_a_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were found for the scores and again for the heads that keep everything."""
    pages, found = FlexiCache._pages, []

    def counted(self: FlexiCache, view: LayerView) -> tuple[Tensor, Tensor | None]:
        found.append(view.layer)
        return pages(self, view)

    monkeypatch.setattr(FlexiCache, "_pages", counted)
    runner = tiny()
    with Engine(runner, base="", denoise="never") as engine:
        context = engine.context("c", keep="flexicache:12,page=4,every=3")
        context.append(TOKENS.tolist())
        context.generate(max_tokens=9, ignore_eos=True)
    n_choices = 1 + 8 // 3  # behind the prompt, and every third of eight rows
    assert found == [*range(len(runner.layers))] * n_choices


@pytest.mark.parametrize("heads", ["uniform", "ada"])
@pytest.mark.parametrize("target", [6, 20, 33, 39])
@pytest.mark.parametrize("several", [1, 2, 3, 4])
def test_heads_that_keep_everything_take_it_from_the_others(
    heads: str, target: int, several: int
) -> None:
    """All of theirs where that leaves the others half, else as much as that; never more in all."""
    n, keep = 40, Keep.parse(f"flexicache:{target},heads={heads}")
    every = torch.arange(n).expand(4, n)
    info = LayerInfo(LayerShape(4, 8, 4, 8), STATIC)
    one = LayerView(0, info, every, every >= 0, every)
    scores, whole = torch.rand(4, n), torch.arange(4) < several
    safe = one.front(1) | one.newest(2)
    kept, coded = keep.divide(one, scores, [target, n - target], safe, n, whole)
    sizes = [len(own) for own in kept]
    assert sizes == [n] * 4  # below or not
    sizes = [n - len(own) for own in coded["below"]]
    assert sum(sizes) <= 4 * target and sum(sizes) > 4 * target - 4
    if heads == "uniform" and several < 4:
        mine, others = sizes[:several], sizes[several:]
        assert len(set(mine)) == 1 and mine[0] >= target
        assert min(others) >= max(3, target // 2) and (
            mine[0] == n or max(others) < target // 2 + 4
        )
    for head, own in enumerate(coded["below"]):
        stays = np.setdiff1d(np.arange(n), own)
        assert safe[head, stays].sum() == 3
        rest = scores[head][stays][~safe[head, stays]]
        assert not len(own) or not len(rest) or rest.min() >= scores[head][own].max()


def test_newest_queries_stay() -> None:
    info = LayerInfo(LayerShape(1, 4, 1, 4), STATIC)
    tally, every = Latest([info], 6), torch.randn(23, 2, 4)
    for start, stop in ((0, 1), (1, 9), (9, 10), (10, 13), (13, 23)):
        tally.add(0, tally.of_queries(0, start, every[start:stop]))
    assert torch.equal(tally.queries[0], every[-6:])


def test_attention_divides_rows_by_its_mean_over_those_that_saw() -> None:
    """Rows under prune / n go, under quant / n rest in less, of the loudest head of the group."""
    kind = DiffKV(prune=0.5, quant=1.5, sinks=0, window=0)
    info = LayerInfo(LayerShape(1, 4, 1, 4), STATIC)
    watch = kind.watch([info], CPU)
    rows = [[1.0, 0, 0, 0], [0.9, 0.1, 0, 0], [0.5, 0.1, 0.4, 0], [0.5, 0.02, 0.38, 0.1]]
    quiet = [[1.0, 0, 0, 0], [0.5, 0.05, 0, 0], [0.5, 0.02, 0.2, 0], [0.5, 0.02, 0.2, 0.02]]
    watch.begin()
    watch.see(0, 0, 0, torch.tensor([rows, quiet]))
    watch.end()
    every = torch.arange(5)[None]  # the last row has been seen by nobody
    one = LayerView(0, info, every, every >= 0, every, watch=watch)
    means = [2.9 / 4, 0.22 / 3, 0.78 / 2, 0.1, 0.0]
    assert torch.allclose(kind.scores(one), torch.tensor([means]))
    # of 4 rows: 0.125 and 0.375
    assert kind.levels(one, kind.scores(one), 4).tolist() == [[1, 3, 1, 3, 1]]
    assert kind.levels(one, kind.scores(one), 16).tolist() == [[1, 2, 1, 1, 1]]  # 0.03 and 0.09


def test_a_budget_bounds_what_thresholds_leave() -> None:
    keep = Keep.parse("diffkv:20,prune=0,quant=1,sinks=2,window=4")
    runner = tiny()
    watch = keep.policy.watch(runner.layers, CPU)
    rows = compute(runner, TOKENS, watch)
    one = view(runner, rows, 1, watch)
    safe = one.front(2) | one.newest(4)
    scores = keep.policy.scores(one)
    kept, coded = keep.divide(one, scores, [20], safe, 70)
    assert [len(own) for own in kept] == [20, 20]
    for head, own in enumerate(kept):
        high, low = coded["k8v4"][head], coded["k4v2"][head]
        worth = scores[head].cpu().numpy()
        assert (worth[high] >= 1 / 70).all() and (worth[low] < 1 / 70).all()
        raw = np.setdiff1d(own, np.r_[high, low])
        assert raw.tolist() == [0, 1, 66, 67, 68, 69]
        others = np.setdiff1d(np.arange(70), raw)
        best = others[np.lexsort((-others, -worth[others]))[:14]]
        assert set(np.r_[high, low]) == set(best)


def test_the_best_take_more_bits_and_the_rest_go() -> None:
    keep = Keep.parse("keydiff:10,int8=12,k4v2=0.2,below=20,sinks=0,window=0")
    runner = tiny()
    rows = compute(runner, TOKENS, None)
    one = view(runner, rows, 1, None)
    scores, safe = keep.policy.scores(one), torch.zeros_like(one.there)
    sizes = keep.sizes(70, dict.fromkeys(("", *keep.forms), 1), 0, 1)
    assert sizes == [10, 12, 14, 20] and keep.forms == ("int8", "k4v2", "below")
    kept, coded = keep.divide(one, scores, sizes, safe, 70)
    for head, own in enumerate(kept):
        order = np.lexsort((-np.arange(70), -scores[head].cpu().numpy()))
        assert set(own) == set(order[:56])
        for form, (start, stop) in {"int8": (10, 22), "k4v2": (22, 36), "below": (36, 56)}.items():
            assert set(coded[form][head]) == set(order[start:stop])


def test_forms_are_read_as_they_are_written() -> None:
    assert Keep.parse("ttkv:256").more == (("int8", Amount()),)
    assert Keep.parse("ttkv:256,int4=rest").more == (("int4", Amount()),)
    keep = Keep.parse("h2o:0.1,below=rest,k8v4=64,int8=2MiB")
    assert keep.more == (
        ("int8", Amount(bytes=2 << 20)),
        ("k8v4", Amount(rows=64)),
        ("below", Amount()),
    )
    row_bytes = {"": 1, "int8": 1 << 14, "k8v4": 1, "below": 1}
    assert keep.sizes(1000, row_bytes, 0, 1) == [100, 128, 64, 708]
    assert not Keep.parse("h2o:0.1").forms
    with pytest.raises(InvalidArgument, match="did you mean k4v2"):
        Keep.parse("h2o:0.1,k4v3=rest")
    with pytest.raises(InvalidArgument, match=r"sinks, window, age, every, .*, below"):
        Keep.parse("h2o:0.1,zzz=3")
    with pytest.raises(InvalidArgument, match="has its own forms"):
        Keep.parse("diffkv,int8=0.2")
