from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvweave.chunk.cut import TokenRange, by_boundary, by_message, by_paragraph, by_tokens, cut
from kvweave.errors import InvalidArgument

tokens_of = st.lists(st.integers(0, 5), max_size=40)


def test_by_tokens():
    assert by_tokens(3)([9, 8, 7, 6, 5, 4, 3]) == [
        TokenRange(0, 3),
        TokenRange(3, 6),
        TokenRange(6, 7),
    ]
    assert cut([9, 8, 7, 6], by_tokens(3)) == [[9, 8, 7], [6]]
    assert cut([], by_tokens(3)) == []


def test_by_boundary():
    tokens = [1, 0, 0, 2, 3, 0, 4, 4, 4, 4, 4]
    assert cut(tokens, by_boundary({0}, 4)) == [[1, 0], [0], [2, 3, 0], [4, 4, 4, 4], [4]]
    assert cut(tokens, by_boundary(lambda t: t == 0, 4, 2)) == [
        [1, 0], [0, 2, 3, 0], [4, 4, 4, 4], [4],
    ]  # fmt: skip


WORDS = ["a", "\n\n", "\n", " ", "b.\n\n", "\n\nc", "\r\n", "\n \t\n"]


def paragraphs(text_of_tokens: list[str], max_tokens: int = 100) -> list[list[str]]:
    ids = [WORDS.index(text) for text in text_of_tokens]
    return [
        [WORDS[i] for i in piece] for piece in cut(ids, by_paragraph(WORDS.__getitem__, max_tokens))
    ]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (["a", "\n\n", "a"], [["a", "\n\n"], ["a"]]),
        (["a", "\n", "\n", "a"], [["a", "\n", "\n"], ["a"]]),
        (["a", "\n", " ", "\n", "a"], [["a", "\n", " ", "\n"], ["a"]]),
        (["a", "\n \t\n", "a"], [["a", "\n \t\n"], ["a"]]),
        (["a", "\r\n", "\r\n", "a"], [["a", "\r\n", "\r\n"], ["a"]]),
        (["b.\n\n", "a"], [["b.\n\n"], ["a"]]),
        (["a", "\n", "a"], [["a", "\n", "a"]]),
        (["a", "\n\nc", "a"], [["a", "\n\nc", "a"]]),
        (["a", "\n\n", "\n", "\n\n", "a"], [["a", "\n\n", "\n", "\n\n"], ["a"]]),
        (["a", "\n\n", " ", "a"], [["a", "\n\n"], [" ", "a"]]),
        (["\n\n", "a", "\n\n"], [["\n\n", "a", "\n\n"]]),
        (["\n", "a"], [["\n", "a"]]),
    ],
)
def test_by_paragraph(text, pieces):
    assert paragraphs(text) == pieces


def test_by_paragraph_cuts_a_long_one():
    assert paragraphs(["a"] * 5 + ["\n\n", "a"], 3) == [["a"] * 3, ["a", "a", "\n\n"], ["a"]]


def test_by_message():
    assert cut([1, 2, 3, 4, 5], by_message([0, 2, 4])) == [[1, 2], [3, 4], [5]]
    assert cut([1, 2, 3], by_message([1])) == [[1], [2, 3]]
    assert cut([1, 2, 3], by_message([])) == [[1, 2, 3]]


def test_cut_refuses_a_cutter_that_loses_tokens():
    bad = [[TokenRange(0, 1)], [TokenRange(1, 3)], [TokenRange(0, 2), TokenRange(1, 3)], [TokenRange(0, 4)],
           [TokenRange(0, 0), TokenRange(0, 3)], []]  # fmt: skip
    for spans in bad:
        with pytest.raises(InvalidArgument, match="cutter"):
            cut([1, 2, 3], lambda _, spans=spans: spans)


@pytest.mark.parametrize(
    "make",
    [
        lambda: by_tokens(0),
        lambda: by_boundary({1}, 0),
        lambda: by_boundary({1}, 3, 4),
        lambda: by_boundary({1}, 3, 0),
        lambda: by_paragraph(str, 0),
        lambda: by_message([1, 1]),
        lambda: by_message([-1]),
        lambda: by_message([3])([1, 2, 3]),
    ],
)
def test_bad_arguments(make):
    with pytest.raises(InvalidArgument):
        make()


@given(tokens_of, st.integers(1, 7), st.integers(1, 7))
def test_every_cutter_is_lossless_and_keeps_its_limits(tokens, a, b):
    low, high = sorted((a, b))
    for cutter in (
        by_tokens(high),
        by_boundary({0, 1}, high, low),
        by_paragraph(lambda t: WORDS[t], high),
    ):
        pieces = cut(tokens, cutter)
        assert [token for piece in pieces for token in piece] == tokens
        assert all(1 <= len(piece) <= high for piece in pieces)
    for piece in cut(tokens, by_boundary({0, 1}, high, low))[:-1]:
        assert len(piece) >= low
        assert len(piece) == high or piece[-1] in (0, 1)
