"""What some tests need that a machine may lack: why they are skipped, and what would enable them.

``make test`` ends with one command for all of it (`tests/conftest.py`). A test that is skipped for
another reason (no right to mount, not on Linux) is only counted there.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

APT, PIP = "apt-get install", "pip install"
LACK = re.compile(f"(.*); ({APT}|{PIP}) (.*)", re.DOTALL)


def lack(what: str, how: str, *packages: str) -> str:
    """Return the reason to skip a test: ``what`` is lacking, ``how`` (APT or PIP) gets it."""
    return f"{what}; {how} {' '.join(packages)}"


def need(module: str, package: str = "") -> Any:
    """Return a module; without it, skip the tests that call this, or all of the file that does."""
    package = package or module.split(".")[0]
    return pytest.importorskip(module, reason=lack(f"{package} is not installed", PIP, package))


def only_on_cpu(why: str) -> pytest.MarkDecorator:
    """Mark a test that says something of tiny models on a CPU alone, and why."""
    on = os.environ.get("KVWEAVE_TEST_DEVICE", "cpu")
    return pytest.mark.skipif(on != "cpu", reason=f"{why}; to run it unset KVWEAVE_TEST_DEVICE")


def summary(reasons: Iterable[str]) -> list[str]:
    """Return lines that say what was skipped and the one command that enables what can be."""
    counts = Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    wanted: dict[str, set[str]] = defaultdict(set)
    lines = []
    for reason, n in counts.most_common():
        found = LACK.fullmatch(reason)
        lines.append(f"{n:5} {found[1] if found else reason}")
        if found:
            wanted[found[2]].update(found[3].split())
    if wanted:
        lines.append(f"to run them: {' && '.join(_command(*each) for each in wanted.items())}")
    return lines


def _command(how: str, packages: set[str]) -> str:
    names = shlex.join(sorted(packages))
    if how == PIP:
        return f"{sys.executable} -m {PIP} {names}"
    return f"{'' if shutil.which('sudo') is None else 'sudo '}{APT} -y {names}"
