"""Low-rank differences, and the list that bounds them: python -m pytest tests/store/test_patches.py"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvweave.store.kv import KV
from kvweave.store.patches import Patch, Patches


def kv(n: int, seed: int) -> KV:
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int) -> torch.Tensor:
        return torch.randn(n, 2, width, generator=generator, dtype=torch.float64)

    return KV([draw(4) for _ in range(3)], [draw(6) for _ in range(3)])


@pytest.mark.parametrize("n", [1, 5, 20])
def test_full_rank_is_the_difference_itself(n: int) -> None:
    old, new = kv(n, 1), kv(n, 2)
    kept = old.clone()
    found = Patch.between(old, new, 99).applied(old)
    pairs = zip((*found.k, *found.v), (*new.k, *new.v), strict=True)
    assert all(torch.allclose(a, b, atol=1e-12) for a, b in pairs)
    assert all(torch.equal(a, b) for a, b in zip(old.k, kept.k, strict=True)), "not in place"


def test_a_rank_is_the_best_of_its_kind() -> None:
    """What is left is what the singular values beyond the rank say (Eckart and Young)."""
    old, new = kv(20, 1), kv(20, 2)
    values = torch.linalg.svdvals((new.v[1] - old.v[1]).flatten(1))
    for rank in range(1, 12):
        patch = Patch.between(old, new, rank)
        left = (patch.applied(old).v[1] - new.v[1]).norm()
        assert float(left) == pytest.approx(float(values[rank:].norm()), abs=1e-12)
        assert patch.n_bytes == 3 * 8 * (min(rank, 8) * (20 + 8) + rank * (20 + 12))


def test_no_difference_is_no_difference() -> None:
    old = kv(5, 1)
    assert torch.equal(Patch.between(old, old, 2).applied(old).k[0], old.k[0])


def test_the_least_recently_used_goes_first() -> None:
    patch = Patch.between(kv(5, 1), kv(5, 2), 2)
    size = patch.n_bytes
    patches = Patches(3 * size)
    keys = [(i, ((b"before", -4),), 2) for i in range(5)]
    for key in keys[:3]:
        patches.put(key, patch, 10 * size)
    assert patches.get(keys[0]) is patch
    patches.put(keys[3], patch, 10 * size)
    assert [k in patches for k in keys] == [True, False, True, True, False]
    patches.put(keys[4], patch, 0)
    assert [k in patches for k in keys] == [True, False, False, True, True], "no room but its own"
    patches.put(keys[4], patch, 0)
    assert len(patches) == 3, "the same key again takes no more"
    assert patches.shrink(size + 1) == 2 * size and len(patches) == 1
    patches.drop(4)
    assert patches.n_bytes == 0 == len(patches)
    patches.put(keys[0], patch, size - 1)
    assert len(patches) == 0, "older patches cannot make room: there are none"
    patches.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6), st.integers(0, 4000)), max_size=30))
def test_any_order_of_puts_stays_within_limit_and_room(steps: list[tuple[int, int, int]]) -> None:
    patches = Patches(3000)
    for id, rank, room in steps:
        before = patches.n_bytes
        patches.put((id, (), rank), Patch.between(kv(2, 1), kv(2, 2), rank), room)
        patches.check_integrity()
        assert patches.n_bytes <= before + room
