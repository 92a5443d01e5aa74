"""What an evict froze, repaired as a whole, and what goes on behind it."""

from __future__ import annotations

from typing import Any

from world import contexts
from world.answers import woven
from world.mirror import Chat, whole
from world.world import SHARES, STRATEGIES, World


def evict(world: World) -> bool:
    """Evict from the middle, weave, repair all of it, evict again: each time what is claimed holds."""
    rng = world.rng
    found = [c for c in world.chats.values() if c.evicts and c.open is None]
    found = [c for c in found if len(c.pieces) > c.first + 1]
    chat = rng.choice(found) if found else _opened(world)
    if chat is None:
        return False
    for _ in range(rng.randint(1, 3)):
        _weave(world, chat, rng.choice((None, "none", "full", rng.choice(STRATEGIES))))
        if len(chat.pieces) > chat.first + 1:
            _drop(world, chat, rng.randrange(chat.first, len(chat.pieces) - 1))
        _weave(world, chat, rng.choice((None, "none", "full")))
    _weave(world, chat, "full")
    _weave(world, chat, None)
    return True


def _opened(world: World) -> Chat | None:
    """Open a context that keeps what its parts saw."""
    rng = world.rng
    if len(world.chats) >= contexts.MOST:
        return None
    world.n_contexts += 1
    name, engine = f"c{world.n_contexts}", world.engine
    options = {"repair": rng.choice(("none", "full", *STRATEGIES)), "denoise": rng.random() < 0.5}
    world.note(f"{name} = context({name!r}, prune='evict', **{options})")
    context = world.attempt(lambda: engine.context(name, prune="evict", **options))
    if context is None:
        return None
    base = world.base
    chat = Chat(context, [whole(base, ())] if base else [], base, evicts=True)
    world.chats[name] = chat
    for _ in range(rng.randint(3, 5)):
        contexts.add(world, chat)
    return chat if len(chat.pieces) > chat.first + 1 else None


def _drop(world: World, chat: Chat, index: int) -> None:
    context = chat.context
    world.note(f"{context.name}.drop({index}, mode='evict')")

    def call() -> bool:
        context.drop(index, mode="evict")
        return True

    if world.attempt(call):
        chat.drop([index])


def _weave(world: World, chat: Chat, repair: str | None) -> None:
    options: dict[str, Any] = {} if repair is None else {"repair": repair}
    if repair is not None and world.rng.random() < 0.3:
        options["share"] = world.rng.choice(SHARES)
    context = chat.context
    world.note(f"{context.name}.weave({options})")
    plan = world.attempt(lambda: context.weave(**options))
    world.touch(chat)
    world.drive()
    if plan is not None:
        woven(world, chat, plan, None, plan.strategy)
