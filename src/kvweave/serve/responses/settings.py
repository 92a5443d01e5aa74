"""Items that nobody says: tools that are added, and how to answer from there on.

::

    items   [additional_tools: look] [u0] [a0] [configuration_update: effort low] [u1]
    asked   with look beside the tools of the request, and with the effort low

A template shows tools in one place, so what holds at the end holds for the whole prompt.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvweave.errors import InvalidArgument
from kvweave.run.grammar import GrammarText
from kvweave.serve.chat.ask import EFFORTS
from kvweave.serve.guard.malformed import shown

TOOLS, UPDATE, TRIGGER = "additional_tools", "configuration_update", "compaction_trigger"
SETTINGS = (TOOLS, UPDATE)  # types of items that are none of the conversation

_Json = dict[str, Any]


@dataclass(slots=True)
class ItemSettings:
    """What items say of how to answer; ``update`` has what the request does not decide any more."""

    tools: list[_Json] = field(default_factory=list)
    update: _Json = field(default_factory=dict)  # effort, format


def settings_of(items: Sequence[Mapping[str, Any]]) -> ItemSettings:
    """Return what holds at the end of items."""
    made = ItemSettings()
    for item in items:
        if item["type"] == TOOLS:
            made.tools += item["tools"]
        elif item["type"] == UPDATE:
            if "reasoning" in item:
                made.update["effort"] = item["reasoning"]["effort"]
            if "text" in item:
                made.update["format"] = item["text"]["format"]
    return made


def read_added(given: Mapping[str, Any], where: str) -> _Json:
    """Return the fields of an item that adds tools. Raises InvalidArgument."""
    only(given, ("type", "id", "role", "tools"), where)
    tools = given.get("tools")
    if given.get("role") != "developer":
        reason = f"{shown(given.get('role'))} adds no tools"
        raise InvalidArgument(f"{where}.role", reason, "say developer")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise InvalidArgument(f"{where}.tools", f"it should be a list of tools, not {shown(tools)}")
    return {"role": "developer", "tools": tools}


def read_update(given: Mapping[str, Any], where: str) -> _Json:
    """Return the fields of an item that says how to answer. Raises InvalidArgument."""
    only(given, ("type", "id", "reasoning", "text"), where)
    made: _Json = {}
    for name, inner in (("reasoning", "effort"), ("text", "format")):
        if (value := given.get(name)) is None:
            continue
        place = f"{where}.{name}"
        if not isinstance(value, dict):
            raise InvalidArgument(place, f"it should be an object, not {shown(value)}")
        only(value, (inner,), place)
        if inner not in value:
            raise InvalidArgument(
                f"{place}.{inner}", "it is missing", f"say it, or leave {name} out"
            )
        made[name] = {inner: value[inner]}
    if not made:
        raise InvalidArgument(where, "it changes nothing", "say reasoning, text or both")
    effort = made.get("reasoning", {}).get("effort")
    if effort is not None and effort not in EFFORTS:
        reason = f"{shown(effort)} is none of {', '.join(EFFORTS)}"
        raise InvalidArgument(f"{where}.reasoning.effort", reason)
    if "text" in made:
        formatted(made["text"]["format"], f"{where}.text.format")
    return made


def formatted(given: Any, where: str) -> GrammarText | None:
    """Return what a text of this format keeps to. Raises InvalidArgument."""
    if not isinstance(given, dict):
        raise InvalidArgument(where, f"it should be an object, not {shown(given)}")
    kind = given.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return GrammarText("json_object", argument=where)
    if kind != "json_schema":
        reason = f"{shown(kind)} is none of text, json_object, json_schema"
        raise InvalidArgument(f"{where}.type", reason)
    if not isinstance(given.get("schema"), dict):
        reason = f"it should be an object, not {shown(given.get('schema'))}"
        raise InvalidArgument(f"{where}.schema", reason)
    return GrammarText("json_schema", given["schema"], where)


def only(given: Mapping[str, Any], names: Sequence[str], where: str) -> None:
    """Raise InvalidArgument for a field that may change what is meant."""
    for name, value in given.items():
        if name not in names and value is not None:
            reason, hint = "it is not known", f"send {', '.join(names)}"
            raise InvalidArgument(f"{where}.{name[:64]}", reason, hint)
