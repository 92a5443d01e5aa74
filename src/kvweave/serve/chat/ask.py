"""What is asked of a chat, in terms of no API: each dialect makes one of these of its request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvweave.run.grammar import GrammarText
from kvweave.run.sample import Sampling
from kvweave.serve.reuse.pooled import WeaveOptions

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True)
class ChatAsk:
    """One request for answers of a conversation.

    Messages are as chat templates take them: ``role``, ``content`` as text or parts, calls as
    ``tool_calls`` with ``id`` and ``function``, results as ``role: tool`` with ``tool_call_id``,
    thinking as ``reasoning_content``.
    """

    messages: Sequence[Mapping[str, Any]]
    sampling: Sampling
    max_tokens: int | None = None  # None: as many as fit, up to a default
    tools: Sequence[Mapping[str, Any]] = ()  # {"type": "function", "function": {...}}
    tool_choice: str = "auto"  # none, auto, required; or a tool by its name, as `tool:NAME`
    parallel: bool = True  # whether an answer may have several calls
    variables: Mapping[str, Any] = field(default_factory=dict)  # of the template
    continues: bool = False  # the answer goes on with the last message
    grammar: GrammarText | None = None  # that the text keeps to
    how: WeaveOptions = field(default_factory=WeaveOptions)
    n: int = 1
    private: bool = False  # nothing of it is kept for later requests

    @property
    def shown_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the template is to show."""
        return () if self.tool_choice == "none" else self.tools

    def free(self) -> ChatAsk:
        """Return the same without what the answer is held to."""
        return replace(self, grammar=None, tools=self.shown_tools, tool_choice="auto")


def thinking(effort: str | None, enabled: bool | None) -> dict[str, Any]:
    """Return the template's variables for what APIs call effort and thinking."""
    made: dict[str, Any] = {}
    if effort is not None:
        made["reasoning_effort"] = effort if effort != "none" else "low"
        enabled = effort != "none" if enabled is None else enabled
    if enabled is not None:
        made |= {"enable_thinking": enabled, "thinking": enabled}
    return made
