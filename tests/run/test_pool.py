"""One buffer a layer for all contexts: what it holds besides their rows, and that none are mixed."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from kvweave.run.base import LayerInfo, Mask
from kvweave.run.pool import Pools
from kvweave.run.rotary import STATIC
from kvweave.run.rows import KVRows
from kvweave.run.thinned import ThinnedRows
from kvweave.store.kv import LayerShape

SHAPE = LayerShape(2, 4, 2, 4)
INFOS = [LayerInfo(SHAPE, STATIC, Mask(window=8)), LayerInfo(SHAPE, STATIC)]
CPU = torch.device("cpu")


def made(pools: Pools, n: int, mark: float) -> KVRows:
    """A context of ``n`` rows that all hold ``mark``."""
    rows = KVRows(INFOS, pools.new_rows(), CPU)
    rows.reserve(n)
    rows.positions[:n], rows.n = np.arange(n), n
    for layer in rows.layers:
        k, v = layer.seen(slice(0, n))
        k.fill_(mark), v.fill_(-mark)
    return rows


def held(pools: Pools) -> list[int]:
    return [pool.capacity for pool in pools.layers]


@pytest.mark.parametrize("seed", range(3))
def test_what_comes_and_goes_keeps_its_rows_and_the_buffer_small(seed: int) -> None:
    draw, pools = np.random.default_rng(seed), Pools(INFOS, torch.float32, CPU)
    alive: dict[float, KVRows] = {}
    for mark in range(1, 120):
        if len(alive) > 5:
            del alive[draw.choice(list(alive))]
        alive[float(mark)] = made(pools, int(draw.integers(1, 3000)), float(mark))
        other = alive[draw.choice(list(alive))]
        other.reserve(other.n + int(draw.integers(1, 500)))
        for own, rows in alive.items():
            rows.check_integrity()
            for layer in rows.layers:
                k, v = layer.seen(slice(0, rows.n))
                assert bool((k == own).all()) and bool((v == -own).all())
        used = sum(rows.capacity for rows in alive.values())
        most = max(rows.capacity for rows in alive.values())  # grown: the old rows besides
        assert max(held(pools)) <= max(1100, 1.7 * (used + most))


def test_a_pool_is_written_out_of_inference_mode_whoever_made_or_packed_it() -> None:
    with torch.inference_mode():
        pools = Pools(INFOS, torch.float32, CPU)
        first = made(pools, 2000, 1.0)
    second = made(pools, 10, 2.0)
    for rows, mark in ((first, 1.0), (second, 2.0)):
        assert all(bool((layer.seen(slice(0, rows.n))[0] == mark).all()) for layer in rows.layers)


def test_rows_that_leave_the_pool_leave_no_buffer_behind() -> None:
    pools = Pools(INFOS, torch.float32, CPU)
    first, second = made(pools, 2000, 1.0), made(pools, 3000, 2.0)
    first.keep(0, [np.arange(1993, 2000)] * 2)
    assert 3000 <= held(pools)[0] <= 3500  # the other's are there
    second.keep(0, [np.arange(2993, 3000)] * 2)
    assert held(pools)[0] <= 1024 and held(pools)[1] >= 5000
    for rows, mark in ((first, 1.0), (second, 2.0)):
        thinned = rows.layers[0]
        assert isinstance(thinned, ThinnedRows)
        k, _ = rows.packed(0)
        assert k.shape[1] == 7 and bool((k == mark).all())
        assert bool((rows.layers[1].seen(slice(0, rows.n))[0] == mark).all())
    third = made(pools, 50, 3.0)
    third.check_integrity()
    assert bool((third.layers[0].seen(slice(0, 50))[0] == 3.0).all())
    del third
    gc.collect()


def test_rows_shared_with_another_context_stay() -> None:
    pools = Pools(INFOS, torch.float32, CPU)
    rows = made(pools, 100, 1.0)
    twin = rows.clone(0)  # all layers shared
    rows.keep(0, [np.arange(90, 100)] * 2)
    assert held(pools)[0] >= 100
    assert bool((twin.layers[0].seen(slice(0, 100))[0] == 1.0).all())
