"""What the words of a command line stand for: numbers, ages, sizes, lists."""

from __future__ import annotations

import json
import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from kvweave.config import n_bytes
from kvweave.errors import InvalidArgument, StoreError
from kvweave.weave.calibration import options

STRATEGIES = (
    "auto", "none", "first_k", "boundary", "deviation", "query", "rollout", "deps", "patch", "random", "full",
)  # fmt: skip
CHOICE = f"{', '.join(STRATEGIES)}; options behind it, as in deviation:k@2"


def given(text: str) -> str:
    """Return a text that is not empty: what an unset variable leaves must not mean another home, or everything."""
    if not text:
        raise ArgumentTypeError("it is empty: is a variable not set?")
    return text


def number(
    low: float, high: float = math.inf, *, of: str = "", beyond: bool = False
) -> Callable[[str], float]:
    """Return what reads a number from ``low`` to ``high``; ``beyond``: above ``low``."""
    up = " up" if high == math.inf else f" to {high:g}"
    says = f"is not a number{of} {'above' if beyond else 'from'} {low:g}{up}"

    def read(text: str) -> float:
        with suppress(ValueError):
            found = float(text)
            if low <= found <= high and found < math.inf and not (beyond and found == low):
                return found
        raise ArgumentTypeError(f"{text!r} {says}")

    return read


def whole(low: int, high: float = math.inf) -> Callable[[str], int]:
    """Return what reads a whole number from ``low``, which is not below 0, to ``high``."""

    def read(text: str) -> int:
        with suppress(ValueError):  # more digits than Python reads
            if text.isdecimal() and low <= int(text) <= high:
                return int(text)
        up = "up" if high == math.inf else f"to {high}"
        raise ArgumentTypeError(f"{text!r} is not a whole number from {low} {up}")

    return read


positive, from_0 = whole(1), whole(0)
share, nats, seconds = number(0, 1), number(0, of=" of nats"), number(0, of=" of seconds")
above_0 = number(0, beyond=True)


def strategy(text: str) -> str:
    """Return the name of a strategy, with its options."""
    if text.split(":")[0] not in STRATEGIES:
        raise ArgumentTypeError(f"no strategy {text!r}: one of {', '.join(STRATEGIES)}")
    return text


def recipe(text: str) -> str:
    """Return options of `auto`."""
    try:
        return options(text)
    except ValueError as error:
        raise ArgumentTypeError(
            f"{text!r} is not DRAFT@THIRDS@ROUNDS: 0 to 2, 0 to 3, from 1 up"
        ) from error


def words(text: str) -> list[str]:
    """Return the words between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def shares(text: str) -> list[float]:
    """Return numbers from 0 to 1."""
    return [share(word) for word in words(text)]


def fields(text: str) -> dict[str, Any]:
    """Return a JSON object."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ArgumentTypeError(f"{text!r} is no JSON object")
    return found


def path_of(text: str) -> Path:
    """Return a path, of which `~` is a user's home. Raises StoreError for a user that there is not."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        hint = "write the directory out, or ./~ for one that is called so"
        raise StoreError(
            f"cannot use {text}: there is no such user", hint=hint, path=text
        ) from error


def age(text: str) -> float:
    """Return seconds of ``90s``, ``15m``, ``2h``, ``7d``."""
    seconds = {"s": 1, "m": 60, "h": 3600, "d": 86400}
    number, unit = text[:-1], text[-1:]
    if unit not in seconds or not number.isdecimal():
        raise ArgumentTypeError(f"{text!r} is no age: write 90s, 15m, 2h or 7d")
    try:
        return float(int(number) * seconds[unit])
    except OverflowError as error:
        raise ArgumentTypeError("it is longer than time itself") from error


def part_of(word: str) -> str | int:
    """Return the index of a part, or its name."""
    try:
        return int(word) if word.lstrip("-").isdecimal() else word
    except ValueError:  # --1, or more digits than Python reads
        return word


def size(text: str) -> int:
    """Return bytes."""
    try:
        return n_bytes(int(text) if text.isdecimal() else text)
    except InvalidArgument as error:
        raise ArgumentTypeError(f"{text!r} is no size: write 2GiB or 500MB") from error
