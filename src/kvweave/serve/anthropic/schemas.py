"""The requests of ``/v1/messages``.

What would change the text and cannot be done is refused; what cannot change it is ignored, and named
in `kvweave.ignored`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    model_validator,
)

from kvweave.errors import InvalidArgument
from kvweave.run.grammar import GrammarText
from kvweave.run.sample import Sampling
from kvweave.serve.anthropic.blocks import (
    EFFORT,
    MAX_MESSAGES,
    DialogueMessage,
    ResultBlock,
    SystemText,
    chat_messages,
    system_message,
)
from kvweave.serve.anthropic.editing import ContextManagement
from kvweave.serve.anthropic.noted import unused
from kvweave.serve.anthropic.tools import ClientTool, Tool, changes_between, offered
from kvweave.serve.chat.ask import ChatAsk, thinking
from kvweave.serve.openai.messages import MAX_TOOLS
from kvweave.serve.openai.schemas import Extension
from kvweave.serve.reuse.pooled import WeaveOptions
from kvweave.serve.routes.base import MAX_STOPS, STRICT, Int, Num, Stop
from kvweave.serve.state import ServerState

# Fields that say nothing about the answer's text.
HARMLESS = frozenset(
    "cache_control metadata service_tier inference_geo speed diagnostics user_profile_id "
    "workspace_id billing_policy fallbacks fallback_credit_token betas anthropic_beta "
    "anthropic_version".split()
)
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
OFF: tuple[object, ...] = (None, [], {})  # values of fields that ask for nothing
MIN_BUDGET = 1024  # tokens of thinking, as the API has it
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ToolChoice(BaseModel):
    """Whether tools are called, and which."""

    model_config = STRICT
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: StrictBool = False

    @model_validator(mode="after")
    def _named(self) -> ToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("a name goes with the type tool, and only with it")
        return self


class ThinkingConfig(BaseModel):
    """Whether the model thinks first. ``budget_tokens`` bounds nothing here."""

    model_config = STRICT
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[Int, Field(ge=MIN_BUDGET)] | None = None
    display: Literal["summarized", "omitted", "updates"] | None = None
    block_binding: Any = None

    @model_validator(mode="after")
    def _with_budget(self) -> ThinkingConfig:
        if self.type == "enabled" and self.budget_tokens is None:
            raise ValueError("budget_tokens: it is missing")
        return self

    @property
    def enabled(self) -> bool | None:
        return None if self.type == "adaptive" else self.type == "enabled"


class JsonFormat(BaseModel):
    """A JSON schema that the answer's text keeps to."""

    model_config = STRICT
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    """How much effort, and the form of the answer."""

    model_config = STRICT
    effort: EFFORT | None = None
    format: JsonFormat | None = None
    task_budget: Any = None


class SummaryWanted(BaseModel):
    """The conversation becomes a summary, which is all the answer."""

    model_config = STRICT
    type: Literal["summarize"]
    instructions: StrictStr | None = None


def _not_too_many(given: object) -> object:
    """Refuse more messages than any context holds before one of them is looked at."""
    if isinstance(given, list) and len(given) > MAX_MESSAGES:
        raise ValueError(f"{len(given):,} messages are more than {MAX_MESSAGES:,}")
    return given


class CountRequest(BaseModel):
    """Body of ``POST /v1/messages/count_tokens``."""

    model_config = ConfigDict(extra="allow")
    model: str
    messages: Annotated[list[DialogueMessage], BeforeValidator(_not_too_many), Field(min_length=1)]
    system: SystemText = Field(default_factory=list)
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    context_management: ContextManagement | None = None
    compaction: SummaryWanted | None = None
    kvweave: Extension | None = None

    def check(self) -> None:
        """Raise InvalidArgument for fields that would have to be ignored."""
        for name, value in (self.model_extra or {}).items():
            if name not in HARMLESS and value not in OFF:
                error = InvalidArgument(name, "this server does not know it", "leave it out")
                if name == "thread":  # the SDK's tool runner goes on without, where that is said so
                    error.data["details"] = NO_THREADS
                raise error
        if self.compaction is not None and self.context_management is not None:
            reason = "there is context_management too"
            raise InvalidArgument("compaction", reason, "send one of them")
        self.offered()

    def offered(self) -> list[ClientTool]:
        """Return the tools that the model is shown. Raises InvalidArgument for one that is not there."""
        changes = (
            (f"messages.{i}.content.{j}", change)
            for i, message in enumerate(self.messages)
            for j, change in message.changes
        )
        return offered(self.tools, changes)

    @property
    def tool_changes(self) -> list[dict[str, Any]]:
        """What the messages have changed of the tools."""
        return list(changes_between(self.tools, self.offered()))

    @property
    def effort(self) -> str | None:
        """How much to think: what a message said last, or the request."""
        said = [m.output_config.effort for m in self.messages if m.output_config is not None]
        asked = None if self.output_config is None else self.output_config.effort
        return next((each for each in reversed(said) if each is not None), asked)

    def ask(
        self, messages: Sequence[DialogueMessage], sampling: Sampling, max_tokens: int | None
    ) -> ChatAsk:
        """Return what is asked when ``messages`` are what is left of those that were sent.

        Raises InvalidArgument.
        """
        given = self.tool_choice or ToolChoice(type="auto")
        config, think = self.output_config, self.thinking
        shape = self.output_format if config is None else config.format or self.output_format
        extension = self.kvweave or Extension()
        chat = chat_messages(messages)
        return ChatAsk(
            messages=[*system_message(self.system), *chat],
            sampling=sampling,
            max_tokens=max_tokens,
            tools=[tool.function() for tool in self.offered()],
            tool_choice=CHOICES.get(given.type, f"tool:{given.name}"),
            parallel=not given.disable_parallel_tool_use,
            variables=thinking(self.effort, None if think is None else think.enabled),
            continues=bool(chat) and chat[-1]["role"] == "assistant",
            grammar=None if shape is None else GrammarText("json_schema", shape.schema_),
            how=WeaveOptions(
                extension.repair, extension.share, extension.max_drift, extension.keep,
                extension.bases,
            ),
            private=self.is_private,
        )  # fmt: skip

    @property
    def is_private(self) -> bool:
        """Whether nothing of it is kept for later requests."""
        return True

    def ignored(self, state: ServerState) -> list[str]:
        """Return the names of what was given and changes nothing."""
        found = [name for name, value in (self.model_extra or {}).items() if value is not None]
        for name in ("system", "messages", "tools", "thinking", "output_config"):
            value = getattr(self, name)
            for path, each in (
                [(name, value)]
                if not isinstance(value, list)
                else [(f"{name}.{i}", each) for i, each in enumerate(value)]
            ):
                found += unused(each, path) if isinstance(each, BaseModel) else ()
        think = self.thinking
        if think is not None and think.budget_tokens is not None:
            found.append("thinking.budget_tokens")
        if think is not None and think.display == "updates":
            found.append("thinking.display")
        known = state.renderer.template
        if self.effort is not None:
            if not (known.knows("reasoning_effort") or known.knows("enable_thinking")):
                found.append("output_config.effort")
        for i, message in enumerate(self.messages):
            for j, block in enumerate(message.content):
                if isinstance(block, ResultBlock) and block.is_error:
                    found.append(f"messages.{i}.content.{j}.is_error")
        return found


class MessagesRequest(CountRequest):
    """Body of ``POST /v1/messages``."""

    max_tokens: Annotated[Int, Field(ge=0)]
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    stream: StrictBool = False
    temperature: Annotated[Num, Field(ge=0)] | None = None
    top_p: Num | None = None
    top_k: Int | None = None
    store: StrictBool | None = None
    """False: nothing of the request or its answer is kept for later ones, or can be read."""

    def check(self) -> None:
        """Raise InvalidArgument for what this server cannot do."""
        CountRequest.check(self)
        think = self.thinking
        if think is not None and think.type == "enabled" and self.max_tokens:
            if (think.budget_tokens or 0) >= self.max_tokens:
                reason = f"{think.budget_tokens} are not below max_tokens, {self.max_tokens}"
                raise InvalidArgument("thinking.budget_tokens", reason)

    def asked(self, messages: Sequence[DialogueMessage]) -> ChatAsk:
        """Return what is asked, as `ask`. Raises InvalidArgument."""
        return self.ask(messages, self.sampling(), self.max_tokens)

    def sampling(self) -> Sampling:
        """Return how to choose tokens; the default temperature is 1. Raises InvalidArgument."""
        return Sampling(
            max_tokens=max(1, self.max_tokens),
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            stop=tuple(self.stop_sequences or ()),
        )

    @property
    def is_private(self) -> bool:
        """Whether nothing of it is kept for later requests."""
        return self.store is False
