"""Traces are read and written, and generated ones are as told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvweave.errors import InvalidArgument
from kvweave.simulate.generate import Shape, generate
from kvweave.simulate.trace import parse, read, write

MOONCAKE = '{"timestamp": 1500, "input_length": 1030, "output_length": 5, "hash_ids": [7, 8, 9]}'


def bailian(chat: int, parent: int, time: float) -> str:
    return json.dumps(
        {"chat_id": chat, "parent_chat_id": parent, "timestamp": time, "input_length": 20,
         "output_length": 3, "type": "text", "turn": 1, "hash_ids": [1, 2]}
    )  # fmt: skip


def test_mooncake() -> None:
    trace = parse([MOONCAKE, "", MOONCAKE.replace("1500", "0")])
    assert [r.time for r in trace.requests] == [0, 1.5]
    assert trace.requests[1].blocks == (7, 8, 9) and trace.requests[1].sizes == (512, 512, 6)
    assert trace.unique_tokens() == 3 * 512


def test_bailian_sessions_are_chains_of_chats() -> None:
    trace = parse([bailian(1, -1, 0.5), bailian(2, 1, 1), bailian(3, 2, 2), bailian(4, -1, 3)])
    assert [r.session for r in trace.requests] == ["1", "1", "1", "4"]
    assert trace.requests[0].sizes == (16, 4) and trace.requests[0].kinds == ("text", "text")
    assert trace.requests[0].time == 0.5 and trace.unique_tokens() == 32


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2"),
        ("[]", "line 2"),
        (MOONCAKE.replace("hash_ids", "ids"), "line 2: no 'hash_ids'"),
        (MOONCAKE.replace("1030", "-1"), "line 2: a length or a time is negative"),
        (MOONCAKE.replace("1500", "NaN"), "line 2: a length or a time is negative"),
        (MOONCAKE[:-1] + ', "sizes": [1]}', "line 2: sizes, kinds and hash_ids do not match"),
    ],
)
def test_what_is_no_trace_is_refused(line: str, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        parse([MOONCAKE, line])


def test_an_empty_trace_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no request"):
        parse([])


def test_generated_traces_are_seeded_and_survive_a_file(tmp_path: Path) -> None:
    shape = Shape(sessions=40)
    trace = generate(shape, 3)
    assert trace == generate(shape, 3) != generate(shape, 4)
    write(trace, tmp_path / "t.jsonl")
    again = read(tmp_path / "t.jsonl")
    assert [r.blocks for r in again.requests] == [r.blocks for r in trace.requests]
    assert [(r.sizes, r.kinds, r.session, r.pruned, r.ended) for r in again.requests] == [
        (r.sizes, r.kinds, r.session, r.pruned, r.ended) for r in trace.requests
    ]
    assert 0.6 < sum(r.ended for r in trace.requests) / 40 < 0.95
    pruned = [id for r in trace.requests for id in r.pruned]
    kinds = {id: kind for r in trace.requests for id, kind in zip(r.blocks, r.kinds, strict=True)}
    assert {kinds[id] for id in pruned} >= {"thinking", "user", "assistant"}
    assert "system" not in {kinds[id] for id in pruned}


def test_a_bailian_trace_survives_a_file(tmp_path: Path) -> None:
    trace = parse([bailian(1, -1, 0.5), bailian(2, 1, 1)])
    write(trace, tmp_path / "t.jsonl")
    again = read(tmp_path / "t.jsonl")
    assert again.requests == trace.requests
