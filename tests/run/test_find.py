"""Where a model is, and how soon one knows that it is nowhere: python -m pytest tests/run/test_find.py"""

from __future__ import annotations

import json
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import huggingface_hub
import pytest

from kvweave.errors import ModelUnusable
from kvweave.run import find as finding
from kvweave.run.model import Runner

HAS = "owner/has"
COMMIT = 40 * "a"


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does when it is asked what it has of a model."""

    asked: list[str]

    def do_GET(self) -> None:
        self.asked.append(self.path)
        found = self.path == f"/api/models/{HAS}"
        told = {"id": HAS, "siblings": [{"rfilename": "config.json"}]} if found else {}
        body = json.dumps(told).encode()
        self.send_response(200 if found else 404)
        if not found:
            self.send_header("X-Error-Code", "RepoNotFound")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Lets a hub elsewhere be asked, with nothing downloaded yet, from an empty directory."""
    (tmp_path / "cwd" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "kept"))

    def at(url: str) -> None:
        api = huggingface_hub.HfApi(endpoint=url, token=False)
        monkeypatch.setattr(finding, "HfApi", lambda: api)

    return at


@pytest.fixture
def hub(online: Callable[[str], None]) -> Iterator[list[str]]:
    """A hub that has one model; the paths it was asked for."""
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Counted", (Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    online(f"http://127.0.0.1:{server.server_port}")
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def keep(tmp_path: Path, name: str, source: Path) -> Path:
    """Keep a checkpoint as if it had been downloaded."""
    where = tmp_path / "kept" / f"models--{name.replace('/', '--')}"
    (where / "refs").mkdir(parents=True)
    (where / "refs" / "main").write_text(COMMIT)
    shutil.copytree(source, where / "snapshots" / COMMIT)
    return where / "snapshots" / COMMIT


@pytest.mark.parametrize(
    "path",
    ["/no/such/model", "./nope", "../nope/model", "a/b/c", "~/model", "here/typo", "nope", "a b/c"],
)
def test_a_mistyped_path_fails_at_once_and_nobody_is_asked(path: str, hub: list[str]) -> None:
    started = time.monotonic()
    with pytest.raises(ModelUnusable, match="no such directory") as failed:
        Runner.load(path)
    assert time.monotonic() - started < 1
    assert hub == [] and "owner/name on the hub" in failed.value.hint


def test_what_the_hub_has_is_left_to_transformers(
    hub: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finding, "ASK_SECONDS", 60.0)  # it answers, however busy the machine is
    assert finding.find(HAS) == finding.Checkpoint(HAS, frozenset(["config.json"]))
    assert hub == [f"/api/models/{HAS}"]


def test_what_nobody_has_fails_after_one_question(hub: list[str]) -> None:
    with pytest.raises(ModelUnusable, match=r"no such directory.*hub.*no such model.*downloaded"):
        Runner.load("owner/nope")
    assert hub == ["/api/models/owner/nope"]


def test_a_hub_that_is_not_there_or_silent_is_not_waited_for(
    online: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        online(f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        with pytest.raises(ModelUnusable, match=r"no such directory.*hub.*refused.*downloaded"):
            Runner.load("owner/nope")
        assert time.monotonic() - started < 1
        silent.listen()
        monkeypatch.setattr(finding, "ASK_SECONDS", 0.3)
        started = time.monotonic()
        with pytest.raises(ModelUnusable, match=r"no such directory.*hub.*downloaded"):
            Runner.load("owner/nope")
        assert time.monotonic() - started < 1


@pytest.mark.parametrize("name", ["owner/kept", "kept", "here/kept"])
def test_without_a_hub_what_was_downloaded_is_used(
    name: str, online: Callable[[str], None], tmp_path: Path, bundled: Path
) -> None:
    online("http://127.0.0.1:9")
    where = keep(tmp_path, name, bundled)
    assert finding.find(name).path == str(where)
    loaded = Runner.load(name)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("a")) == "a"


def test_offline_is_what_the_error_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelUnusable, match=r"no such directory.*offline mode.*downloaded"):
        Runner.load("owner/nope")


@pytest.mark.parametrize("path", ["y" * 300, "a/" * 3000])
def test_a_path_that_the_system_refuses(path: str) -> None:
    with pytest.raises(ModelUnusable, match="name too long"):
        Runner.load(path)
