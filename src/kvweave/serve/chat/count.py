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
    size = SegmentSizes(state, tenant)
    return sum(map(size, prompt.segments)) + len(state.driver.engine.maker.tokens(prompt.header))


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


class SegmentSizes:
    """Counts the tokens of segments; when more than twice a context were counted, those of others by
    their characters: nobody waits for the exact size of what does not fit."""

    def __init__(self, state: ServerState, tenant: str) -> None:
        self.state, self.tenant = state, tenant
        self._n = self._letters = 0

    def __call__(self, segment: PromptSegment) -> int:
        """Return the tokens of a segment, about so many of one that is far too long."""
        if segment.chunk is not None:
            return self.state.driver.engine.table.resolve(segment.chunk, self.tenant).n_tokens
        letters = len(segment.text)
        if self._n > 2 * self.state.limit:
            return -(-letters * self._n // self._letters)
        try:
            n = len(self.state.assembler.tokens(segment, self.tenant))
        except ContextTooLong as error:
            n = int(str(error.data["n"]))
        self._n, self._letters = self._n + n, self._letters + letters
        return n
