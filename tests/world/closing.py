"""Closing everything, and opening it again."""

from __future__ import annotations

from kvweave.serve.driver.tasks import Tasks
from world import memory
from world.answers import finish_all
from world.checks import require
from world.world import BESIDE, World


def close_all(world: World) -> None:
    """Close everything: what is left are the chunks with names."""
    world.note("close all")
    finish_all(world)
    world.tasks.fail(RuntimeError("everything is closed"))
    for name in list(world.chats):
        world.engine.close_context(name)
        del world.chats[name]
    names = [entry.name for entry in world.engine.files.ls()]
    require(names == sorted(world.names), f"names left: {names}, not {sorted(world.names)}")
    bases, there = world.engine.weaver.sources.bases, {r.id for r in world.engine.table}
    for first, made in list(bases._made.items()):
        require(first in there or not made, f"#{first} is gone, what was made of it is not")
        bases.drop(first)  # what was made for other bases goes with it, and nothing else is left
    found, wanted = world.n_chunks(), world.expected_chunks()
    require(found == wanted, f"{found} chunks are left, {wanted} have names")
    world.engine.check_integrity()
    world.within_budget()


def reopen(world: World) -> bool:
    """Close the engine and open it again on the same home."""
    if world.folder is None:
        return False
    close_all(world)
    world.note("reopen")
    world.engine.close()
    del world.engine
    left = memory.alive()
    require(left <= BESIDE, f"{left:,} bytes are alive though the engine is closed")
    world.engine, world.sums = world.opened(), {}
    world.tasks = Tasks(world.engine.loop)
    names = {entry.name: entry.n_tokens for entry in world.engine.files.ls()}
    wanted = {name: len(chunk.tokens) for name, chunk in world.names.items()}
    require(names == wanted, f"names after opening again: {names}")
    return True
