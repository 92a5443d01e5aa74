"""Items of the Responses API: read from clients, told to them, and made messages of.

::

    items     [reasoning][message][function_call][function_call] [function_call_output] [message]
    messages  [---- assistant: reasoning, content, calls -------][------- tool --------][-- user -]

An item is JSON as the API has it, with an ``id``; what is read is in one form however it was
written. ``encrypted_content`` is sealed (`kvweave.serve.chat.sealed`).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.serve.chat.sealed import unseal
from kvweave.serve.guard.malformed import shown
from kvweave.serve.responses.settings import (
    SETTINGS,
    TOOLS,
    TRIGGER,
    UPDATE,
    read_added,
    read_update,
)
from kvweave.serve.reuse.said import normal

ResponseItem = dict[str, Any]
Find = Callable[[str], ResponseItem | None]  # an item that was stored, by its id

SUMMARY = "Summary of the conversation so far:\n"
PREFIX = {"message": "msg", "function_call": "fc", "reasoning": "rs", "compaction": "cmp"}
# Fields that say nothing to the model.
NOTES = frozenset(
    "id async status phase annotations logprobs created_by prompt_cache_breakpoint cache_control caller "
    "metadata internal_chat_message_metadata_passthrough summary detail end_turn".split()
)
# Of these, what neither this server sends itself nor a client needs to know is unread.
UNREAD = tuple(
    "annotations logprobs phase created_by prompt_cache_breakpoint cache_control caller metadata detail end_turn".split()
)
MAY_BE_EMPTY = ("arguments", "input", "text", "refusal")
TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")


def new_id(kind: str) -> str:
    """Return the id of a new item of type ``kind``."""
    return f"{PREFIX.get(kind, 'item')}_{uuid.uuid4().hex}"


def digest(item: ResponseItem) -> str:
    """Return the same for items that say the same, whatever their ids."""
    said = {key: value for key, value in item.items() if key not in NOTES}
    if item["type"] == "function_call":
        said["arguments"] = normal(item["arguments"]) or item["arguments"]
    if item["type"] == "reasoning":
        said = {"type": "reasoning", "text": reasoning_of(item)}
    if item["type"] == "message":
        said["content"] = [_part_said(part) for part in item["content"]]
    return blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=8).hexdigest()


def _part_said(part: Mapping[str, Any]) -> str | list[str]:
    """Return what a part says; a chunk that is named says something else than its name."""
    return [part["name"]] if part["type"] == "chunk" else _said(part)


def fresh(known: Mapping[str, ResponseItem], items: Iterable[ResponseItem]) -> list[ResponseItem]:
    """Return the items that are not known by their id yet, each once.

    One that says something else than what has its id gets another: the same whenever it comes.
    """
    taken, made = dict(known), []
    for item in items:
        said = digest(item)
        while (other := taken.get(item["id"])) is not None and digest(other) != said:
            kind = item["type"]
            hashed = blake2b(f"{item['id']} {said}".encode(errors="replace"), digest_size=16)
            item = item | {"id": f"{PREFIX.get(kind, 'item')}_{hashed.hexdigest()}"}
        if other is None:
            taken[item["id"]] = item
            made.append(item)
    return made


def apart(before: Iterable[ResponseItem], items: Iterable[ResponseItem]) -> list[ResponseItem]:
    """Return the items, those with the id of one before them under another; summaries keep theirs,
    which leads to what they stand for."""
    taken, made = {item["id"] for item in before}, []
    for item in items:
        if item["id"] in taken and item["type"] != "compaction":
            item = item | {"id": new_id(item["type"])}
        taken.add(item["id"])
        made.append(item)
    return made


# ---- reading


def read_items(
    given: str | Sequence[Mapping[str, Any]], find: Find, where: str
) -> list[ResponseItem]:
    """Return the items of an input. Raises InvalidArgument for what the model cannot be given."""
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read(item, find, f"{where}.{i}") for i, item in enumerate(given)]


def _read(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    kind = given.get("type") or ("message" if "role" in given else None)
    if kind == "item_reference" or (kind is None and "id" in given):
        found = find(_text(given, "id", where))
        if found is None:
            raise InvalidArgument(where, f"no stored item {given['id']!r}", "send the item itself")
        return found
    kind = {"compaction_summary": "compaction"}.get(str(kind), kind)
    if kind == TRIGGER:
        raise InvalidArgument(where, "it asks for a summary", "let it be the last of an input")
    reader = READERS.get(str(kind))
    if reader is None:
        raise InvalidArgument(
            where, f"an item of type {str(kind)[:64]!r} is nothing this model reads", "leave it out"
        )
    id = given.get("id")
    made = {"type": kind, "id": id if isinstance(id, str) and id else new_id(str(kind))}
    made |= {"status": "completed"} if kind not in ("compaction", *SETTINGS) else {}
    return made | reader(given, find, where)


def unread(given: str | Sequence[Mapping[str, Any]] | None, where: str) -> list[str]:
    """Return the names of what items may have and the model is not given."""
    found = []
    for i, item in enumerate(given or () if not isinstance(given, str) else ()):
        names = ["namespace", *(["name"] if "output" in item else [])]
        names += ["async"] if not str(item.get("type")).endswith("_call") else []
        found += _noted(item, [*names, *UNREAD], f"{where}.{i}")
        if item.get("type") == "reasoning" and not (
            item.get("content") or item.get("encrypted_content")
        ):
            found += _noted(item, ("summary",), f"{where}.{i}")
        for field in ("content", "output"):
            parts = item.get(field)
            for j, part in enumerate(parts if isinstance(parts, list) else ()):
                if isinstance(part, Mapping):
                    found += _noted(part, UNREAD, f"{where}.{i}.{field}.{j}")
    return found


def _noted(given: Mapping[str, Any], names: Iterable[str], where: str) -> list[str]:
    return [f"{where}.{name}" for name in names if given.get(name) not in (None, [], {}, "")]


def _known(given: Mapping[str, Any], names: str, where: str) -> None:
    """Raise InvalidArgument for a field that may change what the item says."""
    for name, value in given.items():
        if name != "type" and name not in NOTES and name not in names.split() and value is not None:
            raise InvalidArgument(f"{where}.{name[:64]}", "it is not known", "leave it out")


def _text(given: Mapping[str, Any], name: str, where: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or (name not in MAY_BE_EMPTY and not value):
        raise InvalidArgument(f"{where}.{name}", f"it should be text, not {shown(value)}")
    return value


def _message(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    _known(given, "role content", where)
    role = given.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        reason = f"{shown(role)} is none of user, assistant, system, developer"
        raise InvalidArgument(f"{where}.role", reason)
    content = given.get("content")
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    return {"role": role, "content": _parts(content, role == "assistant", f"{where}.content")}


def _parts(content: Any, answered: bool, where: str) -> list[ResponseItem]:
    """Return the parts of a content. Raises InvalidArgument for what is no text."""
    if not isinstance(content, list):
        reason = f"it should be text, or a list of parts, not {shown(content)}"
        raise InvalidArgument(where, reason)
    made: list[ResponseItem] = []
    for i, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        place = f"{where}.{i}"
        if kind in TEXTS:
            _known(part, "text", place)
            told: ResponseItem = {
                "type": "output_text" if answered else "input_text",
                "text": _text(part, "text", place),
            }
            made.append(told | ({"annotations": [], "logprobs": []} if answered else {}))
        elif kind in ("refusal", "chunk"):
            field = "name" if kind == "chunk" else "refusal"
            made.append({"type": kind, field: _text(part, field, place)})
        else:
            reason = f"a part of type {str(kind)[:64]!r} is no text; this model reads text"
            raise InvalidArgument(place, reason, "send its text, or leave it out")
    return made


def _call(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    what = "input" if given["type"] == "custom_tool_call" else "arguments"
    _known(given, f"call_id name {what} namespace", where)
    later = {"async": True} if given.get("async") is True else {}
    return {name: _text(given, name, where) for name in ("call_id", "name", what)} | later


def _added(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    return read_added(given, where)


def _update(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    return read_update(given, where)


def _result(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    _known(given, "call_id output name", where)
    output = given.get("output")
    if not isinstance(output, str):
        output = _parts(output, False, f"{where}.output")
    return {"call_id": _text(given, "call_id", where), "output": output}


def _reasoning(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    _known(given, "content encrypted_content", where)
    content = given.get("content")
    texts = _parts(content, False, f"{where}.content") if content else []
    text = "".join(part.get("text", "") for part in texts)
    text = text or str(unseal(given.get("encrypted_content")).get("reasoning") or "")
    if not text and isinstance(given.get("id"), str):
        stored = find(given["id"])  # a client that has it stored sends its id only
        text = "" if stored is None else reasoning_of(stored)
    told = [{"type": "reasoning_text", "text": text}] if text else []
    return {"summary": [], "content": told}


def _compaction(given: Mapping[str, Any], find: Find, where: str) -> ResponseItem:
    _known(given, "encrypted_content", where)
    sealed = unseal(given.get("encrypted_content"))
    covers = sealed.get("covers", [])
    digests = isinstance(covers, list) and all(isinstance(each, str) for each in covers)
    if not digests or not isinstance(sealed.get("summary"), str):
        reason = "it was not made by a server of this kind"
        raise InvalidArgument(f"{where}.encrypted_content", reason, "send the items themselves")
    return {"encrypted_content": given["encrypted_content"]}


READERS: dict[str, Callable[[Mapping[str, Any], Find, str], ResponseItem]] = {
    "message": _message,
    "function_call": _call,
    "custom_tool_call": _call,
    "function_call_output": _result,
    "custom_tool_call_output": _result,
    "reasoning": _reasoning,
    "compaction": _compaction,
    TOOLS: _added,
    UPDATE: _update,
}


def reasoning_of(item: ResponseItem) -> str:
    """Return the text of a reasoning item."""
    return "".join(part.get("text", "") for part in item.get("content") or ())


# ---- messages


def messages_of(instructions: str | None, items: Sequence[ResponseItem]) -> list[dict[str, Any]]:
    """Return items as `ChatAsk` has messages: what one answer was made of is one message."""
    made: list[dict[str, Any]] = []
    if instructions:
        made.append({"role": "system", "content": instructions})
    answer: dict[str, Any] | None = None  # goes on while items of the assistant come
    for item in items:
        kind = item["type"]
        if kind in SETTINGS:
            continue
        answers = kind in ("reasoning", "function_call", "custom_tool_call")
        if not answers and not (kind == "message" and item["role"] == "assistant"):
            answer = None
            made.append(_other(item))
            continue
        if answer is None or _begins(item, answer):
            answer = {"role": "assistant", "content": ""}
            made.append(answer)
        _add(answer, item)
    return made


def _other(item: ResponseItem) -> dict[str, Any]:
    if item["type"] == "message":
        return {"role": item["role"], "content": _content(item["content"])}
    if item["type"] == "compaction":
        return {"role": "user", "content": SUMMARY + unseal(item["encrypted_content"])["summary"]}
    output = item["output"]
    text = output if isinstance(output, str) else _content(output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": text}


def _content(parts: Sequence[ResponseItem]) -> str | list[ResponseItem]:
    """Return parts as chat messages have them; text alone as text."""
    if any(part["type"] == "chunk" for part in parts):
        return [p if p["type"] == "chunk" else {"type": "text", "text": _said(p)} for p in parts]
    return "".join(map(_said, parts))


def _joined(a: Any, b: Any) -> Any:
    """Return two contents as one: text where both are."""
    if isinstance(a, str) and isinstance(b, str):
        return a + b
    parts = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in (a, b))
    return [part for each in parts for part in each if part.get("text", True)]


def _said(part: Mapping[str, Any]) -> str:
    return str(part.get("text", part.get("refusal", "")))


def _begins(item: ResponseItem, answer: Mapping[str, Any]) -> bool:
    """Tell whether an item is of another answer than the one before it."""
    if item["type"] == "reasoning":
        return bool(answer["content"] or answer.get("tool_calls"))
    if item["type"] == "message":
        return bool(answer["content"]) and not answer.get("tool_calls")
    return False


def _add(answer: dict[str, Any], item: ResponseItem) -> None:
    if item["type"] == "reasoning":
        answer["reasoning_content"] = answer.get("reasoning_content", "") + reasoning_of(item)
    elif item["type"] == "message":
        content = _content(item["content"])
        answer["content"] = _joined(answer["content"], content)
    else:
        given = item["input"] if item["type"] == "custom_tool_call" else None
        arguments = item["arguments"] if given is None else json.dumps({"input": given})
        function = {"name": item["name"], "arguments": arguments}
        call = {"id": item["call_id"], "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)
