"""An engine in a fork of the process that opened it: it has none of its threads, and a copy of each lock and
connection.

python -m pytest tests/test_forks.py
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import postgres
import pytest
import torch
from indexes import put

from kvweave import Engine
from kvweave.chunk.table import Table
from kvweave.run.spill import SpillFile

PATIENCE = 20.0  # seconds


def forked(work: Callable[[], object]) -> str:
    """Return what ``work`` returns, or its error, in a fork; it fails where that hangs."""
    read, write = os.pipe()
    if not (child := os.fork()):
        try:
            said = repr(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode()[:4000])
        os._exit(0)
    os.close(write)
    try:
        if not select.select([read], [], [], PATIENCE)[0]:
            os.kill(child, signal.SIGKILL)
            pytest.fail("it hangs in the fork")
        return os.read(read, 4000).decode()
    finally:
        os.waitpid(child, 0)
        os.close(read)


def test_forked_while_another_thread_is_in_a_verb(engines: Callable[..., Engine]) -> None:
    engine = engines()
    engine.put("a", [5, 6, 7])
    inside, leaves = threading.Event(), threading.Event()

    def told(n: int) -> None:
        inside.set()
        leaves.wait(PATIENCE)

    thread = threading.Thread(target=lambda: engine.put("b", [8, 9], progress=told))
    thread.start()
    assert inside.wait(PATIENCE)
    found = [forked(verb) for verb in (lambda: engine.files.ls("**"), engine.close)]
    leaves.set()
    thread.join(PATIENCE)
    assert all("was in the middle of a verb" in said for said in found), found
    assert forked(lambda: [entry.name for entry in engine.files.ls("**")]) == "['a', 'b']"


@pytest.fixture
def url() -> Iterator[str]:
    if postgres.LACKING:
        pytest.skip(postgres.LACKING)
    with postgres.running() as server:
        yield server.fresh()


def test_a_fork_neither_uses_the_connection_nor_ends_the_lease(url: str) -> None:
    """What one of both asked the other one was answered; closing in the fork let go of what was held here."""
    table = Table(url)
    mine = put(table, "mine", 5, 6, 7)
    table.hold(mine, "chat")
    for verb in (table.names, lambda: put(table, "theirs", 8), table.close):
        for _ in range(3):
            said = forked(verb)
            assert said == "None" or "was opened in process" in said
            table.unbind("again") if "again" in table.names() else table.bind("again", mine)
    table.unbind("mine")
    with Table(url) as other:
        other.collect()
        assert other.tokens(mine).tolist() == [5, 6, 7]
    began = time.monotonic()
    table.release(mine, "chat")
    table.close()
    assert time.monotonic() - began < PATIENCE / 2


def test_a_fork_writes_to_a_file_of_rows_of_its_own() -> None:
    """It is the same file: what the fork put below memory was read here as rows of this process."""
    file, slots = SpillFile.of(), np.arange(4)

    def taken() -> list[int]:
        of = SpillFile.of()
        [rows] = of.rows([(1, 4, 2)], torch.float32)
        rows.write(0, slots, torch.full((4, 2), 2.0))
        return [int(of is file), *map(int, rows.read(0, slots).unique())]

    [rows] = file.rows([(1, 4, 2)], torch.float32)
    rows.write(0, slots, torch.full((4, 2), 1.0))
    for verb in (
        lambda: rows.write(0, slots, torch.full((4, 2), 3.0)),
        lambda: rows.read(0, slots).tolist(),
    ):
        assert "was opened in process" in forked(verb)
    assert forked(taken) == "[0, 2]"
    assert rows.read(0, slots).eq(1).all()
