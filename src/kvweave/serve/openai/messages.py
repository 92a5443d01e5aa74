"""Messages and tools of OpenAI's chats, and which of their fields are used, ignored or refused.

What a client writes to itself or to a cache is ignored, and said; a field that the chat template
uses reaches it; any other might change what is asked, and is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)

from kvweave.errors import InvalidArgument
from kvweave.serve.guard.malformed import faults
from kvweave.serve.reuse.adapt import TemplateHabits
from kvweave.serve.reuse.said import REASONING
from kvweave.serve.routes.base import ChunkRef

MAX_MESSAGES = 16_384  # of one conversation
MAX_TOOLS = 1024  # of one request
MAX_VARIABLES = 64  # of a chat template

# Fields that say nothing to a model, of messages, parts, calls and tools.
NOTES = frozenset(
    "id index status phase created created_at timestamp date usage metadata annotations cache_control "
    "citations logprobs provider_specific_fields provider_options providerOptions provider_metadata "
    "providerMetadata response_metadata additional_kwargs parsed parsed_arguments reasoning_details "
    "thinking_blocks reasoning_items reasoning_opaque reasoning_signature thinking_signature thought_signature signature extra_content "
    "encrypted_content copilot_cache_control prompt_cache_breakpoint finish_reason is_error".split()
)
PARTS = {"chunk": "name", "refusal": "refusal"}  # type of a part -> what it has; text by default
_OPEN = ConfigDict(extra="allow")  # what else there is, is looked at below


class TextPart(BaseModel):
    """Text of a message, under the names that APIs have for it."""

    model_config = _OPEN
    type: Literal["text", "input_text", "output_text"]
    text: str


class RefusalPart(BaseModel):
    """What an assistant said instead of an answer."""

    model_config = _OPEN
    type: Literal["refusal"]
    refusal: str


class ChunkPart(BaseModel):
    """A stored chunk by name or ``#id``, in the place where it stands in the message."""

    model_config = _OPEN
    type: Literal["chunk"]
    name: ChunkRef


ContentPart = Annotated[TextPart | RefusalPart | ChunkPart, Field(discriminator="type")]


class CallFunction(BaseModel):
    """What was called: ``arguments`` is JSON, or the object itself."""

    model_config = _OPEN
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(BaseModel):
    """A call of a tool in an answer that is sent back."""

    model_config = _OPEN
    id: str | None = None
    type: Literal["function"] | None = None
    function: CallFunction


class ChatMessage(BaseModel):
    """One message."""

    model_config = _OPEN
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_text: str | None = None
    thinking: str | None = None


class ToolFunction(BaseModel):
    """A function that the model may call."""

    model_config = _OPEN
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: dict[str, Any] | None = None


def _not_too_many(given: object) -> object:
    """Refuse more messages than any context holds before one of them is looked at."""
    if isinstance(given, list) and len(given) > MAX_MESSAGES:
        raise ValueError(f"{len(given):,} messages are more than {MAX_MESSAGES:,}")
    return given


Messages = Annotated[list[ChatMessage], BeforeValidator(_not_too_many), Field(min_length=1)]


def plain_messages(
    messages: Sequence[ChatMessage], template: TemplateHabits
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return messages as `ChatAsk` has them, and the names of what is ignored. Raises InvalidArgument."""
    fields = _Fields(template)
    return [
        fields.message(each, f"messages.{i}") for i, each in enumerate(messages)
    ], fields.ignored


def plain_tools(
    tools: Sequence[Mapping[str, Any]],
    template: TemplateHabits,
    where: str = "tools",
    inner: str = ".function",
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions among tools, and the names of what is ignored: tools of other types too.

    ``where`` and ``inner``: of paths, what the list is called, and a function's fields are in. Raises
    InvalidArgument.
    """
    fields, made = _Fields(template), []
    for i, tool in enumerate(tools):
        place = f"{where}.{i}"
        if tool.get("type") != "function":
            fields.ignored.append(place)
            continue
        function = tool.get("function")
        try:
            ToolFunction.model_validate(function)
        except ValidationError as error:
            wrong = faults(error.errors(), function)[0]
            path = f"{place}{inner}.{wrong.path}" if wrong.path else f"{place}{inner}"
            raise InvalidArgument(path, wrong.message) from None
        made.append(fields.tool(tool, place, f"{place}{inner}"))
    return made, fields.ignored


class _Fields:
    """Sorts fields into those that are kept and those that are ignored."""

    def __init__(self, template: TemplateHabits) -> None:
        self.template = template
        self.ignored: list[str] = []

    def kept(self, given: Mapping[str, Any], known: Collection[str], where: str) -> dict[str, Any]:
        """Return the fields that are used. Raises InvalidArgument for one that might have to be."""
        made = {}
        for name, value in given.items():
            if value is None:
                continue
            if name in known:
                made[name] = value
            elif name in NOTES or value in ([], {}, ""):
                self.ignored.append(f"{where}.{name}")
            elif self.template.knows(name):
                made[name] = value
            else:
                hint = "send tool_calls" if name == "function_call" else "leave it out"
                raise InvalidArgument(
                    f"{where}.{name[:64]}",
                    "neither this server nor the model's template knows it",
                    hint,
                )
        return made

    def message(self, message: ChatMessage, where: str) -> dict[str, Any]:
        """Return one message."""
        given = message.model_dump(exclude_none=True)
        refusal = given.pop("refusal", None)
        if refusal:  # the text of the answer that it was
            if given.get("content"):
                raise InvalidArgument(
                    f"{where}.refusal", "there is content too", "send one of them"
                )
            given["content"] = refusal
        if message.role != "assistant":
            self.ignored += [f"{where}.{name}" for name in REASONING if given.pop(name, None)]
        if "name" in given and not self.template.knows("name"):
            del given["name"]
            self.ignored.append(f"{where}.name")
        known = ("role", "content", "tool_calls", "tool_call_id", "name", *REASONING)
        made = self.kept(given, known, where)
        if isinstance(message.content, list):
            made["content"] = [
                self.kept(part, ("type", PARTS.get(part["type"], "text")), f"{where}.content.{i}")
                for i, part in enumerate(given["content"])
            ]
        if "tool_calls" in made:
            calls = enumerate(made["tool_calls"])
            made["tool_calls"] = [self._call(call, f"{where}.tool_calls.{i}") for i, call in calls]
        return made

    def _call(self, call: Mapping[str, Any], where: str) -> dict[str, Any]:
        made = self.kept(call, ("id", "type", "function"), where)
        inner = self.kept(made["function"], ("name", "arguments"), f"{where}.function")
        return made | {"function": inner}

    def tool(self, tool: Mapping[str, Any], where: str, within: str) -> dict[str, Any]:
        """Return one function, as the template is to show it; ``within``: where its fields are."""
        made = self.kept(tool, ("type", "function"), where)
        known = ("name", "description", "parameters", "strict")
        inner = self.kept(made["function"], known, within)
        if inner.get("strict"):  # shown to the model; only calls that are forced are held to it
            self.ignored.append(f"{within}.strict")
        return made | {"function": inner}
