from __future__ import annotations

import shutil
import tempfile
from collections import Counter
from pathlib import Path

import postgres
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvweave.chunk.files import Files
from kvweave.chunk.table import Table
from kvweave.errors import ChunkPinned, NameTaken


def digest_of(*tokens: int) -> bytes:
    return bytes(tokens).rjust(16, b"\0")


class Model(RuleBasedStateMachine):
    """A Table on disk against plain dicts, with aborts and restarts."""

    gives_all_ids = True

    names = st.sampled_from(["a", "b", "d/a", "d/b", "d/e/a"])
    tokens = st.integers(1, 6)
    bases = st.none() | st.integers(1, 3)
    picks = st.integers(0, 50)
    contexts = st.sampled_from(["x", "y"])

    def __init__(self):
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.where = self.make()
        self.bound: dict[str, int] = {}
        self.chunks: dict[int, tuple[int, int | None]] = {}  # id -> token, base id
        self.held: Counter[tuple[int, str]] = Counter()
        self.pinned: set[int] = set()
        self.given = 0
        self.freed: set[int] = set()
        self.open()

    def make(self) -> str | Path:
        return self.directory / "index.sqlite"

    def open(self):
        self.table = Table(self.where)
        self.table.on_free = self.freed.add
        self.files = Files(self.table)

    def teardown(self):
        self.table.close()
        shutil.rmtree(self.directory)

    def pick(self, n):
        return sorted(self.chunks)[n % len(self.chunks)]

    def sweep(self, loose):
        """Free, in the model, what nothing keeps."""
        while loose:
            id = loose.pop()
            kept = (
                id in self.bound.values()
                or id in self.pinned
                or any(holder == id for holder, _ in +self.held)
                or any(base == id for _, base in self.chunks.values())
            )
            if id in self.chunks and not kept:
                base = self.chunks.pop(id)[1]
                if base is not None:
                    loose.append(base)

    def add(self, token, base):
        digest = digest_of(base or 0, token)
        known = {value: id for id, value in self.chunks.items()}
        id, new = self.table.add([token], digest=digest, base=base)
        assert new == ((token, base) not in known)
        if new:
            assert id == self.given + 1 if self.gives_all_ids else id > self.given
            self.given = id
            self.chunks[id] = (token, base)
        return id

    @rule(token=tokens, name=names, base=bases, replace=st.booleans())
    def put(self, token, name, base, replace):
        base = base if base in self.chunks else None
        old = self.bound.get(name)
        n = self.given
        try:
            with self.table.transaction():
                before = dict(self.chunks)
                id = self.add(token, base)
                self.table.bind(name, id, replace=replace)
        except NameTaken:
            assert old is not None and old != id and not replace
            self.chunks = before
            assert self.given in (n, n + 1) or not self.gives_all_ids
            return
        except ChunkPinned:
            assert replace and old in self.pinned and list(self.bound.values()).count(old) == 1
            self.chunks = before
            return
        assert old in (None, id) or replace
        self.bound[name] = id
        if old not in (None, id):
            self.sweep([old])

    @rule(token=tokens)
    def put_nameless(self, token):
        self.add(token, None)

    @precondition(lambda self: self.bound)
    @rule(pick=picks, to=names, replace=st.booleans(), move=st.booleans())
    def copy_or_move(self, pick, to, replace, move):
        name = sorted(self.bound)[pick % len(self.bound)]
        id, old = self.bound[name], self.bound.get(to)
        last = old not in (None, id) and list(self.bound.values()).count(old) == 1
        try:
            (self.files.mv if move else self.files.cp)(name, to, replace)
        except NameTaken:
            assert old not in (None, id) and not replace
            return
        except ChunkPinned:
            assert last and old in self.pinned
            return
        assert old in (None, id) or replace
        if move:
            del self.bound[name]
        self.bound[to] = id
        if old not in (None, id):
            self.sweep([old])

    @precondition(lambda self: self.bound)
    @rule(pick=picks)
    def unbind(self, pick):
        name = sorted(self.bound)[pick % len(self.bound)]
        self.table.unbind(name)
        self.sweep([self.bound.pop(name)])

    @precondition(lambda self: self.chunks)
    @rule(pick=picks, context=contexts)
    def hold(self, pick, context):
        self.table.hold(self.pick(pick), context)
        self.held[self.pick(pick), context] += 1

    @precondition(lambda self: +self.held)
    @rule(pick=picks)
    def release(self, pick):
        id, context = sorted(+self.held)[pick % len(+self.held)]
        self.table.release(id, context)
        self.held[id, context] -= 1
        if not self.held[id, context]:
            self.sweep([id])

    @precondition(lambda self: self.chunks)
    @rule(pick=picks, pinned=st.booleans())
    def pin(self, pick, pinned):
        id = self.pick(pick)
        self.table.pin([id], pinned)
        (self.pinned.add if pinned else self.pinned.discard)(id)

    @precondition(lambda self: self.chunks)
    @rule(pick=picks)
    def touch(self, pick):
        self.table.touch([self.pick(pick)])

    @rule()
    def collect(self):
        before = set(self.chunks)
        self.sweep(list(self.chunks))
        assert set(self.table.collect()) == before - set(self.chunks)

    @rule(pick=picks, token=tokens)
    def abort(self, pick, token):
        before, new = set(self.freed), False
        with pytest.raises((ZeroDivisionError, ChunkPinned)), self.table.transaction():
            id, new = self.table.add([token, token], digest=digest_of(99, token))
            self.given += new
            self.table.bind("a", id, replace=True)
            for name in self.table.names():
                self.table.unbind(name)
            self.table.collect()
            raise ZeroDivisionError
        assert self.freed == before | ({id} if new else set())

    @rule()
    def restart(self):
        self.table.close()
        self.held.clear()
        self.open()

    @invariant()
    def agrees(self):
        self.table.check_integrity()
        found = {r.id: (int(self.table.tokens(r.id)[0]), r.base) for r in self.table}
        assert found == self.chunks
        assert {n: self.table.resolve(n).id for n in self.table.names()} == self.bound
        assert {r.id for r in self.table if r.pinned} == self.pinned
        for id in self.chunks:
            assert set(self.table.contexts_of(id)) == {c for i, c in +self.held if i == id}
        assert not self.freed & self.chunks.keys()


TestModel = Model.TestCase
TestModel.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


class SharedModel(Model):
    """The same on PostgreSQL; ids of transactions that failed are left out there."""

    gives_all_ids = False
    server: postgres.Server

    def make(self) -> str:
        return self.server.fresh()


@pytest.mark.slow
def test_shared_model(server):
    SharedModel.server = server
    run_state_machine_as_test(
        SharedModel,
        settings=settings(
            max_examples=5, stateful_step_count=25, deadline=None, database=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )  # fmt: skip
