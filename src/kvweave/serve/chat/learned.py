"""Behind an answer: what the next request edits is worked out from what earlier ones edited.

A client that takes old outputs out of its history does so again and again, by a rule that nobody told
the server (`kvweave.serve.reuse.habits`). What is foreseen is done to a copy of the context; a wrong guess
leaves nothing but that, and goes with the next request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from kvweave.serve.chat.ask import ChatAsk
from kvweave.serve.chat.asked import Asked, prompt_of
from kvweave.serve.chat.read import ReadAnswer
from kvweave.serve.driver.work import Event
from kvweave.serve.reuse.ahead import Anticipation, WorkedOut
from kvweave.serve.reuse.habits import Foreseen
from kvweave.serve.state import ServerState

FILL = secrets.token_hex(24)  # stands for what nobody knows yet, and for nothing else


async def learning(asked: Asked, ask: ChatAsk) -> AsyncGenerator[Event, None]:
    """Yield the events of a request; learn from it when all are read."""
    async with aclosing(asked.events()) as events:
        async for event in events:
            yield event
    await asyncio.to_thread(look_ahead, asked, ask)  # a long history takes its time


def look_ahead(asked: Asked, ask: ChatAsk, *, edits_only: bool = False) -> bool:
    """Learn from a request that was answered, and have foreseen edits made while nobody waits; tell
    whether there are any. ``edits_only``: not where only thinking goes."""
    state, left, reader = asked.state, asked.left, asked.reader
    if left is None or reader is None or not state.learns:
        return False
    read = reader.answers.get(0)
    if read is None or read.end not in ("stop", "tool_calls"):
        return False
    with state.anticipating.guarded():  # the answer is there
        answer = _message(read)
        tools = [str(tool["function"]["name"]) for tool in ask.tools]
        foreseen = state.habits.note(asked.tenant, ask.messages, answer, tools)
        if foreseen is None:
            return False
        thinks = bool(read.reasoning) and foreseen.returns is not None
        if not foreseen.edits and (edits_only or not thinks):
            return False
        following = _next(ask, answer, foreseen)
        state.anticipating.note(
            Anticipation(
                asked.tenant, *left, foreseen.began,
                [lambda: beginning(state, asked.tenant, following)],
                sure=False, rule=foreseen.rule or "thinking goes that does not come back",
            )
        )  # fmt: skip
        state.driver.later(())
        return True
    return False


def _message(read: ReadAnswer) -> dict[str, Any]:
    """Return an answer as its client sends it back, thinking included."""
    made: dict[str, Any] = {"role": "assistant", "content": read.content}
    if read.reasoning:
        made["reasoning_content"] = read.reasoning
    if read.calls:
        made["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in read.calls
        ]
    return made


def _next(ask: ChatAsk, answer: Mapping[str, Any], foreseen: Foreseen) -> ChatAsk:
    """Return the request that is likely to come, `FILL` for what it brings."""
    calls = answer.get("tool_calls", ())
    if foreseen.returns is False:
        answer = {key: value for key, value in answer.items() if key != "reasoning_content"}
    new: Sequence[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": call["id"], "content": FILL} for call in calls
    ]
    messages = foreseen.applied([*ask.messages, answer])
    return replace(ask, messages=[*messages, *(new or [{"role": "user", "content": FILL}])])


def beginning(state: ServerState, tenant: str, ask: ChatAsk) -> WorkedOut:
    """Work out what a context begins with for a request of which `FILL` is what is new."""
    segments = prompt_of(state, ask).segments
    yield
    behind = next((i for i, s in enumerate(segments) if s.is_new), len(segments))
    if any(FILL in segment.text for segment in segments[:behind]):
        return None  # where the answer ends cannot be told
    return state.assembler.assemble(segments[:behind], tenant, state.sessions.engine_base)
