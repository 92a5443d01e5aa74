"""Rows that become exact while nobody waits: at once, or beside whatever else happens."""

from __future__ import annotations

from kvweave.errors import InvalidArgument
from world.checks import ROWS, Woven, exact_as_claimed, require
from world.mirror import Chat
from world.world import World


def _cannot(world: World, chat: Chat) -> bool:
    return world.lossy or chat.thins or chat.evicts


def refine(world: World) -> bool:
    """Some rows, or all: then the context is that of a full prefill."""
    chat = world.idle(filled=True)
    if chat is None:
        return False
    context, n = chat.context, world.rng.choice((None, None, None, 1, 5, 20))
    world.note(f"{context.name}.refine({n})")
    if _cannot(world, chat):
        world.refused(InvalidArgument, lambda: context.refine(n))
        return True
    done = world.attempt(lambda: context.refine(n))
    if done is None:
        return True
    world.touch(chat)
    world.drive()
    require(n is None or done <= n, f"{done} rows are refined, {n} were asked for")
    chat.was_woven, chat.answered = True, chat.answered if not done else None
    found = Woven(world.twin, chat.pieces, (), world.rows_of(chat))
    exact_as_claimed(found, context.plan)
    if not context.preview().repaired:  # else it tells what rows will be
        exact_as_claimed(found, context.preview(), "the preview")
    if n is None:
        error = found.error(0, min(found.n_rows, found.n))
        require(error <= ROWS, f"refined, rows are {error:.1e} off\n{context.plan.explain()}")
        now = context.preview()
        require(now.drift == 0, f"refined, it is not exact\n{now.explain()}")
        require(world.attempt(context.refine) in (0, None), "what was refined is refined again")
    return True


def ahead(world: World) -> bool:
    """Begin it; it goes on whenever the loop has nothing better to do (`answers.drive`)."""
    chat = world.idle(filled=True)
    if chat is None or _cannot(world, chat):
        return False
    world.note(f"{chat.context.name}: refine it when there is time")
    world.touch(chat)
    world.attempt(lambda: world.begin(chat))
    return True
