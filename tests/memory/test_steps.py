"""Steps of a memory that wait for the model: nobody comes in between, and one given up never was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from memory.test_memory import eight_turns, state

from kvweave import Memory
from kvweave.errors import ChunkInUse, ContextBusy
from kvweave.memory import AskModel

ASKED = "what about Omar's metal"


@pytest.fixture
def memory() -> Iterator[Memory]:
    """One whose turns leave when the model has summed them up."""
    with eight_turns() as made:
        made._settling.summarise = AskModel(made._ground.engine, made.context)
        made.tell("so well", "assistant")
        yield made


def sums_up(memory: Memory) -> Any:
    for _ in range(9):
        memory.context.message("user", f"so well it was {ASKED}")
    return memory.settling()


TASKS: dict[str, Callable[[Memory], Any]] = {
    "settle": sums_up,
    "recall": lambda memory: memory.recalling(ASKED, "attention"),
    "search": lambda memory: memory.searching(ASKED, "attention"),
}


@pytest.mark.parametrize("what", TASKS)
def test_no_other_verb_comes_in_between(memory: Memory, what: str) -> None:
    task, engine = TASKS[what](memory), memory._ground.engine
    loop = engine.loop
    request = next(task)
    assert set(engine.contexts) == {"c"}, "it is seen by others"
    for verb in (
        lambda: memory.write("notes/a", "so"), lambda: memory.tell("so"), lambda: memory.undo(),
        lambda: memory.stream("so"), lambda: memory.context.append("so"),
    ) if what != "search" else ():  # fmt: skip
        with pytest.raises(ContextBusy):
            verb()
    assert memory.search(ASKED) and memory.search(ASKED, "attention")  # two may look
    assert what == "search" or memory.idle() is None
    try:
        while True:
            if request.key not in loop.requests:
                loop.add(request)
            loop.run(lambda: not request.running)  # noqa: B023
            request = next(task)
    except StopIteration as done:
        assert done.value
    assert memory.write("notes/a", "so") and memory.undo() == "write"
    assert what == "search" or memory.undo() == what


def test_an_item_that_goes_while_it_is_looked_at_is_not_recalled(memory: Memory) -> None:
    task, loop = memory.recalling(ASKED, "attention"), memory._ground.engine.loop
    request = next(task)
    names = [item.name for item in memory.items() if not item.in_context]
    files = memory._ground.engine.files
    with pytest.raises(ChunkInUse, match=r"in use by c \("):
        files.rm(names[0])
    files.rm(names[0], force=True)
    loop.add(request)
    loop.run(lambda: not request.running)
    assert names[0] not in loop.finish(task)


@pytest.mark.parametrize("what", TASKS)
def test_one_that_is_given_up_leaves_nothing(memory: Memory, what: str) -> None:
    n_steps, task = memory.n_steps, TASKS[what](memory)
    before, engine = state(memory), memory._ground.engine
    next(task)
    engine.loop.step()
    task.close()
    assert state(memory) == before and memory.n_steps == n_steps
    assert not memory.context.session.busy and not engine.loop.requests
    assert engine.loop.finish(TASKS[what](memory))


def test_a_model_that_says_nothing_stops_no_conversation(memory: Memory, monkeypatch) -> None:
    """It would say nothing again, and every message to come would be refused."""
    engine = memory._ground.engine
    monkeypatch.setattr(engine.loop.backend, "ends", frozenset(range(engine.runner.n_vocab)))
    for _ in range(9):
        memory.context.message("user", "so well it was . then we saw it .")
    memory.settle()
    said = [memory.items_below.text(part.name) for part in memory.zone("summary")]
    assert said and "so well it was ." in said[-1]
