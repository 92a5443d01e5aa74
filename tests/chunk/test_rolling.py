from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvweave.chunk.rolling import as_tokens, mixed, rolling, widened
from kvweave.errors import InvalidArgument

ODD = 0x2545F4914F6CDD1D


def polynomial(tokens: list[int], multiplier: int) -> int:
    """The same, one token after the other."""
    total = 0
    for token in tokens:
        spread = (token + 1) * multiplier % 2**64
        total = (total * multiplier + (spread ^ (spread >> 32))) % 2**64
    return total


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 33))
def test_it_is_the_polynomial_of_every_run(tokens, width):
    runs = [tokens[i : i + width] for i in range(len(tokens) - width + 1)]
    found = rolling(as_tokens(tokens), width, ODD)
    assert found.dtype == np.uint64
    assert found.tolist() == [polynomial(run, ODD) for run in runs]


def test_zeros_of_every_length_have_hashes_of_their_own():
    zeros = as_tokens([0] * 64)
    hashes = {int(rolling(zeros, width, ODD)[0]) for width in range(1, 65)}
    assert len(hashes) == 64 and 0 not in hashes


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 5), st.integers(0, 20))
def test_widened_hashes_are_of_these_tokens_only(tokens, n, more):
    width = n + more
    found = widened(rolling(as_tokens(tokens), n, ODD), n, width, ODD).tolist()
    runs = [tokens[i : i + width] for i in range(len(tokens) - width + 1)]
    last = width // n * n - 1  # of the runs of n side by side
    wanted = [polynomial(run[: last + 1], ODD) for run in runs]
    if width % n:
        wanted = [
            (a * ODD**n + polynomial(run[-n:], ODD)) % 2**64
            for a, run in zip(wanted, runs, strict=True)
        ]
    assert found == wanted


def test_mixed_is_not_linear():
    a, b, c = mixed(as_tokens([1, 2, 3]), ODD).tolist()
    assert (a + c - 2 * b) % 2**64 != 0


def test_as_tokens_copies_and_refuses_what_is_no_id():
    given = np.array([1, 2, 2**32 - 1])
    made = as_tokens(given)
    given[0] = 7
    assert made.tolist() == [1, 2, 2**32 - 1] and made.dtype == np.uint32
    for bad in ([-1], [2**32], [1.5], [[1]]):
        with pytest.raises(InvalidArgument, match="tokens"):
            as_tokens(bad)
