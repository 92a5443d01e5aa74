"""Every field of the request types of the installed clients: used, refused, or named as ignored.

`TAKEN` has those that are used; a field of a newer client that is taken and said nothing of fails here.
python -m pytest -m "slow or not slow" tests/serve/test_api_types.py
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable
from typing import Any, get_type_hints

import days
import pytest
import torch
from answering import FORCED
from loaded import short_runner
from needs import need
from pydantic import ValidationError
from serve.api_walk import Ignored, Walk, tail
from torch import Tensor

from kvweave.errors import KVWeaveError
from kvweave.run import loop
from kvweave.run.sample import Choice, Sampler, sample
from kvweave.serve.anthropic.compact import given
from kvweave.serve.anthropic.schemas import MessagesRequest
from kvweave.serve.openai.schemas import ChatRequest, CompletionRequest
from kvweave.serve.responses.course import ResponseCourse
from kvweave.serve.responses.schemas import ResponsesRequest

beta = need("anthropic.types.beta.message_create_params")
plain = need("anthropic.types.message_create_params")
chat = need("openai.types.chat.completion_create_params")
responses = need("openai.types.responses.response_create_params")
compact = need("openai.types.responses.response_compact_params")
completion = need("openai.types.completion_create_params")
KINDS = [
    ("messages", beta.MessageCreateParamsBase),
    ("messages", plain.MessageCreateParamsBase),
    ("chat", chat.CompletionCreateParamsBase),
    ("responses", responses.ResponseCreateParamsBase),
    ("responses", compact.ResponseCompactParams),
    ("completions", completion.CompletionCreateParamsBase),
]

DAYS = min(3, int(os.environ.get("KVWEAVE_EVERY", "1")))  # in which all of it goes over HTTP
USER = {"role": "user", "content": "a"}
SAMPLES: dict[str, Any] = {
    "budget_tokens": 1024,
    "logit_bias": {"1": 1},
    "json_schema": {"name": "x", "schema": {"type": "object"}},
    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "x"}}]},
}
TOOL = {"name": "x", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}


def base_of(api: str) -> dict[str, Any]:
    """The smallest body of a request."""
    if api == "messages":
        return {"model": "m", "max_tokens": 1, "messages": [USER], "tools": [TOOL]}
    if api == "chat":
        return {"model": "m", "max_tokens": 1, "messages": [USER], "tools": [FUNCTION]}
    if api == "completions":
        return {"model": "m", "max_tokens": 1, "prompt": "a"}
    tool = {"type": "function", **FUNCTION["function"]}
    return {"model": "m", "max_output_tokens": 1, "input": "a", "tools": [tool]}


def in_messages(value: Any) -> list[Any]:
    """A message among others, where it may stand."""
    return [value] if value["role"] == "user" else [USER, value, USER]


def walked(api: str, kind: Any, send: Callable[[dict[str, Any]], Ignored]) -> Walk:
    """Try all fields of a request's type."""
    walk, base = Walk(SAMPLES), base_of(api)
    known: dict[str, Ignored] = {}  # a body comes by several ways

    def place(name: str) -> Callable[[Any], Ignored]:
        def sent(value: Any) -> Ignored:
            if name == "messages":
                value = in_messages(value[0])
            elif name == "input" and isinstance(value, list):
                value = [USER, *value]
            more = {"max_tokens": 1025} if name == "thinking" else {}
            body = {**base, name: value, **more}
            key = json.dumps(body)
            if key not in known:
                known[key] = send(body)
            return known[key]

        return sent

    for name, inner in get_type_hints(kind).items():
        if name != "model":
            walk.go(inner, name, place(name))
    return walk


def parsing(api: str, state: Any) -> Callable[[dict[str, Any]], Ignored]:
    """Return what reads a request up to what the model would be asked."""

    def send(body: dict[str, Any]) -> Ignored:
        asked: Any
        try:
            if api == "messages":
                asked = MessagesRequest.model_validate(body)
                asked.check()
                asked.asked(given(asked.messages, {}))
            elif api == "responses":
                asked = ResponsesRequest.model_validate(body)
                ResponseCourse(state, "anna", asked)
            elif api == "chat":
                asked = ChatRequest.model_validate(body)
                asked.ask(state.renderer.template)
            else:
                asked = CompletionRequest.model_validate(body)
                asked.sampling(1, 0)
        except (ValidationError, KVWeaveError):
            return None
        return list(asked.ignored(state))

    return send


# What changes the answer, or is the server's own sent back: ends of paths, see `tail`.
TAKEN = {
    "messages": """
        <SystemMessageOutputConfigParam>.effort=high <SystemMessageOutputConfigParam>.effort=low
        <SystemMessageOutputConfigParam>.effort=max <SystemMessageOutputConfigParam>.effort=medium
        <SystemMessageOutputConfigParam>.effort=xhigh <ToolParam>.description
        <ToolParam>.input_schema <ToolParam>.name <adaptive>.display=omitted
        <adaptive>.display=summarized <any>.disable_parallel_tool_use <assistant>.content
        <auto>.disable_parallel_tool_use <clear_thinking_20251015>.keep=all
        <clear_tool_uses_20250919>.clear_tool_inputs <clear_tool_uses_20250919>.exclude_tools
        <compact_20260112>.instructions <compact_20260112>.pause_after_compaction
        <compaction>.content <compaction>.encrypted_content <compaction>.signature <content>.content
        <document>.context <document>.title <enabled>.display=omitted <enabled>.display=summarized
        <input_tokens>.value <json_schema>.schema <object>.properties <object>.required
        <search_result>.source <search_result>.title <summarize>.instructions
        <system>.clear_at=never <system>.clear_at=next_user_message <system>.content <text>.data
        <text>.media_type=text/plain <text>.text <thinking>.signature <thinking>.thinking
        <thinking_turns>.value <tool>.disable_parallel_tool_use <tool>.name <tool_reference>.name
        <tool_reference>.tool_name <tool_result>.content <tool_result>.tool_use_id <tool_use>.id
        <tool_use>.input <tool_use>.name <tool_uses>.value <user>.content
        block_binding<ThinkingBlockBindingParam> citations<CitationsConfigParam>
        citations<CitationsConfigParamParam> clear_at_least<input_tokens> compaction<summarize>
        content<compaction> content<document> content<search_result> content<text> content<thinking>
        content<tool_addition> content<tool_reference> content<tool_removal> content<tool_result>
        content<tool_use> context_management<ContextManagementConfigParam> definition<ToolParam>
        edits<clear_thinking_20251015> edits<clear_tool_uses_20250919> edits<compact_20260112>
        format<json_schema> input_schema<object> keep<all> keep<thinking_turns> keep<tool_uses>
        max_tokens messages<assistant> messages<system> messages<user>
        output_config<OutputConfigParam> output_config<SystemMessageOutputConfigParam>
        source<content> source<text> stop_sequences system system<text> thinking<adaptive>
        thinking<disabled> thinking<enabled> tool<tool_definition> tool<tool_reference>
        tool_changes<tool_addition> tool_changes<tool_removal> tool_choice<any> tool_choice<auto>
        tool_choice<none> tool_choice<tool> tools<ToolParam> trigger<input_tokens>
        trigger<tool_uses>
    """,
    "chat": """
        <ChatCompletionStreamOptionsParam>.include_usage <Function>.arguments <Function>.name
        <FunctionDefinition>.description <FunctionDefinition>.name <FunctionDefinition>.parameters
        <allowed_tools>.allowed_tools <assistant>.content <developer>.content <function>.content
        <function>.id <json_schema>.json_schema <refusal>.refusal <system>.content <text>.text
        <tool>.content <tool>.tool_call_id <user>.content content<refusal> content<text>
        frequency_penalty function<Function> function<FunctionDefinition> logit_bias logprobs
        max_completion_tokens max_tokens messages<assistant> messages<developer> messages<function>
        messages<system> messages<tool> messages<user> modalities=text n parallel_tool_calls
        presence_penalty response_format<json_object> response_format<json_schema>
        response_format<text> seed stop store stream_options<ChatCompletionStreamOptionsParam>
        temperature tool_calls<function> tool_choice<allowed_tools> tool_choice<function>
        tool_choice=auto tool_choice=none tool_choice=required tools<function> top_p
    """,
    "responses": """
        <additional_tools>.id <configuration_update>.id <custom_tool_call>.async <function>.async
        <function_call>.async <Reasoning>.effort=high <Reasoning>.effort=low
        <Reasoning>.effort=max <Reasoning>.effort=medium <Reasoning>.effort=minimal
        <Reasoning>.effort=none <Reasoning>.effort=xhigh input<additional_tools>
        input<compaction_trigger> input<configuration_update> text<Text>
        <ItemReference>.id input<ItemReference>
        <custom_tool_call>.call_id <custom_tool_call>.id <custom_tool_call>.input
        <custom_tool_call>.name <custom_tool_call_output>.call_id <custom_tool_call_output>.id
        <custom_tool_call_output>.output <function>.description <function>.name
        <function>.parameters <function>.strict <function_call>.arguments <function_call>.call_id
        <function_call>.id <function_call>.name <function_call>.status=completed
        <function_call>.status=in_progress <function_call>.status=incomplete <input_text>.text
        <json_schema>.description <json_schema>.name <json_schema>.schema <json_schema>.strict
        <message>.id <message>.status=completed <message>.status=in_progress
        <message>.status=incomplete <output_text>.text <reasoning>.encrypted_content <reasoning>.id
        <reasoning>.status=completed <reasoning>.status=in_progress <reasoning>.status=incomplete
        <reasoning_text>.text <refusal>.refusal <summary_text>.text <user>.content
        <user>.status=completed <user>.status=in_progress <user>.status=incomplete
        content<input_text> content<output_text> content<reasoning_text> content<refusal>
        format<json_object> format<json_schema> format<text> include=message.output_text.logprobs
        include=reasoning.encrypted_content input input<custom_tool_call>
        input<custom_tool_call_output> input<function_call> input<message> input<reasoning>
        input<user> instructions max_output_tokens metadata output<input_text> parallel_tool_calls
        reasoning<Reasoning> store stream_options<StreamOptions> summary<summary_text> temperature
        text<ResponseTextConfigParam> tool_choice<function> tool_choice=auto tool_choice=none
        tool_choice=required tools<function> top_p truncation=auto truncation=disabled
    """,
    "completions": """
        <ChatCompletionStreamOptionsParam>.include_usage best_of echo frequency_penalty logit_bias
        logprobs max_tokens n presence_penalty prompt seed stop
        stream_options<ChatCompletionStreamOptionsParam> temperature top_p
    """,
}


@pytest.mark.parametrize(("api", "kind"), KINDS, ids=[k.__module__ for _, k in KINDS])
def test_every_field_is_used_refused_or_named(api: str, kind: Any, serve: Any) -> None:
    state = serve(start=False).app.state.kvweave
    walk = walked(api, kind, parsing(api, state))
    unknown = {path for path in walk.taken if tail(path) not in TAKEN[api].split()}
    assert not unknown, "taken, and nothing is said of it: honour, refuse or name it"
    assert walk.n_sent > 20


@pytest.mark.slow
@pytest.mark.parametrize(("api", "kind"), [KINDS[i] for i in (0, 2, 3, 5)])
def test_no_field_is_a_fault_of_the_server(
    api: str, kind: Any, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same over HTTP, in `.ci/run` a third of it each day: what is refused says why and what to do,
    nothing is a 500. Answers end at once: with room for a budget of thinking they would be a thousand
    tokens each."""
    served = serve(any_model=True)
    anna, ends = served.anna, torch.tensor(sorted(short_runner().ends))
    read, numbers = parsing(api, served.app.state.kvweave), itertools.count(days.DAY)

    def brief(logits: Tensor, samplers: list[Sampler]) -> list[Choice | Exception]:
        return sample(logits.index_fill(1, ends, FORCED), samplers)

    monkeypatch.setattr(loop, "sample", brief)
    path = {"chat": "chat/completions", "messages": "messages"}.get(api, api)

    def send(body: dict[str, Any]) -> Ignored:
        if next(numbers) % DAYS:
            return read(body)
        told = anna("POST", f"/v1/{path}", body, (200, 400, 404))
        if told.get("error"):
            assert len(told["error"]["message"]) > 10
            return None
        return list(told["kvweave"].get("ignored", ()))

    walk = walked(api, kind, send)
    assert {tail(path) for path in walk.taken} <= {*TAKEN[api].split()}
