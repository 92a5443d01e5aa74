"""The kernels of a GPU against plain torch: compiled where CUDA is, else interpreted (`conftest`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from needs import PIP, lack
from torch import Tensor

from kvweave.run import kernel
from kvweave.run.rotary import Rotation

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
fused = pytest.importorskip(
    "kvweave.run.fused", reason=lack("no Triton", PIP, "triton"), exc_type=ImportError
)

# (query heads, kv heads, dim, v_dim): groups of one and more, sizes that are no power of two
SHAPES = [(2, 2, 16, 16), (4, 2, 24, 40), (7, 1, 64, 32)]
# of each context: its first slot, and slots of its rows counted from there
CONTEXTS = [(1, [*range(5)]), (40, [30]), (90, [3, 4, 9, *range(20, 60)])]
N_SLOTS = 160
DTYPES = {torch.float64: 1e-9, torch.float32: 1e-5, torch.float16: 5e-3}
if DEVICE.type == "cuda":  # Triton's interpreter multiplies the bits of bfloat16
    DTYPES[torch.bfloat16] = 4e-2


def cut(window: int | None) -> tuple[Tensor, Tensor]:
    """Intervals [2, row] and tiles [tile, 2] of all rows, and of three that fill up."""
    begins, ends, tiles = [], [], []
    for start, slots in CONTEXTS:
        for first in range(len(ends), len(ends) + len(slots), kernel.TILE):
            tiles.append([first, min(first + kernel.TILE, len(ends) + len(slots))])
        begins += [start + max(0, 0 if window is None else s - window + 1) for s in slots]
        ends += [start + s + 1 for s in slots]
    for _ in range(3):
        tiles.append([len(ends), len(ends) + 1])
        begins.append(0)
        ends.append(0)
    return torch.tensor([begins, ends]), torch.tensor(tiles)


def normal(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made, dtype=torch.float64).to(dtype)


def rows_of(shape: tuple[int, int, int, int], n: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """Queries of ``n`` rows, and pools of keys and values."""
    heads, kv_heads, dim, v_dim = shape
    pools = [normal(kv_heads, N_SLOTS, d, dtype=dtype, seed=d) for d in (dim, v_dim)]
    for pool in pools:
        pool[:, 6:20] = float("nan")  # nobody's
    return normal(n, heads, dim, dtype=dtype, seed=0), pools


def near(found: Tensor, wanted: Tensor, bound: float) -> None:
    torch.testing.assert_close(found.cpu(), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (7, 0.0), (None, 5.0)])
@pytest.mark.parametrize("splits", [1, 4])
def test_every_row_sees_its_interval_as_in_plain_torch(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    splits: int,
) -> None:
    dim = shape[2]
    seen, tiles = cut(window)
    query, pools = rows_of(shape, seen.shape[1], dtype)
    wanted = kernel.interval_attention(query, *pools, seen, tiles, dim**-0.5, softcap)
    there = [t.to(DEVICE) for t in (query, *pools, seen, tiles)]
    found = fused.interval_attention(
        there[0],
        (there[1], there[2]),
        there[3],
        there[4],
        (dim**-0.5, softcap),
        (kernel.TILE, splits),
    )
    for mine, one in zip(found, wanted, strict=True):
        assert mine.dtype == one.dtype
        near(mine, one, DTYPES[dtype])
    assert not found[0][-3:].any() and bool((found[1][-3:] == -torch.inf).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_each_are_a_tile_each(dtype: torch.dtype) -> None:
    seen = torch.tensor([[1, 40, 0], [9, 73, 0]])
    tiles = torch.tensor([[0, 1], [1, 2], [2, 3]])
    query = normal(3, 6, 32, dtype=dtype, seed=1)
    pools = [normal(2, N_SLOTS, 32, dtype=dtype, seed=d) for d in (2, 3)]
    wanted = kernel.interval_attention(query, *pools, seen, tiles, 0.2, 0.0)
    q, k, v, s, t = (x.to(DEVICE) for x in (query, *pools, seen, tiles))
    cut = 1, fused.splits(len(tiles) * 2, 64)
    found = fused.interval_attention(q, (k, v), s, t, (0.2, 0.0), cut)
    for mine, one in zip(found, wanted, strict=True):
        near(mine, one, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [0, 16, 24])
def test_rows_are_turned_and_written_where_plain_torch_writes_them(
    dtype: torch.dtype, interleaved: bool, width: int
) -> None:
    slots = torch.tensor([3, 9, 10, 40, 0])
    keys, values = (normal(5, 2, d, dtype=dtype, seed=d) for d in (24, 40))
    rotation = Rotation(width, interleaved, torch.logspace(0, -2, width // 2))
    angles = torch.stack(rotation.angles(torch.tensor([0, 5, 611, 7, 0])))
    wanted = [torch.zeros(2, N_SLOTS, d, dtype=dtype) for d in (24, 40)]
    found = [pool.to(DEVICE, copy=True) for pool in wanted]
    kernel.write_rows(keys, values, *wanted, slots, angles, interleaved)
    there = [t.to(DEVICE) for t in (keys, values, slots, angles)]
    fused.write_rows(there[0], there[1], tuple(found), there[2], there[3], interleaved)
    for mine, one in zip(found, wanted, strict=True):
        near(mine, one, DTYPES[dtype])
    turned = rotation.apply(keys, (angles[0], angles[1]))
    near(found[0][:, slots.to(DEVICE)].transpose(0, 1), turned, DTYPES[dtype])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (7, 0.0), (None, 5.0)])
@pytest.mark.parametrize("squared", [False, True])
def test_what_rows_pay_is_added_up_as_in_plain_torch(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    window: int | None,
    softcap: float,
    squared: bool,
) -> None:
    heads, _, dim, _ = shape
    seen, tiles = cut(window)
    query, pools = rows_of(shape, seen.shape[1], dtype)
    _, lse = kernel.interval_attention(query, *pools, seen, tiles, dim**-0.5, softcap)
    first, last = len(CONTEXTS[0][1]) + 1, len(seen[0]) - 3  # rows of the third context
    rows = torch.arange(first, last)
    rows = torch.cat((rows, rows.new_zeros(64 - len(rows))))
    weights = torch.zeros(64, dtype=torch.float64)
    weights[: last - first] = torch.linspace(0, 1, last - first)  # the first does not count
    total = torch.ones(60, dtype=lse.dtype)
    counted = rows, weights, torch.tensor([CONTEXTS[2][0]])
    paid, how = (query, pools[0], seen, lse), (dim**-0.5, softcap, 2.0 if squared else 1.0)
    found = total.to(DEVICE, copy=True)
    fused.attention_sums([t.to(DEVICE) for t in paid], [t.to(DEVICE) for t in counted], found, how)
    kernel.attention_sums(paid, counted, total, how)
    near(found, total, DTYPES[dtype])
    if not squared:  # each head of each row pays 1 in all
        wanted = 60 + heads * weights.sum()
        assert float(total.sum()) == pytest.approx(float(wanted), rel=DTYPES[dtype])


def test_what_comes_to_one_column_is_added_up_the_same_again() -> None:
    """In one order, on CUDA too."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 60_000, generator=generator)
    where = torch.randint(0, 9, values.shape, generator=generator)
    wanted = torch.zeros(3, 10, dtype=torch.float64).scatter_add_(1, where, values.double()) + 2
    found = [
        kernel.added(torch.full((3, 10), 2.0).to(DEVICE), where.to(DEVICE), values.to(DEVICE)).cpu()
        for _ in range(9)
    ]
    assert (found[0] - wanted).abs().max() < 1e-2
    assert all(torch.equal(each, found[0]) for each in found)


def test_nobody_else_adds_up_in_any_order() -> None:
    """What these do on a GPU is another number each time (torch.use_deterministic_algorithms)."""
    source = Path(kernel.__file__).parents[1]
    loose = re.compile(r"scatter_add|index_add|accumulate=True|scatter_reduce\w*\(.*(sum|mean)")
    found = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if any(loose.search(line) for line in path.read_text().splitlines())
    }
    assert found == {"run/kernel.py"}
