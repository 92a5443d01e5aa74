"""A home directory: the index and KV of one model, and the file that says whose they are."""

from __future__ import annotations

import json
from pathlib import Path

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import CorruptChunk, InvalidArgument


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
        """Make it this model's; called before the first chunk."""
        if not self._file.exists():
            self._file.write_text(json.dumps(self.mine.to_dict()))

    def _check(self) -> None:
        if not self._file.exists():
            return
        try:
            theirs = ModelFingerprint.from_dict(json.loads(self._file.read_text()))
        except (ValueError, TypeError, InvalidArgument) as error:
            raise CorruptChunk(str(self._file), f"not a model's fingerprint: {error}") from error
        self.mine.require(theirs)
