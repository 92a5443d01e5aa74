"""Versions of a context: what the log tells, how to come back, and which edit cost what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from world import models

from kvweave import Context, Engine, Sampling
from kvweave.errors import ChunkNotFound, InvalidArgument
from kvweave.weave import history


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(models.build("llama")[0], repair="none") as made:
        made.put_many([(f"d{i}", [*range(9 + 4 * i, 19 + 4 * i)]) for i in range(4)])
        yield made
        made.check_integrity()


@pytest.fixture
def context(engine: Engine) -> Context:
    made = engine.context("c")
    for i in range(3):
        made.append_chunk(f"d{i}")
    made.append([40, 41, 42])
    return made


def verbs(context: Context) -> list[str]:
    return [edit.verb for edit in context.history.log()][::-1]


def test_each_edit_is_a_version_and_several_in_one_are_one(context: Context) -> None:
    assert verbs(context)[-4:] == ["append"] * 4
    first = context.history.version
    with context.edit():
        context.drop("d0")
        context.insert(1, [9, 9])
    context.reorder([0, 2, 1, 3, 4])
    with pytest.raises(InvalidArgument), context.edit():
        context.drop("d1")
        context.reorder([0])
    assert context.history.version == first + 2
    last, before = context.history.log()[:2]
    assert (last.verb, last.added, last.removed) == ("reorder", (), ())
    assert before.verb == "drop, insert" and before.removed == ("d0",)
    assert before.n_tokens == context.n_tokens


def test_what_changes_nothing_is_no_version(context: Context) -> None:
    first = context.history.version
    context.drop()
    context.restore(context.snapshot())
    context.revert(first)
    context.weave()
    assert context.history.version == first


def test_an_answer_is_one_version_and_one_given_up_is_none(context: Context) -> None:
    first = context.history.version
    turn = context.begin(Sampling(max_tokens=3, ignore_eos=True), chat=True)
    begun = context.history.version
    assert begun > first
    turn.abandon()
    assert context.history.version == first
    context.ask("t9 t10", 3)
    assert verbs(context)[-2:] == ["message", "answer"]
    assert context.history.version > begun, "a number was given twice"


def test_a_version_comes_back_as_it_was_also_what_was_freed(
    engine: Engine, context: Context
) -> None:
    wanted, version = context.tokens(), context.history.version
    text = context.parts[-1]
    context.weave()
    context.drop("d1", text)
    context.generate(3, ignore_eos=True)
    engine.files.rm("d3")
    assert text.id not in [record.id for record in engine.table]
    context.revert(version)
    assert context.tokens() == wanted
    assert context.weave("full").drift == 0
    assert context.check().kl < 1e-9
    assert verbs(context)[-1] == f"revert to {version}"


def test_what_was_removed_by_its_name_does_not_come_back(engine: Engine, context: Context) -> None:
    version, before = context.history.version, context.parts
    context.drop("d1")
    left = context.parts
    engine.files.rm("d1")
    with pytest.raises(ChunkNotFound, match="d1"):
        context.revert(version)
    assert context.parts == left != before
    with pytest.raises(InvalidArgument, match="no version 99"):
        context.revert(99)


def test_the_difference_of_two_versions(context: Context) -> None:
    first = context.history.version
    context.drop("d1")
    context.append([50], name="new")
    context.reorder([0, 2, 1, 3, 4])
    diff = context.history.diff(first)
    assert [p.name for p in diff.added] == ["new"]
    assert [p.name for p in diff.removed] == ["d1"]
    assert len(diff.moved) == 1 and diff.moved[0].name in ("d0", "d2", "text-4")
    back = context.history.diff(context.history.version, first)
    assert (back.added, back.removed) == (diff.removed, diff.added)


def test_why_names_the_edit_that_cost(context: Context) -> None:
    context.generate(2, ignore_eos=True)
    assert not context.why().pending  # the answer is what was woven for
    context.append([30, 31], name="question")
    context.drop("d0")
    dropped = context.history.version
    context.append([32, 33], name="more")
    told = context.why()
    assert told.pending and told.n_kept + told.n_moved + told.n_computed == context.n_tokens
    by_name = {part.name: part for part in told.parts}
    assert by_name["question"].how == "new" and by_name["question"].edit.verb == "append"
    for name in ("d1", "d2"):
        assert by_name[name].how == "moved", by_name[name]
        assert by_name[name].edit.version == dropped and "drop d0" in by_name[name].says
    context.weave()
    assert not context.why().pending and context.why().n_computed == told.n_computed
    assert "computed" in told.says


def test_a_fork_has_the_history_up_to_there(context: Context) -> None:
    twin = context.fork("twin")
    assert twin.history.log() == context.history.log()
    twin.drop("d0")
    assert twin.history.version == context.history.version + 1
    twin.close()


def test_only_so_much_of_what_is_gone_is_kept(
    monkeypatch: pytest.MonkeyPatch, context: Context
) -> None:
    monkeypatch.setattr(history, "MOST_TOKENS", 40)
    first = context.history.version
    versions = []
    for i in range(12):
        context.append([9 + i] * 10)
        versions.append(context.history.version)
        context.drop(-1)
        assert sum(len(gone.tokens) for gone in context.history._gone.values()) <= 40
    assert context.history._n_gone == 40
    context.revert(versions[-1])
    assert context.parts[-1].n == 10
    with pytest.raises(ChunkNotFound):
        context.revert(versions[0])
    context.revert(first)


def test_versions_share_the_parts_that_no_edit_changed(context: Context) -> None:
    before = context.parts
    context.reorder([0, 2, 1, 3, 4])
    context.insert(1, [9])
    context.drop(1)
    assert {id(part) for part in context.parts} <= {id(part) for part in before}


def test_only_so_many_versions_are_kept(monkeypatch: pytest.MonkeyPatch, context: Context) -> None:
    monkeypatch.setattr(history, "MOST_VERSIONS", 8)
    for i in range(20):
        context.append([9 + i])
        context.drop(-1)
    log = context.history.log()
    assert 4 <= len(log) <= 8 and len(context.history._gone) <= 8
    assert log[0].version - log[-1].version == len(log) - 1
    with pytest.raises(InvalidArgument, match="see the log"):
        context.revert(1)


def test_why_takes_time_in_proportion_to_the_parts(engine: Engine) -> None:
    """It runs in a server's one thread: what it looks at is counted, not timed."""
    context = engine.context("long")
    seen = 0

    class Counted(tuple):  # type: ignore[type-arg]
        def __iter__(self):  # type: ignore[no-untyped-def]
            nonlocal seen
            for part in super().__iter__():
                seen += 1
                yield part

    def looked(n: int) -> int:
        nonlocal seen
        with context.edit():
            for i in range(n):
                context.append([9 + i % 50])
        context.weave()
        context.drop(1)
        kept = context.history._versions
        for _ in range(len(kept)):
            version = kept.popleft()
            kept.append(replace(version, parts=Counted(version.parts)))
        seen = 0
        context.why()
        return seen

    few, many = looked(20), looked(60)
    assert 0 < many < 8 * few


def test_what_is_made_again_has_the_base_it_had(engine: Engine) -> None:
    context = engine.context("c")
    context.replace(0, [50, 51])
    context.append([52, 53, 54])
    then, digests = context.history.version, context.snapshot().digests
    context.replace(0, [55, 56, 57])
    context.drop(1)
    context.revert(then)
    assert context.snapshot().digests == digests
    engine.denoise()
    assert engine.table.get(context.parts[0].id).base is None
    assert not context.weave(repair="none").approximate and context.check().kl_max < 1e-9
