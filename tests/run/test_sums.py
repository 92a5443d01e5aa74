"""Attention that is added up where it is computed is what observers add up who are shown it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import oracle
import pytest
import torch
from oracle import DEVICE
from recorded import Played
from run.backend import Pooled

from kvweave.run.base import Work
from kvweave.run.graphs import Graphs
from kvweave.run.model import Runner
from kvweave.run.rows import KVRows
from kvweave.weave.passes import Mass

NAMES = ["llama", "gemma2", "gemma3", "gpt_oss_sinks", "llama4_chunked", "smollm3_nope"]
KINDS = [None, Played] + ([Graphs] if DEVICE.type == "cuda" else [])


class Shown(Mass):
    """Adds up what it is shown."""

    n_seen = 0

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sums = None
        self._host = args[1]

    def see(self, layer, first, begin, weights):
        type(self).n_seen += 1
        _, n, n_keys = weights.shape
        paid = weights.square() if self.squared else weights
        each = torch.as_tensor(self._host[first : first + n], device=weights.device)
        self._now[begin : begin + n_keys] += torch.einsum("r,hrk->k", each.to(paid), paid).float()


class Told(Mass):
    """Must not be shown anything."""

    def see(self, layer, first, begin, weights):
        raise AssertionError("shown")


def rows_of(runner: Runner, n: int, seed: int) -> KVRows:
    """A context of ``n`` random tokens."""
    rows = runner.new_rows()
    rows.reserve(n + 8)
    every = np.arange(n)
    runner.forward([Work(rows, tokens(n, seed), every, every, want=every[-1:])])
    return rows


def tokens(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 90, n)


def works(lot, kind, seed: int) -> list[Work]:
    """One work a context: scattered rows and the last ones, of which some count."""
    made, draw = [], np.random.default_rng(seed)
    for i, (rows, n) in enumerate(lot):
        slots = np.union1d(draw.choice(n - 4, 5, replace=False), np.arange(n - 4, n))
        weights = draw.random(len(slots))
        weights[[0, 3]], weights[-1] = 0.0, 1.0
        last = None if i else len(rows.infos) - 1
        seen = kind(n + 3, weights, DEVICE, i, squared=bool(i))
        want = np.array([len(slots) - 1]) if last is None else np.zeros(0, np.int64)
        made.append(
            Work(rows, tokens(len(slots), seed), slots, slots, want=want, observer=seen, last=last)
        )
    return made


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.sampled
def test_sums_are_those_of_who_is_shown_all(name, kind) -> None:
    runner = Pooled(oracle.build(*oracle.MODELS[name]), name=name)
    runner.new_rows()
    pools = runner.pools
    assert pools is not None
    pools.graphs = None
    lot = [(rows_of(runner, n, n), n) for n in (21, 38)]
    graphs = None if kind is None else kind(runner.device)
    for seed in range(4):
        pools.graphs = None
        shown = works(lot, Shown, seed)
        before = Shown.n_seen
        runner.forward(shown)
        assert Shown.n_seen > before
        pools.graphs = graphs
        told = works(lot, Told, seed)
        runner.forward(told)
        for mine, one in zip(told, shown, strict=True):
            assert float(one.observer.total.sum()) > 1
            torch.testing.assert_close(
                mine.observer.total, one.observer.total, rtol=1e-5, atol=1e-6
            )
    # some wait for the device amid a pass (routers of experts): these are never recorded
    assert graphs is None or graphs.n_played == (3 if graphs._works else 0)


def test_one_that_is_shown_attention_makes_the_pass_one_of_its_own() -> None:
    runner = Pooled(oracle.build(*oracle.MODELS["llama"]), name="llama")
    runner.new_rows()
    assert runner.pools is not None
    runner.pools.graphs = graphs = Played(runner.device)
    lot = [(rows_of(runner, n, n), n) for n in (21, 38)]
    before = graphs.n_played
    for seed in range(3):
        first, second = works(lot, Told, seed)
        second = works(lot, Shown, seed)[1]
        with pytest.raises(AssertionError, match="shown"):  # all are, where one has to be
            runner.forward([first, second])
        runner.forward([second])
    assert graphs.n_played == before


def test_a_work_in_parts_adds_up_what_it_does_as_a_whole() -> None:
    runner = Pooled(oracle.build(*oracle.MODELS["gemma3"]), name="gemma3")
    runner.new_rows()
    assert runner.pools is not None
    runner.pools.graphs = None
    lot = [(rows_of(runner, 30, 1), 30)]
    found = []
    for cuts in ([0, 9], [0, 4, 9]):
        (work,) = works(lot, Told, 5)
        for start, stop in pairwise(cuts):
            runner.forward([work.part(start, stop)])
        found.append(work.observer.total)
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
