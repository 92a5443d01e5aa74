"""The README's numbers are those of bench/results: python -m pytest tests/test_numbers.py"""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_readme_has_the_measured_numbers() -> None:
    numbers = runpy.run_path(str(ROOT / "docs" / "numbers.py"))
    text = (ROOT / "README.md").read_text()
    shown = text.split(numbers["BEGIN"])[1].split(numbers["END"])[0]
    assert shown == numbers["render"](), "run `make docs`"


def test_every_result_says_machine_and_commit() -> None:
    for file in sorted((ROOT / "bench" / "results").glob("*.json")):
        machine = json.loads(file.read_text())["machine"]
        assert machine["cpu"] and machine["commit"], file.name
