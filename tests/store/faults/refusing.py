"""Openings of SQLite's files while the device refuses to read, each in a process of its own."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from store.faults.scripts import control
from store.faults.shim import EVER, READ

from kvweave.chunk.table import Table
from kvweave.errors import KVWeaveError
from kvweave.serve.responses.records import StoredResponse
from kvweave.serve.responses.store import ResponseStore

Say = Callable[[Any], None]
IN_IT = {"index": 2000, "responses": 400}  # chunks or responses
OPENED: dict[str, Callable[[Path], Any]] = {
    "index": lambda home: Table(home / "index.sqlite"),
    "responses": ResponseStore,
}
COUNTED: dict[str, Callable[[Any], int]] = {
    "index": len,
    "responses": lambda it: len(it.of("anna").responses),
}


def refuse_reads(
    say: Say, kind: str, base: Path, closed: bool, n_reads: int, day: int
) -> list[tuple[str, str, int, str, list[str], int]]:
    """Fill a file, and open copies of it while one read is refused, and from that one on: as many reads as
    asked, evenly from all, others each day.

    Returns of each its name, what was said, how many were refused and where, the files that there are then,
    and how much is in it when it is opened again.
    """
    _forked(partial(_made, kind, base / "home", closed))

    def one(name: str, first: int, count: int) -> Any:
        home, told = shutil.copytree(base / "home", base / name), base / f"{name}.json"
        _forked(partial(_opened, kind, home, told, first, count))
        shutil.rmtree(home)
        return json.loads(told.read_text())

    n, found = one("all", EVER - 1, 1)[0], []
    for k in range(n_reads):
        first = (n * k + day) // n_reads
        for name, count in ((f"once-{k}", 1), (f"ever-{k}", EVER)):
            found.append((name, *one(name, first, count)[1:]))
    return found


def _forked(call: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            call()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0


def _made(kind: str, home: Path, closed: bool) -> None:
    """Fill a file; it is as a killed process leaves it where it is not closed."""
    home.mkdir()
    it = _index(home) if kind == "index" else _responses(home)
    if closed:
        it.close()


def _index(home: Path) -> Table:
    table = Table(home / "index.sqlite")
    for k in range(0, IN_IT["index"], 50):
        with table.transaction():
            for n in range(k, k + 50):
                id, _ = table.add([*range(n, n + 30)], digest=n.to_bytes(16, "little"))
                table.bind(f"n/{n}", id)
    table.sync()
    return table


def _responses(home: Path) -> ResponseStore:
    kept = ResponseStore(home)
    store = kept.of("anna")
    for n in range(IN_IT["responses"]):
        content = [{"type": "input_text", "text": "once upon a time " * 20}]
        item = {"type": "message", "id": f"m{n}", "role": "user", "content": content}
        store.keep(StoredResponse({"id": f"r{n}", "output": []}, (item,)))
        if n % 50 == 49:
            asyncio.run(kept.settled())
    return kept


def _opened(kind: str, home: Path, told: Path, first: int, count: int) -> None:
    """Open it while reads are refused, and again; write what `refuse_reads` tells, and the reads there were."""
    faults = control()
    faults.aim(READ, home, first=first, count=count)
    try:
        it = OPENED[kind](home)
        said = "opened"
    except KVWeaveError as error:
        said = f"{type(error).__name__} {error.hint}"
        traceback.print_exc()
    seen, hits, site = faults.raw.seen, faults.raw.hits, faults.site
    faults.off()
    if said == "opened":
        it.close()
    names = sorted(path.name for path in home.iterdir())
    n = COUNTED[kind](OPENED[kind](home))
    told.write_text(json.dumps([int(seen), said, int(hits), site, names, n]))
