"""How families of models write reasoning and calls of tools: one table, a family an entry.

A family is found by strings in a model's chat template. Its ``response`` is what transformers'
`ResponseParser` reads answers by; ``call`` is how a call is written, where its arguments are JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

NAME, ARGUMENTS = "{name}", "{arguments}"  # in `CallForm.text`


@dataclass(frozen=True, slots=True)
class CallForm:
    """How calls are written, for a grammar: ``begin``, then ``text`` of each, ``end``."""

    text: str
    begin: str = ""
    between: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One way to write answers."""

    marks: tuple[tuple[str, ...], ...]  # a template that has all strings of one of these
    response: Mapping[str, Any]
    call: CallForm | None = None  # None: not to be forced by a grammar
    think: tuple[str, str] | None = None  # what opens and closes reasoning
    pythonic: bool = False  # calls are written as Python calls them


def _call(name: str = "{name}", arguments: str = "{content}") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _response(
    anchor: str | list[str],
    calls: Mapping[str, Any] | None,
    content: Mapping[str, Any],
    think: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return a template of a response; a call is JSON unless it says otherwise."""
    fields: dict[str, Any] = {}
    if think is not None:
        fields["reasoning_content"] = dict(think)
    if calls is not None:
        usual = {"repeats": True, "content": "json", "transform": _call()}
        fields["tool_calls"] = {k: v for k, v in (usual | dict(calls)).items() if v is not None}
    fields["content"] = dict(content)
    return {"defaults": {"role": "assistant"}, "start_anchor": anchor, "fields": fields}


_IM, _THINK = "<|im_start|>assistant\n", {"open": "<think>", "close": "</think>"}
_THOUGHT = ("<think>", "</think>")
_IM_END = {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)"}
_WHOLE = {"type": "function", "function": "{content}"}


def _tags(pattern: str) -> dict[str, Any]:
    return {"content": "xml-inline", "content_args": {"tag_pattern": pattern}}


def _bare_keys(quote: str) -> dict[str, Any]:
    return {"content_args": {"unquoted_keys": True, "string_delims": [[quote, quote]]}}


_AS_TEXT = {"content": "text", "transform": None}
_HARMONY_START = r"(?:<\|start\|>assistant)?"
_HARMONY_ENDS = ["<|end|>", "<|return|>"]

# The first family whose marks are in a template is taken: those with more of their own stand first.
FAMILIES: Mapping[str, Family] = {
    "harmony": Family(
        (("<|channel|>", "<|message|>"),),
        _response(
            "<|start|>assistant",
            {
                "open_pattern": _HARMONY_START
                + r"(?:<\|channel\|>commentary )?\s*to=functions\.(?P<name>[\w.-]+)"
                r"(?:<\|channel\|>(?:commentary|analysis))?\s*(?:<\|constrain\|>)?\s*\w*<\|message\|>",
                "close": ["<|call|>", *_HARMONY_ENDS],
            },
            {
                "open_pattern": _HARMONY_START + r"<\|channel\|>(?:final|commentary)<\|message\|>",
                "close": _HARMONY_ENDS,
                "repeats": True,
                "join": "\n",
            },
            {
                "open_pattern": _HARMONY_START
                + r"<\|channel\|>analysis(?:\s*<\|constrain\|>\w+)?<\|message\|>",
                "close": _HARMONY_ENDS,
                "repeats": True,
                "join": "\n",
            },
        ),
        CallForm(
            "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"
        ),
    ),
    "kimi-k2": Family(
        (("<|tool_call_argument_begin|>",),),
        _response(
            "<|im_assistant|>assistant<|im_middle|>",
            {
                "open_pattern": r"(?:<\|tool_calls_section_begin\|>)?<\|tool_call_begin\|>\s*"
                r"(?:functions\.)?(?P<name>[\w.-]+):\d+\s*<\|tool_call_argument_begin\|>",
                "close": "<|tool_call_end|>",
            },
            {"close_pattern": r"\s*(?:<\|tool_calls_section_end\|>|<\|im_end\|>)"},
        ),
        CallForm(
            "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>",
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
        ),
    ),
    "deepseek-v3": Family(
        (("<｜tool▁calls▁begin｜>",),),
        _response(
            ["<｜Assistant｜></think>", "<｜Assistant｜>"],
            {
                "open_pattern": r"\s*(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>"
                r"(?P<name>[^<]+)<｜tool▁sep｜>",
                "close": "<｜tool▁call▁end｜>",
            },
            {"close_pattern": r"\s*(?:<｜tool▁calls▁end｜>|<｜end▁of▁sentence｜>)"},
            _THINK,
        ),
        CallForm(
            "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>",
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
        ),
        _THOUGHT,
    ),
    "glm-4.5": Family(
        (("<arg_key>", "<arg_value>"),),
        _response(
            "<|assistant|>",
            {
                "open_pattern": r"\s*<tool_call>(?P<name>[^<\n]+)\n?",
                "close": "</tool_call>",
                **_tags(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>"),
            },
            {"close_pattern": r"\s*(?:<\|observation\|>|<\|user\|>|<\|endoftext\|>)"},
            _THINK,
        ),
        None,
        _THOUGHT,
    ),
    "minimax-m2": Family(
        (("<minimax:tool_call>",),),
        _response(
            "]~b]ai\n",
            {
                "open_pattern": r"\s*(?:<minimax:tool_call>\s*)?<invoke name=\"(?P<name>[^\"]+)\">",
                "close": "</invoke>",
                **_tags(r"<parameter name=\"(?P<key>[^\"]+)\">(?P<value>.*?)</parameter>"),
            },
            {"close_pattern": r"\s*(?:</minimax:tool_call>|\[e~\[)"},
            _THINK,
        ),
        None,
        _THOUGHT,
    ),
    "qwen3-coder": Family(
        (("<tool_call>", "<function="), ("<tool_call>", "<parameter=")),
        _response(
            _IM,
            {
                "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
                "close_pattern": r"</function>\s*</tool_call>",
                **_tags(r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>"),
            },
            _IM_END,
            _THINK,
        ),
        None,
        _THOUGHT,
    ),
    "hermes": Family(
        (("<tool_call>",),),
        _response(
            _IM,
            {"open_pattern": r"\s*<tool_call>", "close": "</tool_call>", "transform": _WHOLE},
            _IM_END,
            _THINK,
        ),
        CallForm(
            '<tool_call>\n{"name": "{name}", "arguments": {arguments}}\n</tool_call>', between="\n"
        ),
        _THOUGHT,
    ),
    "functiongemma": Family(
        (("<start_function_call>",),),
        _response(
            "<start_of_turn>model\n",
            {
                "open_pattern": r"\s*<start_function_call>call:(?P<name>[\w.-]+)",
                "close": "<end_function_call>",
                **_bare_keys("<escape>"),
            },
            {"close_pattern": r"<start_function_response>|<end_of_turn>"},
        ),
    ),
    "gemma4": Family(
        (("<|tool_call>", "<|turn>"),),
        _response(
            ["<|turn>model\n", "<tool_response|>"],
            {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                **_bare_keys('<|"|>'),
            },
            {"close": ["<turn|>", "<|tool_response>", "<eos>"]},
            {"open": "<|channel>thought\n", "close": "<channel|>"},
        ),
        None,
        ("<|channel>thought\n", "<channel|>"),
    ),
    # Llama 4, and whatever is told to write so; without marks of their own around the list
    "pythonic": Family(
        (("<|header_start|>",), ("[func_name1(",)),
        _response(
            [
                "<|header_start|>assistant<|header_end|>\n\n",
                "<|start_header_id|>assistant<|end_header_id|>\n\n",
                "<start_of_turn>model\n",
            ],
            {
                "open_pattern": r"\s*(?:<\|python_start\|>)?(?=\[\s*[A-Za-z_][\w.]*\(|\{\s*\"name\")",
                "close_pattern": r"\s*(?:<\|python_end\|>|<\|eot\|>|<\|eom\|>|<\|eot_id\|>|<end_of_turn>)",
                **_AS_TEXT,
            },
            {"close_pattern": r"<\|eot\|>|<\|eom\|>|<\|eot_id\|>|<end_of_turn>"},
        ),
        pythonic=True,
    ),
    "lfm2": Family(
        (("<|tool_call_start|>",), ("<|tool_list_start|>",)),
        _response(
            _IM,
            {
                "open_pattern": r"\s*<\|tool_call_start\|>",
                "close": "<|tool_call_end|>",
                **_AS_TEXT,
            },
            _IM_END,
            _THINK,
        ),
        None,
        _THOUGHT,
        pythonic=True,
    ),
    "olmo3": Family(
        (("<function_calls>", "<functions>"),),
        _response(
            _IM,
            {
                "open_pattern": r"\s*<function_calls>",
                "close": "</function_calls>",
                **_AS_TEXT,
            },
            _IM_END,
            _THINK,
        ),
        None,
        _THOUGHT,
        pythonic=True,
    ),
    "llama3-json": Family(
        (("<|start_header_id|>", "parameters"), ("<|python_tag|>",)),
        _response(
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
            {
                "open_pattern": r"\s*(?:<\|python_tag\|>)?(?=\{\"name\")",
                "close": ["<|eom_id|>", "<|eot_id|>"],
                "transform": _call("{content.name}", "{content.parameters}"),
            },
            {"close_pattern": r"<\|eom_id\|>|<\|eot_id\|>"},
        ),
        CallForm('{"name": "{name}", "parameters": {arguments}}'),
    ),
    "mistral-args": Family(
        (("[TOOL_CALLS]", "[ARGS]"),),
        _response(
            "[/INST]",
            {
                "open_pattern": r"\[TOOL_CALLS\](?P<name>[\w.-]+)(?:\[CALL_ID\][^\[]*)?\[ARGS\]",
                "close_pattern": r"(?=\[TOOL_CALLS\])|</s>",
            },
            {"close": "</s>"},
        ),
        CallForm("[TOOL_CALLS]{name}[ARGS]{arguments}"),
    ),
    "mistral": Family(
        (("[TOOL_CALLS]",),),
        _response(
            "[/INST]",
            {
                "open": "[TOOL_CALLS]",
                "close": "</s>",
                "repeats": None,
                "transform": _call("{name}", "{arguments}"),
                "transform_each": True,
            },
            {"close": "</s>"},
        ),
        CallForm(
            '{"name": "{name}", "arguments": {arguments}}',
            begin="[TOOL_CALLS] [",
            between=", ",
            end="]",
        ),
    ),
    # No calls of its own: a model that only thinks.
    "think": Family(
        (("<think>",), ("</think>",)),
        _response("<|assistant|>", None, {"close": "<|im_end|>"}, _THINK),
        None,
        _THOUGHT,
    ),
}


def family_of(template: str) -> str | None:
    """Return the name of the family a chat template is of; None for none of these."""
    for name, family in FAMILIES.items():
        if any(all(mark in template for mark in marks) for marks in family.marks):
            return name
    return None
