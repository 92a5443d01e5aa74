"""`kvweave simulate`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvweave.cli.app import main
from kvweave.simulate import generate, write
from kvweave.simulate.generate import Shape


@pytest.fixture
def path(tmp_path: Path) -> str:
    write(generate(Shape(sessions=8), 1), tmp_path / "t.jsonl")
    return str(tmp_path / "t.jsonl")


def test_json_has_a_result_for_every_policy(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", path, "--policy", "all", "--tiers", "ram:5%,disk:20%", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["policy"] for r in found["results"]] == [
        "lru", "lfu", "gdsf", "arc", "s3fifo", "reuse", "declared", "belady",
    ]  # fmt: skip
    assert all(0 < r["hit_rate"]["tokens"] < 1 for r in found["results"])
    assert found["results"][0]["tiers"][0]["budget"] == int(found["all_bytes"] * 0.05)


def test_a_sweep_marks_its_front(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", path, "--tiers", "ram:1%,disk:1%", "--sizes", "2%,20%"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and sum(line.rstrip().endswith("*") for line in lines) >= 2


def test_a_queue_is_told(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    rates = []
    for more in ([], ["--look-ahead", "8"]):
        assert main(["simulate", path, "--policy", "declared", "--json", *more]) == 0
        found = json.loads(capsys.readouterr().out)["results"][0]
        assert found["requests_per_s"] > 0
        rates.append(found["hit_rate"]["tokens"])
    assert rates[0] < rates[1]


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--policy", "lur"], 2, "did you mean lru"),
        (["--plot", "x.png"], 2, "--sizes"),
        (["--tiers", "tape:1%"], 1, "no tier"),
    ],
)
def test_nonsense_is_refused(
    path: str, words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", path, *words]) == status
    assert says in capsys.readouterr().err
