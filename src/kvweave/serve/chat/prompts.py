"""What makes a request's prompt, and the tokens that it has."""

from __future__ import annotations

from collections.abc import Callable

from kvweave.serve.guard.text import tokens_of
from kvweave.serve.reuse.render import Prompt, PromptSegment
from kvweave.serve.state import ServerState

MakePrompt = Callable[[ServerState], Prompt]


def completion_prompt(given: str | list[int]) -> MakePrompt:
    """Return what makes the prompt; a BOS the engine begins with anyway is not put twice."""

    def prompt(state: ServerState) -> Prompt:
        engine, base = state.driver.engine, state.sessions.engine_base
        tokens = tokens_of(engine, given)
        begin = [] if base is None else [int(t) for t in engine.table.tokens(base)]
        text = given if isinstance(given, str) else state.assembler.text(tokens)
        if begin and tokens[: len(begin)] == begin:
            tokens = tokens[len(begin) :]
        segment = PromptSegment("document", text, "prompt", True, tokens=tuple(tokens))
        return Prompt((segment,) if tokens else (), "", "")

    return prompt


def prompt_tokens(
    state: ServerState, tenant: str, prompt: Prompt, *, begin: bool = True, header: bool = True
) -> list[int]:
    """Return the tokens that a request for ``prompt`` is computed of, in the driver's thread.

    ``begin``: with what the engine begins a context with; ``header``: ready to be answered. Raises
    ContextTooLong, ChunkNotFound.
    """
    engine, sessions = state.driver.engine, state.sessions
    base = sessions.engine_base
    wanted = state.assembler.assemble(prompt.segments, tenant, base, state.options.reuse)
    front: list[int] = []
    if wanted.base is not None:
        front = wanted.base.tokens.tolist()
    elif begin and base is not None:
        front = engine.table.tokens(base).tolist()
    last = engine.maker.tokens(prompt.header) if header else []
    return [*front, *wanted.tokens().tolist(), *last]
