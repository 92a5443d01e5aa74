"""What a memory does to names and pins: of renamed contexts, of copies, and of what others store beside it."""

from __future__ import annotations

import pytest
from loaded import short_runner

from kvweave import Context, Engine, Memory, MemoryBudget
from kvweave.chunk.files import Files
from kvweave.chunk.identity import MAX_NAME
from kvweave.errors import ChunkInUse, ChunkPinned, InvalidName, NameTaken
from kvweave.memory import FirstSentences

SMALL = MemoryBudget(window=40, summaries=80, summary=40, recalled=60)


@pytest.fixture(scope="module")
def engine():
    with Engine(short_runner()) as made:
        yield made
        made.check_integrity()


def remember(engine: Engine, context: Context | str) -> Memory:
    context = engine.context(context) if isinstance(context, str) else context
    return Memory(engine, context, budget=SMALL, summarise=FirstSentences(1))


def names(engine: Engine, pattern: str) -> list[str]:
    return [entry.name for entry in engine.files.ls(pattern)]


def texts(memory: Memory) -> list[str]:
    """What stands in the window, and what left it."""
    said = [memory.items_below.decode(memory.context.tokens())]
    return said + [memory.read(item.name) for item in memory.items()]


def test_what_was_said_before_a_rename_is_remembered_too(engine):
    context = engine.context("before")
    for i in range(3):
        context.message("user", f"so well {i}{i}{i} . then we saw it , so well")
    engine.rename_context("before", "behind")
    memory = remember(engine, context)
    for i in range(3, 9):
        memory.tell(f"so well {i}{i}{i} . then we saw it , so well")
    kept = [item.name for item in memory.items("behind/u-*")]
    assert kept[:4] == [f"memory/behind/u-00{i}" for i in range(4)]
    assert all(any(f"{i}{i}{i}" in text for text in texts(memory)) for i in range(9))
    assert names(engine, "before/*") == [], "they are items now"
    while memory.undo():
        pass
    assert names(engine, "before/*") == [f"before/u-00{i}" for i in range(3)]
    assert names(engine, "behind/*") == names(engine, "memory/behind/*") == []
    memory.close(), context.close()


def test_a_copy_remembers_what_it_was_made_with_and_leaves_the_names_alone(engine):
    context = engine.context("first")
    for i in range(4):
        context.message("user", f"so well {i}{i}{i} . then we saw it , so well")
    twin = engine.fork(context, "second")
    other = engine.context("third")
    other.restore(context.snapshot())
    for copy in (twin, other):
        memory = remember(engine, copy)
        for i in range(4, 8):
            memory.tell(f"so well {i}{i}{i} . then we saw it , so well")
        assert all(any(f"{i}{i}{i}" in text for text in texts(memory)) for i in range(8))
        assert [part.name for part in context.parts] == names(engine, "first/*")
        memory.close(), copy.close()
    third = engine.context("fourth")  # as behind a restart: composed of the names
    for part in context.parts:
        third.append_chunk(part.name)
    memory = remember(engine, third)
    memory.settle()
    assert memory.items("fourth/u-*") and len(names(engine, "first/*")) == len(context.parts)
    memory.close(), third.close(), context.close()


def test_a_name_that_was_left_is_anothers(engine):
    memory = remember(engine, "old")
    memory.tell("so well")
    engine.rename_context("old", "new")
    other = engine.context("old")
    with memory.step("two"):
        memory.tell("then we saw it")
        other.message("user", "it is cold")
    assert [part.name for part in memory.context.parts] == ["old/u-000", "new/u-001"]
    assert [part.name for part in other.parts] == ["old/u-001"]
    assert memory.undo() == "two"
    assert names(engine, "old/*") == ["old/u-000", "old/u-001"] and not names(engine, "new/*")
    memory.close(), memory.context.close(), other.close()


def test_who_uses_a_chunk_is_told_by_its_name_of_now(engine):
    context = engine.context("was", namespace="team")
    engine.put("docs/a", "it is loud", namespace="team")
    context.append_chunk("docs/a")
    engine.rename_context("was", "is", "team")
    engine.context("was", namespace="team")
    with pytest.raises(ChunkInUse) as refused:
        Files(engine.table, "team").rm("docs/a")
    assert refused.value.contexts == ("is",)
    for name in ("is", "was"):
        engine.close_context(name, "team")
    Files(engine.table, "team").rm("docs/a")


def test_a_rename_is_taken_back_with_the_block_around_it(engine):
    one, two = engine.context("one"), engine.context("two")
    with pytest.raises(ZeroDivisionError), one.edit():
        engine.rename_context("two", "three")
        engine.context("two").message("user", "so well")
        two.message("user", "so well")
        raise ZeroDivisionError
    assert engine.get_context("two") is two and "three" not in engine.contexts
    assert two.message("user", "it is cold").name == "two/u-000"
    one.close(), two.close()


@pytest.mark.parametrize("name", ["beside/mine", "beside/u-007"])
def test_what_others_store_beside_an_answer_is_not_the_steps(engine, name):
    memory = remember(engine, "beside")
    pieces = memory.stream("so well", max_tokens=3)
    engine.put(name, "Mei's song is loud .")
    list(pieces)
    assert memory.undo() == "ask"
    assert names(engine, "beside/*") == [name]
    engine.files.rm(name), memory.close(), memory.context.close()


def test_a_document_beside_the_messages_keeps_its_name(engine):
    memory = remember(engine, "talk")
    engine.put("talk/plan", "Mei's song is loud .")
    memory.context.append_chunk("talk/plan")
    for i in range(6):
        memory.tell(f"so well {i}{i}{i} . then we saw it , so well")
    assert "talk/plan" not in [part.name for part in memory.context.parts]
    assert "talk/plan" in names(engine, "talk/*")
    memory.close(), memory.context.close()


def test_items_lie_down_whatever_they_are_called_and_whoever_put_them(engine):
    context, budget = engine.context("warm"), MemoryBudget(warm=20)
    memory = Memory(engine, context, root="cellar", budget=budget, summarise=FirstSentences(1))
    for i in range(5):
        memory.write(f"notes/{i}", f"so well {i}{i} . then we saw it")
    engine.denoise()
    memory.rename("notes/", "shelf/")
    for i in range(5):
        engine.put(f"cellar/others/{i}", f"so well {i} . Mei's song is loud .")
    while memory.idle():
        pass
    warm = [entry.n_tokens for entry in engine.files.ls("cellar/**") if entry.tier == "ram"]
    assert 0 < sum(warm) <= 20
    memory.close(), context.close()


def test_a_pin_is_of_who_set_it(engine):
    memory = remember(engine, "pins")
    memory.write("a", "loud song")
    memory.anchor("b", "loud song")
    assert engine.files.stat("memory/a").pinned, "it is one chunk"
    memory.undo()
    assert not engine.files.stat("memory/a").pinned

    memory.anchor("b", "loud song")
    memory.anchor("c", "loud song")
    memory.delete("anchors/b")
    assert engine.files.stat("memory/a").pinned
    memory.write("anchors/c", "it is cold")
    assert not engine.files.stat("memory/a").pinned and engine.files.stat("memory/anchors/c").pinned
    memory.rename("anchors/c", "anchors/d")
    memory.close()
    assert not engine.files.stat("memory/anchors/d").pinned

    other, third = remember(engine, memory.context), remember(engine, "beside them")
    other.anchor("f", "loud town")
    third.write("anchors/f", "cold town")
    assert engine.files.stat("memory/anchors/f").pinned
    third.close()
    assert engine.files.stat("memory/anchors/f").pinned
    other.close()
    assert not engine.files.stat("memory/anchors/f").pinned

    engine.files.pin("memory/a")
    again = remember(engine, memory.context)
    again.anchor("e", "loud song")
    again.undo()
    again.anchor("e", "loud song")
    again.delete("anchors/e")
    again.close()
    assert engine.files.stat("memory/a").pinned, "somebody else wanted that"
    with pytest.raises(ChunkPinned):
        engine.files.rm("memory/a")
    engine.files.unpin("memory/a"), engine.files.rm("memory/a"), again.context.close()


def test_what_is_made_again_is_what_it_was(engine):
    memory = remember(engine, "again")
    memory.tell("so well 111 . then we saw it , so well")
    memory.context.amend(memory.context.parts[-1], "it is cold", kind="user")
    for i in range(2, 4):
        memory.tell(f"so well {i}{i}{i} . then we saw it , so well")
    before = [(part.name, part.literal, part.n) for part in memory.context.parts]
    turns = [[part.name for part in turn] for turn in memory._ground.turns()]
    memory.tell("so well 444 . then we saw it , so well")
    memory.delete("again/*")
    assert memory.undo() == "delete" and memory.undo() == "tell"
    assert [(part.name, part.literal, part.n) for part in memory.context.parts] == before
    assert [[part.name for part in turn] for turn in memory._ground.turns()] == turns
    memory.context.drop("again/u-000")
    assert "again/u-000~1" not in [part.name for part in memory.context.parts]
    memory.close(), memory.context.close()


def test_a_name_that_leaves_no_room_for_items_is_refused_before_anything_changes(engine):
    context = engine.context("roomy")
    memory = remember(engine, context)
    memory.tell("so well .")
    with pytest.raises(InvalidName, match="items need 3 characters"):
        engine.rename_context("roomy", "r" * (MAX_NAME - 20))
    assert context.name == "roomy" and names(engine, "roomy/") == ["roomy/u-000"]
    with pytest.raises(InvalidName, match="items"):
        remember(engine, engine.context("q" * (MAX_NAME - 10)))
    engine.rename_context("roomy", "r" * (MAX_NAME - 23))
    for _ in range(20):
        memory.tell("so well Anna's river is cold .")
    assert memory.items()
    memory.context.close()


def test_a_taken_name_does_not_tell_of_an_option_that_a_verb_has_not(engine):
    memory = remember(engine, "taken")
    memory.write("taken/a", "so well .")
    memory.write("taken/b", "so well then .")
    with pytest.raises(NameTaken) as error:
        memory.rename("taken/a", "taken/b")
    assert "replace=" not in error.value.hint and memory.read("taken/b") == "so well then ."
    memory.delete("taken/")
    memory.context.close()
