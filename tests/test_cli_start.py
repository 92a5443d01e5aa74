"""How a command's process starts: python -m pytest tests/test_cli_start.py"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvweave
from kvweave.cli import main

SOURCE = str(Path(kvweave.__file__).parents[1])
PROGRAM = """
import gc
from kvweave.cli.start import uncollected
seen = []
with uncollected():
    seen.append(gc.isenabled())
print(seen, gc.isenabled(), gc.get_freeze_count() > 0)
try:
    with uncollected():
        import torch
        raise ImportError
except ImportError:
    print(gc.isenabled(), gc.get_freeze_count() > 0)
del __import__("sys").modules["torch"]
with uncollected():
    import torch
print(gc.isenabled(), gc.get_freeze_count() > 0)
with uncollected():
    print(gc.isenabled())
"""


def test_the_collector_is_off_while_torch_is_imported_and_on_whatever_happens(
    tmp_path: Path,
) -> None:
    (tmp_path / "torch.py").write_text("")
    path = os.pathsep.join([str(tmp_path), SOURCE])
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert told.split("\n") == ["[False] True False", "True False", "True True", "True", ""]


def test_a_server_spares_the_collector_what_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    monkeypatch.setattr(
        "kvweave.serve.server.Server.run",
        lambda self, sockets: seen.append((gc.isenabled(), len(gc.get_objects()))),
    )
    try:
        assert main(["serve", "--port", "0", "--home", str(tmp_path / "home")]) == 0
        [(enabled, n_seen)] = seen
        assert enabled and n_seen < 10_000, "a look at all objects is short"
    finally:  # the engine goes, and what is imported stays spared, as `conftest` has it
        gc.unfreeze()
        gc.collect()
        gc.freeze()
