"""Tools of a request, and those that its messages add and remove on the way.

::

    tools [look][write]    messages ... [tool_removal: write] ... [tool_addition: send]
    offered                [look][send]          what is true at the end is true of the whole prompt

A template shows tools in one place, so nothing can be offered from some message on only.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

from kvweave.errors import InvalidArgument
from kvweave.serve.anthropic.noted import Noted
from kvweave.serve.routes.base import STRICT


class ClientTool(Noted):
    """A tool that the client runs. Of deferred ones all is shown; to be ``strict``, force a call."""

    type: Literal["custom"] | None = None
    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    input_schema: dict[str, Any]
    strict: Any = None
    defer_loading: Any = None
    input_examples: Any = None
    eager_input_streaming: Any = None
    allowed_callers: Any = None

    def function(self) -> dict[str, Any]:
        """Return it as templates take it."""
        made: dict[str, Any] = {"name": self.name, "parameters": self.input_schema}
        if self.description is not None:
            made["description"] = self.description
        return {"type": "function", "function": made}


class ForeignTool(Noted):
    """A tool of Anthropic's own; this server does not have it, and shows the model nothing of it."""

    model_config = ConfigDict(extra="ignore")
    is_left_out: ClassVar[bool] = True
    type: str
    name: str | None = None


def _whose(given: object) -> str:
    kind = given.get("type") if isinstance(given, dict) else getattr(given, "type", None)
    return "foreign" if isinstance(kind, str) and kind != "custom" else "custom"


Tool = Annotated[
    Annotated[ClientTool, Tag("custom")] | Annotated[ForeignTool, Tag("foreign")],
    Discriminator(_whose),
]


class ToolByName(BaseModel):
    """A tool of the request, or one that a message before defined."""

    model_config = STRICT
    type: Literal["tool_reference"]
    name: str


class ForeignByName(Noted):
    """Tools of an MCP server, which this server has none of."""

    model_config = ConfigDict(extra="ignore")
    is_left_out: ClassVar[bool] = True
    type: Literal["mcp_tool_reference", "mcp_toolset_reference"]


class DefinedTool(BaseModel):
    """A tool that is defined here."""

    model_config = STRICT
    type: Literal["tool_definition"]
    definition: Tool


class AdditionBlock(Noted):
    """From here on there is this tool."""

    type: Literal["tool_addition"]
    tool: Annotated[ToolByName | ForeignByName | DefinedTool, Field(discriminator="type")]


class RemovalBlock(Noted):
    """From here on there is not."""

    type: Literal["tool_removal"]
    tool: Annotated[ToolByName | ForeignByName, Field(discriminator="type")]


ToolChange = AdditionBlock | RemovalBlock


def offered(tools: Sequence[Tool], changes: Iterable[tuple[str, ToolChange]]) -> list[ClientTool]:
    """Return the tools that the model is shown; ``changes``: each with its path.

    Raises InvalidArgument for a tool that nothing defines.
    """
    known = {tool.name: tool for tool in tools if isinstance(tool, ClientTool)}
    foreign = {tool.name for tool in tools if isinstance(tool, ForeignTool)}
    gone: set[str] = set()
    for path, change in changes:
        tool = change.tool
        if isinstance(tool, DefinedTool):
            if isinstance(tool.definition, ClientTool):
                known[tool.definition.name] = tool.definition
                gone.discard(tool.definition.name)
            else:
                foreign.add(tool.definition.name)
        elif isinstance(tool, ToolByName):
            if tool.name not in known and tool.name not in foreign:
                reason = f"no tool {tool.name[:64]!r} is declared or was defined before"
                raise InvalidArgument(f"{path}.tool.name", reason, "put it into tools")
            (gone.add if isinstance(change, RemovalBlock) else gone.discard)(tool.name)
    return [tool for name, tool in known.items() if name not in gone]


def changes_between(tools: Sequence[Tool], now: Sequence[ClientTool]) -> Iterator[dict[str, Any]]:
    """Yield the changes that make of a request's tools those that are offered now."""
    names = {tool.name for tool in now}
    declared = [tool for tool in tools if isinstance(tool, ClientTool)]
    for tool in declared:
        if tool.name not in names:
            by_name = {"type": "tool_reference", "name": tool.name}
            yield {"type": "tool_removal", "tool": by_name}
    for tool in now:
        if tool not in declared:
            definition = tool.model_dump(mode="json", exclude_unset=True)
            defined = {"type": "tool_definition", "definition": definition}
            yield {"type": "tool_addition", "tool": defined}
