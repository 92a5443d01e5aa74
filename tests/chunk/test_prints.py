"""Prints of text: the same wherever it stands, few of padding, sizes that add up."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.chunk.prints import EVERY, WIDTH, prints, thinned


def text(n: int, seed: int = 0) -> str:
    rng = random.Random(seed)
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz     \nåß漢😀", k=n))


@given(st.text(max_size=400))
def test_sizes_add_up_to_the_text(given):
    found = prints(given)
    assert found.n_chars == len(given) and len(found.hashes) == len(found.sizes)
    assert (len(found.hashes) > 0) == (len(given) > 0) and (found.sizes > 0).all()


def test_text_has_its_prints_wherever_it_stands():
    page = text(20_000)
    inside = set(prints(page).hashes.tolist())
    for before, behind in (("", text(5_000, 1)), (text(777, 2), ""), (text(31, 3), text(9, 4))):
        around = set(prints(before + page + behind).hashes.tolist())
        assert len(inside - around) <= 1, "all but what a beginning without prints may cost"


def test_a_change_costs_the_prints_near_it_only():
    page = text(50_000)
    changed = page[:25_000] + "!" + page[25_000:]
    lost = set(prints(page).hashes.tolist()) - set(prints(changed).hashes.tolist())
    assert len(lost) <= 2 * WIDTH / EVERY + 6


def test_about_one_print_for_so_many_characters():
    assert 0.8 < len(prints(text(200_000)).hashes) / (200_000 / EVERY) < 1.25


def test_padding_is_few_prints():
    assert len(prints("a" * 100_000).hashes) == 1
    assert len(prints("ab" * 100_000).hashes) <= 200_000  # whatever it is, it is bounded below
    assert len(thinned(prints("ab" * 100_000), 100).hashes) <= 100


@pytest.mark.parametrize("n", [1, 5, WIDTH - 1, WIDTH, WIDTH + 1])
def test_short_text_has_one_of_its_own(n):
    found = prints(text(n))
    assert len(found.hashes) >= 1 and prints(text(n)).hashes.tolist() == found.hashes.tolist()
    assert prints(text(n, 9)).hashes.tolist() != found.hashes.tolist()


def test_thinned_are_the_same_ones_of_the_same_text():
    page = text(100_000)
    few = thinned(prints(page), 200)
    assert len(few.hashes) == 200 and few.n_chars == len(page)
    assert set(few.hashes.tolist()) <= set(prints(page).hashes.tolist())
    more = thinned(prints(page + text(1_000, 1)), 200)
    assert len(set(few.hashes.tolist()) & set(more.hashes.tolist())) > 190
    assert thinned(few, 200) is few


def test_the_hash_stays_what_it_is():
    """Workers and routers of different versions compare them."""
    found = prints("It was a bright cold day in April, and the clocks were striking thirteen.")
    assert found.hashes.dtype == np.uint64
    assert [f"{x:016x}" for x in found.hashes.tolist()] == EXPECTED


EXPECTED = ["018a118cea61b058", "01f91cf59f628ae9"]
