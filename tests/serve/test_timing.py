"""What one key has stored another cannot tell: not from answers, not from errors, not from the time.

The time is measured in rows the model computes, which has no noise; a clock is asked as well.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from loaded import bundled_runner, short_runner
from served import Server, served

from kvweave import Engine
from kvweave.config import Config
from kvweave.demo.vocabulary import ENTITIES, FILLER
from kvweave.run.model import Runner
from kvweave.serve.driver import pace

ANNA, BERTA = "key-of-anna", "key-of-berta"
KEYS = {ANNA: "anna", BERTA: "berta"}
MINE = {"X-Request-Id": "mine"}  # else each error has an id of its own
TIMES = 4  # anna asks the same so often
N_WORDS = 160
OPENAI = {"model": "demo", "max_tokens": 1, "temperature": 0}
SYSTEM = {"role": "system", "content": "keep the notes ."}


def text_of(seed: int, n_words: int = N_WORDS) -> str:
    """Words that are one token each, but for the first: texts of one length are equally long."""
    return " ".join(["the", *random.Random(seed).choices((*ENTITIES, *FILLER), k=n_words)])


def chat(text: str) -> list[dict[str, str]]:
    return [SYSTEM, {"role": "user", "content": text}]


@dataclass
class World:
    """A server, and how many rows each pass of its model had."""

    server: Server
    passes: list[int]

    def client(self, key: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.Client(base_url=self.server.url, headers=headers, timeout=120)

    def ask(self, key: str, text: str, **more: Any) -> dict[str, Any]:
        """Answer, and wait for the idle work behind it."""
        body = OPENAI | {"messages": chat(text), "max_tokens": 3}
        with self.client(key) as client:
            reply = client.post("/v1/chat/completions", json=body | more)
        assert reply.status_code == 200, reply.text
        self.server.settle()
        told: dict[str, Any] = reply.json()
        return told

    def work(self, key: str, text: str, **more: Any) -> tuple[list[int], dict[str, Any]]:
        """Return the rows of each pass a request took, idle work included, and its usage."""
        self.passes.clear()
        told = self.ask(key, text, **more)
        return list(self.passes), told["usage"]

    def get(self, key: str, path: str, method: str = "GET", **more: Any) -> httpx.Response:
        with self.client(key) as client:
            return client.request(method, path, **more)


@pytest.fixture
def model(request: pytest.FixtureRequest) -> Runner:
    """Two layers, of which only rows are counted; a clock has to see what six take."""
    return bundled_runner() if "clock" in request.node.name else short_runner()


@pytest.fixture
def worlds(model: Runner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make servers on engines of their own; afterwards each engine is checked."""
    passes: list[int] = []
    forward = model.forward

    def counted(segments: Any, *args: Any, **more: Any) -> Any:
        passes.append(sum(len(segment.tokens) for segment in segments))
        return forward(segments, *args, **more)

    monkeypatch.setattr(model, "forward", counted)
    # where another key was there lately steps are as short as this machine makes them
    monkeypatch.setattr(pace, "STEP", float("inf"))
    monkeypatch.setattr(pace, "MANY", Config().max_rows)
    ends: list[Any] = []

    def make(**options: Any) -> World:
        engine = Engine(model, repair="none")
        running = served(engine, keys=KEYS, model_name="demo", **options)
        world = World(running.__enter__(), passes)
        ends.append((running, engine))
        return world

    yield make
    for running, engine in ends:
        running.__exit__(None, None, None)
        engine.check_integrity()
        engine.close()


@pytest.fixture
def world(worlds: Any) -> World:
    """A server that anna has used, and berta not."""
    made: World = worlds()
    for _ in range(TIMES):
        made.ask(ANNA, text_of(1))
    for name, seed in (("secret", 2), ("more", 3), ("most", 4)):
        put = made.get(ANNA, f"/v1/chunks/docs/{name}", "PUT", json={"text": text_of(seed)})
        assert put.status_code == 201
    assert made.get(ANNA, "/v1/contexts", "POST", json={"name": "chat/secret"}).status_code == 201
    made.server.settle()
    return made


# ---- the work


def test_known_text_takes_another_key_the_work_of_a_first_request(worlds, world):
    first, usage = worlds().work(BERTA, text_of(1))
    second, told = world.work(BERTA, text_of(1))
    assert sum(first) > N_WORDS
    assert second == first
    assert told == usage and told["kv"]["reused"] == told["kv"]["exact"] == 0


def test_the_owner_saves_that_work(world):
    """Else the test above could not fail."""
    work, usage = world.work(ANNA, text_of(1))
    assert sum(work) < N_WORDS / 2
    assert usage["kv"]["exact"] + usage["kv"]["reused"] > N_WORDS


@pytest.mark.parametrize("reuse", ["prefix", "off"])
def test_nor_do_other_ways_of_reuse_tell(worlds, reuse):
    used, fresh = worlds(reuse=reuse), worlds(reuse=reuse)
    for _ in range(TIMES):
        used.ask(ANNA, text_of(1))
    assert used.work(BERTA, text_of(1)) == fresh.work(BERTA, text_of(1))


@pytest.mark.parametrize(
    ("method", "path", "body", "seed"),
    [
        ("POST", "/v1/chat/completions", lambda text: OPENAI | {"messages": chat(text)}, 1),
        ("POST", "/v1/completions", lambda text: OPENAI | {"prompt": text}, 3),
        ("PUT", "/v1/chunks/docs/mine", lambda text: {"text": text, "replace": True}, 2),
        ("POST", "/v1/compose", lambda text: {"template": text}, 4),
        ("POST", "/v1/contexts/mine:append", lambda text: {"text": text}, 4),
        ("POST", "/v1/contexts/mine:ask", lambda text: {"content": text, "max_tokens": 1}, 1),
    ],
)
@pytest.mark.slow
def test_known_and_unknown_text_of_one_length_take_the_same_rows(world, method, path, body, seed):
    world.ask(BERTA, "")  # what any first request has to do
    rows = []
    for each in (seed, 77):
        made = world.get(BERTA, "/v1/contexts", "POST", json={"name": "mine"})
        assert made.status_code == 201, made.text
        world.passes.clear()
        assert world.get(BERTA, path, method, json=body(text_of(each))).status_code in (200, 201)
        world.server.settle()
        if path.endswith((":append", "compose")):  # they compute nothing yet
            name = "mine" if path.endswith(":append") else f"compose-{len(rows) + 1}"
            assert world.get(BERTA, f"/v1/contexts/{name}:weave", "POST").status_code == 200
        rows.append(world.passes[0])  # what follows is of the answer, which may end at once
        assert world.get(BERTA, "/v1/contexts/mine", "DELETE").status_code == 200
    assert rows[0] == rows[1] >= N_WORDS


@pytest.mark.slow
def test_a_busy_neighbour_changes_no_plan(worlds, world):
    """Berta's whole conversation goes as it would if she were alone."""
    alone = worlds()
    for place in (alone, world):
        for seed in (31, 32, 31, 33):
            if place is world:
                world.ask(ANNA, text_of(seed))
        place.told = [place.work(BERTA, text_of(seed)) for seed in (31, 32, 31, 33)]
    assert world.told == alone.told


# ---- the words


@pytest.mark.slow
def test_ids_and_names_of_another_key_are_not_there(world):
    ids = {entry["id"] for entry in world.get(ANNA, "/v1/chunks").json()["data"]}
    assert len(ids) > 2
    for ref in [f"%23{id}" for id in ids] + ["docs/secret"]:
        answers = [
            world.get(BERTA, f"/v1/chunks/{ref}"),
            world.get(BERTA, f"/v1/chunks/{ref}", "DELETE"),
            world.get(BERTA, f"/v1/chunks/{ref}:pin", "POST"),
            world.get(BERTA, f"/v1/chunks/{ref}:unpin", "POST"),
            world.get(BERTA, f"/v1/chunks/{ref}:place", "POST", json={"tier": "none"}),
            world.get(BERTA, f"/v1/chunks/{ref}:cp", "POST", json={"to": "mine"}),
            world.get(BERTA, f"/v1/chunks/{ref}:mv", "POST", json={"to": "mine"}),
        ]
        assert [answer.status_code for answer in answers] == [404] * 7, (
            ref,
            [a.text for a in answers],
        )
    for ref in [f"#{id}" for id in ids] + ["docs/secret", "docs/secret[0:4]"]:
        told = world.get(
            BERTA, "/v1/compose", "POST", json={"template": "{d}", "values": {"d": [ref]}}
        )
        assert told.status_code == 404, told.text
        parts = [{"role": "user", "content": [{"type": "chunk", "name": ref}]}]
        body = {"model": "demo", "messages": parts, "max_tokens": 1}
        assert world.get(BERTA, "/v1/chat/completions", "POST", json=body).status_code == 404
    assert world.get(BERTA, "/v1/contexts/chat/secret").status_code == 404
    assert world.get(BERTA, "/v1/contexts/chat/secret:weave", "POST").status_code == 404
    assert {entry["id"] for entry in world.get(ANNA, "/v1/chunks").json()["data"]} == ids


def test_lists_of_another_key_are_empty(world):
    for path in (
        "/v1/chunks",
        "/v1/chunks?pattern=**",
        "/v1/chunks:find",
        "/v1/chunks:du",
        "/v1/contexts",
    ):
        told = world.get(BERTA, path).json()
        assert told == {"object": "list", "data": []} | ({"next": None} if "next" in told else {})
    status = world.get(BERTA, "/v1/status").json()
    assert (status["chunks"], status["contexts"], status["history"], status["last_plan"]) == (
        0,
        0,
        [],
        None,
    )
    assert status["budgets"][0]["used"] == 0


@pytest.mark.slow
def test_an_error_tells_no_more_of_a_foreign_thing_than_of_none(worlds, world):
    """No hint names it, nor is its name taken."""
    alone = worlds()
    for method, path, body in (
        ("GET", "/v1/chunks/docs/secret", None),
        ("GET", "/v1/chunks/docs/secre", None),
        ("DELETE", "/v1/chunks/docs/*", None),
        ("GET", "/v1/contexts/chat/secre", None),
        ("POST", "/v1/contexts/chat/secret:ask", {"content": "x"}),
        ("POST", "/v1/compose", {"template": "{docs/secre}"}),
        ("POST", "/v1/chunks/docs/:cp", {"to": "mine/"}),
    ):
        there, here = (
            place.get(BERTA, path, method, json=body, headers=MINE) for place in (alone, world)
        )
        assert (here.status_code, here.json()) == (there.status_code, there.json()), path
    for path, body in (("docs/secret", {"text": "x"}),):
        assert world.get(BERTA, f"/v1/chunks/{path}", "PUT", json=body).status_code == 201
    assert world.get(BERTA, "/v1/contexts", "POST", json={"name": "chat/secret"}).status_code == 201
    assert world.get(ANNA, "/v1/chunks/docs/secret?text=true").json()["text"] == text_of(2)


# ---- the clock


def chance(known: list[float], fresh: list[float], n: int = 20_000) -> float:
    """Return how often as large a difference of mean ranks comes by chance, by permutation."""
    both = np.array([*known, *fresh])
    ranks = both.argsort().argsort().astype(float)
    k = len(known)

    def distance(r: Any) -> Any:
        return np.abs(r[..., :k].mean(-1) - r[..., k:].mean(-1))

    rng = np.random.default_rng(0)
    shuffled = rng.permuted(np.tile(ranks, (n, 1)), axis=1)
    return float(((distance(shuffled) >= distance(ranks)).sum() + 1) / (n + 1))


@pytest.mark.slow
def test_no_clock_tells_what_another_key_has_asked(world):
    """Interleaved in random order; the same test on the owner's own text does see the difference."""
    n = 30
    for i in range(n):
        world.ask(ANNA, text_of(100 + i), max_tokens=1)
    order = [
        (seed, kind) for kind, at in (("known", 100), ("fresh", 500)) for seed in range(at, at + n)
    ]
    random.Random(0).shuffle(order)
    for key, told in ((BERTA, False), (ANNA, True)):
        seconds: dict[str, list[float]] = {"known": [], "fresh": []}
        for seed, kind in order:
            reply = world.ask(key, text_of(seed), max_tokens=1)
            seconds[kind].append(reply["kvweave"]["ttft"])
        p = chance(seconds["known"], seconds["fresh"])
        print(
            f"\n{key}: p = {p:.5f}", {k: round(float(np.median(v)), 4) for k, v in seconds.items()}
        )
        assert (p < 1e-3) is told
