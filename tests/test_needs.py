"""What a run says of the tests it skipped. python -m pytest tests/test_needs.py"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from conftest import pytest_terminal_summary
from needs import APT, PIP, lack, need, summary


def test_one_command_gets_all_that_is_lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    reasons = [
        "Skipped: needs CUDA",
        lack("no server", APT, "redis-server"),
        *[f"Skipped: {lack('no library (a; b)', APT, 'libnuma1', 'libcurl4')}"] * 3,
        lack("no moto", PIP, "moto[s3]", "flask"),
    ]
    assert summary(reasons) == [
        "    3 no library (a; b)",
        "    1 needs CUDA",
        "    1 no server",
        "    1 no moto",
        "to run them: apt-get install -y libcurl4 libnuma1 redis-server"
        f" && {sys.executable} -m pip install flask 'moto[s3]'",
    ]
    assert summary(["needs CUDA"]) == ["    1 needs CUDA"], "nothing to install"


def test_what_cannot_be_imported_is_named() -> None:
    assert need("json") is json
    with pytest.raises(pytest.skip.Exception) as skipped:
        need("no_such.module", "no-such")
    assert str(skipped.value) == lack("no-such is not installed", PIP, "no-such")


class Reporter(list[str]):
    """Takes what pytest's own would print."""

    config = SimpleNamespace(stash=pytest.Stash())
    stats: ClassVar = {
        "skipped": [SimpleNamespace(longrepr=("test_x.py", 3, "Skipped: needs CUDA"))]
    }
    line = section = list.append


def test_a_run_ends_with_it() -> None:
    said: Any = Reporter()
    pytest_terminal_summary(said)
    assert said == ["skipped", "    1 needs CUDA"]
    said = Reporter()
    said.stats = {}
    pytest_terminal_summary(said)
    assert said == [], "nothing was skipped, nothing is said"
