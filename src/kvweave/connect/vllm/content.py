"""Content parts that name stored chunks, in the messages of a body; plain data, without vLLM.

::

    {"role": "user", "content": [{"type": "chunk", "name": "docs/a"}, {"type": "text", "text": "so ?"}]}

becomes text, which vLLM renders and tokenizes as any other, and a declaration of the same chunks in
``kv_transfer_params``, by which they are found in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvweave.connect.vllm.spec import KEY, MOST_PARTS
from kvweave.errors import InvalidArgument

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
PARAMS = "kv_transfer_params"
HINT = '{"type": "chunk", "name": NAME}'


@dataclass(frozen=True, slots=True)
class Dialect:
    """Where a body has its messages, and what a part that is text is called; ``first``: what stands
    before the messages and may have parts too."""

    messages: str = "messages"
    text: str = "text"
    first: str | None = None


DIALECTS = {
    CHAT: Dialect(),
    RESPONSES: Dialect("input", "input_text"),
    MESSAGES: Dialect(first="system"),
}


def chunks_of(body: Any, path: str = CHAT) -> list[str]:
    """Return the chunks that messages name, in their order. Raises InvalidArgument.

    What else is wrong with a body is vLLM's to say.
    """
    names = []
    for content in _contents(body, DIALECTS[path]):
        for part in content:
            if not _is_chunk(part):
                continue
            if set(part) != {"type", "name"} or not isinstance(part["name"], str):
                raise InvalidArgument("messages", f"a chunk's content part: {_short(part)}", HINT)
            names.append(part["name"])
    if len(names) > MOST_PARTS:
        what = f"{len(names)} content parts name chunks"
        raise InvalidArgument("messages", what, f"at most {MOST_PARTS} of one request")
    return names


def filled(body: Mapping[str, Any], texts: Mapping[str, str], path: str = CHAT) -> dict[str, Any]:
    """Return a body whose chunks are text, declared to the connector.

    Text and chunks that stand together become one text, as in kvweave's own server: vLLM would put
    line breaks between them. Raises InvalidArgument where parts are declared besides.
    """
    params = body.get(PARAMS)
    if params is not None and not isinstance(params, Mapping):
        raise InvalidArgument(PARAMS, "it is no object", "send an object, or leave it out")
    said = params.get(KEY) if params is not None else None
    if isinstance(said, Mapping) and said.get("parts"):
        hint = "name chunks in the messages or in kv_transfer_params, not in both"
        raise InvalidArgument(KEY, "parts are declared besides content parts", hint)
    parts = [{"chunk": name} for name in chunks_of(body, path)]
    said = {**(said if isinstance(said, Mapping) else {}), "parts": parts}
    how = DIALECTS[path]
    made = {**body, PARAMS: {**(params or {}), KEY: said}}
    if isinstance(body.get(how.messages), list):
        made[how.messages] = [_message(each, texts, how) for each in body[how.messages]]
    if how.first is not None and isinstance(first := body.get(how.first), list):
        made[how.first] = _message({"content": first}, texts, how)["content"]
    return made


def _contents(body: Any, how: Dialect) -> Iterator[list[Any]]:
    messages = body.get(how.messages) if isinstance(body, Mapping) else None
    if how.first is not None and isinstance(body, Mapping):
        first = body.get(how.first)
        if isinstance(first, list):
            yield first
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield content


def _is_chunk(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "chunk"


def _message(message: Any, texts: Mapping[str, str], how: Dialect) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(map(_is_chunk, content)):
        return message
    made: list[Any] = []
    joins = False  # the last part is text that goes on
    for part in content:
        text = _text(part, texts, how)
        if text is None:
            made.append(part)
        elif joins:
            made[-1]["text"] += text
        else:
            made.append({"type": how.text, "text": text})
        joins = text is not None
    return {**message, "content": made[0]["text"] if len(made) == 1 else made}


def _text(part: Any, texts: Mapping[str, str], how: Dialect) -> str | None:
    """Return what a part says; None for one that says more, or something else, than text."""
    if _is_chunk(part):
        return texts[part["name"]]
    is_text = isinstance(part, Mapping) and set(part) == {"type", "text"}
    is_text = is_text and part["type"] == how.text
    return part["text"] if is_text and isinstance(part["text"], str) else None


def _short(part: Any) -> str:
    return ", ".join(sorted(str(key)[:40] for key in list(part)[:8]))
