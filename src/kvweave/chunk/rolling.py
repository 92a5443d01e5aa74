"""Hashes of every run of ``width`` tokens, where each depends on these tokens only."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvweave.chunk.identity import token_bytes

Tokens = NDArray[np.uint32]
Hashes = NDArray[np.uint64]

_MASK = (1 << 64) - 1
_HALF = np.uint64(32)


def as_tokens(tokens: Sequence[int] | NDArray[np.generic]) -> Tokens:
    """Return a copy that cannot be written, 4 bytes a token; raise InvalidArgument for other things."""
    return np.frombuffer(token_bytes(tokens), "<u4")  # type: ignore[arg-type]


def mixed(tokens: Tokens, multiplier: int) -> Hashes:
    """Return each token spread over 64 bits."""
    spread = tokens.astype(np.uint64)
    spread += np.uint64(1)  # so that runs of token 0 are not all hashed to 0
    spread *= np.uint64(multiplier)
    # Not linear: without it, equal hashes could be made for any multiplier.
    spread ^= spread >> _HALF
    return spread


def rolling(tokens: Tokens, width: int, multiplier: int) -> Hashes:
    """Return the hash of ``tokens[i : i + width]`` for every i; (n - width + 1,), empty if n < width.

    A polynomial in an odd ``multiplier``, modulo 2**64: sum of mixed(t[i+j]) * m**(width-1-j). Its
    high bits are the good ones. Runs of 1, 2, 4, ... tokens are joined, 2 log2(width) passes in all.
    """
    if len(tokens) < width:
        return np.empty(0, np.uint64)
    return widened(mixed(tokens, multiplier), 1, width, multiplier)


def widened(hashes: Hashes, n: int, width: int, multiplier: int) -> Hashes:
    """Return the hashes of runs of ``width`` tokens from those of ``n <= width``; (+ n - width,).

    If n divides ``width`` they are those of `rolling`; else the last n tokens of each count twice.
    """
    if len(hashes) < width - n + 1:
        return np.empty(0, np.uint64)
    n_runs = width // n
    factor = pow(multiplier, n, _MASK + 1)
    power, n_power, power_factor = hashes, 1, factor
    joined, n_joined = hashes, 0
    while True:
        if n_runs & n_power:
            joined = _join(joined, n_joined * n, power, power_factor) if n_joined else power
            n_joined += n_power
        if n_joined == n_runs:
            break
        power = _join(power, n_power * n, power, power_factor)
        power_factor = power_factor * power_factor & _MASK
        n_power *= 2
    return _join(joined, width - n, hashes, factor) if width % n else joined


def _join(left: Hashes, n_left: int, right: Hashes, factor: int) -> Hashes:
    """Return ``left`` times ``factor`` plus what stands ``n_left`` places further in ``right``."""
    n = len(right) - n_left
    both = left[:n] * np.uint64(factor)
    both += right[n_left:]
    return both
