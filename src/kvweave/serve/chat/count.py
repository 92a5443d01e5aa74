"""How many tokens a prompt has, also one that no model here could take."""

from __future__ import annotations

from kvweave.errors import ContextTooLong
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
    engine, base = state.driver.engine, state.sessions.engine_base
    n_base = 0 if base is None else engine.table.get(base).n_tokens
    n_header = len(engine.maker.tokens(prompt.header))
    try:
        wanted = state.assembler.assemble(prompt.segments, tenant, base, state.options.reuse)
    except ContextTooLong:
        return max(state.limit + 1, about_tokens(state, tenant, prompt))
    return (n_base if wanted.base is None else wanted.base.n) + len(wanted.tokens()) + n_header


def segment_size(state: ServerState, tenant: str, segment: PromptSegment) -> int:
    """Return the tokens of a segment, about so many of one that is far too long."""
    if segment.chunk is not None:
        return state.driver.engine.table.resolve(segment.chunk, tenant).n_tokens
    try:
        return len(state.assembler.tokens(segment, tenant))
    except ContextTooLong as error:
        return int(str(error.data["n"]))
