"""OpenAI's Agents SDK, unchanged, over ``/v1/responses``: tools, handoffs, sessions, compaction.

The model is scripted (`tests/scripted.py`). Needs ``pip install openai-agents``, which may want other
versions of what it depends on: a virtual environment of its own, with this one's packages on its path,
will do.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from needs import need
from scripted import Script, scripted
from serve.test_openai import Server, serving
from serve.test_tools import THOUGHT, WROTE

openai = need("openai")
agents = need("agents", "openai-agents")
MODEL = "gpt-demo"  # its sessions make summaries only with models that are called so


@pytest.fixture(scope="module")
def talk(bundled: Path) -> Iterator[tuple[Server, Script]]:
    agents.set_tracing_disabled(True)
    with pytest.MonkeyPatch.context() as patch:
        engine, script = scripted(bundled, patch)
        with engine, serving(engine, aliases=(MODEL,)) as server:
            yield server, script
            server.settle()
            server.on_engine(lambda engine: engine.check_integrity())


def run(talk: Any, lines: list[str], work: Callable[[Any, Any], Awaitable[Any]]) -> list[Any]:
    """Run ``work`` with a client and an agent that has one tool; return what the tool was asked."""
    server, script = talk
    script.lines.clear()
    script.say(*lines)
    asked: list[Any] = []

    def get_weather(city: str, days: int) -> str:
        """weather"""
        asked.append((city, days))
        return f"rain in {city} for {days}"

    async def main() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="key-of-anna") as client:
            model = agents.OpenAIResponsesModel(MODEL, client)
            tools = [agents.function_tool(get_weather)]
            await work(client, agents.Agent(name="it", instructions="so", tools=tools, model=model))

    asyncio.run(main())
    server.settle()
    return asked


def test_a_loop_of_tools(talk: Any) -> None:
    async def work(client: Any, agent: Any) -> None:
        done = await agents.Runner.run(agent, "rain in Oslo ?")
        assert done.final_output == "so well ."
        kinds = [type(item).__name__ for item in done.new_items]
        assert kinds == [
            "ReasoningItem", "MessageOutputItem", "ToolCallItem", "ToolCallOutputItem",
            "MessageOutputItem",
        ]  # fmt: skip
        first, second = done.context_wrapper.usage.request_usage_entries
        cached = second.input_tokens_details.cached_tokens
        assert cached > first.input_tokens, "what was asked, said and called is found again"

    assert run(talk, [THOUGHT + "I look .\n" + WROTE, "so well ."], work) == [("Oslo", 3)]


def test_streamed_and_gone_on_from_a_response(talk: Any) -> None:
    async def work(client: Any, agent: Any) -> None:
        before = await agents.Runner.run(agent, "rain ?")
        more = agents.Runner.run_streamed(
            agent, "and now ?", previous_response_id=before.last_response_id
        )
        names = [e.name async for e in more.stream_events() if e.type == "run_item_stream_event"]
        assert names == ["tool_called", "tool_output", "message_output_created"]
        assert more.final_output == "then ."
        listed = await client.responses.input_items.list(before.last_response_id)
        assert len(listed.data) == 1

    assert run(talk, ["so .", WROTE, "then ."], work) == [("Oslo", 3)]


def test_a_session_that_is_a_conversation(talk: Any) -> None:
    async def work(client: Any, agent: Any) -> None:
        session = agents.OpenAIConversationsSession(openai_client=client)
        await agents.Runner.run(agent, "rain ?", session=session)
        done = await agents.Runner.run(agent, "and ?", session=session)
        assert done.final_output == "two ."
        items = await session.get_items()
        kinds = ["message", "function_call", "function_call_output", *["message"] * 3]
        assert [item.get("type", "message") for item in items] == kinds
        await session.pop_item()
        assert len(await session.get_items()) == 5

    run(talk, [WROTE, "one .", "two ."], work)


def test_a_session_that_is_compacted(talk: Any) -> None:
    async def work(client: Any, agent: Any) -> None:
        inner = agents.SQLiteSession("it")
        module = agents.memory.openai_responses_compaction_session
        session = module.OpenAIResponsesCompactionSession(
            "it", inner, client=client, model=MODEL,
            should_trigger_compaction=lambda known: len(known["session_items"]) > 3,
        )  # fmt: skip
        done = await agents.Runner.run(agent, "rain ?", session=session)
        assert done.final_output == "one ."
        kinds = [item.get("type", "message") for item in await inner.get_items()]
        assert kinds == ["message", "compaction"]
        done = await agents.Runner.run(agent, "and ?", session=session)
        assert done.final_output == "two ."

    run(talk, [WROTE, "one .", "there is rain .", "two ."], work)


def test_an_agent_hands_over(talk: Any) -> None:
    call = {"name": "transfer_to_other", "arguments": {}}
    handing = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"

    async def work(client: Any, agent: Any) -> None:
        other = agents.Agent(name="other", instructions="well", model=agent.model)
        first = agents.Agent(name="first", handoffs=[other], model=agent.model)
        done = await agents.Runner.run(first, "rain ?")
        assert done.final_output == "then ." and done.last_agent.name == "other"

    run(talk, [handing, "then ."], work)
