"""What comes on stdin: text, as a whole or line by line."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvweave.errors import InvalidArgument


def is_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin.isatty()


def whole() -> str:
    """Return all of it. Raises InvalidArgument where it is no UTF-8."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise _no_text(error) from error


def whole_bytes() -> bytes:
    """Return all of it, whatever it is."""
    return sys.stdin.buffer.read()


def lines() -> Iterator[bytes]:
    """Yield it line by line, without their ends; for `text_of_line`, which one line may fail."""
    for line in sys.stdin.buffer:
        yield line.rstrip(b"\r\n")


def text_of_line(line: bytes) -> str:
    """Return a line's text. Raises InvalidArgument where it is no UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _no_text(error) from error


def _no_text(error: UnicodeDecodeError) -> InvalidArgument:
    return InvalidArgument("stdin", f"it is not UTF-8 text: {error.reason}", "send text")
