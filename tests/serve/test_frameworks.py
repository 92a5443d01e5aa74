"""LangChain, LlamaIndex and smolagents, unchanged, begin as docs/agents.md says and use tools.

Each runs in an interpreter of its own: this one where it has the package, else the one that
KVWEAVE_FRAMEWORKS names. The model is a tiny random one whose logits are forced (`answering`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from answering import Answers, answering
from needs import need
from programs import shown

from kvweave.serve.chat.ask import ChatAsk

need("openai")
need("llguidance")
from serve.test_openai import Server, serving  # noqa: E402

pytestmark = pytest.mark.slow
KEY = "key-of-anna"
ABSENT = 77  # what code ends with where its package is not there
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'
# as grammars want JSON: nothing else may be written where a call must come
CITY, AMOUNT, ANSWER = '{"city": "Oslo"}', '{"amount": 3}', '{"answer": "It rains ."}'


def answer(ask: ChatAsk) -> str:
    """Call the weather, then say what it is; where an amount is asked for, say three."""
    names = [tool["function"]["name"] for tool in ask.shown_tools]
    if "Rain" in names:
        return CALL.format("Rain", AMOUNT)
    if ask.grammar is not None:
        return AMOUNT
    if "wind in Oslo" in str(ask.messages):  # the tool's result; some send it as the user's
        return CALL.format("final_answer", ANSWER) if "final_answer" in names else "It rains ."
    return CALL.format("get_weather", CITY) if "get_weather" in names else "so well ."


@pytest.fixture(scope="module")
def server(bundled: Path) -> Iterator[tuple[Server, Answers]]:
    with (
        pytest.MonkeyPatch.context() as patch,
        answering(bundled, patch, answer) as (engine, answers),
    ):
        with serving(engine) as server:
            yield server, answers
            server.settle()
            server.on_engine(lambda engine: engine.check_integrity())


def run(file: Path, module: str, package: str, code: str) -> Any:
    """Run code, from a file, where there is this module; return the JSON that it printed last."""
    python = sys.executable if importlib.util.find_spec(module.split(".")[0]) else None
    python = python or os.environ.get("KVWEAVE_FRAMEWORKS")
    if python is None:
        pytest.skip(
            f"no {package} here: install it somewhere and name that python in KVWEAVE_FRAMEWORKS"
        )
    env = {name: os.environ[name] for name in ("PATH", "LANG", "HOME") if name in os.environ}
    env |= {
        "NO_PROXY": "127.0.0.1",
        "HTTPS_PROXY": "http://127.0.0.1:9",
        "LANGSMITH_TRACING": "false",
    }
    guard = f"try:\n    import {module}\nexcept ImportError:\n    raise SystemExit({ABSENT})\n"
    file.write_text(guard + code)
    done = subprocess.run([python, str(file)], env=env, capture_output=True, text=True, timeout=240)
    if done.returncode == ABSENT:
        pytest.skip(
            f"{python} has no {package}: install it there, or name another in KVWEAVE_FRAMEWORKS"
        )
    assert done.returncode == 0, f"{code}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout.splitlines()[-1])


LANGCHAIN = '''
import json
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return "wind in " + city

class Rain(BaseModel):
    """How much."""
    amount: int

talk = [HumanMessage("rain in Oslo ?")]
bound = model.bind_tools([get_weather])
said = bound.invoke(talk)
talk += [said, *[get_weather.invoke(call) for call in said.tool_calls]]
last = bound.invoke(talk)
ways = ("json_schema", "function_calling", "json_mode")
found = [model.with_structured_output(Rain, method=way).invoke("how much ?").amount for way in ways]
streamed = list(bound.stream(talk[:1]))
whole = sum(streamed[1:], streamed[0])
print(json.dumps({
    "calls": [[c["name"], c["args"]] for c in said.tool_calls], "end": last.content, "found": found,
    "streamed": [[c["name"], c["args"]] for c in whole.tool_calls],
    "cached": last.usage_metadata["input_token_details"]["cache_read"],
    "given": last.usage_metadata["input_tokens"], "result": talk[-1].content,
}))
'''


def test_langchain(server: tuple[Server, Answers], tmp_path: Path) -> None:
    begin = shown("langchain", server[0].url, KEY)
    told = run(tmp_path / "it.py", "langchain_openai", "langchain-openai", begin + LANGCHAIN)
    assert told["calls"] == told["streamed"] == [["get_weather", {"city": "Oslo"}]]
    assert told["result"] == "wind in Oslo" and told["end"] == "It rains ."
    assert told["found"] == [3, 3, 3]
    assert 0 < told["given"] - told["cached"] < 60, "only the result was computed"


LLAMAINDEX = '''
import asyncio, json
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel

class Rain(BaseModel):
    """How much."""
    amount: int

called = []
def get_weather(city: str) -> str:
    """Weather of a city."""
    called.append(city)
    return "wind in " + city

tool = FunctionTool.from_defaults(get_weather)
said = llm.chat_with_tools([tool], user_msg="rain in Oslo ?")
calls = llm.get_tool_calls_from_response(said)

async def main():
    agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="so")
    return str(await agent.run("rain in Oslo ?"))

end = asyncio.run(main())
amount = llm.structured_predict(Rain, PromptTemplate("how much ?")).amount
streamed = "".join(each.delta or "" for each in llm.stream_chat([ChatMessage("so")]))
print(json.dumps({
    "calls": [[c.tool_name, c.tool_kwargs] for c in calls], "called": called, "end": end,
    "amount": amount, "streamed": streamed,
}))
'''


def test_llamaindex(server: tuple[Server, Answers], tmp_path: Path) -> None:
    begin = shown("llamaindex", server[0].url, KEY)
    package = "llama-index-llms-openai-like"
    told = run(tmp_path / "it.py", "llama_index.llms.openai_like", package, begin + LLAMAINDEX)
    assert told["calls"] == [["get_weather", {"city": "Oslo"}]]
    assert told["called"] == ["Oslo"] and told["end"] == "It rains ."
    assert told["amount"] == 3 and told["streamed"] == "so well ."


SMOLAGENTS = '''
import json
from smolagents import tool

@tool
def get_weather(city: str) -> str:
    """Weather of a city.

    Args:
        city: which.
    """
    return "wind in " + city

agent = ToolCallingAgent(tools=[get_weather], model=model, verbosity_level=0)
end = agent.run("rain in Oslo ?")
steps = [s for s in agent.memory.steps if hasattr(s, "tool_calls")]
print(json.dumps({"end": end, "calls": [[c.name, c.arguments] for s in steps for c in s.tool_calls or ()]}))
'''


def test_smolagents(server: tuple[Server, Answers], tmp_path: Path) -> None:
    begin = shown("smolagents", server[0].url, KEY)
    told = run(tmp_path / "it.py", "smolagents", "smolagents[openai]", begin + SMOLAGENTS)
    assert told["end"] == "It rains ."
    assert [name for name, _ in told["calls"]] == ["get_weather", "final_answer"]
    asked = [ask for ask, _ in server[1].asked if "final_answer" in str(ask.tools)]
    assert [ask.tool_choice for ask in asked] == ["required"] * 2, "a call must come each time"
