"""Agents of other people, as they come from npm: how each is started, and what it can call.

They are not installed by the tests. KVWEAVE_AGENTS names a folder in which
``npm install`` of what `PACKAGES` lists was run.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

FOLDER = "KVWEAVE_AGENTS"
PACKAGES = "@mariozechner/pi-coding-agent opencode-ai @qwen-code/qwen-code @openai/codex"
PAGE = Path(__file__).parents[1] / "docs" / "agents.md"
URL, KEY = "http://127.0.0.1:8700", "KEY"


def shown(name: str, url: str, key: str) -> str:
    """Return the block ``name`` of docs/agents.md, for another server."""
    found = re.search(rf"^```\w+ {re.escape(name)}\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    assert found is not None, f"docs/agents.md has no block {name}"
    return re.sub(rf"\b{KEY}\b", key, found[1].replace(URL, url))


@dataclass(frozen=True)
class Started:
    """Where a program runs: its home, its project, the server."""

    home: Path
    work: Path
    url: str
    key: str


@dataclass(frozen=True)
class Program:
    """One agent: its package, what it is started with, the calls that write and read a file."""

    binary: str
    start: Callable[[Started], tuple[list[str], Mapping[str, str]]]
    write: Callable[[str, str], tuple[str, dict[str, object]]]
    read: Callable[[str], tuple[str, dict[str, object]]]
    keep_unstored: bool = False  # it says `store: false` always

    def run(self, at: Started, question: str, timeout: float = 400) -> str:
        """Ask it one thing, without a terminal; return what it printed. It reaches this machine only."""
        folder = os.environ.get(FOLDER)
        binary = None if folder is None else _within(Path(folder), self.binary)
        if binary is None:
            hint = f"run `npm install {PACKAGES}` and name that folder"
            pytest.skip(f"no {self.binary} below ${FOLDER}: {hint}")
        words, more = self.start(at)
        env = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        nowhere = {f"{way}_PROXY": "http://127.0.0.1:9" for way in ("HTTP", "HTTPS")}
        env |= {"HOME": str(at.home), "NO_PROXY": "127.0.0.1,localhost", **nowhere, **more}
        done = subprocess.run(
            [str(binary), *words, question],
            cwd=at.work, env=env, timeout=timeout, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, (
            f"{self.binary} {done.returncode}: {done.stdout}\n{done.stderr}"
        )
        return done.stdout


def _within(folder: Path, binary: str) -> Path | None:
    for root in (folder, folder / "node_modules"):
        if (root / ".bin" / binary).exists():
            return root / ".bin" / binary
    return None


def _pi(at: Started, block: str = "pi") -> tuple[list[str], dict[str, str]]:
    file = at.home / ".pi" / "agent" / "models.json"
    file.parent.mkdir(parents=True)
    file.write_text(shown(block, at.url, at.key))
    return ["--provider", "kvweave", "--model", "demo", "--no-session", "-p"], {"PI_OFFLINE": "1"}


def _opencode(at: Started) -> tuple[list[str], dict[str, str]]:
    (at.work / "opencode.json").write_text(shown("opencode", at.url, at.key))
    off = ("AUTOUPDATE", "MODELS_FETCH", "DEFAULT_PLUGINS", "LSP_DOWNLOAD")
    return ["run"], {f"OPENCODE_DISABLE_{name}": "1" for name in off}


def _qwen(at: Started) -> tuple[list[str], dict[str, str]]:
    *exports, command = shown("qwen", at.url, at.key).splitlines()
    given = dict(each.split("=", 1) for line in exports for each in shlex.split(line)[1:])
    _, *words = shlex.split(command)
    return [*words, "--yolo", "-p"], given


def _codex(at: Started) -> tuple[list[str], dict[str, str]]:
    file = at.home / ".codex" / "config.toml"
    file.parent.mkdir()
    file.write_text(shown("codex", at.url, at.key))
    words = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    return words, {"KVWEAVE_KEY": at.key}


PROGRAMS = {
    "pi": Program(
        "pi",
        _pi,
        lambda path, text: ("write", {"path": path, "content": text}),
        lambda path: ("read", {"path": path}),
    ),
    "pi-messages": Program(  # over Anthropic's API
        "pi",
        lambda at: _pi(at, "pi-messages"),
        lambda path, text: ("write", {"path": path, "content": text}),
        lambda path: ("read", {"path": path}),
    ),
    "opencode": Program(
        "opencode",
        _opencode,
        lambda path, text: ("write", {"filePath": path, "content": text}),
        lambda path: ("read", {"filePath": path}),
    ),
    "qwen": Program(
        "qwen",
        _qwen,
        lambda path, text: ("write_file", {"file_path": path, "content": text}),
        lambda path: ("read_file", {"file_path": path}),
    ),
    "codex": Program(
        "codex",
        _codex,
        lambda path, text: ("exec_command", {"cmd": f"printf '%s' '{text}' > {path}"}),
        lambda path: ("exec_command", {"cmd": f"cat {path}"}),
        keep_unstored=True,
    ),
}
