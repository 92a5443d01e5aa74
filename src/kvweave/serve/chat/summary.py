"""A summary that the model writes of a conversation, to stand in the place of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvweave.run.sample import Sampling
from kvweave.serve.chat.ask import ChatAsk
from kvweave.serve.chat.asked import Asked
from kvweave.serve.driver.work import Finished
from kvweave.serve.state import ServerState

MOST_TOKENS = 1024  # of a summary, and an eighth of the model's positions


@dataclass(frozen=True, slots=True)
class WrittenSummary:
    """What the model wrote, and what that cost."""

    text: str  # "" where it wrote none
    n_tokens: int
    asked: Asked


def summary_room(state: ServerState) -> int:
    """Return the tokens that a summary may have."""
    return min(MOST_TOKENS, max(1, state.limit // 8))


async def write_summary(
    state: ServerState, tenant: str, ask: ChatAsk, most: int | None = None
) -> WrittenSummary:
    """Have the model answer a chat whose last message asks for a summary, in ``most`` tokens at most.

    Raises ContextTooLong. It sees the tools, as before, and is not made to call one.
    """
    most = most or summary_room(state)
    sampling = Sampling(max_tokens=most, temperature=0.0)
    asked = Asked.of_chat(state, tenant, replace(ask.free(), sampling=sampling, max_tokens=most))
    n = 0
    async with aclosing(asked.events()) as events:
        async for event in events:
            asked.read(event)
            n = len(event.answer.tokens) if isinstance(event, Finished) else n
    assert asked.reader is not None
    return WrittenSummary(asked.reader.answers[0].content.strip(), n, asked)


async def fewest(most: int, fits: Callable[[int], Awaitable[bool]]) -> int:
    """Return the fewest from 1 on that fit; ``most`` where fewer do not."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high) // 2
        if await fits(middle):
            high = middle
        else:
            low = middle + 1
    return high
