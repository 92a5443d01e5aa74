"""Verbs on the versions of a context."""

from __future__ import annotations

from kvweave.errors import ChunkNotFound, ContextBusy
from world.contexts import _exists
from world.world import World, require


def remember(world: World) -> bool:
    chat = world.idle()
    if chat is None:
        return False
    version = chat.context.history.version
    world.note(f"{chat.context.name} is at version {version}")
    chat.versions = [*chat.versions, (version, list(chat.pieces), chat.base)][-3:]
    return True


def revert(world: World) -> bool:
    """What was freed since is made again; what was removed by its name is not."""
    chat = world.idle()
    if chat is None or not chat.versions:
        return False
    context = chat.context
    version, pieces, base = world.rng.choice(chat.versions)
    before = context.history.version
    world.note(f"{context.name}.revert({version})")
    past = context.history.at(version).parts

    def call() -> bool:
        context.revert(version)
        return True

    allowed = () if all(_exists(world, f"#{p.id}") for p in past) else (ChunkNotFound,)
    if world.attempt(call, *allowed):
        same = chat.pieces == pieces
        chat.pieces, chat.base = list(pieces), base
        require(same or context.history.version > before, "a revert is no new version")
    require(context.history.version >= before, "versions went back")
    return True


def why(world: World) -> bool:
    """Its counts are the plan's."""
    chat = world.idle()
    if chat is None or not chat.pieces:
        return False
    try:
        told = chat.context.why()
    except ContextBusy:
        return False
    world.note(f"{chat.context.name}.why()")
    total = told.n_kept + told.n_moved + told.n_computed
    require(total == told.n_tokens == sum(p.n_tokens for p in told.parts), "tokens are lost in why")
    return True
