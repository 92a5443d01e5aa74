"""What an index must contain, said outside of it: how else to notice that its newest rows are gone?

SQLite takes a log that is missing, older or flipped for one that ends earlier, without a word. So
each write counts up in the index, and then here::

    index.sqlite.seal    one record of 80 bytes: RECORD, then xxh3 of it

``n`` must be there while the machine runs, ``synced`` even after a power cut. ``size`` and ``sum``
are those of the whole file if it was closed; while it is open, ``size`` is 0.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self
from uuid import UUID

from xxhash import xxh3_64, xxh3_64_intdigest

from kvweave.chunk.log import log_of
from kvweave.chunk.rebuild import there

MAGIC = b"kvwseal1"
RECORD = struct.Struct("<8s16s16sqqqQ")
_SUM = struct.Struct("<Q")
_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Sealed:
    """What the seal says; as it is here, nothing."""

    uuid: str = ""
    boot: bytes = bytes(16)
    n: int = 0
    synced: int = 0
    size: int = 0
    sum: int = 0


def boot_id() -> bytes:
    """Return what identifies this run of the machine; zeros where nothing does."""
    try:
        return UUID(_BOOT.read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)


class Seal:
    """The file beside an index. Raises OSError for what the disk refuses."""

    def __init__(self, index: Path) -> None:
        self._index = index
        self.path = index.with_name(index.name + ".seal")
        self.said = Sealed()
        self._boot = boot_id()
        self._file = -1

    def missing(self, uuid: str, n: int, was: Collection[str] = ()) -> str:
        """Return what is wrong with an index of ``n`` writes, which ``was`` others before, or ""."""
        said = self.said
        if not said.uuid:
            return ""
        if said.uuid != uuid and said.uuid not in was:
            return f"it is index {uuid}, where {said.uuid} was"
        wanted = said.n if said.boot == self._boot != bytes(16) else said.synced
        if n < wanted:
            return f"its last {wanted - n} writes are missing"
        return ""

    def is_whole(self, *, alone: bool = False) -> bool:
        """Tell whether the file is bit for bit the one that was closed; ``alone``: whatever log there is."""
        said = self.said
        if not said.size or self._index.stat().st_size != said.size:
            return False
        return (alone or not there(log_of(self._index))) and _sum_of(self._index) == said.sum

    def begin(self, uuid: str, n: int) -> None:
        """Say that an index of ``n`` writes is open, before it is changed."""
        if self._file < 0:
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        synced = min(self.said.synced, n) if self.said.uuid == uuid else 0
        self._write(Sealed(uuid, self._boot, n, synced))

    def wrote(self, n: int) -> None:
        """Say that ``n`` writes are in the index."""
        self._write(replace(self.said, n=n))

    def synced(self, n: int) -> None:
        """Say that the first ``n`` writes would survive a power cut."""
        self._write(replace(self.said, synced=n))

    def end(self, uuid: str, n: int) -> None:
        """Say what the file is, now that it is closed."""
        self.begin(uuid, n)
        size, total = self._index.stat().st_size, _sum_of(self._index)
        self._write(Sealed(uuid, self._boot, n, n, size, total))
        self.close()

    def close(self) -> None:
        """Let go of the file; doing it twice does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _write(self, said: Sealed) -> None:
        uuid = UUID(said.uuid).bytes
        data = RECORD.pack(MAGIC, uuid, said.boot, said.n, said.synced, said.size, said.sum)
        os.pwrite(self._file, data + _SUM.pack(xxh3_64_intdigest(data)), 0)
        self.said = said

    def read(self) -> Self:
        """Read what it says. Raises OSError."""
        self.said = self._read()
        return self

    def _read(self) -> Sealed:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Sealed()
        fixed, rest = data[: RECORD.size], data[RECORD.size :]
        if len(rest) != _SUM.size or _SUM.unpack(rest)[0] != xxh3_64_intdigest(fixed):
            return Sealed()
        magic, uuid, *numbers = RECORD.unpack(fixed)
        return Sealed(UUID(bytes=uuid).hex, *numbers) if magic == MAGIC else Sealed()


def _sum_of(path: Path) -> int:
    state = xxh3_64()
    with open(path, "rb", buffering=0) as file:
        buffer = bytearray(1 << 20)
        while n := file.readinto(buffer):
            state.update(memoryview(buffer)[:n])
    return state.intdigest()
