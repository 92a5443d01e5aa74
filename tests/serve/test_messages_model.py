"""Random lives of the real anthropic client, against a plain model of what the API's pages say.

What the language model reads is compared, to the letter, with what the template makes of the messages
that there ought to be: chats that go on, calls and results, thinking that comes back or does not,
streams that are broken off, answers that are gone on with, edits of the context, wrong values, other
clients between, servers that start anew.

python -m pytest -m "slow or not slow" tests/serve/test_messages_model.py
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import random
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from answering import answering
from needs import need
from scripted import TAGS
from serve.plain_messages import (
    BETA,
    CLEARED,
    THINKING,
    TOOLS,
    USES,
    Edits,
    Json,
    alike,
    blocks,
    chat,
    functions,
    tool,
)

anthropic = need("anthropic")
from serve.test_openai import Server, serving  # noqa: E402

LIVES = int(os.environ.get("KVWEAVE_LIVES", 11))  # of 40 deeds each, with -m slow
WRONG: tuple[Json, ...] = (
    {"frobnicate": 1}, {"max_tokens": -1}, {"temperature": -1.0}, {"tool_choice": {"type": "tool"}},
    {"messages": []}, {"thinking": {"type": "enabled", "budget_tokens": 9}},
    {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
    {"messages": [{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "image", "source": {}}]}]}]},
    {"context_management": {"edits": [{"type": USES, "keep": {"type": "tool_uses", "value": -1}}]}},
    {"context_management": {"edits": [{"type": USES}, {"type": THINKING}]}},
    {"context_management": {"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}]}},
)  # fmt: skip


# ---- what is done


@dataclass
class Talk:
    """What a client keeps of one conversation."""

    system: Any
    tools: list[str]
    edits: list[Json] | None
    messages: list[Json] = field(default_factory=list)
    gone: set[int] = field(default_factory=set)  # results that were cleared, by their number

    @property
    def waiting(self) -> list[Json]:
        """The calls that have no result."""
        last = self.messages[-1] if self.messages else {"role": "", "content": []}
        return [b for b in blocks(last["content"]) if b["type"] == "tool_use"]


class Play:
    """One random life."""

    def __init__(self, seed: int, tokenizer: Any) -> None:
        self.rng, self.tokenizer, self.n = random.Random(seed), tokenizer, itertools.count()
        self.server: Server
        self.client: Any = None
        self.asked: list[Any] = []
        self.talks: list[Talk] = []
        self.written: list[Json] = []  # what the model writes next
        self.odd = False
        self.did: Counter[str] = Counter()

    # -- what is said

    def text(self, n: int = 1) -> str:
        return " ".join(f"so {next(self.n)} well ." for _ in range(n))

    def some(self, text: str) -> Any:
        """Text as a string, or as blocks, with a note to a cache now and then."""
        block: Json = {"type": "text", "text": text}
        note = {"cache_control": {"type": "ephemeral"}} if self.rng.random() < 0.5 else {}
        return self.rng.choice(
            [text, [block | note], [block, {"type": "text", "text": self.text()}]]
        )

    def begin(self) -> None:
        edits: list[Json] = []
        if self.rng.random() < 0.4:
            edits.append({"type": THINKING} | self.rng.choice([{}, {"keep": "all"}, {"keep": {"type": "thinking_turns", "value": self.rng.choice([1, 2])}}]))  # fmt: skip
        if self.rng.random() < 0.7:
            kind = self.rng.choice(["tool_uses", "input_tokens"])
            value = self.rng.randrange(4) if kind == "tool_uses" else self.rng.randrange(60, 700)
            more: Json = {"exclude_tools": [self.rng.choice(TOOLS)], "clear_tool_inputs": self.rng.choice([True, False, [self.rng.choice(TOOLS)]]), "clear_at_least": {"type": "input_tokens", "value": self.rng.randrange(100)}}  # fmt: skip
            more = {k: v for k, v in more.items() if self.rng.random() < 0.4}
            keep = {"type": "tool_uses", "value": self.rng.randrange(3)}
            edits.append(
                {"type": USES, "trigger": {"type": kind, "value": value}, "keep": keep} | more
            )
        system = self.some(self.text(3)) if self.rng.random() < 0.8 else None
        tools = self.rng.sample(TOOLS, self.rng.randrange(4))
        self.talks.append(Talk(system, tools, edits if self.rng.random() < 0.7 else None))
        self.did["began"] += 1

    def says(self, talk: Talk) -> list[Json]:
        """The user's next message, and perhaps the operator's."""
        content: list[Json] = []
        for call in talk.waiting:
            result: Json = {"type": "tool_result", "tool_use_id": call["id"]}
            if (drawn := self.rng.random()) < 0.9:
                result["content"] = self.some(self.text(self.rng.choice([1, 4, 12])))
            content.append(result | ({"is_error": True} if drawn < 0.2 else {}))
        made: list[Json] = []
        if not content or self.rng.random() < 0.2:
            content += blocks(self.some(self.text()))
        if self.rng.random() < 0.1:
            late: Json = {"role": "system", "content": self.text()}
            made = [late | ({"clear_at": "next_user_message"} if self.rng.random() < 0.5 else {})]
        one: Json = {"role": "user", "content": content}
        return [one, *made]

    def writes(self, names: list[str], *, thinks: bool, one: bool = False) -> None:
        """Settle what the model writes next."""
        self.written, self.odd = [], self.rng.random() < 0.3
        if thinks and self.rng.random() < 0.5:
            self.written.append({"type": "thinking", "thinking": f"thought {self.text(self.rng.choice([1, 7]))}"})  # fmt: skip
        n_calls = self.rng.choice([0, 1, 1, 2, 3]) if names else 0
        if not n_calls or self.rng.random() < 0.5:
            self.written.append({"type": "text", "text": f"it is {self.text(2)}"})
        for _ in range(min(1, n_calls) if one else n_calls):
            given = {"at": self.text(self.rng.choice([1, 3]))}
            self.written.append(
                {"type": "tool_use", "name": self.rng.choice(names), "input": given}
            )

    def line(self, ask: Any = None) -> str:
        """What is settled, as models of this family write it, or nearly so."""
        made = ""
        for block in self.written:
            if block["type"] == "thinking":
                made += f"<think>\n{block['thinking']}\n</think>\n\n"
            elif block["type"] == "text":
                made += block["text"]
            else:
                call = {"name": block["name"], "arguments": block["input"]}
                wrote = json.dumps(call, separators=(" ,", ":") if self.odd else None)
                made += f"{'' if not made or made.endswith(chr(10)) else chr(10)}<tool_call>\n{wrote}\n</tool_call>"  # fmt: skip
        return made

    def kept(self, content: list[Json]) -> list[Json]:
        """What a client makes of an answer before it sends it back."""
        made: list[Json] = copy.deepcopy(content)
        how = self.rng.choice(
            ["as it is"] * 4
            + ["no thinking", "thought", "signature", "text", "input", "apart", "same ids"]
        )
        for block in made:
            if block["type"] == "thinking" and how in ("thought", "signature"):
                block["thinking" if how == "thought" else "signature"] += "altered"
            elif block["type"] == "text" and how == "text":
                block["text"] += " altered ."
            elif block["type"] == "tool_use" and how == "input":
                block["input"] = {"at": "altered"}
            elif block["type"] == "text" and how == "apart" and len(block["text"]) > 9:
                rest = block["text"][5:]
                made.insert(made.index(block) + 1, {"type": "text", "text": rest})
                block["text"] = block["text"][:5]
                break
        for i, block in enumerate(b for b in made if b["type"] == "tool_use" and how == "same ids"):
            block["id"] = f"call_{i}"  # as some clients count, anew in each message
        made = [b for b in made if how != "no thinking" or b["type"] != "thinking"]
        return made or [{"type": "text", "text": "well ."}]

    # -- what is checked

    def rendered(self, talk: Talk, messages: list[Json], **more: Any) -> str:
        """What the template makes of it."""
        tools = functions(talk.tools)
        goes_on = messages[-1]["role"] == "assistant"
        how = {"continue_final_message": True} if goes_on else {"add_generation_prompt": True}
        made = self.tokenizer.apply_chat_template(
            chat(talk.system, messages), tools=tools if more.pop("shown", True) else None, tokenize=False, **how, **more
        )  # fmt: skip
        return str(made)

    def body(self, talk: Talk, messages: list[Json]) -> Json:
        made: Json = {"model": "demo", "messages": messages, "tools": [tool(t) for t in talk.tools]}
        return made | ({"system": talk.system} if talk.system is not None else {})

    def count(self, talk: Talk, messages: list[Json], **more: Any) -> int:
        n = self.client.beta.messages.count_tokens(**self.body(talk, messages), **more)
        return int(n.input_tokens)

    def edited(self, talk: Talk, messages: list[Json], **how: Any) -> tuple[list[Json], list[Json] | None]:  # fmt: skip
        def size(text: str) -> int:
            return len(self.tokenizer.encode(text, add_special_tokens=False))

        if talk.edits is None:
            return messages, None
        rules = Edits(lambda left: size(self.rendered(talk, left, **how)), size)
        return rules.of(messages, talk.edits)

    def read(self) -> str:
        """What the model was given last."""
        [opened] = self.asked[-1][1].opened
        context = self.server.on_engine(
            lambda engine: engine.contexts_of("anna").get(opened.context)
        )
        assert context is not None
        service = self.server.service

        def text(engine: Any) -> str:
            parts = (engine.table.tokens(p.id)[p.start : p.stop] for p in context.parts)
            tokens = [token for part in parts for token in part]
            return alike(service.assembler.text(tokens))

        return str(self.server.on_engine(text))

    def check(self, talk: Talk, messages: list[Json], **more: Any) -> None:
        wanted, found = alike(self.rendered(talk, messages, **more)), self.read()
        if not found.startswith(wanted):
            n = next(i for i in itertools.count() if found[: i + 1] != wanted[: i + 1])
            around = f"behind {wanted[max(0, n - 80) : n]!r}\n"
            pytest.fail(
                f"{around}  was read {found[n : n + 200]!r}\n  wanted   {wanted[n : n + 200]!r}"
            )

    def same(self, content: list[Json], wanted: list[Json]) -> None:
        """An answer is what was written."""
        left = [
            {k: v for k, v in b.items() if k in ("type", "text", "thinking", "name", "input")}
            for b in content
        ]
        assert left == wanted
        assert all(b["signature"] for b in content if b["type"] == "thinking")

    # -- deeds

    def turn(self) -> None:
        """Say something, and have it answered: whole, streamed, or streamed and broken off first."""
        talk = self.rng.choice(self.talks)
        messages = [*talk.messages, *self.says(talk)]
        choice, thinks = self.rng.random(), self.rng.random()
        more: Json = {}
        shown = not (talk.tools and choice < 0.15)
        if not shown:
            more["tool_choice"] = {"type": "none"}
        one = bool(talk.tools) and 0.15 <= choice < 0.3
        if one:
            more["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
        forced = bool(talk.tools) and 0.3 <= choice < 0.4
        if forced:
            name = self.rng.choice(talk.tools)
            more["tool_choice"] = self.rng.choice([{"type": "any"}, {"type": "tool", "name": name}])
        if thinks < 0.2:
            more["thinking"] = {"type": "disabled"}
        how = {} if thinks >= 0.2 else {"enable_thinking": False}
        self.writes(talk.tools if shown else [], thinks=thinks >= 0.2)
        if forced:
            self.odd = False
            self.written = [{"type": "tool_use", "name": name, "input": {"at": self.text()}}]
            self.did["forced"] += 1
        left, applied = self.edited(talk, messages, shown=shown, **how)
        config = {} if talk.edits is None else {"context_management": {"edits": talk.edits}, **BETA}
        n = self.count(talk, messages, **more, **config)
        assert n == self.count(talk, left, **more)
        asked = {"max_tokens": 400, **self.body(talk, messages), **more, **config}
        if self.rng.random() < 0.15:
            self.broken_off(asked)
        reply = self.streamed(asked) if self.rng.random() < 0.4 else self.client.beta.messages.create(**asked)  # fmt: skip
        self.server.settle()
        self.check(talk, left, shown=shown, **how)
        content = [block.model_dump(exclude_none=True) for block in reply.content]
        if one and len(calls := [b for b in self.written if b["type"] == "tool_use"]) > 1:
            self.written = [b for b in self.written if b not in calls[1:]]
        self.same(content, self.written)
        usage = reply.usage
        assert n == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens  # fmt: skip
        told = reply.context_management
        assert (told and told.model_dump()["applied_edits"]) == applied
        assert reply.stop_reason == ("tool_use" if any(b["type"] == "tool_use" for b in self.written) else "end_turn")  # fmt: skip
        self.did["edited"] += bool(applied)
        if talk.edits is not None and shown and not how:
            results = [b for m in left if m["role"] == "user" for b in blocks(m["content"]) if b["type"] == "tool_result"]  # fmt: skip
            gone = {i for i, b in enumerate(results) if b.get("content") == CLEARED}
            assert talk.gone <= gone, "what was cleared stays so"
            talk.gone = gone
        self.did["turns"] += 1
        talk.messages = [*messages, {"role": "assistant", "content": self.kept(content)}]

    def streamed(self, asked: Json) -> Any:
        self.did["streamed"] += 1
        with self.client.beta.messages.stream(**asked) as stream:
            return stream.get_final_message()

    def broken_off(self, asked: Json) -> None:
        self.did["broken off"] += 1
        with self.client.beta.messages.stream(**asked) as stream:
            for _ in zip(range(self.rng.randrange(1, 9)), stream, strict=False):
                pass
        self.server.settle()

    def stops(self) -> None:
        """An answer that ends at a string or at so many tokens, and is gone on with."""
        talk = self.rng.choice(self.talks)
        messages = [*talk.messages, *self.says(talk)]
        self.written = [{"type": "text", "text": f"it is {self.text(3)} done {self.text(1)}"}]
        line, asked = self.line(), {**self.body(talk, messages)}
        if self.rng.random() < 0.5:
            asked |= {"max_tokens": 99, "stop_sequences": ["no such", " done"]}
            wanted, why = (line[: line.index(" done")], "stop_sequence")
        else:
            n = self.rng.randrange(1, 12)
            ids = self.tokenizer.encode(line, add_special_tokens=False)
            wanted, why = self.tokenizer.decode(ids[:n]), "max_tokens"
            asked |= {"max_tokens": n}
        streams = self.rng.random() < 0.4
        reply = self.streamed(asked) if streams else self.client.beta.messages.create(**asked)
        self.server.settle()
        self.check(talk, messages)
        begun = reply.content[0].text
        assert (begun.strip(), reply.stop_reason) == (wanted.strip(), why)
        assert reply.stop_sequence == (" done" if why == "stop_sequence" else None)
        self.did[why] += 1
        if self.rng.random() < 0.7:
            given = [*messages, {"role": "assistant", "content": self.some(begun) if self.rng.random() < 0.3 else begun}]  # fmt: skip
            self.written = [{"type": "text", "text": f" and {self.text(2)}"}]
            n = self.count(talk, given)
            more = self.client.beta.messages.create(**self.body(talk, given), max_tokens=99)
            self.server.settle()
            self.check(talk, given)
            usage = more.usage
            assert n == usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens  # fmt: skip
            assert more.content[0].text.strip() == self.written[0]["text"].strip()
            before = "".join(b["text"] for b in blocks(given[-1]["content"]))
            begun = before + more.content[0].text
            self.did["gone on with"] += 1
        talk.messages = [*messages, {"role": "assistant", "content": begun}]

    def warm(self) -> None:
        talk = self.rng.choice(self.talks)
        messages = [*talk.messages, *self.says(talk)]
        reply = self.client.beta.messages.create(**self.body(talk, messages), max_tokens=0)
        self.server.settle()
        assert (reply.content, reply.stop_reason) == ([], "max_tokens")
        assert self.read() + "<|im_start|>assistant\n" == alike(self.rendered(talk, messages))
        self.did["warmed"] += 1

    def fork(self) -> None:
        """Go back to an earlier message."""
        talk = self.rng.choice(self.talks)
        starts = [i for i, m in enumerate(talk.messages) if m["role"] == "user"]
        if starts:
            self.talks.append(copy.deepcopy(talk))
            self.talks[-1].messages = self.talks[-1].messages[: self.rng.choice(starts)]
            self.talks[-1].gone = set()
            self.did["forked"] += 1

    def refuse(self) -> None:
        """Say what makes no sense; nothing comes of it."""
        talk, n, before = self.rng.choice(self.talks), len(self.asked), self.contexts()
        messages = [*talk.messages, *self.says(talk)]
        asked = self.body(talk, messages) | {"max_tokens": 9} | self.rng.choice(WRONG)
        asked["stream"] = self.rng.random() < 0.3
        with self.server.client() as plain:
            made = httpx.post(f"{self.server.url}/v1/messages", json=asked, headers={"x-api-key": plain.api_key})  # fmt: skip
        assert made.status_code == 400 and made.json()["type"] == "error", made.text
        assert len(self.asked) == n and self.contexts() == before
        self.did["refused"] += 1

    def contexts(self) -> list[Json]:
        """The contexts as they are listed."""
        keys = {"x-api-key": "key-of-anna"}
        listed = httpx.get(f"{self.server.url}/v1/contexts?limit=100", headers=keys).json()["data"]
        for each in listed:
            one = httpx.get(f"{self.server.url}/v1/contexts/{each['name']}", headers=keys).json()
            assert not each["busy"] and len(one["parts"]) == each["n_parts"]
            assert sum(part["n_tokens"] for part in one["parts"]) <= each["n_tokens"]
        return list(listed)

    def other(self) -> None:
        """The same texts from another client."""
        talk = self.rng.choice(self.talks)
        messages = [*talk.messages, *self.says(talk)]
        self.writes([], thinks=False)
        given = chat(talk.system, messages)
        for call in (call for m in given for call in m.get("tool_calls", ())):
            function = call["function"]
            call |= {
                "type": "function",
                "function": function | {"arguments": json.dumps(function["arguments"])},
            }
        tools = functions(talk.tools)
        with self.server.client() as client:
            reply = client.chat.completions.create(model="demo", messages=given, max_tokens=99, **({"tools": tools} if tools else {}))  # fmt: skip
        self.server.settle()
        self.check(talk, messages)
        assert reply.choices[0].message.content == self.line()
        self.did["by another"] += 1

    def step(self) -> None:
        deeds = (*[self.turn] * 9, self.stops, self.warm, self.fork, self.refuse, self.other)
        if not self.talks or self.rng.random() < 0.1:
            self.begin()
        self.rng.choice(deeds)()


def lives(seed: int, bundled: Path, home: Path, n: int) -> Counter[str]:
    """One life, in which the server starts anew now and then."""
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        plays: list[Play] = []
        engine, answers = stack.enter_context(
            answering(bundled, patch, lambda ask: plays[0].line(ask), 8192, added=TAGS, home=home)
        )
        play = Play(seed, answers.script.tokenizer)
        plays.append(play)
        play.asked = answers.asked
        for start in range(0, n, 12):
            with serving(engine) as play.server:
                with anthropic.Anthropic(base_url=play.server.url, api_key="key-of-anna", max_retries=0) as play.client:  # fmt: skip
                    for i in range(start, min(n, start + 12)):
                        try:
                            play.step()
                        except BaseException as error:
                            error.add_note(f"seed {seed}, deed {i}, {dict(play.did)}")
                            raise
                play.server.settle()
        engine.check_integrity()
    return play.did


@pytest.mark.parametrize(
    ("seed", "n"),
    [
        pytest.param(0, 15, marks=pytest.mark.small),
        pytest.param(1, 12, marks=pytest.mark.small),
        *(pytest.param(n, 40, marks=pytest.mark.slow) for n in range(1, LIVES + 1)),
    ],
)
@pytest.mark.slow
def test_a_life_is_as_the_plain_model_has_it(
    seed: int, n: int, bundled: Path, tmp_path: Path
) -> None:
    did = lives(seed, bundled, tmp_path / "home", n)
    print(f"\n{dict(did)}")
    assert did["turns"] and did["streamed"]
