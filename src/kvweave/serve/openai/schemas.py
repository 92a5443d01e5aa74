"""The requests of the OpenAI endpoints. What this server cannot do is refused, never ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from kvweave.errors import InvalidArgument
from kvweave.run.sample import Sampling
from kvweave.serve.reuse.pooled import WeaveOptions
from kvweave.serve.routes.base import ChunkRef, Stops

# Fields that say nothing about the answer's text.
HARMLESS = frozenset(
    "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "parallel_tool_calls".split()
)
MAX_CHOICES = 16
MAX_MESSAGES = 16_384  # of one conversation
MAX_TOP = 20
MAX_ANSWERS = 64  # of one request


class TextPart(BaseModel):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ChunkPart(BaseModel):
    """A stored chunk by name or ``#id``, in the place where it stands in the message."""

    type: Literal["chunk"]
    name: ChunkRef


ContentPart = Annotated[TextPart | ChunkPart, Field(discriminator="type")]


class ToolCall(BaseModel):
    """A call of a tool in an answer that is sent back."""

    model_config = ConfigDict(extra="allow")
    function: dict[str, Any] | None = None


class Message(BaseModel):
    """One message; what else it has (name ...) is the chat template's business."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[ToolCall] | None = None


KeepSpec = Annotated[str, Field(max_length=256)]


class StreamOptions(BaseModel):
    """Whether the last chunk of a stream has the usage."""

    include_usage: bool = False


class Extension(BaseModel):
    """How to weave this request; left out: as the server is set."""

    model_config = ConfigDict(extra="forbid")
    repair: str | None = None
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    max_drift: float | None = None
    keep: KeepSpec | None = None


class GenerationRequest(BaseModel):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="allow")
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stop: Stops | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    store: bool | None = None
    """False: nothing of the request or its answer is kept for later ones, or can be read."""
    kvweave: Extension | None = None

    def sampling(self, max_tokens: int, logprobs: int) -> Sampling:
        """Return how to choose tokens. Raises InvalidArgument, also for what is not supported.

        The default temperature is 1, as the API has it.
        """
        self.check()
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        seed = self.seed
        return Sampling(
            max_tokens=max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            seed=None if seed is None else seed % 2**63,
            stop=tuple(stop),
            logprobs=logprobs,
        )

    def check(self) -> None:
        """Raise InvalidArgument for fields that would have to be ignored."""
        for name in ("frequency_penalty", "presence_penalty", "logit_bias"):
            if getattr(self, name):
                raise InvalidArgument(name, "this server has no such sampling", "leave it out")
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in HARMLESS:
                raise InvalidArgument(name, "this server does not know it", "leave it out")

    @property
    def how(self) -> WeaveOptions:
        given = self.kvweave or Extension()
        return WeaveOptions(given.repair, given.share, given.max_drift, given.keep)

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


def _not_too_many(given: object) -> object:
    """Refuse more messages than any context holds before one of them is looked at."""
    if isinstance(given, list) and len(given) > MAX_MESSAGES:
        raise ValueError(f"{len(given):,} messages are more than {MAX_MESSAGES:,}")
    return given


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[Message], BeforeValidator(_not_too_many), Field(min_length=1)]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    modalities: list[str] | None = None

    def check(self) -> None:
        """Raise InvalidArgument for what this server cannot do."""
        GenerationRequest.check(self)
        if (self.response_format or {}).get("type", "text") != "text":
            raise InvalidArgument("response_format", "only text is supported", "leave it out")
        if self.tool_choice not in (None, "none", "auto"):
            raise InvalidArgument("tool_choice", "only none and auto are supported")
        if self.modalities not in (None, ["text"]):
            raise InvalidArgument("modalities", "only text is supported", "leave it out")
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", "it needs logprobs", "set logprobs to true")

    @property
    def limit(self) -> int | None:
        """The most new tokens; None: as many as fit, up to a default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def plain_messages(self) -> list[dict[str, Any]]:
        """Return the messages as JSON has them."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    def plain_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools the template is to show; none with ``tool_choice="none"``."""
        return None if self.tool_choice == "none" else self.tools


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raise InvalidArgument for what this server cannot do."""
        GenerationRequest.check(self)
        if self.suffix:
            raise InvalidArgument("suffix", "text cannot be put in before other text")
        if self.best_of is not None and self.best_of != self.n_choices:
            raise InvalidArgument("best_of", "it must be n", "leave it out")
        if self.echo and self.logprobs is not None:
            raise InvalidArgument("logprobs", "there are none of the prompt", "leave out echo")

    def prompts(self) -> list[str | list[int]]:
        """Return the prompts, as text or as token ids. Raises InvalidArgument when there are none."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        if given and isinstance(given[0], int):
            return [[token for token in given if isinstance(token, int)]]
        made = [prompt for prompt in given if not isinstance(prompt, int)]
        if not made:
            raise InvalidArgument("prompt", "there is none")
        if len(made) * self.n_choices > MAX_ANSWERS:
            raise InvalidArgument("prompt", f"more than {MAX_ANSWERS} answers are asked for")
        return made
