"""How many tokens a prompt has, also one that no model here could take."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.errors import ContextTooLong
from kvweave.serve.chat.ask import ChatAsk
from kvweave.serve.chat.asked import prompt_of
from kvweave.serve.chat.prompts import prompt_tokens
from kvweave.serve.reuse.render import Prompt, PromptSegment
from kvweave.serve.state import ServerState


def about_tokens(state: ServerState, tenant: str, prompt: Prompt) -> int:
    """Return about how many tokens a prompt has: those of its text, though a model may have written
    it with others; in the driver's thread. Raises ChunkNotFound."""
    sizes = (segment_size(state, tenant, segment) for segment in prompt.segments)
    return sum(sizes) + len(state.driver.engine.maker.tokens(prompt.header))


def count_tokens(state: ServerState, tenant: str, prompt: Prompt) -> int:
    """Return the tokens of a prompt, its header too; in the driver's thread.

    Of one that is too long about so many, and more than fit. Raises ChunkNotFound.
    """
    try:
        return len(prompt_tokens(state, tenant, prompt))
    except ContextTooLong:
        return max(state.limit + 1, about_tokens(state, tenant, prompt))


def chat_tokens(
    state: ServerState,
    tenant: str,
    ask: ChatAsk,
    how: Callable[[ServerState, str, Prompt], int] = count_tokens,
) -> int:
    """Return the tokens of a chat's prompt; in the driver's thread. Raises ChunkNotFound.

    At least so many, and more than fit, where it has more messages than a context has tokens.
    """
    try:
        prompt = prompt_of(state, ask.free())
    except ContextTooLong as error:
        return max(int(str(error.data["n"])), state.limit + 1)
    return how(state, tenant, prompt)


def segment_size(state: ServerState, tenant: str, segment: PromptSegment) -> int:
    """Return the tokens of a segment, about so many of one that is far too long."""
    if segment.chunk is not None:
        return state.driver.engine.table.resolve(segment.chunk, tenant).n_tokens
    try:
        return len(state.assembler.tokens(segment, tenant))
    except ContextTooLong as error:
        return int(str(error.data["n"]))
