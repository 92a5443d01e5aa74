"""What is kept stays for `--retain` after its last use, whatever is done to the machine's clock."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from serve.test_kept_items import response, said

from kvweave.serve.responses import used
from kvweave.serve.responses.store import ResponseStore

WEEK, YEAR = 7 * 86400.0, 365 * 86400.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Set the clock on the wall ahead, by so many seconds."""
    was, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: was() + ahead[0])

    def put(seconds: float, *, anew: bool = False) -> None:
        ahead[0] = seconds
        if anew:  # a process that begins now
            monkeypatch.setattr(used, "BEGAN", time.time())
            monkeypatch.setattr(used, "_from", time.time() - used._counted())

    return put


def ids(home: Path) -> set[str]:
    kept = ResponseStore(home)
    kept.expire(used.before(WEEK))
    found = set(kept.of("anna").responses)
    asyncio.run(kept.settled())
    kept.close()
    return found


@pytest.mark.parametrize("ahead", [YEAR, -YEAR, 50 * YEAR])
def test_a_clock_that_is_set_while_a_server_runs(tmp_path: Path, clock: Any, ahead: float) -> None:
    """A machine finds a server of time after it has begun."""
    clock(0.0, anew=True)
    kept = ResponseStore(tmp_path)
    kept.of("anna").keep(response("r0", [said("a", "m0")]))
    asyncio.run(kept.settled())
    clock(ahead)
    kept.of("anna").keep(response("r1", [said("b", "m1")]))
    kept.expire(used.before(WEEK))
    assert set(kept.of("anna").responses) == {"r0", "r1"}
    kept.close()
    clock(ahead, anew=True)
    assert ids(tmp_path) == {"r0", "r1"}
    clock(ahead + WEEK - 60, anew=True)
    assert ids(tmp_path) == {"r0", "r1"}
    clock(ahead + WEEK + 60, anew=True)
    assert ids(tmp_path) == set()


def test_a_clock_that_is_behind_and_right_again(tmp_path: Path, clock: Any) -> None:
    for ahead, new in ((0.0, "r0"), (-YEAR, "r1"), (0.0, "r2")):
        clock(ahead, anew=True)
        kept = ResponseStore(tmp_path)
        kept.of("anna").keep(response(new, [said(new, f"m{new}")]))
        kept.expire(used.before(WEEK))
        kept.close()
    assert ids(tmp_path) >= {"r0", "r2"}


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("no such thing"), OverflowError("large")]
)
def test_who_writes_them_down_outlives_what_nobody_foresaw(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite's SQLITE_NOMEM is a MemoryError; its thread died of it, and all that followed was lost."""
    kept = ResponseStore(tmp_path)
    store, held = kept.of("anna"), kept._saved
    assert held is not None
    db = held._db

    class Fails:
        def execute(self, *said: Any) -> Any:
            held._db = db  # type: ignore[union-attr]
            raise error

    held._db = Fails()  # type: ignore[assignment]
    store.keep(response("r0", [said("a", "m0")]))
    started = time.monotonic()
    asyncio.run(kept.settled())
    assert time.monotonic() - started < 1.0 and "in memory only" in caplog.text
    kept.expire(0.0)
    store.keep(response("r1", [said("b", "m1")]))
    asyncio.run(kept.settled())
    kept.close()
    assert ids(tmp_path) == {"r0", "r1"}
