"""A home directory: the index and KV of one model, and the file that says whose they are."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from kvweave.chunk.file import soon
from kvweave.chunk.guard import as_ours, lost_of
from kvweave.chunk.identity import ModelFingerprint
from kvweave.chunk.rebuild import clear, there, write_json
from kvweave.errors import CorruptChunk, InvalidArgument, of_system


class Home:
    """The directory ``path`` for chunks of one model; it is made if it is not there.

    Raises ModelMismatch when it holds those of another model, CorruptChunk if it cannot be read;
    then nothing is made.
    """

    def __init__(self, path: Path, mine: ModelFingerprint) -> None:
        try:  # of where it is opened: a program may go elsewhere
            self.path = path = path.absolute()
        except OSError as error:
            raise of_system(error, "find", path) from error
        self.mine = mine
        self.index = path / "index.sqlite"
        self._file = path / "model.json"
        self._check()
        self._is_mine = False
        try:  # text can be recovered from what is stored: a new home is its owner's alone
            soon(self._make, path)
        except OSError as error:
            raise of_system(error, "make", path) from error

    def _make(self) -> None:
        self.path.mkdir(0o700, parents=True, exist_ok=True)
        clear(self.path)

    def claim(self) -> None:
        """Make it this model's, for good; called before the first chunk. Raises StoreError, and
        ModelMismatch when it has become another's since it was opened."""
        try:
            if not self._is_mine:
                soon(self._claim, self.path)
        except OSError as error:
            raise of_system(error, "write", self._file) from error

    def _claim(self) -> None:
        if not there(self._file):
            write_json(self._file, self.mine.to_dict())
        else:  # another engine's, who came between our look and the lock, or ours
            self._check()
        self._is_mine = True

    @property
    def is_partial(self) -> bool:
        """Whether its index was salvaged, and chunks were lost: see `kvweave.chunk.salvage`."""
        with as_ours(lost_of(self.index)):
            return soon(partial(there, lost_of(self.index)), self.path)

    def _check(self) -> None:
        try:
            data = soon(self._file.read_bytes, self.path)
            theirs = ModelFingerprint.from_dict(json.loads(data))
        except FileNotFoundError:
            return
        except OSError as error:
            raise of_system(error, "read", self._file) from error
        except (ValueError, TypeError, InvalidArgument) as error:
            hint = f"`kvweave fsck {self.path} --repair` puts it aside"
            hint = "no path has a NUL in it: give another home" if "\0" in str(self.path) else hint
            why = f"not a model's fingerprint: {error}"
            raise CorruptChunk(str(self._file), why, hint) from error
        self.mine.require(theirs)
