"""Content parts that name stored chunks, in the messages of a chat body; plain data, without vLLM.

::

    {"role": "user", "content": [{"type": "chunk", "name": "docs/a"}, {"type": "text", "text": "so ?"}]}

becomes text, which vLLM renders and tokenizes as any other, and a declaration of the same chunks in
``kv_transfer_params``, by which they are found in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvweave.connect.vllm.spec import KEY, MOST_PARTS
from kvweave.errors import InvalidArgument

CHAT = "/v1/chat/completions"
PARAMS = "kv_transfer_params"
HINT = '{"type": "chunk", "name": NAME}'


def chunks_of(body: Any) -> list[str]:
    """Return the chunks that messages name, in their order. Raises InvalidArgument.

    What else is wrong with a body is vLLM's to say.
    """
    names = []
    for content in _contents(body):
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


def filled(body: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
    """Return a body whose chunks are text, declared to the connector.

    Text and chunks that stand together become one text, as in kvweave's own server: vLLM would put
    line breaks between them. Raises InvalidArgument where parts are declared besides.
    """
    params = body.get(PARAMS)
    if params is not None and not isinstance(params, Mapping):
        raise InvalidArgument(PARAMS, "it is no object")
    said = params.get(KEY) if params is not None else None
    if isinstance(said, Mapping) and said.get("parts"):
        hint = "name chunks in the messages or in kv_transfer_params, not in both"
        raise InvalidArgument(KEY, "parts are declared besides content parts", hint)
    parts = [{"chunk": name} for name in chunks_of(body)]
    messages = [_message(message, texts) for message in body["messages"]]
    said = {**(said if isinstance(said, Mapping) else {}), "parts": parts}
    params = {**(params or {}), KEY: said}
    return {**body, "messages": messages, PARAMS: params}


def _contents(body: Any) -> Iterator[list[Any]]:
    messages = body.get("messages") if isinstance(body, Mapping) else None
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, list):
            yield content


def _is_chunk(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "chunk"


def _message(message: Any, texts: Mapping[str, str]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list) or not any(map(_is_chunk, content)):
        return message
    made: list[Any] = []
    joins = False  # the last part is text that goes on
    for part in content:
        text = _text(part, texts)
        if text is None:
            made.append(part)
        elif joins:
            made[-1]["text"] += text
        else:
            made.append({"type": "text", "text": text})
        joins = text is not None
    return {**message, "content": made[0]["text"] if len(made) == 1 else made}


def _text(part: Any, texts: Mapping[str, str]) -> str | None:
    """Return what a part says; None for one that says more, or something else, than text."""
    if _is_chunk(part):
        return texts[part["name"]]
    is_text = isinstance(part, Mapping) and set(part) == {"type", "text"} and part["type"] == "text"
    return part["text"] if is_text and isinstance(part["text"], str) else None


def _short(part: Any) -> str:
    return ", ".join(sorted(str(key)[:40] for key in list(part)[:8]))
