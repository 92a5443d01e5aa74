"""Something breaks in the middle of a verb: what it had begun is undone, and all goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvweave import KVWeaveError, Runner
from kvweave.run.layers import RawRows
from kvweave.run.quantised import CodedRows
from kvweave.run.rows import KVRows
from kvweave.store.kv import KV
from kvweave.weave.sources import Sources
from world import answers, chunks, contexts, pruned
from world.world import RECORD, STRATEGIES, Broken, Fault, World

# what may fail at any time, for want of memory or because somebody interrupts
POINTS: list[tuple[type, str]] = [
    (RawRows, "place"), (RawRows, "place"), (RawRows, "write"), (RawRows, "grown"),
    (CodedRows, "write"), (KVRows, "place"), (KVRows, "put"), (KVRows, "reserve"),
    (KVRows, "settle"), (Runner, "forward"), (Runner, "forward"), (Runner, "new_kv"), (KV, "clone"),
    (Sources, "load"),
]  # fmt: skip

# those that compute rows; `generate_many` gives the others their answers before it raises
VERBS: list[Callable[[World], bool]] = [
    answers.weave, answers.weave, answers.check, answers.generate, answers.generate, answers.ask,
    answers.begin, answers.finish, answers.cancel, answers.stream, pruned.evict, contexts.fork,
    contexts.open_context, chunks.put, chunks.put_many, chunks.denoise, chunks.place,
]  # fmt: skip


def fault(world: World) -> bool:
    """Break a verb; then weave, and compare."""
    rng = world.rng
    kind, method = rng.choice(POINTS)
    n, error = rng.choice((1, 1, 2, 3, 4, 6, 9)), rng.choice((Broken, Broken, KeyboardInterrupt))
    verb = rng.choice(VERBS)
    world.fault = found = Fault(kind, method, n, error)
    try:
        world.note(f"in what follows call {n} of {kind.__name__}.{method} raises {error.__name__}")
        if not verb(world):
            world.log.pop()
            return False
    finally:
        world.fault = None
    if found.is_over:
        world.drive()
        _ended(world)
        _weave_anew(world)
    return True


def _ended(world: World) -> None:
    """Answers under way that broke are put back to before them."""
    for chat in world.chats.values():
        turn = None if chat.open is None else chat.open.turn
        if chat.open is None or turn is None or not turn.failed:
            continue
        world.note(f"{chat.context.name}: the answer under way broke")
        try:
            turn.finish()
        except (RuntimeError, KVWeaveError):
            chat.pieces, chat.open = list(chat.open.before), None
        else:
            raise AssertionError("an answer that failed has finished")


def _weave_anew(world: World) -> None:
    """Weave as the context does it, or by any strategy; what is claimed of it holds."""
    chat, rng = world.idle(filled=True), world.rng
    if chat is None:
        return
    context = chat.context
    any_of = rng.choice(chat.may(STRATEGIES, RECORD))
    choices: list[dict[str, Any]] = [{}, {}, {"repair": "full"}, {"repair": any_of}]
    options = rng.choice(choices)
    world.note(f"{context.name}.weave({options})")
    plan = world.attempt(lambda: context.weave(**options))
    world.touch(chat)
    if plan is not None:
        answers.woven(world, chat, plan, None, plan.strategy)
