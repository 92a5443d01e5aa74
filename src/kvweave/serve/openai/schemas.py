"""The requests of the OpenAI endpoints.

What this server cannot do is refused; fields that cannot change the text are ignored, and it says
which (`kvweave.ignored`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StrictBool

from kvweave.config import BaseMode
from kvweave.errors import InvalidArgument
from kvweave.run.grammar import GrammarKind, GrammarText
from kvweave.run.sample import Sampling
from kvweave.serve.chat.ask import EFFORTS, ChatAsk, thinking
from kvweave.serve.guard.malformed import shown
from kvweave.serve.openai.messages import (
    MAX_TOOLS,
    MAX_VARIABLES,
    Messages,
    plain_messages,
    plain_tools,
)
from kvweave.serve.reuse.adapt import TemplateHabits
from kvweave.serve.reuse.pooled import WeaveOptions
from kvweave.serve.routes.base import MAX_STOPS, Int, Num, Stops
from kvweave.serve.state import ServerState

# Fields that say nothing about the answer's text.
HARMLESS = frozenset(
    "user metadata service_tier safety_identifier prompt_cache_key prompt_cache_retention "
    "prompt_cache_options session_id verbosity prediction web_search_options audio provider "
    "client_metadata request_id priority include_stop_str_in_output skip_special_tokens "
    "spaces_between_special_tokens cache_salt return_token_ids echo parallel_tool_calls store "
    "truncate_prompt_tokens add_generation_prompt cache_control transforms route usage "
    "add_special_tokens use_beam_search".split()
)
# Of these, what would change it.
ONLY: Mapping[str, tuple[object, ...]] = {
    "cache_salt": (),  # it is to keep users apart: namespaces do, each with keys of its own
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "use_beam_search": (False,),
    "transforms": ([],),
    "echo": (False,),
}
INSTEAD = {"functions": "send tools", "function_call": "send tool_choice"}
MAX_CHOICES = 16
MAX_TOP = 20
MAX_ANSWERS = 64  # of one request


class NamedTool(BaseModel):
    """A tool that has to be called."""

    class Name(BaseModel):
        """Which."""

        name: str

    type: Literal["function"]
    function: Name


class AllowedTools(BaseModel):
    """The tools that may be called, of those that are given."""

    class Allowed(BaseModel):
        """Whether one must be."""

        mode: Literal["auto", "required"]
        tools: list[NamedTool]

    type: Literal["allowed_tools"]
    allowed_tools: Allowed


class Thinking(BaseModel):
    """Whether the model is to think first, as some APIs have it."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Int | None = None


KeepSpec = Annotated[str, Field(max_length=256)]


class StreamOptions(BaseModel):
    """Whether the last chunk of a stream has the usage."""

    model_config = ConfigDict(extra="allow")  # include_obfuscation, ...: nothing of the text
    include_usage: StrictBool = False


class Extension(BaseModel):
    """How to weave this request; left out: as the server is set."""

    model_config = ConfigDict(extra="forbid")
    repair: str | None = None
    share: Annotated[Num, Field(ge=0, le=1)] | None = None
    max_drift: Num | None = None
    keep: KeepSpec | None = None
    bases: BaseMode | None = None


class StructuredOutputs(BaseModel):
    """What an answer keeps to, as vLLM names it; one of these."""

    model_config = ConfigDict(extra="forbid")
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: StrictBool | None = None


class GenerationRequest(BaseModel):
    """What both endpoints have in common."""

    model_config = ConfigDict(extra="allow")
    model: str
    stream: StrictBool = False
    stream_options: StreamOptions | None = None
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    stop: Stops | None = None
    seed: Int | None = None
    temperature: Num | None = None
    top_p: Num | None = None
    top_k: Int | None = None
    min_p: Num | None = None
    min_tokens: Int | None = None
    frequency_penalty: Num | None = None
    presence_penalty: Num | None = None
    repetition_penalty: Num | None = None
    logit_bias: dict[int, float] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOPS)] | None = None
    ignore_eos: StrictBool | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    store: StrictBool | None = None
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
            stop_tokens=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            min_p=self.min_p or 0.0,
            min_tokens=self.min_tokens or 0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            logit_bias=self.logit_bias or {},
        )

    def check(self) -> None:
        """Raise InvalidArgument for fields that would have to be ignored."""
        for name, value in (self.model_extra or {}).items():
            if value is not None and name not in HARMLESS:
                hint = INSTEAD.get(name, "leave it out")
                raise InvalidArgument(name, "this server does not know it", hint)
            if value is not None and value not in ONLY.get(name, (value,)):
                raise InvalidArgument(name, f"{value!r} is not supported", "leave it out")

    def grammar(self) -> GrammarText | None:
        """Return what the text keeps to. Raises InvalidArgument for several things."""
        given = self.structured_outputs or StructuredOutputs()
        asked: list[GrammarText] = []
        fields: list[tuple[str, GrammarKind, object]] = [
            ("structured_outputs", "json_schema", given.json_),
            ("structured_outputs", "regex", given.regex),
            ("structured_outputs", "choice", given.choice),
            ("structured_outputs", "lark", given.grammar),
            ("structured_outputs", "json_object", given.json_object or None),
            ("guided_json", "json_schema", self.guided_json),
            ("guided_regex", "regex", self.guided_regex),
            ("guided_choice", "choice", self.guided_choice),
            ("guided_grammar", "lark", self.guided_grammar),
        ]
        for argument, kind, source in fields:
            if source is not None:
                asked.append(GrammarText(kind, source, argument))
        if (more := self.formatted()) is not None:
            asked.append(more)
        if len(asked) > 1:
            raise InvalidArgument(
                asked[1].argument, f"there is {asked[0].argument} too", "leave one of them out"
            )
        return asked[0] if asked else None

    def formatted(self) -> GrammarText | None:
        """Return what ``response_format`` asks for, where there is one."""
        return None

    def ignored(self, state: ServerState) -> list[str]:
        """Return the names of what was given and changes nothing."""
        found = [name for name, value in (self.model_extra or {}).items() if value is not None]
        more = self.stream_options.model_extra if self.stream_options is not None else None
        return [*found, *(f"stream_options.{name}" for name in more or {})]

    @property
    def how(self) -> WeaveOptions:
        given = self.kvweave or Extension()
        return WeaveOptions(given.repair, given.share, given.max_drift, given.keep, given.bases)

    @property
    def n_choices(self) -> int:
        return self.n or 1

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Messages
    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP)] | None = None
    response_format: dict[str, Any] | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: StrictBool | None = None
    modalities: list[str] | None = None
    reasoning_effort: Literal[EFFORTS] | None = None  # type: ignore[valid-type]
    enable_thinking: StrictBool | None = None
    thinking: Thinking | None = None
    include_reasoning: StrictBool | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_VARIABLES)] | None = None
    continue_final_message: StrictBool | None = None
    _left: list[str] = PrivateAttr(default_factory=list)  # ignored of messages and tools

    def check(self) -> None:
        """Raise InvalidArgument for what this server cannot do."""
        extra = self.model_extra or {}
        if self.continue_final_message and extra.get("add_generation_prompt") is False:
            del extra["add_generation_prompt"]  # as vLLM has it, the one asks for the other
        GenerationRequest.check(self)
        if self.modalities not in (None, ["text"]):
            raise InvalidArgument("modalities", "only text is supported", "leave it out")
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", "it needs logprobs", "set logprobs to true")
        if self.continue_final_message and self.messages[-1].role != "assistant":
            raise InvalidArgument(
                "continue_final_message", "the last message is no assistant's", "set it to false"
            )

    @property
    def limit(self) -> int | None:
        """The most new tokens; None: as many as fit, up to a default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def formatted(self) -> GrammarText | None:
        """Return what ``response_format`` asks for. Raises InvalidArgument."""
        given = self.response_format or {}
        kind = given.get("type", "text")
        if kind == "text":
            return None
        if kind == "json_object":
            return GrammarText("json_object")
        if kind == "json_schema":
            about = given.get("json_schema")
            schema = about.get("schema") if isinstance(about, dict) else None
            if not isinstance(schema, dict):
                reason = f"it should be an object, not {shown(schema)}"
                raise InvalidArgument("response_format.json_schema.schema", reason)
            return GrammarText("json_schema", schema)
        if kind in ("regex", "grammar"):
            text = given.get(kind, given.get("pattern"))
            if not isinstance(text, str):
                reason = f"it should be text, not {shown(text)}"
                raise InvalidArgument(f"response_format.{kind}", reason)
            return GrammarText("regex" if kind == "regex" else "lark", text)
        known = "text, json_object, json_schema, regex, grammar"
        raise InvalidArgument("response_format.type", f"{shown(kind)} is none of {known}")

    def ask(self, template: TemplateHabits) -> ChatAsk:
        """Return what is asked, in terms of no API. Raises InvalidArgument."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else 0
        messages, left = plain_messages(self.messages, template)
        tools, more = plain_tools(self.tools or [], template)
        choice = self.tool_choice or "auto"
        if isinstance(choice, AllowedTools):
            names = {tool.function.name for tool in choice.allowed_tools.tools}
            tools = [tool for tool in tools if tool["function"]["name"] in names]
            choice = choice.allowed_tools.mode
        self._left = [*left, *more]
        return ChatAsk(
            messages=messages,
            sampling=self.sampling(1 if self.limit is None else self.limit, logprobs),
            max_tokens=self.limit,
            tools=tools,
            tool_choice=choice if isinstance(choice, str) else f"tool:{choice.function.name}",
            parallel=self.parallel_tool_calls is not False,
            variables=self._variables(),
            continues=bool(self.continue_final_message),
            grammar=self.grammar(),
            how=self.how,
            n=self.n_choices,
            private=self.store is False,
        )

    def ignored(self, state: ServerState) -> list[str]:
        """Return the names of what was given and changes nothing, once it was asked."""
        known = state.renderer.template
        _, unknown = known.variables(self.chat_template_kwargs or {})
        found = [f"chat_template_kwargs.{name}" for name in unknown]
        if self.reasoning_effort is not None and not (
            known.knows("reasoning_effort") or known.knows("enable_thinking")
        ):
            found.append("reasoning_effort")
        if self.thinking is not None and self.thinking.budget_tokens is not None:
            found.append("thinking.budget_tokens")
        return [*GenerationRequest.ignored(self, state), *found, *self._left]

    def _variables(self) -> dict[str, Any]:
        enabled = self.enable_thinking
        if enabled is None and self.thinking is not None and self.thinking.type != "adaptive":
            enabled = self.thinking.type == "enabled"
        return thinking(self.reasoning_effort, enabled) | (self.chat_template_kwargs or {})


class CompletionRequest(GenerationRequest):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: Int | None = 16
    logprobs: Annotated[Int, Field(ge=0, le=MAX_TOP)] | None = None
    echo: StrictBool | None = False
    best_of: Int | None = None
    suffix: str | None = None

    def check(self) -> None:
        """Raise InvalidArgument for what this server cannot do."""
        GenerationRequest.check(self)
        if self.suffix:
            raise InvalidArgument(
                "suffix", "text cannot be put in before other text", "leave it out"
            )
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
            raise InvalidArgument("prompt", "there is none", "send some text, or token ids")
        if len(made) * self.n_choices > MAX_ANSWERS:
            raise InvalidArgument(
                "prompt", f"more than {MAX_ANSWERS} answers are asked for", "send several requests"
            )
        return made
