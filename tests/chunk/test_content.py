from __future__ import annotations

from itertools import takewhile

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.chunk.cut import _CONTENT, TokenRange, by_content, cut
from kvweave.chunk.rolling import as_tokens, rolling
from kvweave.errors import InvalidArgument


def random_tokens(n: int, seed: int, vocab: int = 32_000) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, n).tolist()


def ends(tokens: list[int], cutter) -> list[int]:
    return [span.stop for span in cutter(tokens)]


def said(tokens: list[int]):
    """Tell which cuts are where the tokens before them say so."""
    limit = (1 << 64) // (512 - 64) - 1
    return lambda end: int(rolling(as_tokens(tokens[end - 8 : end]), 8, _CONTENT)[0]) <= limit


small = by_content(min_tokens=4, avg_tokens=8, max_tokens=16, window=2)


def test_the_cuts_stay_where_they_are_in_every_version():
    tokens = [i * i * 7919 % 32_003 for i in range(4000)]
    assert ends(tokens, by_content()) == [
        186, 355, 807, 1109, 1430, 2624, 3581, 3685, 3826, 4000,
    ]  # fmt: skip
    assert by_content()(np.array(tokens)) == by_content()(tokens)
    assert small([]) == [] and small([7]) == [TokenRange(0, 1)]


def test_pieces_are_about_the_average():
    sizes = np.diff(ends(random_tokens(1_000_000, 2), by_content()))
    assert 470 < sizes.mean() < 540
    assert sizes.min() >= 64 and sizes.max() <= 2048


def test_padding_gives_few_pieces():
    assert ends([0] * 9000, by_content()) == [2048, 4096, 6144, 8192, 9000]


@settings(deadline=None)
@given(st.lists(st.integers(0, 3), max_size=120))
def test_all_tokens_once_and_sizes_in_bounds(tokens):
    pieces = cut(tokens, small)  # raises when a token is lost
    sizes = [len(piece) for piece in pieces]
    assert all(4 <= n <= 16 for n in sizes[:-1])
    assert not sizes or 1 <= sizes[-1] <= 16


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000),
    st.integers(0, 3000),
    st.integers(0, 40),
    st.lists(st.integers(0, 31_999), max_size=40),
)
def test_cuts_are_the_same_soon_after_an_edit(seed, at, n_cut, inserted):
    tokens = random_tokens(9000, seed)
    edited = tokens[:at] + inserted + tokens[at + n_cut :]
    moved = len(inserted) - n_cut
    before, after = ends(tokens, by_content()), ends(edited, by_content())
    # up to the first cut for want of another, which is chosen among all of the longest piece
    kept = [
        [*takewhile(said(of), (end for end in found if end < at))]
        for of, found in ((tokens, before), (edited, after))
    ]
    assert kept[0] == kept[1]
    far = at + n_cut + 5000  # ten pieces on
    assert [end + moved for end in before if end > far] == [
        end for end in after if end > far + moved
    ]


def test_text_after_another_beginning_is_cut_the_same():
    tokens = random_tokens(20_000, 3)
    whole = ends(tokens, by_content())
    for first in (1, 100, 777, 5000):
        rest = [end + first for end in ends(tokens[first:], by_content())]
        assert rest[-20:] == whole[-20:]


def test_a_cut_depends_on_the_last_tokens_only():
    tokens = random_tokens(3000, 4)
    first = ends(tokens, by_content())[0]
    for other in (0, 5, 31_999):
        before, after = [other] * 100, [other] * 200
        assert ends(before + after, by_content()) == [300]
        assert ends(before + tokens[first - 8 : first] + after, by_content()) == [108, 308]


@pytest.mark.parametrize(
    "arguments",
    [
        {"window": 0},
        {"min_tokens": 7},
        {"min_tokens": 512},
        {"avg_tokens": 2048},
        {"min_tokens": 0, "window": 0},
    ],
)
def test_bad_arguments(arguments):
    with pytest.raises(InvalidArgument):
        by_content(**arguments)
