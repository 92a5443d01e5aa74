"""An answer of a memory, read as it comes: one step, whoever stops in the middle of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from memory.test_memory import eight_turns, state

from kvweave import Memory
from kvweave.errors import ContextBusy, InvalidArgument

ASKED = "what about Omar's metal"


@pytest.fixture
def memory() -> Iterator[Memory]:
    with eight_turns() as made:
        yield made


def test_it_says_what_ask_says_and_is_one_step(memory: Memory) -> None:
    """The same text, parts, items and recall; undone at once."""
    before = state(memory)
    answer = memory.ask(ASKED, max_tokens=8)
    told = [part.name for part in memory.zone("recalled")]
    tokens = memory.context.tokens()
    assert memory.undo() == "ask" and state(memory) == before
    pieces = memory.stream(ASKED, max_tokens=8)
    assert "".join(pieces) == answer.text and "hot" in answer.text
    assert [part.name for part in memory.zone("recalled")] == told
    assert memory.context.tokens() == tokens
    assert memory.undo() == "ask" and state(memory) == before


def test_a_reader_that_stops_leaves_what_was_said(memory: Memory) -> None:
    before = state(memory)
    pieces = memory.stream(ASKED, max_tokens=200, ignore_eos=True)
    first = ""
    while not first:
        first = next(pieces)
    pieces.close()
    said = memory.context.parts[-1]
    assert 0 < said.n < 100 and not memory.context.session.busy
    assert memory.ask("what about Mei's song", max_tokens=8).text
    assert [memory.undo(), memory.undo()] == ["ask", "ask"] and state(memory) == before
    memory.stream(ASKED, max_tokens=200).close()  # before its first piece
    assert not memory.context.session.busy and memory.undo() == "ask"
    assert state(memory) == before


def test_no_other_verb_comes_in_between(memory: Memory) -> None:
    """Else it would be taken back with the answer."""
    pieces = memory.stream(ASKED, max_tokens=8)
    for verb in (
        lambda: memory.write("notes/a", "so"),
        lambda: memory.tell("so"),
        lambda: memory.stream("so"),
        lambda: memory.ask("so"),
        lambda: memory.undo(),
        lambda: memory.settle(),
    ):
        with pytest.raises(ContextBusy):
            verb()
    assert memory.idle() is None and memory.search("Omar's metal")
    assert "hot" in "".join(pieces)
    assert memory.write("notes/a", "so") and memory.undo() == "write"


def test_one_that_fails_puts_all_back(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    before, loop = state(memory), memory.context.session.loop
    with pytest.raises(InvalidArgument):
        memory.stream(ASKED, max_tokns=8)
    assert state(memory) == before
    pieces = memory.stream(ASKED, max_tokens=20, ignore_eos=True)
    step, n = loop.step, iter(range(10**6))

    def failing() -> bool:
        if next(n) > 3:
            raise RuntimeError("no more")
        return step()

    with monkeypatch.context() as patched:
        patched.setattr(loop, "step", failing)
        with pytest.raises(RuntimeError, match="no more"):
            list(pieces)
    assert state(memory) == before and not memory.context.session.busy
    assert "hot" in memory.ask(ASKED, max_tokens=8).text
