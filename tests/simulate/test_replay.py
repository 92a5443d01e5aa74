"""Replays worked by hand, and what holds for any trace, policy and tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from needs import PIP, lack

from kvweave.errors import InvalidArgument
from kvweave.keep import LRU, POLICIES
from kvweave.simulate.cost import DEFAULT, Cost, Tier, tier, tiers
from kvweave.simulate.generate import Shape, generate
from kvweave.simulate.replay import NAMES, Result, Simulator, replay
from kvweave.simulate.sweep import draw, front, sweep
from kvweave.simulate.trace import Request, Trace

PLAIN = Cost(seconds=1.0, doubles_at=10**9, token_bytes=1)


def trace(*requests: tuple[int, ...]) -> Trace:
    made = [Request(i, 0, r, (1,) * len(r), ("",) * len(r)) for i, r in enumerate(requests)]
    return Trace(made, 0)


def ram(n: int) -> Tier:
    return Tier("ram", n, 10.0, 1.0)


def test_chunks_hit_anywhere_a_prefix_only_from_the_front() -> None:
    asked = trace((1, 2, 3), (4, 2, 3), (1, 2, 5))
    chunks = replay(asked, "lru", [ram(10)], PLAIN)
    assert (chunks.hit_blocks, chunks.blocks, chunks.hit_tokens) == (4, 9, 4)
    prefix = replay(asked, "lru", [ram(10)], PLAIN, "prefix")
    assert (prefix.hit_blocks, prefix.loaded) == (2, {"ram": 2})
    assert prefix.ttft == pytest.approx([3.0, 3.0, 1.2], rel=1e-6)


def test_a_prefix_cache_lets_the_end_of_a_prompt_go_first() -> None:
    assert replay(trace((1, 2, 3), (4,), (1, 2)), "lru", [ram(3)], PLAIN, "prefix").hit_blocks == 2
    assert replay(trace((1, 2, 3), (4,), (1, 2)), "lru", [ram(3)], PLAIN).hit_blocks == 0


def test_what_goes_from_memory_is_found_on_disk() -> None:
    below = Tier("disk", 2, 2.0, 0.1)
    found = replay(trace((1,), (2,), (3,), (1,), (2,)), "lru", [ram(1), below], PLAIN)
    # 1 and 2 go to disk, 1 comes back for 3, 2 for 1
    assert found.loaded == {"ram": 0, "disk": 2} and found.moved == {"disk": 4}
    assert found.lost == 0 and found.ttft == pytest.approx([1, 1, 1, 0.5, 0.5], rel=1e-6)
    # 3 s of prefill; the disk reads 2 bytes and writes 4 with 2 a second
    assert found.busy == pytest.approx({"prefill": 3, "ram": 0, "disk": 3}, rel=1e-6)
    assert found.throughput == pytest.approx(5 / 3, rel=1e-6)
    slow = replay(trace((1,), (2,), (1,)), "lru", [ram(1), Tier("disk", 2, 0.5, 0.1)], PLAIN)
    assert slow.busy["disk"] == 6 and slow.throughput == pytest.approx(1 / 2)


def test_a_queue_tells_what_comes() -> None:
    asked = trace((1,), (2,), (3,), (1,), (2,), (3,), (1,))
    assert replay(asked, "declared", [ram(2)], PLAIN).hit_blocks == 0
    # told of the next two, it does as the oracle: 2 goes for 3, and then 1 for 2
    assert replay(asked, "declared", [ram(2)], PLAIN, look_ahead=2).hit_blocks == 2
    assert replay(asked, "belady", [ram(2)], PLAIN).hit_blocks == 2
    assert replay(asked, "lru", [ram(2)], PLAIN, look_ahead=2).hit_blocks == 0


def test_a_policy_sees_the_whole_queue_and_not_beyond(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[int]] = []
    monkeypatch.setattr(LRU, "upcoming", lambda self, keys: told.append(list(keys)))
    replay(trace((1, 2), (), (3,), (4,)), "lru", [ram(9)], PLAIN, look_ahead=1)
    assert told == [[1, 2, 3], [3, 4], [4]], "a line with declarations only does not wait"


def test_prefill_costs_more_far_behind() -> None:
    cost = Cost(seconds=1.0, doubles_at=100)
    assert cost.prefill(0, 10) == pytest.approx(10.5)
    assert cost.prefill(100, 10) == pytest.approx(20.5)
    assert cost.prefill(0, 30) == pytest.approx(cost.prefill(0, 10) + cost.prefill(10, 20))


def test_tiers_are_parsed() -> None:
    assert tier("ram:10%", 1000) == Tier("ram", 100, 20e9, 1.0)
    assert tier("disk:2GiB:1GB", 1000).bandwidth == 1e9
    assert tier("disk:2GiB:1GB:.1", 1000).price == 0.1
    assert tier("disk:50%::2", 1000) == Tier("disk", 500, 3e9, 2.0)
    for bad in (["tape:1%"], ["ram"], ["ram:0%"], ["ram:200%"], ["ram:x"], [], ["disk:1%", "ram:1%"],
                ["ram:1%", "ram:2%"], ["ram:1%:1GB:x"], ["ram:1%:1GB:0"], ["ram:1%:1GB:1:1"],
                ["ram:1%:0"]):  # fmt: skip
        with pytest.raises(InvalidArgument):
            tiers(bad, 1000)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no policy"):
        replay(trace((1,)), "magic", [ram(1)])


@pytest.mark.parametrize("hits", ["chunks", "prefix"])
@pytest.mark.parametrize("name", NAMES)
def test_nothing_beats_a_cache_for_everything(name: str, hits: str) -> None:
    made = generate(Shape(sessions=12), 1)
    total = made.unique_tokens() * DEFAULT.token_bytes
    everything = replay(made, name, [ram(total)], DEFAULT, hits)  # type: ignore[arg-type]
    some = replay(made, name, [ram(total // 20)], DEFAULT, hits)  # type: ignore[arg-type]
    assert everything.lost == 0 < some.lost
    assert some.hit_blocks < everything.hit_blocks
    if hits == "chunks":
        n_different = len({b for r in made.requests for b in r.blocks})
        assert everything.blocks - everything.hit_blocks == n_different


@pytest.mark.parametrize("name", POLICIES)
@given(
    asked=st.lists(st.lists(st.integers(0, 12), max_size=5, unique=True), max_size=20),
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    hits=st.sampled_from(["chunks", "prefix"]),
)
@settings(max_examples=25, deadline=None)
def test_accounts_are_right_after_every_request(name, asked, sizes, hits) -> None:
    requests = [
        Request(i, 0, tuple(b), tuple(1 + k % 3 for k in b), ("",) * len(b), str(i % 3), (i % 13,), i % 4 == 0)
        for i, b in enumerate(asked)
    ]  # fmt: skip
    both = [ram(sizes[0]), Tier("disk", sizes[1], 1.0, 0.1)]
    simulator = Simulator(both, POLICIES[name], PLAIN, hits)
    for request in requests:
        simulator.request(request, Trace(requests, 0), lambda: None)
        simulator.check_integrity()
    assert sum(simulator.result.loaded.values()) == simulator.result.hit_tokens


def result(price: float, ttft: float, throughput: float) -> Result:
    made = Result("lru", [Tier("ram", 2**30, 1.0, price)], requests=60, ttft=[ttft])
    made.loaded, made.prefill = {"ram": 0}, 60 / throughput
    return made


def test_the_front_by_hand() -> None:
    best, quick, busy = result(1, 5, 5), result(3, 2, 4), result(4, 3, 9)
    worse = [result(2, 5, 5), result(3, 4, 4), result(9, 2, 9), result(1, 5, 5)]
    worse[2].ttft = [3.5]
    assert front([*worse[:3], busy, best, quick, worse[3]]) == [best, quick, busy]
    assert front([result(1, 1, 1)]) == [result(1, 1, 1)]


def test_a_sweep_tries_all_sizes_and_is_drawn(tmp_path: Path) -> None:
    made = generate(Shape(sessions=10), 2)
    total = made.unique_tokens() * DEFAULT.token_bytes
    sizes = [total // 50, total // 10]
    both = [Tier("ram", 1, 20e9, 1.0), Tier("disk", 1, 3e9, 0.05)]
    results = sweep(made, ["lru", "belady"], both, sizes)
    assert [(r.policy, *(t.budget for t in r.tiers)) for r in results] == [
        (policy, a, b) for policy in ("lru", "belady") for a in sizes for b in sizes
    ]
    assert {r.policy for r in front(results)} == {"lru"}, "nobody can have the oracle"
    assert {r.policy for r in front(results[4:])} == {"belady"}
    if draw(results, tmp_path / "front.png"):
        assert (tmp_path / "front.png").read_bytes()[:4] == b"\x89PNG"


def test_hit_rates_are_libcachesims(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = lack("libcachesim, which is for development only, is absent", PIP, "libcachesim")
    pytest.importorskip("libcachesim", reason=absent)
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "bench"))
    import policies

    made = generate(Shape(sessions=60), 5)
    keys = [key for r in made.requests for key in r.blocks]
    whole = trace(*((key,) for key in keys))
    room = len(set(keys)) // 10 // 10 * 10
    theirs = policies.peers(keys, room)
    assert set(theirs) == {"lru", "lfu", "arc", "s3fifo", "belady"}
    for name, rate in theirs.items():
        mine = replay(whole, name, [ram(room)], PLAIN)
        # theirs of gdsf breaks ties in another way
        off = {"s3fifo": 1e-3, "lfu": 3e-3}.get(name, 5e-5)
        assert mine.block_rate == pytest.approx(rate, abs=off), name
