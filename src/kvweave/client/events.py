"""Server-sent events from bytes, however they are cut. Comments, such as heartbeats, are nothing."""

from __future__ import annotations


class EventParser:
    """Takes bytes in, gives the data of the events that are complete."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, more: bytes) -> list[str]:
        """Return the data of each event that ends in these bytes."""
        # only these end a line: str.splitlines would cut text at U+2028 and the like
        *lines, self._rest = (self._rest + more).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data).decode())
                self._data = []
        return found
