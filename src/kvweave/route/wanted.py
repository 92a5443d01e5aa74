"""What a request asks about: its text as prints, and the stored chunks it names.

Messages are cut where one part ends and the next begins, so that a part has the same prints whatever
stands around it. Sizes are in characters; nobody here has a tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvweave.chunk.identity import check_name
from kvweave.chunk.prints import Prints, prints, thinned
from kvweave.errors import InvalidArgument, InvalidName
from kvweave.weave.template import Template

MOST = 2048  # prints of one request that are looked at
MAX_NAMES = 64  # chunks that one request names, of which workers are asked
MAX_CHARS = 2**21  # of one request that are looked at: 50 ms
_LETTERS = 0x10000  # token ids are hashed as letters from here on, behind the surrogates
# types of parts that are text, and where that is
TEXTS = dict.fromkeys(("text", "input_text", "output_text", "reasoning_text"), "text") | {
    "thinking": "thinking"
}
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class PromptText:
    """The text of a prompt as prints, and the names of chunks in it, each once."""

    prints: Prints
    names: tuple[str, ...]
    by_id: tuple[str, ...] = ()  # ``#17``: a chunk of one worker, nobody knows which


def prompt_of(body: Body) -> PromptText:
    """Return what a body asks about: of a completion, a chat, a message of Anthropic's, a response.

    Whatever the body is: what makes no sense is the worker's to refuse.
    """
    found: list[Prints] = []
    names: dict[str, None] = {}
    tools = body.get("tools")
    if tools:
        found.append(prints(json.dumps(tools, sort_keys=True)))
    left = MAX_CHARS
    for part in _parts(body):
        if isinstance(part, str):
            found.append(prints(part[:left]))
            left -= min(left, len(part))
        else:
            names[part.name] = None
    plain = [name for name in names if is_name(name)]
    by_id = tuple(name for name in names if name.startswith("#"))
    return PromptText(thinned(joined(found), MOST), tuple(plain[:MAX_NAMES]), by_id)


def joined(found: list[Prints]) -> Prints:
    """Return prints of several texts as those of one."""
    none = prints("")
    hashes = np.concatenate([none.hashes, *(each.hashes for each in found)])
    sizes = np.concatenate([none.sizes, *(each.sizes for each in found)])
    return Prints(hashes, sizes)


@dataclass(frozen=True, slots=True)
class _Named:
    name: str


def _parts(body: Body) -> Iterator[str | _Named]:
    for name in ("system", "instructions"):
        yield from _content(body.get(name))
    for name in ("messages", "input"):
        given = body.get(name)
        if isinstance(given, str):
            yield given
        for message in _dicts(given):
            yield from _message(message)
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        yield prompt
    elif isinstance(prompt, list):
        for each in [prompt] if prompt and isinstance(prompt[0], int) else prompt:
            yield each if isinstance(each, str) else _as_letters(each)


def _message(message: Body) -> Iterator[str | _Named]:
    """Yield the parts of a message, or of an item of a response."""
    yield from _content(message.get("content"))
    yield from _content(message.get("output"))
    if isinstance(message.get("arguments"), str):
        yield message["arguments"]
    if message.get("tool_calls"):
        yield json.dumps(message["tool_calls"], sort_keys=True)


def _content(content: object) -> Iterator[str | _Named]:
    if isinstance(content, str):
        yield content
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict):
            continue
        kind = part.get("type")
        name = TEXTS.get(kind) if isinstance(kind, str) else None
        if name is not None and isinstance(part.get(name), str):
            yield part[name]
        elif kind == "chunk" and isinstance(part.get("name"), str):
            yield _Named(part["name"])
        elif kind == "tool_result":
            held = part.get("content")
            yield from _content(
                [each for each in _dicts(held) if each.get("type") != "tool_result"]
            )
            yield from _content(held if isinstance(held, str) else None)
        else:  # an image: the same one has the same prints
            yield json.dumps(part, sort_keys=True)


def _as_letters(tokens: object) -> str:
    """Return a letter for each token id, so that ids have prints too."""
    given = tokens if isinstance(tokens, list) else []
    return "".join(chr(_LETTERS + t % 0x100000) for t in given if isinstance(t, int))


def names_in(body: Body) -> tuple[str, ...]:
    """Return the stored chunks that a verb on a context names; patterns and ids are left out."""
    found: list[object] = [body.get("chunk")]
    edits = body.get("edits")
    found += [edit.get("chunk") for edit in _dicts(edits)]
    for holder in (body, *_dicts(edits)):
        found += [part.name for part in _content(holder.get("content")) if isinstance(part, _Named)]
    values = body.get("values")
    values = values if isinstance(values, dict) else {}
    for value in values.values():
        found += value if isinstance(value, list) else []
    if isinstance(body.get("template"), str):
        try:
            found += [hole for hole in Template(body["template"]).holes if hole not in values]
        except InvalidArgument:
            pass  # the worker says why
    names = [n for n in found if isinstance(n, str) and is_name(n)]
    return tuple(dict.fromkeys(names))[:MAX_NAMES]


def is_name(name: str) -> bool:
    """Tell whether workers can have anything of this name: no id, no pattern, nothing endless."""
    try:
        check_name(name)
    except InvalidName:
        return False
    return True


def _dicts(given: object) -> list[dict[str, Any]]:
    return [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
