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
    write(generate(Shape(sessions=4), 1), tmp_path / "t.jsonl")
    return str(tmp_path / "t.jsonl")


@pytest.mark.slow
def test_json_has_a_result_for_every_policy(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", path, "--policy", "all", "--tiers", "ram:5%,disk:20%", "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [r["policy"] for r in found["results"]] == [
        "lru", "lfu", "gdsf", "arc", "s3fifo", "reuse", "dead_first", "declared", "belady",
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


@pytest.mark.slow
def test_a_load_has_waits_and_a_bill(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", path, "--load", "2", "--nodes", "2", "--router", "all", "--slo", "5"]
    words += ["--tiers", "ram:5%,disk:20%:::600", "--policy", "declared"]
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert [r["router"] for r in found] == [
        "round_robin", "least_loaded", "rendezvous", "prefix", "chunk_sets",
    ]  # fmt: skip
    for each in found:
        assert each["ttft_s"]["p50"] <= each["ttft_s"]["p99"] and each["nodes"] == 2
        assert each["dollars"]["nodes"] == 5.0 and each["wear"]["disk"]["years"] > 0
        assert each["slo_s"] == 5.0 and each["tiers"][1]["ttl"] == 600
    assert main(words) == 0
    assert "chunk_sets" in capsys.readouterr().out


def test_an_slo_alone_asks_for_the_largest_load(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "simulate",
        "generated",
        "--sessions",
        "12",
        "--slo",
        "4",
        "--arrivals",
        "closed",
        "--json",
    ]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)["results"][0]
    assert found["keeps_slo"] and found["ttft_s"]["p99"] <= 4 and found["load"] >= 1


def test_a_sweep_under_a_load_is_drawn(path: str, tmp_path: Path) -> None:
    drawn = tmp_path / "front.png"
    words = ["simulate", path, "--load", "1", "--tiers", "ram:1%", "--sizes", "2%,20%"]
    assert main([*words, "--plot", str(drawn)]) == 0
    assert drawn.read_bytes()[:4] == b"\x89PNG"


def test_costs_come_from_a_log(
    path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    rows = [{"seconds": 0.01 * n, "computed": n, "attended": 0, "loaded": {}} for n in range(1, 20)]
    log.write_text("\n".join(map(json.dumps, rows)))
    assert main(["simulate", path, "--calibrate", str(log), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["calibration"]["token"] == pytest.approx(0.01)
    assert found["results"][0]["ttft_s"]["mean"] > 1


def test_a_chained_trace_says_nothing_about_chunks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chained = tmp_path / "c.jsonl"
    row = '{"timestamp": 0, "input_length": 1024, "output_length": 5, "hash_ids": [1, 2]}\n'
    chained.write_text(row * 2)
    assert main(["simulate", str(chained), "--hits", "chunks"]) == 2
    assert "another predecessor" in capsys.readouterr().err
    assert main(["simulate", str(chained), "--json", "--tiers", "ram:1GiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hits"] == "prefix" and found["chained"] is True


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--policy", "lur"], 2, "did you mean lru"),
        (["--plot", "x.png"], 2, "--sizes"),
        (["--tiers", "tape:1%"], 1, "no tier"),
        (["--router", "rendezvos", "--load", "1"], 2, "did you mean rendezvous"),
        (["--arrivals", "closed"], 2, "--load"),
        (["--load", "0"], 2, "over 0"),
        (["--slo", "0.001"], 2, "no load keeps"),
        (["--policy", "belady", "--load", "1"], 1, "oracle"),
    ],
)
def test_nonsense_is_refused(
    path: str, words: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", path, *words]) == status
    assert says in capsys.readouterr().err
