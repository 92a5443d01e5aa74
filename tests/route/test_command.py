"""`kvweave route` as a process, before two real servers, one of which is killed under load."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from launching import launch
from routing import CHAT, PATIENCE, answered, until

from kvweave.cli import main

WORDS = "so well then we saw it was a day of rain and some more light on way there".split()


@contextmanager
def command(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `kvweave route`; yield its process and address."""
    env = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    line = [sys.executable, "-m", "kvweave.cli", "route", "--port", "0", "--json", *words]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], 180)
            told = process.stdout.readline() if ready else ""
            assert told, "it did not start"
            yield process, json.loads(told)["url"]
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def test_it_starts_without_torch_and_ends_when_what_runs_has_ended(workers, tmp_path):
    waits = threading.Event()
    both = workers(2, lambda seen: answered("at last") if waits.wait(PATIENCE) else answered())
    (tmp_path / "key").write_text("key-of-operator\n")
    found: list[httpx.Response] = []
    urls = [word for worker in both for word in ("--worker", worker.url)]
    with command(*urls, "--key-file", str(tmp_path / "key"), "--policy", "hash") as (process, url):
        maps = Path(f"/proc/{process.pid}/maps")
        assert not maps.exists() or "libtorch" not in maps.read_text()
        body = {"model": "m", "messages": []}
        thread = threading.Thread(
            target=lambda: found.append(httpx.post(url + CHAT, json=body, timeout=PATIENCE))
        )
        thread.start()
        until(lambda: any(w.asked(CHAT) for w in both), "the request")
        own = {"Authorization": "Bearer key-of-operator"}
        told = httpx.get(f"{url}/v1/workers", headers=own, timeout=PATIENCE).json()
        assert told["policy"] == "hash" and len(told["data"]) == 2
        process.send_signal(signal.SIGTERM)
        until(lambda: closed(url), "closing the door")
        assert process.poll() is None
        waits.set()
        thread.join(PATIENCE)
        assert process.wait(PATIENCE) == 0
    assert found[0].status_code == 200 and "at last" in found[0].text


def closed(url):
    try:
        httpx.get(f"{url}/health", timeout=5)
    except httpx.TransportError:
        return True
    return False


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--worker"),
        (["--worker", "ftp://x"], "no address"),
        (["--worker", "a:1", "--policy", "best"], "invalid choice"),
        (["--worker", "a:1", "--host", "0.0.0.0"], "--key-file"),
        (["--worker", "a:1", "--key-file", "/nowhere"], "nowhere"),
        (["--worker", "a:1", "--url", "http://x"], "this machine only"),
        (["--worker", "a:1", "--calibrate", "/nowhere"], "nowhere"),
    ],
)
def test_what_makes_no_sense_is_said_in_one_line(words, says, capsys):
    assert main(["route", *words]) in (1, 2)
    assert says in capsys.readouterr().err


@pytest.mark.slow
def test_a_worker_is_killed_under_load_and_nobody_loses_an_answer(tmp_path):
    """Greedy answers are the same whoever gives them, so a wrong token would show."""
    servers = [launch(tmp_path / str(i), "--name", "demo", "--repair", "full") for i in range(2)]
    try:
        with command("--worker", servers[0].url, "--worker", servers[1].url, "--probe", "0.2") as (_, url):  # fmt: skip
            alone = {q: answer(servers[1].url, q) for q in range(6)}
            until(lambda: httpx.get(f"{url}/health").json()["taking"] == 2, "both")
            wrong: list[str] = []
            n = [0, 0]  # whole, and told to be cut off
            stop = threading.Event()

            def client(number: int) -> None:
                while not stop.is_set():
                    question, stream = (number + sum(n)) % 6, number % 2 == 0
                    try:
                        text = answer(url, question, stream)
                    except Cut as cut:
                        n[1] += 1
                        if not alone[question].startswith(cut.text):
                            wrong.append(f"{cut.text!r} is no part of {alone[question]!r}")
                        continue
                    except Exception as error:
                        wrong.append(repr(error))
                        continue
                    n[0] += 1
                    if text != alone[question]:
                        wrong.append(f"{text!r} is not {alone[question]!r}")

            threads = [threading.Thread(target=client, args=(i,)) for i in range(6)]
            for thread in threads:
                thread.start()
            until(lambda: n[0] >= 12 or bool(wrong), "answers before")
            both = httpx.get(f"{url}/v1/workers").json()["data"]
            servers[0].kill()
            before = n[0]
            until(lambda: n[0] >= before + 24 or bool(wrong), "answers after")
            stop.set()
            for thread in threads:
                thread.join(PATIENCE)
            assert not wrong, wrong[:5]
            assert all(worker["answered"] for worker in both), "both had work"
            told = httpx.get(f"{url}/v1/workers").json()["data"]
            assert sorted(w["state"] for w in told) == ["down", "up"]
    finally:
        for server in servers:
            if server.process.poll() is None:
                server.kill()


class Cut(Exception):
    """A stream that said that it was cut off."""

    def __init__(self, text: str) -> None:
        self.text = text


def answer(url: str, question: int, stream: bool = False) -> str:
    """Return an answer's text. Raises Cut, and AssertionError for any other error."""
    words = " ".join(WORDS[question:] + WORDS[:question])
    content = f"Anna's river is cold . {words} . {words} . what about Anna's river"
    body = {"model": "demo", "temperature": 0, "max_tokens": 12, "stream": stream}
    body |= {"messages": [{"role": "user", "content": content}]}
    if not stream:
        reply = httpx.post(url + CHAT, json=body, timeout=PATIENCE)
        assert reply.status_code == 200, reply.text
        return str(reply.json()["choices"][0]["message"]["content"])
    text, done = "", False
    with httpx.stream("POST", url + CHAT, json=body, timeout=PATIENCE) as reply:
        assert reply.status_code == 200, reply.read()
        for line in reply.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                told = json.loads(line[6:])
                if "error" in told:
                    assert told["error"]["code"] == "worker_died", told
                    raise Cut(text)
                for choice in told["choices"]:
                    text += choice["delta"].get("content") or ""
    assert done, "it ended without saying so"
    return text
