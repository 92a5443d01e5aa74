"""The bench of recordings, tiny: its numbers add up."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import asdict
from types import ModuleType

import pytest
from benches import on_path


@pytest.fixture(scope="module")
def record() -> Iterator[ModuleType]:
    with on_path():
        yield importlib.import_module("record")


@pytest.mark.slow
def test_both_ways_are_measured(record: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    common = importlib.import_module("common")
    monkeypatch.setattr(record.torch, "set_num_threads", lambda n: None)
    options = common.parser(None, threads=1, rounds=2, context=70).parse_args([])
    vars(options).update(asdict(common.Shape.tiny()), block=9)
    ways = {}
    for way in record.WAYS:
        options.child = way
        ways[way] = record.child(options)
    found = record.summed(ways, options)
    pages, heads = (70 + 9 - 1) // record.PAGE + 1, 4
    assert found["setup"]["parameters"] == ways["plain"]["parameters"] > 0
    assert (
        4 * heads * pages * 9 >= ways["recorded"]["recorder_bytes"] >= 4 * heads * (pages - 1) * 9
    )
    memory = found["memory"]
    assert memory["rows_mib"] < memory["plain_mib"] and 0.5 < memory["times_as_much"] < 2
    for key in ("times_as_long", "times_as_much_cpu"):
        assert 0 < found[key]["min"] <= found[key]["median"] <= found[key]["max"]
    assert found["seconds_per_step"]["recorded"] > 0
