"""Each bench runs with a tiny model and gives figures that add up."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from benches import on_path
from forking import Instead


@pytest.fixture(scope="module")
def bench() -> Iterator[dict[str, ModuleType]]:
    """The benches as modules; they import each other as scripts do."""
    # pytest calls tests/serve, tests/memory and tests/route so
    names = [folder.name for folder in Path(__file__).parent.iterdir() if folder.is_dir()]
    folders = {name: sys.modules.pop(name, None) for name in names}
    with on_path():
        import audit
        import beside
        import common
        import decode
        import disk
        import gpu
        import hit_rate
        import kv_codecs
        import memory
        import memory_loop
        import products
        import prune
        import remote
        import route
        import serve
        import soak
        import tiers

        yield {
            "audit": audit, "common": common, "decode": decode, "disk": disk, "gpu": gpu, "hit_rate": hit_rate,
            "kv_codecs": kv_codecs, "memory": memory, "prune": prune, "remote": remote, "route": route, "serve": serve,
            "products": products, "tiers": tiers, "memory_loop": memory_loop, "beside": beside, "soak": soak,
        }  # fmt: skip
    sys.modules.update({name: folder for name, folder in folders.items() if folder})


@pytest.fixture
def forked(bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers that benches start are forked: each would import torch anew."""
    for name in ("serve", "route"):
        monkeypatch.setattr(bench[name], "subprocess", Instead)


@pytest.fixture(scope="module")
def pair(bench: dict[str, ModuleType]) -> Any:
    common = bench["common"]
    return common.model_pair(common.Shape.tiny(), "float32", "cpu", 2048)


@pytest.mark.slow
def test_audited_bounds_are_kept_and_a_shift_is_seen(
    bench: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, order = bench["audit"], np.random.default_rng(0)
    monkeypatch.setattr(audit, "ORDERS", 40)
    drifts = [float(x) for x in np.exp(order.normal(-5, 1, 150))]
    found = audit.kept(drifts)
    assert found["audits"] == 150 and found["coverage"] >= 0.95 and found["drift_95"] > 0
    shift = audit.shift(drifts, [100 * x for x in drifts])
    assert shift["within_20"] > 0.95 and shift["before"] < 0.2 and shift["audits_to_alarm"] <= 10
    assert shift["under_old_bound"] < 0.2
    check_numbers(shift)


def test_the_conversation_asks_each_fact_back_once(bench: dict[str, ModuleType]) -> None:
    loop = bench["memory_loop"]
    ages, told = loop.scripted(1_000)
    wanted = [each.wanted for each in told if each.wanted is not None]
    assert len(set(wanted)) == len(wanted) and len({each.fact for each in told}) == 1_000
    counts = {age: sum(each.age == age for each in told) for age in ages}
    assert (
        counts[900] == 100 and min(counts.values()) >= 100 and sum(counts.values()) == len(wanted)
    )
    assert all(told[i - each.age].fact == each.wanted for i, each in enumerate(told) if each.wanted)
    assert loop.rate([True] * 100) == [1.0, 0.963, 1.0, 100]


@pytest.mark.slow
def test_memory_loop(bench: dict[str, ModuleType]) -> None:
    loop = bench["memory_loop"]
    ages, told = loop.scripted(40)
    found = {name: loop.play(name, told, lambda _: None) for name in ("memory", "window")}
    check_numbers(found)
    far = str(ages[-1])
    assert found["memory"]["recall"][far][0] > 0.5
    assert found["memory"]["items"] > 20
    assert found["memory"]["tokens_most"] < 900
    assert loop._ranked([0], {0: ["items/0"]})["first"][0] == 1


def check_numbers(found: object, where: str = "") -> None:
    """Every number is finite and not negative, and JSON can hold all of it."""
    json.dumps(found)
    if isinstance(found, dict):
        for key, value in found.items():
            check_numbers(value, f"{where}/{key}")
    elif isinstance(found, list):
        for i, value in enumerate(found):
            check_numbers(value, f"{where}/{i}")
    elif isinstance(found, float):
        assert math.isfinite(found) and found >= 0, where


def test_the_two_models_share_weights_and_agree(bench: dict[str, ModuleType], pair: Any) -> None:
    mine, theirs = pair.runner.model.model, pair.plain.model
    assert mine.layers[0].mlp.up_proj.weight is theirs.layers[0].mlp.up_proj.weight
    common = bench["common"]
    engine = common.make_engine(pair, [1, 2, 3])
    context = engine.context("c", repair="none", denoise=False)
    context.append(common.random_ids(40, pair.shape.vocab, 3))
    ids = torch.tensor([context.tokens()])
    answer = context.generate(max_tokens=5, ignore_eos=True)
    whole = pair.plain.generate(ids, max_new_tokens=5, do_sample=False, pad_token_id=0)
    assert list(answer.tokens) == whole[0, ids.shape[1] :].tolist()


def test_prune(bench: dict[str, ModuleType], pair: Any) -> None:
    found = bench["prune"].bench(pair, 512, 1)
    check_numbers(found)
    assert set(found["cases"]) == {
        "prune/none", "prune/random", "prune/first_k", "prune/auto", "prune/own",
        "replace a middle turn/none", "reorder two turns/none", "re-add a dropped turn/none",
    }  # fmt: skip
    kept = found["kept_by_prefix_caching"]
    n_base = bench["prune"].N_BASE
    assert n_base <= kept["prune"] < n_base + 4  # a few first tokens may agree by chance
    assert kept["prune"] < kept["re-add a dropped turn"] < kept["replace a middle turn"]
    assert found["idle"]["tokens"] > 512 - 64 and found["idle"]["seconds"] > 0
    assert bench["prune"].tables(found)


def test_products(bench: dict[str, ModuleType], pair: Any) -> None:
    from kvweave.run import products

    if not products._is_right():
        pytest.skip("this torch has no oneDNN operation: nothing to enable")
    found = bench["products"].bench(lambda: pair, 64, 1, [(8, 12)])
    assert found["faster"] == products.faster
    assert len(found["layers"]) == len(bench["products"].ROWS)
    assert all(max(x["error"]) < 1e-5 for x in found["layers"])
    assert set(found["model"]["prefill"]["seconds"]) == {"transformers", "torch", "oneDNN"}
    assert bench["products"].tables(found)


def test_turn_sizes_vary_and_add_up(bench: dict[str, ModuleType]) -> None:
    sizes = bench["common"].turn_sizes(4032, 24)
    assert sum(sizes) == 4032 and len(sizes) == 24
    assert min(sizes) < 130 and max(sizes) > 200


def test_full_repair_gives_the_token_of_a_full_prefill(
    bench: dict[str, ModuleType], pair: Any
) -> None:
    prune = bench["prune"]
    world = prune.make_world(pair, 512)
    context = world.contexts["none"]
    context.session.strategy = bench["gpu"].strategy("full")
    suffix = world.suffix()
    names = [f"turn/{i}" for i in range(1, prune.N_TURNS)]
    whole = torch.cat([world.ids(names), torch.tensor([suffix])], 1)
    seen: list[int] = []
    inner = context.session.loop._take
    context.session.loop._take = lambda request, choice: (
        seen.append(choice.token),
        inner(request, choice),
    )
    prune.first_token(world, context, lambda c: c.drop(c.oldest()), suffix)
    with torch.inference_mode():
        assert seen == [int(pair.plain(whole).logits[0, -1].argmax())]


def test_decode(bench: dict[str, ModuleType], pair: Any) -> None:
    found = bench["decode"].bench(pair, [64], 4, 3, 1)
    check_numbers(found)
    figures = found["lengths"]["64"]["clock"]
    assert figures["kvweave_tokens_per_s"] > 0
    assert len(figures["raw_s"]["together"]) == 1
    assert bench["decode"].roofline(pair, 64, 10.0) > 0


def test_memory(bench: dict[str, ModuleType], pair: Any) -> None:
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("needs Linux")
    found = bench["memory"].measure(pair, 512)
    assert found["steps"][0]["step"] == "weave, first token"
    for step in found["steps"]:
        assert step["rows_bytes"] == step["tokens"] * pair.runner.row_bytes
        assert step["allocated_bytes"] >= step["rows_bytes"]


def test_what_tensors_hold_is_counted_once(bench: dict[str, ModuleType]) -> None:
    before = torch.zeros(1000)
    with bench["memory"].Alive() as alive:
        assert alive.n_bytes() == 0
        kept = torch.zeros(300, 4)
        part, same, old = kept[7:8], kept.view(-1).numpy(), before[:10]
        assert alive.n_bytes() == 4800, "views of it add nothing, nor do those of what was there"
        again = torch.from_numpy(same[100:])
        del kept, same
        assert alive.n_bytes() == 4800 and part.numel() + old.numel() + again.numel() == 1114
        del part, again
        assert alive.n_bytes() == 0


@pytest.mark.slow
def test_what_is_alive_through_random_operations(bench: dict[str, ModuleType], pair: Any) -> None:
    budget = 300 * pair.runner.row_bytes
    found = bench["memory"].alive(pair, 60, budget, seed=1)
    check_numbers(found)
    assert sum(found["done"].values()) + sum(found["refused"].values()) == 60
    assert found["refused"]["OverBudget"] > 0 and found["operations_at_80_percent"] > 5
    assert budget == found["budget_bytes"] >= found["accounted_max_bytes"]
    assert min(found["alive_max_bytes"], found["accounted_max_bytes"]) > 0.8 * budget
    assert found["alive_after_close_bytes"] == 0
    steps = {"steps": []}
    assert len(bench["memory"].tables(steps | {"alive": found})) == 2


def test_gpu_smoke(bench: dict[str, ModuleType], pair: Any) -> None:
    found = bench["gpu"].bench(pair, 256, 1)
    check_numbers(found)
    for name in ("full prefill", "none/total", "first 32 of every 512/pass", "place all rows"):
        assert found[name] > 0
    decoded = bench["gpu"].decode(pair, 64, 3, 1, counts=(1, 2))
    limits = bench["gpu"].limits(pair)
    check_numbers([decoded, limits])
    result = {"contexts": {"256": found}, "decode": {"64": decoded}, "limits": limits}
    assert len(bench["gpu"].tables(result)) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_serve(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Starts real servers of a tiny model."""
    out = tmp_path / "serve.json"
    bench["serve"].main(["--quick", "--threads", "1", "--json", "--out", str(out)])
    found = json.loads(out.read_text())
    check_numbers({key: found[key] for key in ("fill_s", "clients")})
    assert set(found["clients"]) == {"1", "2"}
    for figures in found["clients"].values():
        ways, times = figures["ways"], figures["times_as_fast"]
        assert {name: each["requests"] for name, each in ways.items()} == {
            "all": 2, "all, no repair": 2, "prefix": 2, "off": 2,
        }  # fmt: skip
        for each in ways.values():
            assert each["prompt_tokens"] > 200 and each["tokens_per_s"] > 0
            assert 0 < each["server_ttft_p50_s"] <= each["ttft_p99_s"]
            kinds = sum(each["kv_tokens"].values())
            assert kinds == pytest.approx(each["prompt_tokens"], rel=0.2), "medians and means"
        prefilled = {name: each["kv_tokens"]["prefilled"] for name, each in ways.items()}
        assert prefilled["off"] > prefilled["prefix"] > 2 * prefilled["all"] > 0
        assert prefilled["all"] == prefilled["all, no repair"]
        assert (
            ways["all"]["kv_tokens"]["repaired"]
            > 0
            == ways["all, no repair"]["kv_tokens"]["repaired"]
        )
        ratio = ways["prefix"]["ttft_p50_by_round_s"][0] / ways["all"]["ttft_p50_by_round_s"][0]
        assert times["all"]["prefix"]["median"] == pytest.approx(ratio, abs=0.01)
    assert bench["serve"].tables(found)


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_route(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Starts two real servers of the bundled model, and four routers."""
    route, out = bench["route"], tmp_path / "route.json"
    route.main(["--quick", "--json", "--out", str(out)])
    found = json.loads(out.read_text())
    about = found["traces"]["generated"]
    assert list(about["policies"]) == list(route.POLICIES) and 0 < about["new_share"] < 1
    for each in about["policies"].values():
        assert each["requests"] == 12 and sum(each["requests_by_worker"]) == 12
        computed = each["prefilled_tokens"] + each["repaired_tokens"]
        assert 0 < computed < each["prompt_tokens"]
        assert each["computed_share"] == pytest.approx(computed / each["prompt_tokens"], abs=1e-3)
        assert 0 < each["ttft_p50_s"] <= each["ttft_p99_s"]
    assert route.tables(found)


def test_turns_of_a_trace_are_pruned_and_reordered(bench: dict[str, ModuleType]) -> None:
    route, trace = bench["route"], bench["route"].Trace
    rows = [
        json.dumps({"timestamp": n, "input_length": 512 * k, "output_length": 1, "hash_ids": [0, *range(100 * s, 100 * s + k - 1)]})
        for n, (s, k) in enumerate((s, k) for k in (12, 14, 16) for s in (1, 2))
    ]  # fmt: skip
    from kvweave.simulate.trace import parse

    chained = parse(rows)
    assert isinstance(chained, trace) and chained.chained
    assert sorted(map(len, route.sessions_of(chained))) == [3, 3]
    setup = route.Setup(requests=6)
    whole, turns = (route.turns_of(chained, setup, prune=prune) for prune in (False, True))
    assert [len(turn.messages) for turn in whole] == [12, 12, 14, 14, 16, 16]
    assert [turn.session for turn in turns] == ["s0", "s1"] * 3
    assert turns == route.turns_of(chained, setup, prune=True)
    moved = 0
    for one, other in zip(whole, turns, strict=True):
        texts, left = ([m["content"] for m in turn.messages] for turn in (one, other))
        assert set(left) < set(texts) and left[0] == texts[0] and left[-2:] == texts[-2:]
        moved += left != [text for text in texts if text in left]
    assert moved, "some stand in another order"


def test_a_chat_drops_its_oldest_turn(bench: dict[str, ModuleType]) -> None:
    serve = bench["serve"]
    setup = serve.Setup(turns=3, context=150, answer=4)
    chat = serve.Chat(0, setup)
    first = [dict(message) for message in chat.next()]
    chat.said.append({"role": "assistant", "content": "ok"})
    second = chat.next()
    assert [m["role"] for m in first] == ["system", *["user", "assistant"] * 2, "user"]
    assert second == [first[0], *first[3:], {"role": "assistant", "content": "ok"}, second[-1]]
    assert [serve.Chat(0, setup).next()[-1], serve.Chat(1, setup).next()[-1]] != [first[-1]] * 2
    assert serve.Chat(0, setup).next() == first


@pytest.mark.slow
def test_hit_rate(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "hit_rate.json"
    bench["hit_rate"].main(["--quick", "--json", "--out", str(out)])
    found = json.loads(out.read_text())
    check_numbers({key: found[key] for key in ("hit_rate", "speed", "worst")})
    for stream, cases in found["hit_rate"].items():
        assert len(cases) == 6
        for name, methods in cases.items():
            share = {method: values["share"][0] for method, values in methods.items()}
            of_ceiling = {method: values["of_ceiling"][0] for method, values in methods.items()}
            if stream == "random tokens":
                assert max(share.values()) == share["ceiling"], name
            assert of_ceiling["ceiling"] == 1
            assert of_ceiling["names + find"] > 0.99, (stream, name)
            assert of_ceiling["undeclared"] > (0.85 if name[0] == "e" else 0.95), (stream, name)
            assert share["undeclared"] > share["fixed-256"] > 0, (stream, name)
            assert share["prefix-16"] < 0.4, (stream, name)
    for figures in found["speed"].values():
        times = figures["times"]["all of it known, shuffled"]["cpu"]
        assert set(times) == {"hash", "look up", "find", "compare", "short"}
        assert times["find"] > times["hash"] > 0
        assert figures["matches"]["all of it known, shuffled"] > 4
    assert found["speed"]["random tokens"]["matches"]["all of it new"] == 0


def test_disk(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "disk.json"
    bench["disk"].main(["--quick", "--json", "--dir", str(tmp_path), "--out", str(out)])
    found = json.loads(out.read_text())
    check_numbers({key: found[key] for key in ("read", "write", "load", "waits", "victims")})
    assert set(found["read"]["64 KiB"]) == {"bare", "one a call", "batches"}
    (loaded,) = found["load"].values()
    assert loaded["bare"]["of_bare"] == 1 and loaded["loaded"]["gb_per_s"] > 0
    assert found["waits"]["n"] == 20
    assert bench["disk"].tables(found)
    assert [path.name for path in tmp_path.iterdir()] == ["disk.json"]


@pytest.mark.slow
def test_remote(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Starts real servers where they are installed."""
    out = tmp_path / "remote.json"
    bench["remote"].main(["--quick", "--threads", "1", "--json", "--out", str(out)])
    found = json.loads(out.read_text())
    check_numbers(found["sizes"])
    for each in found["sizes"]["64 KiB"].values():
        speeds = each["gb_per_s"]
        assert set(speeds) <= {
            "socket", "redis", "redis, checked", "redis, 8 together", "redis-py",
            "mooncake", "mooncake, 8 together",
        }  # fmt: skip
        assert set(each["of_socket"]) == set(speeds) - {"socket"}
        for way, ratio in each["of_socket"].items():  # one round: the ratio is that of the speeds
            wanted = speeds[way] / speeds["socket"]
            assert ratio["median"] == pytest.approx(wanted, rel=0.02, abs=0.006)
    assert bench["remote"].tables(found)


@pytest.mark.slow
def test_tiers(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    """Starts real servers where they are installed."""
    out = tmp_path / "tiers.json"
    bench["tiers"].main(["--quick", "--threads", "1", "--json", "--out", str(out)])
    found = json.loads(out.read_text())
    check_numbers({name: found[name] for name in ("seconds", "times_as_fast_as_full", "overlap")})
    assert {"ram", "disk", "files"} <= set(found["overlap"])
    assert found["under_the_pass"]["disk"]["layer_0_placed_s"] > 0
    assert bench["tiers"].tables(found)


@pytest.mark.slow
def test_kv_codecs(bench: dict[str, ModuleType], tmp_path: Path) -> None:
    out = tmp_path / "kv_codecs.json"
    bench["kv_codecs"].main(["--quick", "--json", "--out", str(out)])
    found = json.loads(out.read_text())
    check_numbers({name: found[name] for name in ("prose", "notes", "loud", "random", "matched")})
    for name in ("prose", "notes", "loud"):
        raw, eight, four = (found[name][spec] for spec in ("raw", "int8", "int4+zstd"))
        assert raw["kl"] == raw["relative"] == 0 and raw["ratio"] == 0.5
        assert 0 < eight["kl"] < min(1e-3, four["kl"]) and eight["ratio_int8"] == 1
        assert four["ratio"] > 3.9 and four["relative"] < 0.2
    assert found["prose"]["int4+zstd"]["ratio"] > 5
    sizes = [figures["ratio"] for figures in found["random"].values()]
    assert len(sizes) == 14 and min(sizes) >= 1


def test_bits_at_equal_error_are_read_between_points(bench: dict[str, ModuleType]) -> None:
    points = {"a": (0.01, 4.0), "b": (0.1, 2.0), "x": (0.1**1.5, 4.0), "far": (0.5, 1.0)}
    found = {name: {"kl": kl, "bits": bits} for name, (kl, bits) in points.items()}
    assert bench["kv_codecs"].matched(found, ["a", "b"], ["x", "far"], "kl") == {"x": 0.75}


def test_each_way_to_find_covers_what_it_should(bench: dict[str, ModuleType]) -> None:
    hit_rate = bench["hit_rate"]
    parts = [np.arange(first, first + n) for first, n in ((0, 100), (1000, 400), (2000, 300))]
    new = np.arange(9000, 9040)
    case = hit_rate.Case([[part] for part in parts], [[parts[0]], [parts[2]], [new]])
    store = hit_rate.Store()
    covered = {
        "prefix": hit_rate.by_prefix(case),
        "blocks": hit_rate.by_blocks(case),
        "found": store.find([*hit_rate.as_served(case)], case.prompt),
        "names": hit_rate.named_parts(case)[1],
        "both": hit_rate.by_names_and_find(case, store),
        "ceiling": hit_rate.ceiling(case),
    }
    assert {name: mask.sum() for name, mask in covered.items()} == {
        "prefix": 96, "blocks": 256, "found": 400, "names": 400, "both": 400, "ceiling": 400,
    }  # fmt: skip
    assert len(store.matcher) == 0


def test_report_writes_and_prints(
    bench: dict[str, ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = bench["common"]
    out = tmp_path / "deep" / "x.json"
    options = common.parser("x").parse_args(["--json", "--out", str(out)])
    result = {"a": 1.5, "machine": common.machine(torch.device("cpu"))}
    common.report(result, [common.table("t", ("a",), [(1.5,)])], options, "x")
    assert json.loads(out.read_text()) == json.loads(capsys.readouterr().out) == result
    assert {"cpu", "cores", "torch", "transformers", "python", "commit", "date", "load_average"} <= set(
        result["machine"]
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("beside", ["--rounds", "1"]), ("soak", ["--seconds", "12", "--turn", "8"])],
)
def test_servers_under_load(
    name: str, arguments: list[str], bench: dict[str, ModuleType], tmp_path: Path
) -> None:
    """Nothing is lost to others or wrong; how fast it was says nothing here."""
    out = tmp_path / "found.json"
    bench[name].main(["--quick", "--threads", "1", *arguments, "--out", str(out)])
    found = json.loads(out.read_text())
    if name == "beside":
        kinds = {"put", "weave", "check", "compress", "system", "settle", "search"}
        assert set(found["found"]) == kinds
        assert all(each["largest_ms"][0] > 0 for each in found["found"].values())
    else:
        assert found["n_wrong"] == 0 and min(found["answers"].values()) > 5
        assert max(found["disk_mib"]) <= found["setup"]["disk"] / 2**20 + 16
