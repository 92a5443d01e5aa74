"""A server of a shared index that says nothing any more: verbs end in time, and say what is known."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import postgres
import pytest
from indexes import put

from kvweave.chunk.table import Table
from kvweave.errors import StoreError

if postgres.LACKING:
    pytest.skip(postgres.LACKING, allow_module_level=True)

from kvweave.chunk import link

ANSWER = 0.5
BUSY = 2.0  # seconds that a busy machine may take beside


@pytest.fixture
def wire(server: postgres.Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[postgres.Wire]:
    monkeypatch.setattr(link, "ANSWER_SECONDS", ANSWER)
    monkeypatch.setattr(link, "CONNECT_SECONDS", ANSWER)
    with tempfile.TemporaryDirectory() as directory:
        made = postgres.Wire(server, Path(directory))
        yield made
        made.close()


def refused(call: Callable[[], Any], limit: float = 2 * ANSWER) -> StoreError:
    begun = time.monotonic()
    with pytest.raises(StoreError, match="does not answer") as told:
        call()
    assert told.value.hint and time.monotonic() - begun < limit + BUSY
    return told.value


def well_again(table: Table) -> None:
    ends = time.monotonic() + 20
    while True:
        try:
            table.names()
            return
        except StoreError:
            assert time.monotonic() < ends
            time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["questions", "answers"])
def test_each_verb_ends(server: postgres.Server, wire: postgres.Wire, lost: str) -> None:
    url = wire.of(server.fresh())
    with Table(url) as table:
        one, two = put(table, "a", 1), put(table, "b", 2)
        wire.loses = {lost}
        for verb in (
            table.names,
            lambda: table.lookup("a"),
            lambda: put(table, "c", 3),
            lambda: table.bind("d", one),
            lambda: table.unbind("a"),
            lambda: table.pin([two]),
            lambda: table.hold(two, "talk"),
            lambda: table.tokens(two),
            lambda: list(table.digests()),
            table.check_integrity,
            lambda: list(table),
            lambda: Table(url),
        ):
            assert "nothing was changed" in refused(verb).hint
        wire.heal()
        well_again(table)
        assert table.names() == ["a", "b"] and not table.get(two).pinned
        assert put(table, "c", 3) > two
        table.hold(two, "talk")
        wire.loses = {lost}
        begun = time.monotonic()
        table.close()
        assert time.monotonic() - begun < 4 * ANSWER + BUSY


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["questions", "answers"])
def test_of_a_commit_without_an_answer_nobody_knows(
    server: postgres.Server, wire: postgres.Wire, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    direct = server.fresh()
    url, run = wire.of(direct), link.Link._run
    with Table(url) as table, Table(direct) as other:
        one, two = put(table, "a", 1), put(table, "b", 2)
        table.hold(two, "talk")

        def cut(self: link.Link, query: str, *values: object, **words: Any) -> Any:
            if query == "COMMIT" and self is table._rows:
                wire.loses = {lost}
            return run(self, query, *values, **words)

        freed: list[int] = []
        table.on_free = freed.append
        with monkeypatch.context() as patched:
            patched.setattr(link.Link, "_run", cut)
            with pytest.raises(StoreError, match="does not answer") as told:
                with table.transaction():
                    table.unbind("a")
                    table.release(two, "talk")
                    table.bind("c", two)
            assert "nobody knows" in told.value.hint
        refused(lambda: table.lookup("a"))
        wire.heal()
        well_again(table)
        done = lost == "answers"
        assert other.names() == table.names() == (["b", "c"] if done else ["a", "b"])
        assert (table.lookup("a") is None) == done
        assert table.lookup("b").names == (("b", "c") if done else ("b",))  # type: ignore[union-attr]
        ends = time.monotonic() + 20
        while other.contexts_of(two) != ("talk",):  # it was taken back here, so it holds
            assert time.monotonic() < ends
            time.sleep(0.05)
        assert freed == ([one] if done else [])
        table.release(two, "talk")
        table.check_integrity()
