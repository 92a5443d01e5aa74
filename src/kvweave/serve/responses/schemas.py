"""The requests of the Responses API; sampling and what is ignored are as in OpenAI's other endpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictBool

from kvweave.errors import InvalidArgument
from kvweave.run.grammar import GrammarText
from kvweave.serve.chat.ask import EFFORTS, ChatAsk, thinking
from kvweave.serve.guard.malformed import shown
from kvweave.serve.openai.messages import MAX_MESSAGES, MAX_TOOLS, MAX_VARIABLES, plain_tools
from kvweave.serve.openai.schemas import MAX_TOP, GenerationRequest
from kvweave.serve.responses.items import ResponseItem, unread
from kvweave.serve.responses.settings import (
    TOOLS,
    TRIGGER,
    ItemSettings,
    formatted,
    only,
    settings_of,
)
from kvweave.serve.reuse.adapt import TemplateHabits
from kvweave.serve.routes.base import STRICT, Int
from kvweave.serve.state import ServerState

ENCRYPTED, LOGPROBS = "reasoning.encrypted_content", "message.output_text.logprobs"
UNUSED = ("access_programs", "image")  # about what this server does not have

_Text = Annotated[str, Field(max_length=512)]
MetadataPairs = Annotated[dict[Annotated[str, Field(max_length=64)], _Text], Field(max_length=16)]
GivenItems = Annotated[list[dict[str, Any]], Field(max_length=MAX_MESSAGES)]
GivenId = Annotated[str, Field(min_length=1, max_length=256)]


class ReasoningOptions(BaseModel):
    """How much to think, and how that is told."""

    model_config = ConfigDict(extra="allow")
    effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    summary: str | None = None


class TextOptions(BaseModel):
    """What the text keeps to."""

    model_config = ConfigDict(extra="allow")
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ConversationRef(BaseModel):
    """A conversation, by its id."""

    model_config = STRICT
    id: GivenId


class CompactAt(BaseModel):
    """When to make a summary of what was said."""

    model_config = STRICT
    type: Literal["compaction"]
    compact_threshold: Annotated[Int, Field(ge=1)] | None = None


class Instructed(BaseModel):
    """What a response goes on from: items, instructions, an earlier response."""

    model_config = ConfigDict(extra="allow")
    model: str | None = None
    input: str | GivenItems | None = None
    instructions: str | None = None
    previous_response_id: GivenId | None = None


class ResponsesRequest(GenerationRequest):
    """Body of ``POST /v1/responses``."""

    input: str | GivenItems | None = None
    instructions: str | None = None
    previous_response_id: GivenId | None = None
    conversation: GivenId | ConversationRef | None = None
    max_output_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_tool_calls: Int | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: StrictBool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    include: Annotated[list[str], Field(max_length=32)] | None = None
    context_management: Annotated[list[CompactAt], Field(max_length=1)] | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP)] | None = None
    metadata: MetadataPairs | None = None
    background: StrictBool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    _left: list[str] = PrivateAttr(default_factory=list)  # ignored of tools
    _said: ItemSettings = PrivateAttr(default_factory=ItemSettings)  # of its items
    _unused: list[str] = PrivateAttr(default_factory=list)

    def check(self) -> None:
        """Raise InvalidArgument for what this server cannot do."""
        extra = self.model_extra or {}
        self._unused += [name for name in UNUSED if extra.pop(name, None) is not None]
        GenerationRequest.check(self)
        if self.background:
            raise InvalidArgument("background", "answers come while one waits", "set stream")
        if self.n_choices != 1:
            raise InvalidArgument("n", "a response is one answer", "ask several times")
        if self.previous_response_id is not None and self.conversation is not None:
            raise InvalidArgument(
                "conversation", "there is previous_response_id too", "leave one of them out"
            )
        if self.conversation is not None and self.store is False:
            reason = "a conversation keeps what is said in it"
            raise InvalidArgument("store", reason, "send the items instead")
        if self.compacts:
            where = f"input.{len(self.input or ()) - 1}"
            only(self.input[-1], ("type", "id"), where)  # type: ignore[index, arg-type]
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise InvalidArgument("top_logprobs", f"it needs {LOGPROBS}", "add it to include")

    @property
    def is_private(self) -> bool:
        """Whether nothing of it is kept for later requests."""
        return self.store is False

    @property
    def compacts(self) -> bool:
        """Whether its last item asks for a summary, which is all the answer then."""
        last = self.input[-1] if self.input and not isinstance(self.input, str) else {}
        return last.get("type") == TRIGGER

    @property
    def said(self) -> str | list[dict[str, Any]]:
        """The items that are said: without what asks for a summary."""
        given = self.input or []
        return given[:-1] if self.compacts else given

    def check_added(self, items: Sequence[ResponseItem], template: TemplateHabits) -> None:
        """Look at the tools that its own items add. Raises InvalidArgument."""
        self._unused += unread_tools(items, template, "input")

    @property
    def kept_in(self) -> str | None:
        """The id of the conversation that it is part of."""
        given = self.conversation
        return given.id if isinstance(given, ConversationRef) else given

    @property
    def compact_above(self) -> int | None:
        """Tokens of a prompt above which a summary is made; None for never."""
        given = self.context_management or []
        return given[0].compact_threshold if given else None

    def includes(self, name: str) -> bool:
        """Tell whether something that is left out otherwise is asked for."""
        return name in (self.include or ())

    @property
    def format(self) -> dict[str, Any]:
        """What the text keeps to, as the API has it."""
        given = self.text.format if self.text is not None else None
        return self._said.update.get("format") or given or {"type": "text"}

    @property
    def answered_later(self) -> set[str]:
        """The names of tools whose results may come later than with the next request."""
        tools = [*(self.tools or []), *self._said.tools]
        return {str(tool.get("name")) for tool in tools if tool.get("async") is True}

    @property
    def effort(self) -> str | None:
        """How much to think: what an item said last, or the request."""
        asked = None if self.reasoning is None else self.reasoning.effort
        effort: str | None = self._said.update.get("effort", asked)
        return effort

    def formatted(self) -> GrammarText | None:
        """Return what ``text.format`` asks for. Raises InvalidArgument."""
        return formatted(self.format, "text.format")

    def ask(self, template: TemplateHabits, items: Sequence[ResponseItem]) -> ChatAsk:
        """Return what is asked of items, still without messages. Raises InvalidArgument."""
        self._said = settings_of(items)
        tools, self._left = functions(self.tools or [], template, "tools")
        tools = added(tools, functions(self._said.tools, template, "tools")[0])
        choice, allowed = _choice(self.tool_choice)
        if allowed is not None:
            tools = [tool for tool in tools if tool["function"]["name"] in allowed]
        logprobs = (self.top_logprobs or 0) if self.includes(LOGPROBS) else 0
        limit = self.max_output_tokens
        return ChatAsk(
            messages=(),
            sampling=self.sampling(1 if limit is None else limit, logprobs),
            max_tokens=limit,
            tools=tools,
            tool_choice=choice,
            parallel=self.parallel_tool_calls is not False,
            variables=thinking(self.effort, None) | (self.chat_template_kwargs or {}),
            grammar=self.grammar(),
            how=self.how,
            private=self.is_private,
        )

    def ignored(self, state: ServerState) -> list[str]:
        """Return the names of what was given and changes nothing, once it was asked."""
        known = state.renderer.template
        found = [*GenerationRequest.ignored(self, state), *self._left]
        found += [*self._unused, *(["max_tool_calls"] if self.max_tool_calls is not None else [])]
        _, unknown = known.variables(self.chat_template_kwargs or {})
        found += [f"chat_template_kwargs.{name}" for name in unknown]
        found += unread(self.input, "input")
        if self.compacts and self.input[-1].get("id"):  # type: ignore[index, union-attr]
            found.append(f"input.{len(self.input or ()) - 1}.id")
        if self.effort is not None and not (
            known.knows("reasoning_effort") or known.knows("enable_thinking")
        ):
            found.append("reasoning.effort")
        for name, given, used in (
            ("reasoning", self.reasoning, "effort"),
            ("text", self.text, "format"),
        ):
            set_ = given.model_dump(exclude_none=True) if given is not None else {}
            found += [f"{name}.{each}" for each in set_ if each != used]
        found += [
            f"include.{i}"
            for i, each in enumerate(self.include or ())
            if each not in (ENCRYPTED, LOGPROBS)
        ]
        return found


def functions(
    tools: Sequence[dict[str, Any]], template: TemplateHabits, where: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the functions among tools as chats have them, and what is ignored. Raises
    InvalidArgument."""
    return plain_tools([_nested(tool) for tool in tools], template, where, inner="")


def unread_tools(
    items: Sequence[Mapping[str, Any]], template: TemplateHabits, where: str
) -> list[str]:
    """Return the names of what is ignored of tools that items add. Raises InvalidArgument."""
    found: list[str] = []
    for i, item in enumerate(items):
        if item["type"] == TOOLS:
            if (n := len(item["tools"])) > MAX_TOOLS:
                raise InvalidArgument(f"{where}.{i}.tools", f"{n:,} are more than {MAX_TOOLS:,}")
            found += functions(item["tools"], template, f"{where}.{i}.tools")[1]
    return found


def added(tools: Sequence[dict[str, Any]], more: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return functions with those that were added, which take the place of what has their names."""
    last = {tool["function"]["name"]: tool for tool in more}
    kept = [last.pop(tool["function"]["name"], tool) for tool in tools]
    return [*kept, *last.values()]


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as chats have it; of other types only that. Whether its result may come later
    is between the client and its tool."""
    if tool.get("type") != "function":
        return {"type": str(tool.get("type"))}
    left = ("type", "async")
    function = {key: value for key, value in tool.items() if key not in left and value is not None}
    return {"type": "function", "function": function}


def _choice(given: str | dict[str, Any] | None) -> tuple[str, set[str] | None]:
    """Return the choice as `ChatAsk` has it, and the tools that may be called where that is said."""
    if given is None or isinstance(given, str):
        return given or "auto", None
    kind, where = given.get("type"), "tool_choice"
    if kind == "function":
        return f"tool:{_name(given, where)}", None
    if kind != "allowed_tools":
        reason = f"{shown(kind)} cannot be chosen"
        raise InvalidArgument(where, reason, "name a function, or say allowed_tools")
    mode, tools = given.get("mode", "auto"), given.get("tools")
    if mode not in ("auto", "required"):
        raise InvalidArgument(f"{where}.mode", f"{shown(mode)} is none of auto, required")
    if not isinstance(tools, list):
        raise InvalidArgument(f"{where}.tools", f"it should be a list, not {shown(tools)}")
    return str(mode), {_name(tool, f"{where}.tools.{i}") for i, tool in enumerate(tools)}


def _name(given: Any, where: str) -> str:
    name = given.get("name") if isinstance(given, dict) else None
    if not isinstance(name, str):
        raise InvalidArgument(f"{where}.name", f"it should be text, not {shown(name)}")
    return name
