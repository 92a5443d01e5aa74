"""KV on disk: one safetensors file per chunk, checked on every read.

The header's metadata holds the format version, the model fingerprint and a blake2b of the tensors.
Files appear by rename, so a crash leaves either the old file or the new one.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import CorruptChunk, FormatTooNew, ModelMismatch, OverBudget
from kvweave.store.kv import KV

FORMAT = 1


class Disk:
    """A directory of ``ID.kv`` files written by one model."""

    name = "disk"

    def __init__(
        self, directory: Path, fingerprint: ModelFingerprint, device: torch.device
    ) -> None:
        self.directory = directory
        self.fingerprint = fingerprint
        self.device = device
        directory.mkdir(parents=True, exist_ok=True)
        self._sizes = {int(p.stem): p.stat().st_size for p in directory.glob("*.kv")}

    def keys(self) -> set[int]:
        """Return the ids that have a file."""
        return set(self._sizes)

    def size(self, key: int) -> int:
        """Return the bytes of a file; 0 when there is none."""
        return self._sizes.get(key, 0)

    def path(self, key: int) -> Path:
        """Return the file of ``key``."""
        return self.directory / f"{key}.kv"

    def put(self, key: int, kv: KV) -> int:
        """Write a file and return its bytes. Raises OverBudget when the disk is full."""
        tensors = {f"k.{i}": t.cpu().contiguous() for i, t in enumerate(kv.k)}
        tensors |= {f"v.{i}": t.cpu().contiguous() for i, t in enumerate(kv.v)}
        meta = {
            "format": str(FORMAT),
            "model": self.fingerprint.digest().hex(),
            "checksum": _checksum(tensors),
        }
        data = save(tensors, meta)
        temporary = self.path(key).with_suffix(f".{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.path(key))
            _sync_directory(self.directory)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            free = os.statvfs(self.directory)
            raise OverBudget(len(data), free.f_bavail * free.f_frsize, 0) from error
        self._sizes[key] = len(data)
        return len(data)

    def get(self, key: int) -> KV | None:
        """Read a file back, verified.

        Raises:
            CorruptChunk: truncated, or the checksum differs.
            FormatTooNew: written by a newer kvweave.
            ModelMismatch: written by another model.
        """
        path = self.path(key)
        if key not in self._sizes or not path.exists():
            self._sizes.pop(key, None)
            return None
        try:
            with safe_open(path, "pt") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except (SafetensorError, OSError, ValueError) as error:
            raise CorruptChunk(str(path), f"not readable: {error}") from error
        if int(meta.get("format", "0")) > FORMAT:
            raise FormatTooNew(str(path), int(meta["format"]), FORMAT)
        if meta.get("model") != self.fingerprint.digest().hex():
            wanted = self.fingerprint.digest().hex()
            raise ModelMismatch("fingerprint", wanted, str(meta.get("model")))
        if meta.get("checksum") != _checksum(tensors):
            raise CorruptChunk(str(path), "the checksum differs")
        n = len(tensors) // 2
        return KV(
            [tensors[f"k.{i}"].to(self.device) for i in range(n)],
            [tensors[f"v.{i}"].to(self.device) for i in range(n)],
        )

    def delete(self, key: int) -> None:
        """Remove the file."""
        if self._sizes.pop(key, None) is not None:
            self.path(key).unlink(missing_ok=True)

    def __contains__(self, key: int) -> bool:
        return key in self._sizes

    @property
    def n_bytes(self) -> int:
        return sum(self._sizes.values())

    def check_integrity(self) -> None:
        """Raise AssertionError when files and accounting differ."""
        found = {int(p.stem): p.stat().st_size for p in self.directory.glob("*.kv")}
        assert found == self._sizes, f"files {found}, counted {self._sizes}"


def _sync_directory(directory: Path) -> None:
    """Make a rename in it survive a power cut."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        state.update(name.encode())
        state.update(tensors[name].contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return state.hexdigest()
