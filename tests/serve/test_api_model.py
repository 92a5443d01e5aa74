"""Random work of the real openai client, against a plain model of what the API's pages say comes of it.

What the language model is asked is compared with the items that there ought to be: responses that go
on from others, conversations, results of tools, streams that are broken off, deletions, summaries
taken back and given again, tools that are added, servers that start anew.

python -m pytest -m "slow or not slow" tests/serve/test_api_model.py
"""

from __future__ import annotations

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
from days import some
from needs import need
from scripted import TAGS

from kvweave.serve.chat.ask import ChatAsk

openai = need("openai")
from serve.test_openai import serving  # noqa: E402

LIVES = int(os.environ.get("KVWEAVE_LIVES", 2))
Json = dict[str, Any]
Atom = tuple[str, ...]
CALL = "<tool_call>\n{}\n</tool_call>"
FRONT = "Summary of the conversation so far:\n"
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}}


def tool(name: str) -> Json:
    return {"type": "function", "name": name, "strict": False, "parameters": PARAMETERS}


# ---- what there ought to be


@dataclass
class Summary:
    """What a compaction stands for."""

    text: str
    items: list[Json]  # all there was
    covered: list[Json]
    undone: bool = False


@dataclass
class Plain:
    """Items by response and conversation; an item is one object wherever it stands."""

    responses: dict[str, list[Json]] = field(default_factory=dict)
    talks: dict[str, list[Json]] = field(default_factory=dict)
    summaries: dict[str, Summary] = field(default_factory=dict)

    def given(self, items: list[Json]) -> list[Json]:
        """What the model is given: a summary in the place of the last item it covers, or what was there."""
        made: list[Json] = []
        for item in items:
            if item["type"] != "compaction":
                made.append(item)
                continue
            known = self.summaries[item["id"]]
            if known.undone:
                here = [each for each in made if all(each is not one for one in known.items)]
                first = next((i for i, e in enumerate(made) if any(e is o for o in known.items)), len(made))  # fmt: skip
                front = [e for e in made[:first] if e in here]
                behind = [e for e in made[first:] if all(e is not o for o in known.items)]
                made = [*front, *self.given(known.items), *behind]
                continue
            places = [i for i, e in enumerate(made) if any(e is o for o in known.covered)]
            at = places[-1] if places else len(made)
            left = [*made[:at], item, *made[at + bool(places) :]]
            made = [e for e in left if all(e is not o for o in known.covered)]
        return made

    def atoms(self, items: list[Json], instructions: str | None) -> list[Atom]:
        made: list[Atom] = [("system", instructions)] if instructions else []
        for item in self.given(items):
            match item["type"]:
                case "message":
                    made.append((item["role"], item["text"]))
                case "function_call":
                    made.append(("call", item["name"], item["arguments"]))
                case "function_call_output":
                    made.append(("tool", item["output"]))
                case "compaction":
                    made.append(("user", FRONT + self.summaries[item["id"]].text))
        return tidy(made)

    def tools(self, items: list[Json], own: list[str]) -> list[str]:
        added = [n for item in self.given(items) if item["type"] == "additional_tools" for n in item["names"]]  # fmt: skip
        return sorted({*own, *added})


def asked_atoms(ask: ChatAsk) -> list[Atom]:
    made: list[Atom] = []
    for message in ask.messages:
        content = message["content"]
        if content or message["role"] != "assistant":
            made.append((message["role"], content))
        for call in message.get("tool_calls", ()):
            function = call["function"]
            made.append(("call", function["name"], function["arguments"]))
    return tidy(made)


def tidy(atoms: list[Atom]) -> list[Atom]:
    """Of what the assistant says in one go, texts first: chats have no other order."""
    made: list[Atom] = []
    for mine, group in itertools.groupby(atoms, lambda a: a[0] in ("assistant", "call")):
        found = list(group)
        if mine:
            said = "".join(a[1] for a in found if a[0] == "assistant")
            found = [("assistant", said)] * bool(said) + [a for a in found if a[0] == "call"]
        made += found
    return made


# ---- what is done


class Play:
    """One random life."""

    def __init__(self, seed: int, asked: list[Any]) -> None:
        self.rng, self.asked = random.Random(seed), asked
        self.client: Any = None
        self.plain, self.n = Plain(), itertools.count()
        self.did: Counter[str] = Counter()

    def text(self) -> str:
        return f"so {next(self.n)} well ."

    def message(self, role: str = "user") -> tuple[Json, Json]:
        """An item as it is sent, and as it is known here."""
        text = self.text()
        return {"role": role, "content": text}, {"type": "message", "role": role, "text": text}

    def own(self, before: list[Json]) -> tuple[list[Json], list[Json], list[str]]:
        """What is said next; results of calls that wait, sometimes late."""
        sent, known = [], []
        done = {i["call_id"] for i in before if i["type"] == "function_call_output"}
        for call in before:
            if call["type"] == "function_call" and call["call_id"] not in done:
                if self.rng.random() < 0.8:
                    output = self.text()
                    each = {"type": "function_call_output", "call_id": call["call_id"]}
                    sent.append(each | {"output": output})
                    known.append(each | {"output": output})
        if self.rng.random() < 0.15:
            name = f"added_{next(self.n)}"
            sent.append({"type": "additional_tools", "role": "developer", "tools": [tool(name)]})
            known.append({"type": "additional_tools", "names": [name]})
        answered = any(item["type"] == "function_call_output" for item in known)
        for _ in range(self.rng.choice([0, 1, 1, 2]) if answered else self.rng.choice([1, 1, 2])):
            given, kept = self.message(self.rng.choice(["user", "user", "user", "developer"]))
            sent.append(given)
            known.append(kept)
        return sent, known, [f"own_{next(self.n)}"] if self.rng.random() < 0.4 else []

    def check(self, ask: ChatAsk, items: list[Json], instructions: str | None, own: list[str]) -> None:  # fmt: skip
        assert asked_atoms(ask) == self.plain.atoms(items, instructions)
        names = sorted(tool["function"]["name"] for tool in ask.tools)
        assert names == self.plain.tools(items, own)

    def outputs(self, output: list[Json]) -> list[Json]:
        """What a response gave, as it is known here."""
        made: list[Json] = []
        for item in output:
            kept: Json = {"type": item["type"], "id": item["id"]}
            if item["type"] == "message":
                kept |= {"role": "assistant", "text": item["content"][0]["text"]}
            elif item["type"] == "function_call":
                kept |= {k: item[k] for k in ("name", "arguments", "call_id")}
            made.append(kept)
        return made

    def create(self) -> None:
        where: Json = {}
        before: list[Json] = []
        talk = None
        kind = self.rng.random()
        if kind < 0.45 and self.plain.responses:
            id = self.rng.choice(list(self.plain.responses))
            where, before = {"previous_response_id": id}, self.plain.responses[id]
        elif kind < 0.8 and self.plain.talks:
            talk = self.rng.choice(list(self.plain.talks))
            where, before = {"conversation": talk}, self.plain.talks[talk]
        sent, known, own = self.own(before)
        instructions = self.text() if self.rng.random() < 0.3 else None
        options: Json = {"model": "demo", "input": sent, "tools": [tool(name) for name in own]}
        options |= where | ({"instructions": instructions} if instructions else {})
        stored = talk is not None or self.rng.random() < 0.85
        options |= {} if stored else {"store": False}
        del self.asked[:]
        items, broken = [*before, *known], False
        if self.rng.random() < 0.4:
            body, broken = self.stream(options)
        else:
            body = self.client.responses.create(**options).to_dict(warnings=False)
        self.check(self.asked[-1][0], items, instructions, own)
        if broken:
            self.did["broken"] += 1
            return
        out = self.outputs(body["output"])
        if stored:
            self.plain.responses[body["id"]] = [*items, *out]
        if talk is not None:
            self.plain.talks[talk] = [*items, *out]
        self.did["talked" if talk else "went on" if where else "began"] += 1

    def stream(self, options: Json) -> tuple[Json, bool]:
        breaks = self.rng.random() < 0.4
        with self.client.responses.create(stream=True, **options) as events:
            for event in events:
                if breaks and event.type == "response.output_text.delta":
                    return {}, True
                if event.type in ("response.completed", "response.incomplete"):
                    return event.response.to_dict(warnings=False), False
        raise AssertionError("a stream without an end")

    def forget(self) -> None:
        if self.plain.responses:
            id = self.rng.choice(list(self.plain.responses))
            self.client.responses.delete(id)
            del self.plain.responses[id]
            with pytest.raises(openai.NotFoundError):
                self.client.responses.retrieve(id)
            with pytest.raises(openai.NotFoundError):
                self.client.responses.create(model="demo", input="a", previous_response_id=id)
            self.did["forgot"] += 1

    def open(self) -> None:
        given, kept = self.message(self.rng.choice(["user", "assistant"]))
        begun = self.rng.random() < 0.5
        made = self.client.conversations.create(items=[given] if begun else [])
        self.plain.talks[made.id] = [kept] if begun else []
        self.did["opened"] += 1

    def edit(self) -> None:
        """Add to a conversation, take out of it, or list it."""
        if not self.plain.talks:
            return
        id = self.rng.choice(list(self.plain.talks))
        items = self.plain.talks[id]
        listed = list(self.client.conversations.items.list(id, order="asc", limit=100))
        assert [item.type for item in listed] == [item["type"] for item in items]
        if items and self.rng.random() < 0.5:
            at = self.rng.randrange(len(items))
            self.client.conversations.items.delete(listed[at].id, conversation_id=id)
            self.plain.talks[id] = [*items[:at], *items[at + 1 :]]
            self.did["took out"] += 1
        else:
            given, kept = self.message(self.rng.choice(["user", "assistant"]))
            self.client.conversations.items.create(id, items=[given])
            self.plain.talks[id] = [*items, kept]
            self.did["put in"] += 1

    def compact(self) -> None:
        """Have a summary written of a response or a conversation, by either way."""
        if not self.plain.responses:
            return
        id = self.rng.choice(list(self.plain.responses))
        items = self.plain.responses[id]
        given = self.plain.given(items)
        covered = [i for i in given if i["type"] not in ("message", "additional_tools") or i.get("role") == "assistant"]  # fmt: skip
        if not covered:
            return
        del self.asked[:]
        where = {"model": "demo", "previous_response_id": id}
        if self.rng.random() < 0.5:
            made = self.client.responses.compact(**where).to_dict(warnings=False)
            item = next(i for i in made["output"] if i["type"] == "compaction" and i["id"] not in self.plain.summaries)  # fmt: skip
            stored = None
        else:
            trigger = [{"type": "compaction_trigger"}]
            made = self.client.responses.create(input=trigger, **where).to_dict(warnings=False)
            [item], stored = made["output"], made["id"]
        atoms = asked_atoms(self.asked[-1][0])
        assert atoms[:-1] == self.plain.atoms(items, None), "it is written of what is given"
        record = self.client.get(f"/compactions/{item['id']}", cast_to=httpx.Response).json()
        self.plain.summaries[item["id"]] = Summary(record["summary"], given, covered)
        kept = {"type": "compaction", "id": item["id"]}
        if stored is not None:
            self.plain.responses[stored] = [*items, kept]
        else:  # what came back is sent, with something new
            known = self.plain.given([*given, kept])
            more, also = self.message()
            del self.asked[:]
            reply = self.client.responses.create(model="demo", input=[*made["output"], more])
            self.check(self.asked[-1][0], [*known, also], None, [])
            out = self.outputs(reply.to_dict(warnings=False)["output"])
            self.plain.responses[reply.id] = [*known, also, *out]
        self.did["summed up"] += 1

    def take_back(self) -> None:
        if self.plain.summaries:
            id, known = self.rng.choice(list(self.plain.summaries.items()))
            known.undone = not known.undone
            how = "undo" if known.undone else "redo"
            self.client.post(f"/compactions/{id}:{how}", cast_to=httpx.Response)
            self.did[how] += 1

    def look(self) -> None:
        """Read a response again, and what it was given."""
        if self.plain.responses:
            id = self.rng.choice(list(self.plain.responses))
            items = self.plain.responses[id]
            body = self.client.responses.retrieve(id)
            listed = list(self.client.responses.input_items.list(id, order="asc", limit=100))
            n = len(items) - len(body.output)
            assert [i.type for i in listed] == [i["type"] for i in items[:n]]
            texts = [i.content[0].text for i in listed if i.type == "message"]
            assert texts == [i["text"] for i in items[:n] if i["type"] == "message"]
            self.did["looked"] += 1

    def step(self) -> None:
        deeds = (
            *[self.create] * 8, self.forget, self.open, self.edit, self.edit, self.compact,
            self.take_back, self.look,
        )  # fmt: skip
        self.rng.choice(deeds)()


def answer_of(rng: random.Random) -> Any:
    count = itertools.count()

    def answer(ask: ChatAsk) -> str:
        n = next(count)
        names = [tool["function"]["name"] for tool in ask.shown_tools]
        if "summary of this conversation" in str(ask.messages[-1]["content"]):
            return f"a summary {n} ."
        if names and rng.random() < 0.6:
            call = {"name": rng.choice(names), "arguments": {"at": f"{n}"}}
            front = f"I look {n} .\n" if rng.random() < 0.5 else ""
            return front + CALL.format(json.dumps(call))
        return f"it is {n} and some more light on way there ."

    return answer


def lives(seed: int, bundled: Path, home: Path, n: int) -> Counter[str]:
    """One life, in which the server starts anew now and then."""
    rng = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        engine, answers = stack.enter_context(
            answering(bundled, patch, answer_of(rng), 8192, added=TAGS, home=home)
        )
        play = Play(seed, answers.asked)
        for start in range(0, n, 12):
            with serving(engine) as server:
                with server.client("key-of-anna") as play.client:
                    for i in range(start, min(n, start + 12)):
                        try:
                            play.step()
                        except Exception as error:
                            error.add_note(f"seed {seed}, deed {i}, {dict(play.did)}")
                            raise
                server.settle()
    return play.did


@pytest.mark.parametrize("seed", some(min(LIVES, 2), (0, 1)))
@pytest.mark.slow
def test_a_life_is_as_the_plain_model_has_it(seed: int, bundled: Path, tmp_path: Path) -> None:
    did = lives(seed, bundled, tmp_path / "home", 60)
    print(f"\n{dict(did)}")
    assert did["went on"] and did["talked"] and did["summed up"]
