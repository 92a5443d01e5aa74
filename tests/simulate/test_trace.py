"""Traces are read and written, and generated ones are as told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvweave.errors import InvalidArgument
from kvweave.simulate.generate import Shape, asked_again, generate
from kvweave.simulate.trace import Made, Request, Trace, parse, prefix_chained, read, write

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
        (MOONCAKE[:-1] + ', "made": [[1, 0, ""]]}', "line 2: an answer's chunk has no tokens"),
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
    assert [(r.sizes, r.kinds, r.session, r.pruned, r.ended, r.made) for r in again.requests] == [
        (r.sizes, r.kinds, r.session, r.pruned, r.ended, r.made) for r in trace.requests
    ]
    assert again.unique_tokens() == trace.unique_tokens()
    assert 0.6 < sum(r.ended for r in trace.requests) / 40 < 0.95
    pruned = [id for r in trace.requests for id in r.pruned]
    kinds = {id: kind for r in trace.requests for id, kind in zip(r.blocks, r.kinds, strict=True)}
    kinds |= {made.id: made.kind for r in trace.requests for made in r.made}
    assert {kinds[id] for id in pruned} >= {"thinking", "user", "assistant"}
    assert "system" not in {kinds[id] for id in pruned}


def test_a_bailian_trace_survives_a_file(tmp_path: Path) -> None:
    trace = parse([bailian(1, -1, 0.5), bailian(2, 1, 1)])
    write(trace, tmp_path / "t.jsonl")
    again = read(tmp_path / "t.jsonl")
    assert again.requests == trace.requests


@pytest.mark.parametrize("regret", [0.0, 0.02, 0.1, 0.3])
def test_what_is_regretted_is_really_asked_for_again(regret: float) -> None:
    again = asked_again(generate(Shape(sessions=300, regret=regret), 4))
    # of what is pruned before the last turn; a little is pruned in the last one
    assert 0.8 * regret <= again <= 1.15 * regret


def test_answers_are_made_not_asked_for() -> None:
    trace = generate(Shape(sessions=20), 1)
    first: dict[int, Request] = {}
    for request in trace.requests:
        for id in request.blocks:
            first.setdefault(id, request)
    made = {m.id: (m.size, r) for r in trace.requests for m in r.made}
    asked = [r for r in trace.requests if r.blocks]
    assert all(r.n_output == sum(m.size for m in r.made) for r in asked)
    used = made.keys() & first.keys()
    assert len(used) > 100
    assert all(first[id].time > made[id][1].time for id in used), "used behind the answer only"
    assert all("assistant" not in r.kinds or len(r.blocks) > 2 for r in asked)


def test_only_published_traces_are_chained() -> None:
    assert parse([MOONCAKE, MOONCAKE]).chained
    assert not parse([MOONCAKE, MOONCAKE.replace("[7, 8, 9]", "[9, 7, 8]")]).chained
    assert not parse([MOONCAKE, MOONCAKE.replace("[7, 8, 9]", "[5, 8, 9]")]).chained
    assert not generate(Shape(sessions=20), 1).chained


def test_a_prefix_cache_tells_blocks_apart_by_what_stands_before_them() -> None:
    def request(*ids: int, made: tuple[int, ...] = ()) -> Request:
        about = tuple(Made(id, 1, "") for id in made)
        return Request(0, 0, ids, (1,) * len(ids), ("",) * len(ids), "s", (2,), made=about)

    seen = prefix_chained(
        Trace([request(1, 2, made=(3, 4)), request(1, 2, 3, 5), request(2, 4)], 0)
    )
    assert seen.chained
    one, two, three = seen.requests
    assert two.blocks[:3] == (*one.blocks, one.made[0].id), "what was thought is still before it"
    assert not {*three.blocks} & {*one.blocks, *two.blocks, *(m.id for m in one.made)}
    assert one.pruned == ()
    plain = parse([MOONCAKE])
    assert prefix_chained(plain) is plain
