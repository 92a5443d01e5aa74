"""What an answer is held to: the grammar of its text, or of calls that must come."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.run.grammar import COMPACT, Grammar, Grammars, GrammarText, ThinkTokens
from kvweave.serve.chat.ask import ChatAsk
from kvweave.serve.chat.families import ARGUMENTS, NAME, CallForm
from kvweave.serve.chat.parse import ResponseForm

MOST_CALLS = 16  # of one answer that has to call


def grammar_of(ask: ChatAsk, form: ResponseForm | None, grammars: Grammars) -> Grammar | None:
    """Return what an answer is held to; None for nothing. Raises InvalidArgument."""
    if ask.tool_choice in ("none", "auto"):
        return None if ask.grammar is None else grammars.compile(ask.grammar)
    tools = list(ask.tools)
    if ask.tool_choice.startswith("tool:"):
        name = ask.tool_choice.removeprefix("tool:")
        tools = [tool for tool in tools if tool["function"]["name"] == name]
        if not tools:
            raise InvalidArgument(
                "tool_choice", f"no tool {name!r} is given", "name one of tools, or say auto"
            )
    if not tools:
        raise InvalidArgument(
            "tool_choice", "no tools are given", "send them in tools, or leave tool_choice out"
        )
    call = form.family.call if form is not None and form.family is not None else None
    if call is None:
        name = "text" if form is None else form.name
        raise InvalidArgument(
            "tool_choice", f"calls of the family {name} cannot be forced", "take auto"
        )
    one = ask.tool_choice.startswith("tool:") or not ask.parallel
    text = _calls(call, tools, grammars, 1 if one else MOST_CALLS)
    return grammars.compile(GrammarText("lark", text, "tools"))


def _calls(
    form: CallForm, tools: Sequence[Mapping[str, Any]], grammars: Grammars, most: int
) -> str:
    """Return Lark of one to ``most`` calls of these tools."""
    rules = []
    for i, tool in enumerate(tools):
        function = tool["function"]
        schema = (function.get("parameters") or {"type": "object"}) | {"x-guidance": COMPACT}
        before, after = form.text.replace(NAME, function["name"]).split(ARGUMENTS)
        parts = [grammars.literal(before), f"%json {json.dumps(schema)}", grammars.literal(after)]
        rules.append(f"call{i}: {' '.join(filter(None, parts))}")
    names = " | ".join(f"call{i}" for i in range(len(tools)))
    more = f"({grammars.literal(form.between)} call)" if form.between else "call"
    whole = [grammars.literal(form.begin), "call", f"{more}{{0,{most - 1}}}" if most > 1 else ""]
    whole.append(grammars.literal(form.end))
    return "\n".join([f"start: {' '.join(filter(None, whole))}", f"call: {names}", *rules])


def held(grammar: Grammar, form: ResponseForm | None, front: str, tokenizer: Any) -> Grammar:
    """Return the grammar as it begins behind ``front``: with the answer, or behind its thinking."""
    think = form.family.think if form is not None and form.family is not None else None
    if form is None or think is None:
        return grammar
    opened, known = form.opened(front), tokenizer.get_vocab()
    if think[1] in opened or think[0] not in known or think[1] not in known:
        return grammar
    tokens = ThinkTokens(known[think[0]], known[think[1]], think[0] in opened)
    return replace(grammar, think=tokens)
