"""Nothing that git tracks names a path or a package registry of one machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
HOME = re.compile(r"(?<![\w.:/~})-])/(?:home|root|work|Users|opt|mnt|tmp)/")
REGISTRY = re.compile(r"pypi\.org|pythonhosted\.org|download\.pytorch\.org|index-url|find-links")
HERE = Path(__file__).relative_to(ROOT).as_posix()


def tracked() -> list[str]:
    """Paths git tracks; without git (an unpacked source archive) every file that is no cache."""
    git = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if git.returncode == 0:
        paths = git.stdout.split("\0")
    else:
        parts = ((path, path.relative_to(ROOT)) for path in ROOT.rglob("*") if path.is_file())
        paths = [p.as_posix() for _, p in parts if not any(x.startswith(".") for x in p.parts)]
    return [path for path in paths if path and path != HERE and (ROOT / path).is_file()]


def of_one_machine(text: str) -> list[str]:
    return [
        f"{number}: {line.strip()[:120]}"
        for number, line in enumerate(text.splitlines(), 1)
        if HOME.search(line) or REGISTRY.search(line)
    ]


def test_no_file_names_a_machine():
    found = []
    for path in tracked():
        try:
            text = (ROOT / path).read_text("utf-8")
        except UnicodeDecodeError:
            continue  # binary
        found += [f"{path}:{line}" for line in of_one_machine(text)]
    assert not found, "paths or registries of one machine:\n" + "\n".join(found)


LOCAL = ['open("/home/me/x")', "cd /work/main", "--find-links=/opt/wheels"]
LOCAL += [
    "pip install --index-url x",
    "https://pypi.org/simple",
    "https://download.pytorch.org/whl",
]


@pytest.mark.parametrize("line", LOCAL)
def test_a_line_of_one_machine_is_found(line):
    assert of_one_machine(f"fine\n{line}\n") == [f"2: {line}"]


@pytest.mark.parametrize(
    "line", ["#!/usr/bin/env bash", "docs/work/x", "https://host/home/x", "{root}/tmp/x", "~/work/"]
)
def test_a_line_of_any_machine_is_not(line):
    assert not of_one_machine(line)
