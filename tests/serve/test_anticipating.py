"""Edits of the next request, made before it comes: against a server that never does it, whatever
clients do then. python -m pytest tests/serve/test_anticipating.py
"""

from __future__ import annotations

import copy
import logging
import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from days import some
from scripted import Script, scripted
from serve.test_context_editing import CALL, CLEAR, prose, wrote
from serve.test_openai import Server, serving
from serving import METRICS_KEY

from kvweave import Engine
from kvweave.run import loop
from kvweave.serve.guard.quota import Quota

LIVES = int(os.environ.get("KVWEAVE_LIVES", 6))  # of 12 deeds each or more, with -m slow
USES, THINKING = "clear_tool_uses_20250919", "clear_thinking_20251015"
NAMES = ("look", "list", "read")
Json = dict[str, Any]
Make = Callable[..., tuple[Server, Script]]


def tool(name: str) -> Json:
    return {"name": name, "input_schema": {"type": "object"}}


def rest(server: Server) -> None:
    """Wait until nothing is left to do ahead and all rows are exact."""
    audits = server.service.driver.audits
    until = time.monotonic() + 60
    while True:
        server.settle()
        if not audits.is_due():
            return
        assert time.monotonic() < until, "never at rest"
        time.sleep(0.005)


@pytest.fixture
def make(bundled: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    with ExitStack() as stack:
        servers = []

        def made(refine: str = "chats", **more: Any) -> tuple[Server, Script]:
            more.setdefault("metrics_key", METRICS_KEY)
            own = {
                k: more.pop(k) for k in ("max_sessions", "metrics_key", "learn_edits") if k in more
            }
            engine, script = scripted(bundled, monkeypatch, added=CALL, refine=refine, **more)
            stack.enter_context(engine)
            servers.append(stack.enter_context(serving(engine, **own)))
            return servers[-1], script

        yield made
        for server in servers:
            server.settle()
            server.on_engine(lambda engine: engine.check_integrity())
            idle = server.service.sessions.idle

            def n_left(engine: Engine, idle: list[Any] = idle) -> int:
                """At one moment: a context may be edited ahead meanwhile."""
                return sum(len(engine.contexts_of(k)) for k in ("anna", "berta")) - len(idle)

            assert server.on_engine(n_left) == 0, "none is left open"


def ask(server: Server, messages: list[Json], *, status: int = 200, key: str = "anna", **more: Any) -> Json:  # fmt: skip
    body = {"model": "demo", "max_tokens": 160, "temperature": 0, "messages": messages} | more
    found = httpx.post(
        f"{server.url}/v1/messages", json=body, headers={"x-api-key": f"key-of-{key}"}, timeout=60
    )
    assert found.status_code == status, found.text
    return found.json()


def result(call: Json, text: str) -> Json:
    return {"type": "tool_result", "tool_use_id": call["id"], "content": text}


def calls(reply: Json) -> list[Json]:
    return [block for block in reply["content"] if block["type"] == "tool_use"]


def told(usage: Json) -> int:
    """The tokens of the prompt, however they came."""
    return sum(usage[f"{k}input_tokens"] for k in ("", "cache_read_", "cache_creation_"))


@dataclass
class Talk:
    """One conversation with two servers that give ids of their own."""

    rule: list[Json]
    tools: list[str]
    system: str
    sides: tuple[list[Json], list[Json]] = field(default_factory=lambda: ([], []))

    @property
    def waits(self) -> bool:
        """Whether an answer was the last."""
        return not self.sides[0] or self.sides[0][-1]["role"] == "assistant"


class Lives:
    """Random clients of two servers, one of which looks ahead."""

    def __init__(self, seed: int, servers: tuple[Server, Server], script: Script) -> None:
        self.rng, self.servers, self.script = random.Random(seed), servers, script
        self.exact = servers[0].service.driver.engine.config.repair == "full"
        self.talks: list[Talk] = []
        self.n, self.did = 0, Counter[str]()

    def rule(self) -> list[Json]:
        edits: list[Json] = []
        if self.rng.random() < 0.4:
            keep = self.rng.choice(["all", {"type": "thinking_turns", "value": 1}])
            edits.append({"type": THINKING, "keep": keep})
        if self.rng.random() < 0.85:
            kind = self.rng.choice(["tool_uses", "input_tokens"])
            value = self.rng.randrange(3) if kind == "tool_uses" else self.rng.randrange(100, 500)
            more: Json = {
                "exclude_tools": [self.rng.choice(NAMES)],
                "clear_tool_inputs": self.rng.choice([True, ["look"]]),
                "clear_at_least": {"type": "input_tokens", "value": self.rng.randrange(80)},
            }
            more = {k: v for k, v in more.items() if self.rng.random() < 0.3}
            keep = {"type": "tool_uses", "value": self.rng.randrange(3)}
            edits.append(
                {"type": USES, "trigger": {"type": kind, "value": value}, "keep": keep} | more
            )
        return edits

    def begin(self) -> None:
        system = self.rng.choice(["so it is .", f"so {self.n} well ."])
        self.talks.append(Talk(self.rule(), self.rng.sample(NAMES, 2), system))

    def line(self) -> str | None:
        """What the model is made to write; None: what it would."""
        drawn = self.rng.random()
        if drawn < 0.15 and self.exact:
            return None
        self.n += 1
        thought = f"<think>\n{prose(self.n, 12)}\n</think>\n\n" if self.rng.random() < 0.4 else ""
        if drawn < 0.3:
            return thought + prose(self.n, 15)
        made = wrote(self.n, thought)
        if self.rng.random() < 0.25:
            made += made[made.index("\n<tool_call>") :].replace(f'"{self.n}"', '"again"')
        return made

    def says(self, talk: Talk) -> None:
        """The client's next message, the same to both but for ids."""
        n_words = [self.rng.choice([1, 8, 40, 60]) for _ in range(4)]
        more = self.rng.random() < 0.15
        self.n += 1
        for messages in talk.sides:
            last = messages[-1]["content"] if messages else []
            waiting = [b for b in last if b["type"] == "tool_use"]
            content = [result(c, prose(self.n + i, n_words[i % 4])) for i, c in enumerate(waiting)]
            if more or not content:
                content.append({"type": "text", "text": prose(self.n, 6)})
            messages.append({"role": "user", "content": content})

    def breaks(self, talk: Talk) -> None:
        """Do what nobody could foresee."""
        what = self.rng.choice(["back", "rule", "no rule", "tools", "branch", "retry"])
        self.did[what] += 1
        if what == "back" and len(talk.sides[0]) > 3:
            n = 2 * self.rng.randrange(1, len(talk.sides[0]) // 2)
            for messages in talk.sides:
                del messages[-n:]
        elif what == "retry" and talk.sides[0] and talk.waits:
            for messages in talk.sides:
                del messages[-1:]
        elif what == "rule":
            talk.rule = self.rule()
        elif what == "no rule":
            talk.rule = []
        elif what == "tools":
            talk.tools = self.rng.sample(NAMES, 2)
        elif what == "branch":
            self.talks.append(copy.deepcopy(talk))

    def deed(self) -> None:
        if not self.talks or self.rng.random() < 0.1:
            self.begin()
        talk = self.rng.choice(self.talks[-3:])
        if self.rng.random() < 0.3:
            self.breaks(talk)
        if talk.waits:
            self.says(talk)
        line, calm = self.line(), self.rng.random() < 0.7
        wait = self.rng.choice([0.0, 0.01, 0.1])
        replies = []
        for server, messages in zip(self.servers, talk.sides, strict=True):
            if line is not None:
                self.script.say(line)
            rest(server) if calm else time.sleep(wait)
            body: Json = {"tools": [tool(n) for n in talk.tools], "system": talk.system}
            if talk.rule:
                body["context_management"] = {"edits": talk.rule}
            n = 160 if line is not None else 6
            replies.append(ask(server, messages, max_tokens=n, **body))
            assert not self.script.lines
            messages.append({"role": "assistant", "content": replies[-1]["content"]})
        self.compare(*replies)

    def compare(self, ours: Json, theirs: Json) -> None:
        def plain(reply: Json) -> Any:
            return [{k: v for k, v in b.items() if k != "id"} for b in reply["content"]]

        usage, other = ours["usage"], theirs["usage"]
        assert ours["stop_reason"] == theirs["stop_reason"]
        assert told(usage) == told(other) and usage["output_tokens"] == other["output_tokens"]
        assert ours.get("context_management") == theirs.get("context_management")
        kv = usage["kv"]
        counted = ("exact", "reused", "repaired", "prefilled")
        assert sum(kv[k] for k in counted) == told(usage) and min(kv[k] for k in counted) >= 0
        self.did["exact"] += kv["drift"] == 0
        self.did["edited"] += bool((ours.get("context_management") or {}).get("applied_edits"))
        if self.exact:
            assert plain(ours) == plain(theirs) and kv["drift"] == other["kv"]["drift"] == 0
        held = [self.text(s, r) for s, r in zip(self.servers, (ours, theirs), strict=True)]
        assert held[0] == held[1], "the model read something else"
        if kv["drift"] == 0:
            name = ours["kvweave"]["context"]
            check = self.servers[0].on_engine(lambda e: e.contexts_of("anna")[name].check())
            assert check.kl_max < 1e-6 and max(*check.k_error, *check.v_error) < 1e-4

    def text(self, server: Server, reply: Json) -> list[int]:
        """The tokens that the model read and wrote. Where there was no room beside a context, it may
        have been edited since."""

        def tokens(engine: Any) -> list[int]:
            context = engine.contexts_of("anna")[reply["kvweave"]["context"]]
            idle = server.service.sessions.idle
            edited = any(s.context is context and s.ahead is not None for s in idle)
            history = context.history
            read = history.at(history.version - 1).parts if edited else context.parts
            found = []
            for part in read:
                gone = history.gone(part.id)
                ids = engine.table.tokens(part.id) if gone is None else gone.tokens
                found += [int(t) for t in ids[part.start : part.stop]]
            return found

        return server.on_engine(tokens)


@pytest.mark.slow
@pytest.mark.parametrize("repair", some(min(LIVES, 2), ["none", "full"]))
@pytest.mark.parametrize(
    "seed",
    [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, LIVES))],
)
def test_whatever_clients_do_answers_and_bills_are_as_without(
    make: Make, monkeypatch: pytest.MonkeyPatch, seed: int, repair: str
) -> None:
    ours, _ = make(repair=repair)
    theirs, script = make("never", repair=repair)
    monkeypatch.setattr(loop, "sample", script.sample)
    lives = Lives(seed, (ours, theirs), script)
    ahead = ours.service.sessions.ahead
    for n in range(60):
        lives.deed()
        edited = lives.did["edited"] or seed > 0  # some talk without a rule all the time
        if n > 10 and ahead.n_used and edited and lives.did["exact"]:
            break
    else:
        pytest.fail(f"nothing came of it: {ahead.n_used}, {lives.did}")
    assert not ours.service.anticipating.n_failed and not theirs.service.sessions.ahead.n_made


# ---- one conversation


class Loop:
    """An agent's loop of calls with one server."""

    def __init__(self, served: tuple[Server, Script], *edits: Json, **more: Any) -> None:
        self.server, self.script = served
        self.more = {"context_management": {"edits": list(edits)}} if edits else {}
        self.more |= {"tools": [tool("look")], "system": "so it is ."} | more
        self.messages: list[Json] = [{"role": "user", "content": "look at all of it ."}]
        self.n = 0

    def step(self, line: str | None = None, **more: Any) -> Json:
        """Have it answered."""
        self.n += 1
        self.script.say(wrote(self.n) if line is None else line)
        reply = ask(self.server, self.messages, **self.more | more)
        self.messages.append({"role": "assistant", "content": reply["content"]})
        return reply

    def give(self, text: str | None = None) -> None:
        """Give back what came of the calls."""
        text = prose(self.n) if text is None else text
        content = [result(call, text) for call in calls({"content": self.messages[-1]["content"]})]
        self.messages.append({"role": "user", "content": content})

    def run(self, n: int) -> Json:
        """Go on ``n`` times, with a rest behind each answer; the last call has no result yet."""
        for i in range(n):
            if i:
                self.give()
            reply = self.step()
            rest(self.server)
        return reply

    @property
    def ahead(self) -> Any:
        return self.server.service.sessions.ahead

    @property
    def idle(self) -> list[Any]:
        return self.server.service.sessions.idle


@pytest.mark.slow
def test_the_request_that_edits_is_a_plain_append(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(4)
    assert agent.ahead.n_made == 1 and agent.ahead.n_used == 0
    (left, made) = (s for s in agent.idle if s.instead is not None)
    assert made.ahead and left.ahead is None and made.instead is left
    agent.give()
    reply = agent.step()
    (edit,) = reply["context_management"]["applied_edits"]
    kv = reply["usage"]["kv"]
    assert edit["cleared_tool_uses"] == 1 and agent.ahead.n_used == 1
    assert kv["drift"] == 0 and kv["reused"] == kv["repaired"] == 0
    how = {span["how"] for span in reply["kvweave"]["plan"]["spans"][:-2]}
    assert how == {"prefix"}
    # the placeholder was computed for this request, and counts so
    n_new = sum(s["n_prefilled"] for s in reply["kvweave"]["plan"]["spans"])
    n_told = reply["usage"]["cache_creation_input_tokens"]
    assert n_told == kv["prefilled"] and 10 < n_told - n_new < 60
    assert left not in agent.idle and left.context.closed
    shown = httpx.get(f"{agent.server.url}/metrics", headers={"x-api-key": METRICS_KEY}).text
    assert "kvweave_ahead_edits_used 1.0" in shown and "kvweave_ahead_edits_failed 0.0" in shown
    seconds = [float(line.split()[1]) for line in shown.splitlines() if line.startswith("kvweave_ahead_seconds ")]  # fmt: skip
    assert 0 < seconds[0] < 30


@pytest.mark.slow
def test_a_result_too_short_to_be_cleared_finds_all_as_it_was(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(4)
    made = agent.idle[-1]
    assert made.ahead
    agent.give("so")
    reply = agent.step()
    kv = reply["usage"]["kv"]
    assert not reply["context_management"]["applied_edits"]
    assert kv["drift"] == 0 and kv["prefilled"] < 40 and agent.ahead.n_used == 0
    assert made not in agent.idle and made.context.closed


@pytest.mark.slow
def test_without_room_for_two_only_what_is_sure_is_done(make: Make) -> None:
    agent = Loop(make(max_sessions=1), CLEAR)
    agent.run(4)
    assert agent.ahead.n_made == 0, "a short result would not have been cleared"
    agent.give()
    assert agent.step()["context_management"]["applied_edits"]
    sure = CLEAR | {"trigger": {"type": "tool_uses", "value": 4}, "keep": {"type": "tool_uses", "value": 1}}  # fmt: skip
    other = Loop((agent.server, agent.script), sure, system="so well .")
    other.run(4)
    assert other.ahead.n_made == 0
    other.give()
    other.step(prose(9, 20))  # the fifth call was not made: the number of calls stays below
    rest(other.server)
    assert other.ahead.n_made == 0
    later = sure | {"trigger": {"type": "tool_uses", "value": 3}}
    other.more["context_management"] = {"edits": [later]}
    other.messages.append({"role": "user", "content": "and now ?"})
    other.step()  # clears
    rest(other.server)
    other.give("so")
    other.step(prose(10, 20))
    rest(other.server)
    n = other.ahead.n_made
    other.messages.append({"role": "user", "content": "and now ?"})
    reply = other.step(prose(11, 20))
    assert reply["usage"]["kv"]["drift"] == 0 and other.ahead.n_used == n


def test_thinking_that_a_template_drops_goes_before_the_user_says_more(make: Make) -> None:
    """This template keeps thinking only as long as tools answer."""
    agent = Loop(make(max_sessions=1))
    thought = f"<think>\n{prose(1, 30)}\n</think>\n\n"
    agent.step(wrote(1, thought))
    rest(agent.server)
    agent.give()
    agent.step(prose(2, 20))
    rest(agent.server)
    assert agent.ahead.n_made == 1 and len(agent.idle) == 1, "it is sure: in place"
    agent.messages.append({"role": "user", "content": "and now ?"})
    reply = agent.step()
    kv = reply["usage"]["kv"]
    assert agent.ahead.n_used == 1 and kv["drift"] == 0 and kv["prefilled"] < 60


@pytest.mark.slow
def test_what_is_not_kept_is_not_looked_ahead_of(make: Make) -> None:
    for more, refine in (({"store": False}, "chats"), ({}, "never")):
        agent = Loop(make(refine), CLEAR, **more)
        agent.run(4)
        assert not agent.ahead.n_made and not agent.server.service.anticipating.seconds


@pytest.mark.slow
def test_a_namespace_over_its_quota_makes_nothing_ahead(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(3)
    service = agent.server.service
    sessions, done = service.sessions, service.sessions.give_back

    def then(given: Any) -> None:
        done(given)
        sessions.quota = Quota(n_chunks=len(sessions.table))

    sessions.give_back = then  # type: ignore[method-assign]
    agent.give()
    agent.step()
    rest(agent.server)
    n = len(agent.idle)
    assert service.anticipating.n_failed == 1 and agent.ahead.n_made == 0 and n
    sessions.give_back, sessions.quota = done, Quota()  # type: ignore[method-assign]
    agent.give()
    assert agent.step()["context_management"]["applied_edits"]


@pytest.mark.slow
@pytest.mark.parametrize("n_steps", range(6))
@pytest.mark.sampled
def test_a_request_that_comes_in_the_middle(make: Make, n_steps: int) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(3)
    agent.give()
    anticipating = agent.server.service.anticipating
    step, left = anticipating.rest, n_steps
    due = anticipating.is_due

    def some() -> None:
        nonlocal left
        left -= 1
        step()

    anticipating.rest, anticipating.is_due = some, lambda: left > 0 and due()  # type: ignore[method-assign]
    agent.step()
    rest(agent.server)
    agent.give()
    reply = agent.step()
    (edit,) = reply["context_management"]["applied_edits"]
    assert edit["cleared_tool_uses"] == 1
    assert (reply["usage"]["kv"]["drift"] == 0) == (agent.ahead.n_used == 1)
    assert agent.ahead.n_made == (n_steps > 3)
    # what was begun for an answer is not done to the one behind it
    anticipating.rest, anticipating.is_due = step, due  # type: ignore[method-assign]
    rest(agent.server)
    assert agent.ahead.n_made == (n_steps > 3) + 1
    agent.give()
    reply = agent.step()
    (edit,) = reply["context_management"]["applied_edits"]
    assert edit["cleared_tool_uses"] == 2 and reply["usage"]["kv"]["drift"] == 0
    assert not anticipating.n_failed


@pytest.mark.slow
@pytest.mark.parametrize("where", ["copy", "edit", "rule", "next"])
def test_what_fails_below_is_noted_without_content(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(3)
    agent.give()
    service = agent.server.service

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError(f"planted, of {agent.messages}")

    agent.step()
    rest(agent.server)
    assert agent.ahead.n_made == 1
    agent.give()
    sessions = service.sessions
    with monkeypatch.context() as patch, caplog.at_level(logging.INFO):
        # planted while the answer is under way, so that it hits what is done behind it
        done = sessions.give_back

        def then(given: Any) -> None:
            done(given)
            if where == "copy":
                patch.setattr(sessions, "fork", fails)
            elif where == "edit":
                patch.setattr(sessions.composer, "edit", fails)
            elif where == "rule":
                patch.setattr("kvweave.serve.anthropic.following.edit_messages", fails)
            else:
                patch.setattr("kvweave.serve.anthropic.following.given", fails)

        patch.setattr(sessions, "give_back", then)
        agent.step()
        rest(agent.server)
        assert service.anticipating.n_failed == 1 and agent.ahead.n_made == 1
    assert "nothing was edited ahead: RuntimeError" in caplog.text
    assert "planted" not in caplog.text and "look at all" not in caplog.text
    agent.server.on_engine(lambda engine: engine.check_integrity())
    n = len(agent.idle)
    agent.give()
    reply = agent.step()
    (edit,) = reply["context_management"]["applied_edits"]
    assert edit["cleared_tool_uses"] == 2 and len(agent.idle) <= n + 1


@pytest.mark.slow
def test_two_clients_of_one_history_each_find_what_they_want(make: Make) -> None:
    served = make()
    agent = Loop(served, CLEAR)
    agent.run(4)
    other = copy.copy(agent)
    other.messages, other.more = copy.deepcopy(agent.messages), dict(agent.more)
    other.more["context_management"] = {"edits": []}
    agent.give()
    edited = agent.step()
    other.give()
    whole = other.step()
    assert edited["usage"]["kv"]["drift"] == 0
    assert (
        told(whole["usage"]) - told(edited["usage"])
        == (edited["context_management"]["applied_edits"][0]["cleared_input_tokens"])
    )
    rest(agent.server)
    holders = [s for s in agent.idle if s.instead is not None]
    assert all(s.instead.instead is s and s.instead in agent.idle for s in holders)


@pytest.mark.slow
def test_contexts_made_ahead_do_not_pile_up(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(9)
    assert agent.ahead.n_made == 6 and agent.ahead.n_used == 5
    assert len(agent.idle) <= 4
    sessions = agent.server.service.sessions
    assert agent.idle[0].instead is agent.idle[-1], "it goes first where memory is short"
    agent.server.on_engine(lambda engine: sessions.close_oldest())
    assert agent.idle[-1].ahead and agent.idle[-1].instead is None
    agent.give()
    assert agent.step()["usage"]["kv"]["drift"] == 0


@pytest.mark.slow
def test_streams_and_contexts_that_let_go_of_rows(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(3)
    agent.give()
    agent.script.say(wrote(4))
    body = {"model": "demo", "max_tokens": 160, "messages": agent.messages, "stream": True}
    url, key = f"{agent.server.url}/v1/messages", {"x-api-key": "key-of-anna"}
    said = httpx.post(url, json=body | agent.more, headers=key, timeout=60).text
    assert "message_stop" in said
    rest(agent.server)
    assert agent.ahead.n_made == 1
    thin = Loop((agent.server, agent.script), CLEAR, system="thin .", kvweave={"keep": "snapkv:0.5"})  # fmt: skip
    thin.run(4)
    assert agent.ahead.n_made == 1 and not agent.server.service.anticipating.n_failed


@pytest.mark.slow
def test_a_context_that_somebody_edited_is_left_as_it_is(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(3)
    agent.give()
    anticipating = agent.server.service.anticipating
    due, held = anticipating.is_due, True
    anticipating.is_due = lambda: not held and due()  # type: ignore[method-assign]
    name = agent.step()["kvweave"]["context"]
    agent.server.on_engine(lambda e: e.contexts_of("anna")[name].append([5, 6, 7]))
    held = False
    agent.server.service.driver.later(
        ()
    )  # which sleeps, perhaps, and hears of this by nothing else
    rest(agent.server)
    assert agent.ahead.n_made == 0 and not due()
    agent.give()
    assert agent.step()["context_management"]["applied_edits"]


@pytest.mark.slow
def test_a_private_request_takes_a_copy_and_leaves_both(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(4)
    pair = {id(s) for s in agent.idle if s.instead is not None}
    agent.give()
    private = agent.step(store=False)
    rest(agent.server)
    assert {id(s) for s in agent.idle if s.instead is not None} == pair and len(pair) == 2
    assert all(s.instead in agent.idle for s in agent.idle if s.instead is not None)
    agent.messages.pop()
    reply = agent.step()
    assert agent.ahead.n_used == 1 and reply["usage"]["kv"]["drift"] == 0
    ours, theirs = reply["usage"], private["usage"]
    assert told(ours) == told(theirs) and theirs["cache_creation_input_tokens"] == 0
    assert theirs["cache_read_input_tokens"] == ours["cache_read_input_tokens"]


def test_what_is_edited_ahead_is_made_exact_though_nobody_asks_for_anything(make: Make) -> None:
    agent = Loop(make(), CLEAR)
    agent.run(3)
    agent.give()
    service = agent.server.service
    due, held = service.anticipating.is_due, True
    service.anticipating.is_due = lambda: not held and due()  # type: ignore[method-assign]
    agent.step()
    rest(agent.server)
    held = False
    service.driver.later(())
    until = time.monotonic() + 60
    while agent.ahead.n_made < 1 or service.driver.audits.is_due():
        assert time.monotonic() < until
        time.sleep(0.005)
    made = agent.idle[-1].context
    assert agent.server.on_engine(lambda engine: made.preview()).drift == 0


@pytest.mark.slow
def test_where_the_pool_is_full_the_oldest_of_ones_own_makes_room(make: Make) -> None:
    served = make(max_sessions=2)
    other = Loop(served, system="so well .")
    other.step(prose(9, 20))
    (oldest,) = other.idle
    agent = Loop(served, CLEAR)
    agent.run(4)
    assert agent.ahead.n_made == 1 and oldest.context.closed and len(agent.idle) == 2
    agent.give()
    assert agent.step()["usage"]["kv"]["drift"] == 0 and agent.ahead.n_used == 1
