"""No lock outlives an engine, whatever the system refuses meanwhile: python -m pytest tests/store/test_locks.py

Each look at a file, and each lock that is taken or let go, fails once, all of them in turn
(`tests/store/faults` does this below Python, for more calls, and by samples every day).
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny

from kvweave import Engine
from kvweave.chunk.guard import take_lock
from kvweave.errors import KVWeaveError, StoreError


class Once:
    """Stands before a call of the system's and has one of its calls fail."""

    def __init__(self, call: Callable[..., Any], code: int, root: Path) -> None:
        self.call, self.code, self.root = call, code, str(root)
        self.seen, self.fails = 0, -1

    def __call__(self, what: Any, *rest: Any, **named: Any) -> Any:
        if isinstance(what, int) or str(what).startswith(self.root):
            self.seen += 1
            if self.seen == self.fails:
                raise OSError(self.code, os.strerror(self.code), str(what))
        return self.call(what, *rest, **named)


@pytest.mark.parametrize(("module", "name", "code"), [(os, "stat", errno.EIO), (fcntl, "flock", errno.ENOLCK)])  # fmt: skip
@pytest.mark.slow
def test_what_fails_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, code: int
) -> None:
    runner = tiny()
    once = Once(getattr(module, name), code, tmp_path)
    monkeypatch.setattr(module, name, once)
    tiers = (f"disk path={tmp_path / 'tier'}", "files")
    with Engine(runner, home=tmp_path / "home", tiers=tiers) as engine:
        engine.put("docs/a", range(3, 15))
    once.seen, once.fails, more = 0, 0, True
    while more:
        once.fails, once.seen = once.fails + 1, 0
        with suppress(KVWeaveError):  # with a hint, as all of them; anything else is raised
            engine = Engine(runner, home=tmp_path / "home", tiers=tiers)
            try:
                engine.put(f"docs/{once.fails}", range(4, 12))
            finally:
                engine.close()
        more = once.seen >= once.fails
        once.seen = -(1 << 30)
        with Engine(runner, home=tmp_path / "home", tiers=tiers) as engine:
            assert engine.files.stat("docs/a").n_tokens == 12
    assert once.fails > 3


def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match="local disk") as told:
        take_lock(tmp_path / "index.sqlite")
    assert "open in process" not in str(told.value)
