"""An erratum of a part: what it computes, what it belongs to, and when it goes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weaving import chat, rows, same_rows, text

from kvweave import Engine
from kvweave.chunk.identity import ChunkId
from kvweave.errors import ChunkNotFound, InvalidArgument
from kvweave.weave.edits import with_errata
from kvweave.weave.parts import Part

Make = Callable[..., Engine]


def test_an_erratum_is_all_that_is_computed(engines: Make) -> None:
    llama = engines("llama")
    context = chat(llama, "c", [6, 7, 8], repair="none")
    context.weave()
    before = [p.uid for p in context.parts]
    erratum = context.amend("c/0", text(4, 9))
    assert (erratum.name, erratum.amends) == ("c/0~1", context.parts[1].id)
    plan = context.weave()
    assert (plan.prefilled, plan.repaired, plan.moved) == (4, 0, 0)
    assert [p.uid for p in context.parts] == [*before, erratum.uid]
    assert [s.amends for s in plan.spans] == [None] * 4 + [int(context.parts[1].id)]
    assert context.history.log()[0].says == "amend c/0~1"
    plain = chat(llama, "d", [6, 7, 8], repair="none")
    plain.weave()
    plain.append(text(4, 9))
    plain.weave()
    assert same_rows(rows(context), rows(plain)), "its rows are those of any text there"


def test_errata_go_with_what_they_amend(engines: Make) -> None:
    context = chat(engines("llama"), "c", [6, 7, 8])
    version = context.history.version
    for i, ref in enumerate(("c/0", "c/0", "c/0~2", "c/1", 0)):
        context.amend(ref, text(3, 50 + i))
    names = [p.name for p in context.parts[4:]]
    assert names == ["c/0~1", "c/0~2", "c/0~2~1", "c/1~1", "base~1"]
    amended = context.history.version
    context.append_chunk("c/0")
    context.drop(1)
    assert len(context.parts) == 9, "the chunk stands elsewhere still"
    context.drop("c/0")
    assert [p.name for p in context.parts] == ["base", "c/1", "c/2", "c/1~1", "base~1"]
    context.replace("c/1", text(5, 6))
    assert [p.name for p in context.parts] == ["base", "c/1", "c/2", "base~1"]
    context.revert(amended)
    assert [p.name for p in context.parts[4:]] == names
    context.drop("c/0")
    assert [p.name for p in context.parts[3:]] == ["c/1~1", "base~1"], "made again, still errata"
    context.revert(version)
    assert len(context.parts) == 4
    context.check_integrity()


def test_errata_of_text_that_was_made_again_are_of_that(engines: Make) -> None:
    context = chat(engines("llama"), "c", [6])
    context.append(text(5, 3), label="note")
    context.amend("note", text(4, 4))
    version = context.history.version
    context.drop("note")
    context.revert(version)
    note, erratum = context.parts[-2:]
    assert erratum.amends == note.id
    context.drop("note")
    assert [p.name for p in context.parts] == ["base", "c/0"]


def test_what_is_no_erratum_changes_nothing(engines: Make) -> None:
    llama = engines("llama")
    context = chat(llama, "c", [6])
    for wrong in ({"content": text(3, 1), "role": "user"}, {"content": "so", "kind": "tool", "role": "user"}):  # fmt: skip
        with pytest.raises(InvalidArgument, match="leave kind away"):
            context.amend(1, **wrong)
    with pytest.raises(ChunkNotFound):
        context.amend("c/9", text(3, 1))
    assert len(context.parts) == 2 and context.history.log()[0].verb != "amend"


def test_positions_that_are_kept_can_be_amended_at_the_end(engines: Make) -> None:
    context = chat(engines("llama"), "c", [6, 7], positions="keep")
    context.drop(1)
    context.amend("c/1", text(4, 4))
    context.weave()
    assert context.session.state.rows.positions[: context.n_tokens][-1] == 5 + 6 + 7 + 4 - 1


PARTS = st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, 4)), max_size=9)


@given(PARTS, st.sets(st.integers(0, 8)))
@settings(deadline=None)
def test_which_errata_go_is_what_one_at_a_time_gives(
    drawn: list[tuple[int, int | None]], gone: set[int]
) -> None:
    parts = [
        Part(i, ChunkId(id), 1, "x", amends=None if amends is None else ChunkId(amends))
        for i, (id, amends) in enumerate(drawn)
    ]
    gone = {i for i in gone if i < len(parts)}
    slow = set(gone)
    for _ in parts:  # an erratum goes when what it amends was here, and is nowhere any more
        for i, part in enumerate(parts):
            was = any(parts[j].id == part.amends for j in slow)
            stays = any(p.id == part.amends for j, p in enumerate(parts) if j not in slow)
            if was and not stays:
                slow.add(i)
    assert with_errata(parts, gone) == slow
