"""``store: false`` leaves nothing behind: no name, no token, no KV, no file; others lose nothing by it."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

WORDS = "Anna Omar so well then we saw it was a day of rain keep the notes".split()


def conversation(rng: random.Random, n: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [
        {"role": roles[i % 2], "content": " ".join(rng.choices(WORDS, k=rng.randint(3, 40)))}
        for i in range(2 * n + 1)
    ]


def ask(caller: Any, messages: Any, **more: Any) -> Any:
    body = {"model": "kvweave", "messages": messages, "max_tokens": 6, "temperature": 0} | more
    return caller("POST", "/v1/chat/completions", body)


def kept(served: Any) -> dict[str, Any]:
    """All there is in the engine, by what it is."""
    found: dict[str, Any] = {}

    def look(engine: Any) -> None:
        table = engine.table
        found["tokens"] = {tuple(table.tokens(r.id).tolist()) for r in table}
        found["names"] = {(s, n) for s in table.namespaces() for n in table.names(s)}
        found["contexts"] = {
            (space, name) for space in ("", "anna", "berta") for name in engine.contexts_of(space)
        }
        found["kv"] = sorted(int(r.id) for r in table if engine.shelf.tier(r.id) != "none")

    served.client.portal.call(served.driver.call, look)
    return found


def settle(served: Any) -> None:
    while served.driver.stats()["later"] or served.driver.stats()["active"]:
        served.client.portal.call(served.driver.call, lambda engine: None)


@pytest.mark.parametrize("how", [{}, {"n": 3}, {"kvweave": {"repair": "none"}}])
def test_nothing_is_left(serve: Any, how: dict[str, Any]) -> None:
    served, rng = serve(), random.Random(1)
    anna = served.anna
    talk = conversation(rng, 1)
    ask(anna, talk[:1])
    settle(served)
    before = kept(served)
    private = [*talk[:1], *conversation(rng, 2)]
    first = ask(anna, private, store=False, **how)
    settle(served)
    assert kept(served) == before
    again = ask(anna, private, store=False, **how)
    assert [c["message"] for c in first["choices"]] == [c["message"] for c in again["choices"]]
    settle(served)
    assert kept(served) == before
    ask(anna, private)
    settle(served)
    assert kept(served)["tokens"] > before["tokens"], "the default keeps what was said"


def test_what_was_stored_before_is_reused_and_stays(serve: Any) -> None:
    served, rng = serve(), random.Random(2)
    anna = served.anna
    talk = conversation(rng, 3)
    ask(anna, talk)
    settle(served)
    before = kept(served)
    more = [*talk, {"role": "assistant", "content": "so well"}, {"role": "user", "content": "rain"}]
    told = ask(anna, more, store=False)
    assert told["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    settle(served)
    assert kept(served) == before
    stored = ask(anna, talk)
    assert stored["usage"]["kv"]["prefilled"] <= 8, "its own context is where it was"


def test_a_private_request_that_fails_or_completes_text_leaves_nothing(serve: Any) -> None:
    served = serve()
    before = kept(served)
    body = {"model": "kvweave", "prompt": "Anna's river is cold so well", "max_tokens": 4}
    served.anna("POST", "/v1/completions", body | {"store": False})
    too_long = [{"role": "user", "content": "Anna's river " * 5000}]
    body = {"model": "kvweave", "messages": too_long, "store": False}
    served.anna.error("POST", "/v1/chat/completions", body, 400)
    settle(served)
    assert kept(served) == before


def test_no_file_of_the_home_has_the_words(serve: Any, tmp_path: Path) -> None:
    served = serve(home=tmp_path / "home")
    rng = random.Random(3)
    private = conversation(rng, 2)
    ask(served.anna, private, store=False)
    tokens: list[list[int]] = []
    text = private[0]["content"]
    served.client.portal.call(
        served.driver.call, lambda engine: tokens.append(list(engine.maker.tokens(text)))
    )
    served.close()
    middle = b"".join(t.to_bytes(4, "little") for t in tokens[0][2:8])
    for path in (tmp_path / "home").rglob("*"):
        assert not path.is_file() or middle not in path.read_bytes(), path


def texts(served: Any) -> list[str]:
    """What is remembered of prompts' texts."""
    return [text for _, text, _ in served.app.state.kvweave.assembler._tokens]


@pytest.mark.slow
def test_no_text_of_a_prompt_is_left(serve: Any) -> None:
    served = serve()
    anna, secret = served.anna, "zebra and metal"
    message = {"role": "user", "content": secret}
    ask(anna, [message], store=False)
    body = {"model": "kvweave", "messages": [message], "max_tokens": 4, "store": False}
    anna("POST", "/v1/messages", body)
    anna("POST", "/v1/messages/count_tokens", {"model": "kvweave", "messages": [message]})
    body = {"model": "kvweave", "input": secret, "store": False, "truncation": "auto"}
    anna("POST", "/v1/responses", body)
    anna("POST", "/v1/responses/input_tokens", body)
    settle(served)
    assert not any("zebra" in text for text in texts(served))
    ask(anna, [message])
    assert any("zebra" in text for text in texts(served))
    state = served.app.state.kvweave
    served.client.portal.call(served.driver.call, lambda engine: state.expire(time.time() - 100))
    assert texts(served)
    served.client.portal.call(served.driver.call, lambda engine: state.expire(time.time() + 1))
    assert texts(served) == [] and state.assembler._n_cached == 0
    kept = serve(keep_unstored=True)
    ask(kept.anna, [message], store=False)
    assert any("zebra" in text for text in texts(kept))


def test_what_nobody_used_for_long_is_forgotten(serve: Any) -> None:
    served, rng = serve(retain=3600.0), random.Random(5)
    anna, sessions = served.anna, served.app.state.kvweave.sessions
    anna.put("docs/a", "the museum opens at nine")
    ask(anna, conversation(rng, 1))
    settle(served)
    kept_name = anna.names("auto/**")[0]
    anna("POST", f"/v1/chunks/{kept_name}:pin")
    later = time.time() + 10
    ask(served.berta, conversation(rng, 1))
    settle(served)

    def expire(before: float) -> None:
        served.client.portal.call(served.driver.call, lambda engine: sessions.expire(before))

    expire(time.time() - 3600)
    assert len(anna.names("auto/**")) > 1 and len(sessions) == 2
    expire(later)
    assert anna.names() == [kept_name, "docs/a"] and len(sessions) == 0
    assert served.berta.names() == []
    assert len({name for _, name in kept(served)["names"]}) == 2


def test_it_is_forgotten_without_anybody_asking(serve: Any) -> None:
    served = serve(retain=0.5)
    ask(served.anna, conversation(random.Random(6), 1))
    end = time.monotonic() + 20
    while (served.anna.names() or kept(served)["tokens"] or texts(served)) and (
        time.monotonic() < end
    ):
        time.sleep(0.1)
    assert texts(served) == []
    assert served.anna.names() == [] and kept(served)["tokens"] == set()


def test_no_answer_is_put_aside_for_an_audit(serve: Any) -> None:
    served, rng, asked = serve(), random.Random(7), []

    def spy(engine: Any) -> None:
        engine.shadow.watch = lambda sure=False: asked.append(sure)

    served.client.portal.call(served.driver.call, spy)
    talk = conversation(rng, 2)
    ask(served.anna, talk, store=False)
    assert not asked
    ask(served.anna, talk)
    assert len(asked) == 1
    for n in (1, 2, 4):
        ask(served.anna, [*talk, *conversation(rng, 1)[1:]], store=False, n=n)
    assert len(asked) == 1
    ask(served.anna, [*talk, *conversation(rng, 1)[1:]])
    assert len(asked) == 2


@pytest.mark.slow
def test_a_server_may_keep_what_is_not_stored(serve: Any) -> None:
    served, rng = serve(keep_unstored=True), random.Random(8)
    talk = conversation(rng, 2)
    ask(served.anna, talk, store=False)
    settle(served)
    again = ask(served.anna, talk, store=False)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] > again["prompt_tokens"] / 2
    made = served.anna("POST", "/v1/responses", {"model": "kvweave", "input": "so", "store": False})
    served.anna.error("GET", f"/v1/responses/{made['id']}", None, 404)
