"""What comes on stdin: text, as a whole or line by line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import IO, AnyStr

from kvweave.errors import InvalidArgument

LONGEST = 1 << 28  # bytes or characters of one text, more than any model reads: a device has no end
_NO_END = (f"it has more than {LONGEST >> 20} MiB", "send it in parts")


def is_terminal() -> bool:
    """Whether somebody types."""
    return sys.stdin.isatty()


def whole() -> str:
    """Return all of it. Raises InvalidArgument where it is no UTF-8, or does not end."""
    try:
        found: str = all_of(sys.stdin, "stdin")
    except UnicodeDecodeError as error:
        raise _no_text(error) from error
    return found


def whole_bytes() -> bytes:
    """Return all of it, whatever it is. Raises InvalidArgument where it does not end."""
    found: bytes = all_of(sys.stdin.buffer, "stdin")
    return found


def all_of(file: IO[AnyStr], name: str) -> AnyStr:
    """Return what is in a file. Raises InvalidArgument where that is more than `LONGEST`."""
    found = file.read(LONGEST + 1)
    if len(found) > LONGEST:
        raise InvalidArgument(name, *_NO_END)
    return found


def lines() -> Iterator[bytes]:
    """Yield it line by line, without their ends; for `text_of_line`, which one line may fail.

    Raises InvalidArgument where a line does not end.
    """
    while line := sys.stdin.buffer.readline(LONGEST):
        if len(line) == LONGEST:
            raise InvalidArgument("stdin", *_NO_END)
        yield line.rstrip(b"\r\n")


def text_of_line(line: bytes) -> str:
    """Return a line's text. Raises InvalidArgument where it is no UTF-8."""
    try:
        return line.decode()
    except UnicodeDecodeError as error:
        raise _no_text(error) from error


def _no_text(error: UnicodeDecodeError) -> InvalidArgument:
    return InvalidArgument("stdin", f"it is not UTF-8 text: {error.reason}", "send text")
