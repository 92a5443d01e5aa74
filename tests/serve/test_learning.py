"""Edits that clients make themselves, made ahead once they are known: against a server that never does it,
whatever clients do then, over all three APIs. python -m pytest tests/serve/test_learning.py
"""

from __future__ import annotations

import copy
import json
import os
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from days import some
from scripted import Script
from serve.test_anticipating import Make, make, rest  # noqa: F401
from serve.test_context_editing import prose, wrote
from serve.test_openai import Server

from kvweave.run import loop
from kvweave.serve.guard.quota import Quota

LIVES = int(os.environ.get("KVWEAVE_LIVES", 3))  # with -m slow
APIS = ("chat", "responses", "messages")
PATHS = {"chat": "chat/completions", "responses": "responses", "messages": "messages"}
Json = dict[str, Any]
Edit = Callable[[list[Json]], list[Json]]
SCHEMA = {"type": "object"}


# ---- rules: what is sent of a history


def last_outputs(n: int, batch: int = 1) -> Edit:
    """All results but the last ``n`` become a line, in batches."""

    def edit(history: list[Json]) -> list[Json]:
        there = [i for i, m in enumerate(history) if m["role"] == "tool"]
        gone = there[: max(0, len(there) - n) // batch * batch]
        return [m | {"content": "so well ."} if i in gone else m for i, m in enumerate(history)]

    return edit


def last_messages(n: int, notice: str | None) -> Edit:
    """Rounds between the task and the last ``n`` go, two at a time."""

    def edit(history: list[Json]) -> list[Json]:
        starts = [i for i, m in enumerate(history) if m["role"] == "assistant"]
        n_gone = max(0, len(starts) - n) // 2 * 2
        if not n_gone:
            return history
        said = [] if notice is None else [{"role": "user", "content": notice}]
        return [*history[: starts[0]], *said, *history[starts[n_gone] :]]

    return edit


def as_it_is(history: list[Json]) -> list[Json]:
    return history


# ---- APIs: each of a history in the form of chats


def body_of(api: str, messages: list[Json]) -> Json:
    tool = {"name": "look", "parameters": SCHEMA}
    if api == "chat":
        system = {"role": "system", "content": "so it is ."}
        return {"messages": [system, *messages], "tools": [{"type": "function", "function": tool}]}
    if api == "responses":
        items = [item for m in messages for item in items_of(m)]
        return {
            "input": items,
            "instructions": "so it is .",
            "tools": [{"type": "function"} | tool],
        }
    blocks = [{"role": "user" if m["role"] == "tool" else m["role"], "content": blocks_of(m)} for m in messages]  # fmt: skip
    return {
        "messages": blocks, "system": "so it is .",
        "tools": [{"name": "look", "input_schema": SCHEMA}],
    }  # fmt: skip


def items_of(message: Json) -> list[Json]:
    if message["role"] == "tool":
        id, text = message["tool_call_id"], message["content"]
        return [{"type": "function_call_output", "call_id": id, "output": text}]
    calls = [
        {"type": "function_call", "call_id": c["id"], **c["function"]} for c in message.get("tool_calls", ())
    ]  # fmt: skip
    said = {"role": message["role"], "content": message["content"]}
    return [said, *calls] if message["content"] else calls


def blocks_of(message: Json) -> list[Json]:
    text = [{"type": "text", "text": message["content"]}] if message["content"] else []
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    calls = message.get("tool_calls", ())
    return text + [
        {"type": "tool_use", "id": c["id"], "name": c["function"]["name"], "input": json.loads(c["function"]["arguments"])}
        for c in calls
    ]  # fmt: skip


def answer_of(api: str, reply: Json) -> Json:
    """What was answered, thinking left out as most clients do."""
    if api == "chat":
        said = reply["choices"][0]["message"]
        text, calls = said.get("content") or "", said.get("tool_calls") or []
    elif api == "responses":
        parts = [
            p for item in reply["output"] if item["type"] == "message" for p in item["content"]
        ]
        text = "".join(part["text"] for part in parts)
        calls = [
            {"id": item["call_id"], "type": "function", "function": {k: item[k] for k in ("name", "arguments")}}
            for item in reply["output"] if item["type"] == "function_call"
        ]  # fmt: skip
    else:
        text = "".join(b["text"] for b in reply["content"] if b["type"] == "text")
        calls = [
            {"id": b["id"], "type": "function", "function": {"name": b["name"], "arguments": json.dumps(b["input"])}}
            for b in reply["content"] if b["type"] == "tool_use"
        ]  # fmt: skip
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def kv_of(reply: Json) -> Json:
    return reply["usage"]["kv"]  # type: ignore[no-any-return]


def told(api: str, reply: Json) -> int:
    """The tokens of the prompt."""
    usage = reply["usage"]
    if api == "messages":
        return sum(usage[f"{k}input_tokens"] for k in ("", "cache_read_", "cache_creation_"))
    return int(usage["prompt_tokens" if api == "chat" else "input_tokens"])


class Client:
    """An agent that keeps a history, and sends what its rule leaves of it."""

    def __init__(self, server: Server, api: str, edit: Edit, **more: Any) -> None:
        self.server, self.api, self.edit, self.more = server, api, edit, more
        self.history: list[Json] = [{"role": "user", "content": "look at all of it ."}]

    def ask(self, **more: Any) -> Json:
        most = {"chat": "max_completion_tokens", "responses": "max_output_tokens"}
        body = {"model": "demo", most.get(self.api, "max_tokens"): 160, "temperature": 0}
        body |= body_of(self.api, self.edit(self.history)) | self.more | more
        url, key = (
            f"{self.server.url}/v1/{PATHS[self.api]}",
            {"authorization": "Bearer key-of-anna"},
        )
        found = httpx.post(url, json=body, headers=key, timeout=60)
        assert found.status_code == 200, found.text
        reply: Json = found.json()
        self.history.append(answer_of(self.api, reply))
        return reply

    def give(self, *texts: str) -> None:
        """Say what came of the last calls; what the user says where there are none."""
        calls = self.history[-1].get("tool_calls", ())
        self.history += [
            {"role": "tool", "tool_call_id": c["id"], "content": text}
            for c, text in zip(calls, texts, strict=False)
        ]  # fmt: skip
        if not calls:
            self.history.append({"role": "user", "content": texts[0]})

    @property
    def ahead(self) -> Any:
        return self.server.service.sessions.ahead


def run(client: Client, script: Script, n: int, first: int = 0) -> list[Json]:
    """Have ``n`` calls answered, with a rest behind each."""
    replies = []
    for i in range(first, first + n):
        script.say(wrote(i))
        replies.append(client.ask())
        rest(client.server)
        client.give(prose(i, 40))
    return replies


RULES: dict[str, Edit] = {
    "last outputs": last_outputs(2), "in batches": last_outputs(1, 2),
    "last messages": last_messages(3, None), "with a notice": last_messages(3, "so it was ."),
}  # fmt: skip


QUICK = (("chat", "last outputs"), ("responses", "in batches"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("api", "rule"),
    [
        pytest.param(api, rule, marks=() if (api, rule) in QUICK else pytest.mark.slow)
        for api in APIS
        for rule in RULES
    ],
)
@pytest.mark.sampled
def test_an_edit_that_was_learned_is_a_plain_append(make: Make, api: str, rule: str) -> None:  # noqa: F811
    server, script = make()
    client = Client(server, api, RULES[rule])
    n = 7 if "last outputs" in rule else 10
    replies = run(client, script, n)
    known = [reply["kvweave"].get("ahead") for reply in replies]
    assert client.ahead.n_used == sum(map(bool, known)) > 0, known
    for reply in (r for r in replies if r["kvweave"].get("ahead")):
        assert "all but the newest" in reply["kvweave"]["ahead"]
        assert kv_of(reply)["drift"] == 0 and kv_of(reply)["repaired"] == 0
    assert not server.service.anticipating.n_failed
    # the same requests of a server that learns nothing: the edit makes rows approximate
    other, script = make(learn_edits=False)
    plain = Client(other, api, RULES[rule])
    others = run(plain, script, n)
    n_idle = [len(each.service.sessions.idle) for each in (server, other)]
    assert n_idle[0] <= n_idle[1] + 1, "what is made ahead does not pile up"
    assert plain.ahead.n_made == 0 and any(kv_of(reply)["drift"] != 0 for reply in others)
    assert [told(api, r) for r in replies] == [told(api, r) for r in others]


@pytest.mark.slow
def test_thinking_that_a_client_leaves_out_goes_ahead(make: Make) -> None:  # noqa: F811
    server, script = make()
    client = Client(server, "chat", as_it_is)
    used = []
    for i in range(4):
        script.say(wrote(i, f"<think>\n{prose(100 + i, 30)}\n</think>\n\n"))
        reply = client.ask()
        rest(server)
        client.give(prose(i, 40))
        used.append(client.ahead.n_used)
        assert i < 2 or (kv_of(reply)["drift"] == 0 and kv_of(reply)["reused"] == 0)
        assert (i < 2) or "thinking" in reply["kvweave"]["ahead"]
    assert used[1] == 0 < used[3], "it has to be seen once"


@pytest.mark.slow
def test_a_wrong_guess_leaves_nothing(make: Make) -> None:  # noqa: F811
    server, script = make()
    client = Client(server, "chat", last_outputs(1))
    run(client, script, 4)
    script.say(wrote(4))
    client.ask()
    rest(server)
    idle = server.service.sessions.idle
    (made,) = (s for s in idle if s.ahead is not None)
    n, client.edit = client.ahead.n_used, keeping(client.history, client.edit)
    client.give(prose(4, 40))
    script.say(wrote(5))
    reply = client.ask()
    assert client.ahead.n_used == n and "ahead" not in reply["kvweave"]
    assert kv_of(reply)["drift"] == 0 and kv_of(reply)["reused"] == kv_of(reply)["repaired"] == 0
    assert made not in idle and made.context.closed


def keeping(history: list[Json], edit: Edit) -> Edit:
    """A client that edits no more: what it took out stays so."""
    was = edit(history)

    def edited(history: list[Json]) -> list[Json]:
        return [*was, *history[len(was) :]]

    return edited


@pytest.mark.slow
@pytest.mark.parametrize("how", ["no room", "off", "unstored", "never"])
def test_what_is_not_to_be_done_is_not_done(make: Make, how: str) -> None:  # noqa: F811
    options: dict[str, Json] = {
        "no room": {"max_sessions": 1}, "off": {"learn_edits": False}, "never": {"refine": "never"},
    }  # fmt: skip
    server, script = make(**options.get(how, {}))
    client = Client(server, "chat", last_outputs(1), **({"store": False} if how == "unstored" else {}))  # fmt: skip
    run(client, script, 5)
    assert client.ahead.n_made == 0 and not server.service.anticipating.n_failed


@pytest.mark.slow
def test_a_namespace_over_its_quota_learns_and_makes_nothing_ahead(make: Make) -> None:  # noqa: F811
    """Nor does that cost it what it has: the next request is answered, and its edit too."""
    server, script = make()
    client, sessions = Client(server, "chat", last_outputs(1)), server.service.sessions
    run(client, script, 4)
    made, done = client.ahead.n_made, sessions.give_back

    def full(given: Any) -> None:
        done(given)
        sessions.quota = Quota(n_parts=3)  # the line in an output's place is stored already

    assert made
    sessions.give_back = full  # type: ignore[method-assign]
    run(client, script, 1, 4)
    assert server.service.anticipating.n_failed == 1 and client.ahead.n_made == made
    sessions.give_back, sessions.quota = done, Quota()  # type: ignore[method-assign]
    used = client.ahead.n_used
    replies = run(client, script, 3, 5)
    assert "ahead" not in replies[0]["kvweave"] and "ahead" in replies[-1]["kvweave"]
    assert client.ahead.n_used > used
    server.service.driver.engine.check_integrity()


# ---- whatever clients do


class Lives:
    """Random clients of two servers, one of which learns."""

    def __init__(self, seed: int, servers: tuple[Server, Server], script: Script) -> None:
        self.rng, self.servers, self.script = random.Random(seed), servers, script
        self.exact = servers[0].service.driver.engine.config.repair == "full"
        self.talks: list[tuple[Client, Client]] = []
        self.n, self.did = 0, Counter[str]()
        self.api = self.rng.choice(APIS)

    def edit(self) -> Edit:
        n = self.rng.randrange(1, 3)
        notice = self.rng.choice([None, "so it was ."])
        return self.rng.choice(
            [last_outputs(n), last_outputs(n), last_outputs(1, 2), last_messages(n + 1, notice), as_it_is]
        )  # fmt: skip

    def deed(self) -> None:
        if not self.talks or self.rng.random() < 0.08:
            edit = self.edit()
            ours, theirs = (Client(server, self.api, edit) for server in self.servers)
            self.talks.append((ours, theirs))
        talk = self.rng.choice(self.talks[-2:])
        if self.rng.random() < 0.2:
            self.breaks(talk)
        drawn, self.n = self.rng.random(), self.n + 1
        thought = f"<think>\n{prose(self.n, 12)}\n</think>\n\n" if drawn < 0.3 else ""
        line = thought + (prose(self.n, 12) if 0.2 < drawn < 0.4 else wrote(self.n))
        calm, own = self.rng.random() < 0.8, self.exact and self.rng.random() < 0.15
        texts = [prose(self.n + i, self.rng.choice([1, 8, 40])) for i in range(2)]
        replies = []
        for client in talk:
            if client.history[-1]["role"] == "assistant":
                client.give(*texts)
            if not own:
                self.script.say(line)
            replies.append(client.ask())
            self.script.lines.clear()
            rest(client.server) if calm else None
        self.compare(talk, *replies)

    def breaks(self, talk: tuple[Client, Client]) -> None:
        """Do what nobody could foresee."""
        what, edit = self.rng.choice(["back", "rule", "branch", "retry"]), self.edit()
        n = 2 * self.rng.randrange(1, 3)
        self.did[what] += 1
        for client in talk:
            if what == "back" and len(client.history) > n + 2:
                del client.history[-n:]
            elif what == "retry" and client.history[-1]["role"] == "assistant":
                client.history.pop()
            elif what == "rule":
                client.edit = edit
        if what == "branch":
            self.talks.append(tuple(self.copied(c) for c in talk))  # type: ignore[arg-type]

    def copied(self, client: Client) -> Client:
        made = copy.copy(client)
        made.history = [*client.history]
        return made

    def compare(self, talk: tuple[Client, Client], ours: Json, theirs: Json) -> None:
        assert told(self.api, ours) == told(self.api, theirs)
        kv, other = kv_of(ours), kv_of(theirs)
        counted = ("exact", "reused", "repaired", "prefilled")
        assert (
            sum(kv[k] for k in counted) == told(self.api, ours) and min(kv[k] for k in counted) >= 0
        )
        said = [answer_of(self.api, reply) for reply in (ours, theirs)]
        plain = [(m["content"], [c["function"] for c in m.get("tool_calls", ())]) for m in said]
        if self.exact:
            assert plain[0] == plain[1] and kv["drift"] == other["drift"] == 0
        held = [self.text(client, r) for client, r in zip(talk, (ours, theirs), strict=True)]
        assert held[0] == held[1], "the model read something else"
        self.did["exact"] += kv["drift"] == 0
        if kv["drift"] == 0:
            name = ours["kvweave"]["context"]
            check = self.servers[0].on_engine(lambda e: e.contexts_of("anna")[name].check())
            assert check.kl_max < 1e-6 and max(*check.k_error, *check.v_error) < 1e-4

    def text(self, client: Client, reply: Json) -> list[int]:
        """The tokens that the model read and wrote."""

        def tokens(engine: Any) -> list[int]:
            parts = engine.contexts_of("anna")[reply["kvweave"]["context"]].parts
            return [int(t) for p in parts for t in engine.table.tokens(p.id)[p.start : p.stop]]

        return client.server.on_engine(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("repair", some(min(LIVES, 2), ["full", "none"]))
@pytest.mark.parametrize("seed", range(LIVES))
def test_whatever_clients_do_answers_are_as_without(
    make: Make,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    repair: str,
) -> None:
    ours, _ = make(repair=repair)
    theirs, script = make(repair=repair, learn_edits=False)
    monkeypatch.setattr(loop, "sample", script.sample)
    lives = Lives(seed, (ours, theirs), script)
    ahead = ours.service.sessions.ahead
    for _n in range(24):
        lives.deed()
    assert ahead.n_used and lives.did["exact"], lives.did
    assert not ours.service.anticipating.n_failed
