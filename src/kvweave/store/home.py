"""A home directory: the index and KV of one model, and the file that says whose they are."""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvweave.chunk.guard import free_name
from kvweave.chunk.identity import ModelFingerprint
from kvweave.chunk.rebuild import fsync, put_in_place
from kvweave.errors import CorruptChunk, InvalidArgument, StoreError


class Home:
    """The directory ``path`` for chunks of one model; it is made if it is not there.

    Raises ModelMismatch when it holds those of another model, CorruptChunk if it cannot be read;
    then nothing is made.
    """

    def __init__(self, path: Path, mine: ModelFingerprint) -> None:
        self.path, self.mine = path, mine
        self.index = path / "index.sqlite"
        self._file = path / "model.json"
        self._check()
        path.mkdir(parents=True, exist_ok=True)

    def claim(self) -> None:
        """Make it this model's, for good; called before the first chunk. Raises StoreError."""
        if not self._file.exists():
            self._write()

    def mend(self) -> Path | None:
        """Write ``model.json`` anew if it cannot be read; return where the damaged one is kept.

        Only who knows that the home is this model's may call it. Raises ModelMismatch, StoreError.
        """
        try:
            self._check()
        except CorruptChunk:
            aside = free_name(self._file)
            self._file.rename(aside)
            self._write()
            return aside
        return None

    def _write(self) -> None:
        new = self._file.with_suffix(f".{os.getpid()}.tmp")
        try:
            new.write_text(json.dumps(self.mine.to_dict()))
            fsync(new)
            put_in_place(new, self._file)
        except OSError as error:
            new.unlink(missing_ok=True)
            hint = "free some space, or give another home"
            raise StoreError(
                f"cannot write {self._file}: {error}", hint=hint, path=str(self._file)
            ) from error

    def _check(self) -> None:
        if not self._file.exists():
            return
        try:
            theirs = ModelFingerprint.from_dict(json.loads(self._file.read_bytes()))
        except (ValueError, TypeError, InvalidArgument) as error:
            raise CorruptChunk(
                str(self._file),
                f"not a model's fingerprint: {error}",
                hint=f"run `kvweave fsck {self.path} --repair` with the home's model",
            ) from error
        self.mine.require(theirs)
