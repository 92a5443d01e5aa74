"""Messages in the form that chat templates take, and what a template is given that cannot take them.

A template may know no tools, no developer, or a system message only at the front. Then a message is
written as one that it knows, so that no client has to know which model answers it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.serve.reuse.said import REASONING

Message = Mapping[str, Any]

TOOLS = (
    "You may call these tools:\n<tools>\n{tools}\n</tools>\nTo call one, write the JSON of its name "
    'and arguments:\n<tool_call>\n{{"name": ..., "arguments": {{...}}}}\n</tool_call>'
)
CALL, RESULT = "<tool_call>\n{}\n</tool_call>", "<tool_response>\n{}\n</tool_response>"
NINE = re.compile(r"[A-Za-z0-9]{9}")  # what Mistral's templates want ids of calls to be


@dataclass(frozen=True, slots=True)
class Dialogue:
    """What a template is given."""

    messages: list[dict[str, Any]]
    tools: Sequence[Message] | None
    variables: Mapping[str, Any]
    continues: bool = False  # the answer goes on with the last message


class TemplateHabits:
    """What one chat template knows, by its text."""

    def __init__(self, tokenizer: Any) -> None:
        text = str(getattr(tokenizer, "chat_template", None) or "")
        self.text = text
        self.knows_developer = "developer" in text
        self.knows_tools = bool(re.search(r"\btools\b", text))
        self.knows_calls = "tool_calls" in text
        self._short_ids = "length 9" in text
        taken = (
            () if tokenizer is None else inspect.signature(tokenizer.apply_chat_template).parameters
        )
        self._taken = {
            *taken,
            "messages",
            "tools",
            "add_generation_prompt",
            "continue_final_message",
        }

    def knows(self, variable: str) -> bool:
        """Tell whether a variable of this name, which is none of transformers' own, is used."""
        free = variable not in self._taken and variable.isidentifier()
        return free and bool(re.search(rf"\b{variable}\b", self.text))

    def variables(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Return those the template uses, and the names of the others."""
        used = {name: value for name, value in given.items() if self.knows(name)}
        return used, [name for name in given if name not in used]

    def message(self, message: Message) -> dict[str, Any]:
        """Return a message as templates expect it: reasoning under each name, arguments as objects."""
        made = {key: value for key, value in message.items() if value is not None}
        if made["role"] == "developer" and not self.knows_developer:
            made["role"] = "system"
        if made["role"] == "function":
            made["role"] = "tool"
        given = [made.pop(name) for name in REASONING if isinstance(made.get(name), str)]
        reasoning = next(filter(None, given), None)
        if reasoning is not None and made["role"] == "assistant":
            made["reasoning_content"] = made["reasoning"] = reasoning
        calls = made.pop("tool_calls", None)
        if calls:
            made["tool_calls"] = [self._call(call) for call in calls]
        if self._short_ids and isinstance(made.get("tool_call_id"), str):
            made["tool_call_id"] = _short(made["tool_call_id"])
        return made

    def _call(self, call: Message) -> dict[str, Any]:
        made = _with_arguments(call)
        if self._short_ids and isinstance(made.get("id"), str):
            made["id"] = _short(made["id"])
        return made

    def ways(self, asked: Dialogue) -> Iterator[tuple[Dialogue, list[int | None]]]:
        """Yield what to try, one after the other, each with the number of every message before."""
        every: list[int | None] = list(range(len(asked.messages)))
        known = self._known(asked)
        if known is asked:
            yield asked, every
            known = self._known(asked, all_of_them=True)
        yield known, _numbers(known, len(every))
        front = _system_in_front(known)
        yield front, _numbers(front, len(every))
        merged, numbers = _merged(front, _numbers(front, len(every)))
        yield merged, numbers

    def _known(self, asked: Dialogue, *, all_of_them: bool = False) -> Dialogue:
        """Return it with tools, calls and results as text, where the template does not know them."""
        write_tools = bool(asked.tools) and (all_of_them or not self.knows_tools)
        write_calls = all_of_them or not self.knows_calls
        messages = [_as_text(m) if write_calls else m for m in asked.messages]
        if not write_tools and messages == asked.messages:
            return asked
        tools = asked.tools
        if write_tools and tools:
            lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            told, tools = TOOLS.format(tools=lines), None
            first = messages[0]
            if first["role"] == "system":
                messages[0] = {**first, "content": f"{first['content']}\n\n{told}"}
            else:
                messages.insert(0, {"role": "system", "content": told})
        return replace(asked, messages=messages, tools=tools)


def text_of_content(content: Any, mark: Callable[[str], str]) -> str:
    """Return content as text, with a mark for each chunk it names. Raises InvalidArgument."""
    if isinstance(content, str):
        return content
    pieces = []
    for part in content:
        if part["type"] == "chunk":
            pieces.append(mark(part["name"]))
        elif isinstance(part.get("text"), str):
            pieces.append(part["text"])
        elif isinstance(part.get("refusal"), str):
            pieces.append(part["refusal"])
        else:
            raise InvalidArgument(
                "messages",
                f"a part {part['type']!r} is no text; this model reads text",
                "send its text, or leave it out",
            )
    return "".join(pieces)


def _numbers(asked: Dialogue, n: int) -> list[int | None]:
    more = len(asked.messages) - n
    return [*[None] * more, *range(n)]


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return a call or a result of a tool as text of a message that every template knows."""
    made = dict(message)
    calls = made.pop("tool_calls", None)
    if calls:
        written = [CALL.format(json.dumps(_told(call), ensure_ascii=False)) for call in calls]
        made["content"] = "\n".join(filter(None, [made["content"], *written]))
    if made["role"] == "tool":
        return {"role": "user", "content": RESULT.format(made["content"])}
    return made


def _told(call: Message) -> dict[str, Any]:
    function = call.get("function") or {}
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}


def _system_in_front(asked: Dialogue) -> Dialogue:
    """Return it with system messages behind the first one as the user's."""
    first, *rest = asked.messages
    late = [{**m, "role": "user"} if m["role"] == "system" else m for m in rest]
    return replace(asked, messages=[first, *late])


def _merged(asked: Dialogue, numbers: list[int | None]) -> tuple[Dialogue, list[int | None]]:
    """Return it with neighbours of one role as one message."""
    messages: list[dict[str, Any]] = []
    kept: list[int | None] = []
    for message, number in zip(asked.messages, numbers, strict=True):
        last = messages[-1] if messages else None
        if last is not None and last["role"] == message["role"] and not message.get("tool_calls"):
            messages[-1] = {**last, "content": f"{last['content']}\n\n{message['content']}"}
            kept[-1] = None
        else:
            messages.append(message)
            kept.append(number)
    return replace(asked, messages=messages), kept


def _with_arguments(call: Message) -> dict[str, Any]:
    """Return a tool call whose arguments are an object where they are the JSON of one."""
    function = dict(call.get("function") or {})
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (TypeError, ValueError, RecursionError):
        return dict(call)
    if isinstance(arguments, dict):
        function["arguments"] = arguments
    return {**call, "function": function}


def _short(id: str) -> str:
    """Return an id of nine letters and digits, the same for the same one."""
    return id if NINE.fullmatch(id) else hashlib.sha256(id.encode()).hexdigest()[:9]
