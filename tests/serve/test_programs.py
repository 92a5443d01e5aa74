"""pi, opencode, qwen-code and codex, unchanged, work through a loop of tools to its end.

Their prompts are 2,400 to 32,000 tokens of its tokenizer, so the model is a tiny random one with 65,536 positions whose
logits are forced (`answering`): it calls what they offer to write a file and then to read it. All else,
from what they send to what they print, is theirs and the server's. Set KVWEAVE_AGENTS; see `programs`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from answering import answering
from needs import need
from programs import PROGRAMS, Started

from kvweave.serve.chat.ask import ChatAsk

need("openai")
from serve.test_openai import serving  # noqa: E402

pytestmark = pytest.mark.slow
CALL = "<think>\nso well\n</think>\n\nI look .\n<tool_call>\n{}\n</tool_call>"
KEY = "key-of-anna"


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_loop_of_tools_ends(
    name: str, bundled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, work, home = PROGRAMS[name], tmp_path / "work", tmp_path / "home"
    work.mkdir()
    home.mkdir()
    file, text = str(work / "made.txt"), "cold rain in Oslo"
    calls = (program.write(file, text), program.read(file))

    def answer(ask: ChatAsk) -> str:
        if not ask.shown_tools:
            return "a file"  # of a title
        n_done = sum(message["role"] == "tool" for message in ask.messages)
        if n_done == len(calls):
            return "It is all there ."
        tool, arguments = calls[n_done]
        # as models write it: not as these programs write it again
        return CALL.format(
            json.dumps({"name": tool, "arguments": arguments}, separators=(",", " : "))
        )

    with (
        answering(bundled, monkeypatch, answer) as (engine, answers),
        serving(engine, keep_unstored=program.keep_unstored) as server,
    ):
        printed = program.run(Started(home, work, server.url, KEY), "make a file")
        server.settle()
        server.on_engine(lambda engine: engine.check_integrity())
    assert "It is all there ." in printed
    assert (work / "made.txt").read_text().strip() == text
    main, made = zip(*[pair for pair in answers.asked if pair[0].shown_tools], strict=True)
    assert [sum(m["role"] == "tool" for m in ask.messages) for ask in main] == [0, 1, 2]
    assert text in str(main[-1].messages[-1]["content"]), "what was read came back"
    ids = [call["id"] for m in main[-1].messages for call in m.get("tool_calls") or ()]
    assert len(set(ids)) == 2
    # each later request computes the result of the tool, and no call anew
    first, *later = [each.opened[0].counts() for each in made]
    assert first["prefilled"] == made[0].opened[0].n_tokens > 1000
    assert all(0 < each["prefilled"] < 300 and each["repaired"] == 0 for each in later), later
