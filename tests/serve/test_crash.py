"""A server that is killed at any moment has, when it is back, all that it had acknowledged."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import torch
from hostile import CHAT, USER
from launching import Launched, launch
from store.records import load

from kvweave import Engine
from kvweave.demo.vocabulary import FILLER
from kvweave.run.model import Runner
from kvweave.store.kv import KV
from kvweave.store.record.transfer import digest_of
from kvweave.store.tier.disk import Disk

ROUNDS = int(os.environ.get("KVWEAVE_CRASHES", "8"))
SEED = int(os.environ.get("KVWEAVE_SEED", "2026"))
WRITERS = 3
NAMES = 12  # of each writer; few, so that replacing and removing happen
LIFE = 40  # acknowledged writes before the kill, at most
PAUSE = 0.2  # seconds from there to the kill, at most
QUESTION = "what about Anna's river"

State = tuple[int, ...] | None  # the tokens under a name; None: there is no such name


@dataclass
class Ledger:
    """What one writer was told, and what he had asked for when the server died."""

    prefix: str
    rng: random.Random
    told: dict[str, State] = field(default_factory=dict)
    asked: dict[str, State] = field(default_factory=dict)
    n_told: int = 0

    def write(self, client: httpx.Client) -> None:
        """Change one name at random."""
        name = f"{self.prefix}/{self.rng.randrange(NAMES)}"
        path = f"/v1/chunks/{name}"
        if self.told.get(name) is not None and self.rng.random() < 0.4:
            self.asked[name] = None
            self.settle(name, client.delete(path), 200)
            return
        tokens = [self.rng.randrange(50, 400) for _ in range(self.rng.randrange(4, 60))]
        body = {"tokens": tokens, "durable": True, "replace": name in self.told}
        self.asked[name] = tuple(tokens)
        self.settle(name, client.put(path, json=body), 200, 201)

    def settle(self, name: str, reply: httpx.Response, *wanted: int) -> None:
        assert reply.status_code in wanted, reply.text
        self.told[name] = self.asked.pop(name)
        self.n_told += 1

    def check(self, client: httpx.Client) -> dict[str, str]:
        """Compare with a server that is back, and take over what became of the last request.

        Returns the digests by name.
        """
        listed = client.get("/v1/chunks", params={"pattern": f"{self.prefix}/**"}).json()["data"]
        found: dict[str, State] = {}
        digests = {}
        for entry in listed:
            told = client.get(f"/v1/chunks/{entry['name']}", params={"text": True})
            assert told.status_code == 200, told.text
            assert told.json()["tier"] == "disk", "durable KV was lost"
            found[entry["name"]] = tuple(told.json()["tokens"])
            digests[entry["name"]] = told.json()["digest"]
            assert len(told.json()["tokens"]) == entry["n_tokens"] > 0
        for name in {*found, *self.told, *self.asked}:
            now, may = found.get(name), [self.told.get(name)]
            if name in self.asked:
                may.append(self.asked[name])
            assert now in may, f"{name} is {now}, may be one of {may}"
        self.told, self.asked = dict(found), {}
        return digests


@contextmanager
def under_load(server: Launched, ledgers: list[Ledger]) -> Iterator[list[BaseException]]:
    """Write and chat in threads until the server is gone; yields what else went wrong."""
    wrong: list[BaseException] = []
    stop = threading.Event()

    def run(work) -> None:  # type: ignore[no-untyped-def]
        try:
            with server.client() as client:
                while not stop.is_set():
                    work(client)
        except httpx.TransportError:
            pass  # it was killed
        except BaseException as error:
            wrong.append(error)

    def chat(client: httpx.Client) -> None:
        text = " ".join(random.choices(FILLER, k=20))
        messages = [USER | {"content": f"{text} . {QUESTION}"}]
        body = {"model": "demo", "messages": messages, "max_tokens": 20, "stream": True}
        with client.stream("POST", CHAT, json=body) as reply:
            assert reply.status_code == 200, reply.read()
            for _ in reply.iter_lines():
                pass

    works = [ledger.write for ledger in ledgers] + [chat, chat]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield wrong
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()


def records_of(home: Path, model: Runner) -> dict[str, KV]:
    """Read every record of a home that nobody has open, which checks its sums."""
    disk, digest = Disk(home / "kv"), model.fingerprint.digest().hex()
    found = {digest_of(key): load(disk, key, model=digest) for key in disk.keys()}
    disk.check_integrity()
    disk.close()
    wrong = {key: each for key, each in found.items() if not isinstance(each, KV)}
    assert not wrong, f"half there: {wrong}"
    return {key: each for key, each in found.items() if isinstance(each, KV)}


def start(directory: Path, *options: str) -> Launched:
    return launch(directory, "--repair", "none", "--max-sessions", "4", *options)


def until_told(ledgers: list[Ledger], n: int) -> None:
    """Wait until that many more writes were acknowledged."""
    n += sum(ledger.n_told for ledger in ledgers)
    until = time.monotonic() + 120
    while sum(ledger.n_told for ledger in ledgers) < n:
        assert time.monotonic() < until, "nothing is acknowledged"
        time.sleep(0.002)


@pytest.mark.slow
def test_what_was_acknowledged_survives_kills(tmp_path: Path, bundled: Path) -> None:
    rng, model = random.Random(SEED), Runner.load(str(bundled))
    ledgers = [Ledger(f"w{i}", random.Random(SEED + i)) for i in range(WRITERS)]
    home, n_open = tmp_path / "it" / "home", 0
    server = start(tmp_path / "it")
    try:
        for _ in range(ROUNDS):
            with under_load(server, ledgers) as wrong:
                until_told(ledgers, rng.randint(1, LIFE))
                time.sleep(rng.uniform(0, PAUSE))
                server.kill()
            assert not wrong, wrong
            n_open += sum(len(ledger.asked) for ledger in ledgers)
            there = set(records_of(home, model))
            server = start(tmp_path / "it")
            with server.client() as client:
                digests = {k: v for ledger in ledgers for k, v in ledger.check(client).items()}
                n_all = len(client.get("/v1/chunks").json()["data"])
            assert set(digests.values()) <= there
        told = {
            name: tokens for ledger in ledgers for name, tokens in ledger.told.items() if tokens
        }
        n_told = sum(ledger.n_told for ledger in ledgers)
        print(f"\n{ROUNDS} kills, {n_told} acknowledged, {n_open} open, {n_all} names at the end")
        assert n_told >= ROUNDS and told
        answer = ask_over(server, told)
        server.stop()
        compare(
            told,
            {name: records_of(home, model)[digests[name]] for name in some(told)},
            answer,
            model,
        )
    finally:
        if server.process.poll() is None:
            server.kill()


def some(told: dict[str, tuple[int, ...]]) -> list[str]:
    return sorted(told)[::5]


TEMPLATE = "{docs} " + QUESTION


def ask_over(server: Launched, told: dict[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the tokens that a server says over some chunks."""
    with server.client() as client:
        body = {"template": TEMPLATE, "values": {"docs": some(told)}, "name": "after"}
        made = client.post("/v1/compose", json=body)
        assert made.status_code == 201, made.text
        reply = client.post("/v1/contexts/after:generate", json={"max_tokens": 12}).json()
        assert client.get("/health").json()["status"] == "ok"
    return tuple(reply["tokens"])


def compare(
    told: dict[str, tuple[int, ...]], kept: dict[str, KV], answer: tuple[int, ...], model: Runner
) -> None:
    """Check KV and answer of some chunks against an engine that never died."""
    with Engine(model, repair="none") as fresh:
        for name, mine in kept.items():
            whole = fresh.shelf.get(fresh.put(name, list(told[name])).id)
            assert whole is not None
            for a, b in zip((*whole.k, *whole.v), (*mine.k, *mine.v), strict=True):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        wanted = fresh.compose(TEMPLATE, {"docs": list(kept)}).generate(max_tokens=12)
        assert answer == tuple(wanted.tokens)


@pytest.mark.slow
def test_a_server_that_stops_has_written_what_it_had(tmp_path: Path) -> None:
    """SIGTERM, unlike a kill, also keeps what was not asked to be durable."""
    server = start(tmp_path / "it")
    with server.client() as client:
        put = client.put("/v1/chunks/docs/a", json={"text": "Anna's river is cold ."})
        assert put.status_code == 201 and put.json()["tier"] == "ram"
    server.stop()
    server = start(tmp_path / "it")
    try:
        with server.client() as client:
            told = client.get("/v1/chunks/docs/a").json()
            assert (told["tier"], told["id"]) == ("disk", put.json()["id"])
    finally:
        server.kill()


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_answers_and_writes_all_the_same(tmp_path: Path) -> None:
    server = start(tmp_path / "it", "--grace", "600")
    words = {
        "model": "demo",
        "messages": [USER],
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    with server.client() as client:
        put = client.put("/v1/chunks/docs/a", json={"text": "Anna's river is cold ."})
        assert put.json()["tier"] == "ram"
        with (
            suppress(httpx.HTTPError),
            client.stream("POST", CHAT, json=words) as answer,
        ):
            for line in answer.iter_lines():
                if line.startswith("data"):
                    server.process.send_signal(signal.SIGINT)
                    time.sleep(0.05)
                    server.stop("INT")
                    break
    server = start(tmp_path / "it")
    try:
        with server.client() as client:
            assert client.get("/v1/chunks/docs/a").json()["tier"] == "disk"
    finally:
        server.kill()
