"""The demonstration: same tokens for all ways, honest baselines, counts that add up."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from needs import need
from rich.console import Console
from transformers import Qwen3Config, Qwen3ForCausalLM

from kvweave import Config, Engine, Runner
from kvweave.demo import baselines, job, plot, report, world
from kvweave.demo.baselines import FullPrefill, GreedyReply, PrefixCache
from kvweave.demo.tokenizer import N_TOKENS
from kvweave.demo.vocabulary import words

SMALL = job.JobSize(turns=4, tokens=300, cap=480, answer=6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model with the bundled tokenizer."""
    where = tmp_path_factory.mktemp("tiny")
    config = Qwen3Config(
        vocab_size=N_TOKENS, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=1024,
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(where)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(job.MODEL / name, where)
    return where


@pytest.fixture(scope="module")
def quick(tiny, tmp_path_factory):
    """What a quick run prints, and the directory it writes to."""
    out = tmp_path_factory.mktemp("demo") / "new"
    here = tiny
    if (job.MODEL / "model.safetensors").exists():
        here = job.MODEL
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(job, "MODEL", here)
        assert job.run(None, json_out=True, out=out, quick=True) == 0
    return printed.getvalue(), out


@pytest.fixture(scope="module")
def rows(quick):
    return json.loads(quick[0])["rows"]


@pytest.fixture
def scene(tiny):
    """An engine with the kvweave way and the script, in float64."""
    runner = job.CountedRunner.load(str(tiny), dtype="float64")
    engine = Engine(runner)
    weaving = job.WeavingWay(engine, runner, world.SYSTEM)
    return engine, weaving, job.Script(engine, weaving.chat.tokens(), SMALL)


@pytest.fixture
def plain(tiny):
    return Runner.load(str(tiny), dtype="float64")


# ---- the whole job


def test_json_is_all_there_is_on_stdout_and_is_written_too(quick):
    text, out = quick
    assert json.loads(text) == json.loads((out / "demo.json").read_text())


def test_report_has_what_its_readers_need(quick):
    found = json.loads(quick[0])
    assert set(found) == {"machine", "model", "settings", "rows", "summary"}
    assert found["model"]["bundled"] is True and found["model"]["parameters"] > 10_000
    assert {"cpu", "threads", "torch", "transformers", "commit"} <= set(found["machine"])
    assert found["settings"]["repair"] == Config().repair
    ways = found["summary"]["ways"]
    assert list(ways) == list(report.WAYS) and ways["full"]["speedup"] == 1
    for way in ways.values():
        assert way["asked"] == 6 and 0 <= way["right"] <= 6 and way["ttft_ms"] > 0


def test_each_measured_turn_is_one_out_and_one_in(rows):
    phases = [row["phase"] for row in rows]
    assert phases == ["fill"] * (len(rows) - 6) + ["prune"] * 6
    assert [row["dropped"] for row in rows[-6:]] == [1] * 6
    assert [row["turn"] for row in rows] == list(range(len(rows)))
    assert all(550 < row["n_tokens"] < job.QUICK.cap for row in rows[-6:])


def test_counts_add_up_to_the_context(rows):
    for row in rows:
        k, n = row["kvweave"], row["n_tokens"]
        assert k["exact"] + k["reused"] + k["repaired"] + k["prefilled"] == n
        assert k["prefilled"] + k["repaired"] <= k["computed"] < n
        assert row["full"]["computed"] == n
        assert row["prefix"]["exact"] + row["prefix"]["prefilled"] == n
        assert row["prefix"]["computed"] == row["prefix"]["prefilled"]


def test_pruning_moves_what_is_left_and_keeps_only_the_prefix_for_prefix_caching(rows):
    for row in rows[-6:]:
        assert row["kvweave"]["moved"] >= row["kvweave"]["reused"] > 400
        assert row["kvweave"]["idle_computed"] > 0
        assert row["prefix"]["exact"] == 0
    assert any(row["prefix"]["exact"] > 400 for row in rows[:-6])


def test_while_nothing_is_pruned_kvweave_answers_as_a_full_prefill(quick, rows):
    if not (job.MODEL / "model.safetensors").exists():
        pytest.skip("a random model's replies are corrected, so reuse begins at once")
    filled = [row for row in rows[:-6] if row["kvweave"]["reused"] == 0]
    assert filled and all(row["kvweave"]["text_as_full"] for row in filled)


def test_verdicts_follow_from_texts(rows):
    for row in rows:
        for way in report.WAYS:
            said = words(row[way]["text"])
            value = words(row["expected"])[2]
            assert row[way]["right"] == (len(said) > 2 and said[2] == value)
        for way in ("kvweave", "prefix"):
            if row[way]["text_as_full"]:
                assert row[way]["text"] == row["full"]["text"] and row[way]["first_as_full"]


def test_times_are_in_order(rows):
    for row in rows:
        for way in report.WAYS:
            assert 0 < row[way]["ttft_ms"] <= row[way]["answer_ms"]
        k = row["kvweave"]
        assert k["edit_ms"] + k["weave_ms"] < k["ttft_ms"] and k["idle_ms"] > 0


def test_figure_shows_all_three_ways(quick):
    image = need("matplotlib.image").imread(quick[1] / "demo.png")[..., :3]
    for name, colour, _ in plot.LOOKS.values():
        wanted = np.array(need("matplotlib.colors").to_rgb(colour))
        n = (np.abs(image - wanted).max(-1) < 0.02).sum()
        assert n > 500, f"{n} pixels of {name}"


def test_without_matplotlib_there_is_no_figure_and_the_rest_goes_on(quick, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert plot.draw(json.loads(quick[0]), tmp_path / "x.png") is False
    assert not (tmp_path / "x.png").exists()


@pytest.mark.slow
def test_another_model_is_told_the_rules_and_compared_with_its_full_prefill(
    tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    out = tmp_path / "[bold]"
    assert job.run(str(tiny), out=out, quick=True, repair="none") == 0
    found = json.loads((out / "demo.json").read_text())
    assert found["model"]["bundled"] is False and found["settings"]["repair"] == "none"
    assert all(row["kvweave"]["repaired"] == 0 for row in found["rows"])
    assert all(row["prefix"]["text_as_full"] for row in found["rows"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.endswith(("✓", "✗")) for line in lines) == 6
    assert any(line.startswith("summary: ") for line in lines)
    assert f"wrote {out}/demo.json" in lines and any("'kvweave[plot]'" in line for line in lines)
    assert (
        max(map(len, (line for line in lines if not line.startswith(("summary", "wrote"))))) <= 80
    )


# ---- turns


def test_another_way_goes_first_each_turn():
    calls: list[tuple[str, object]] = []

    def way(name):
        def answer(what, max_tokens):
            calls.append((name, what))
            return GreedyReply((5, 2), 0.1, 0.2, 3)

        return SimpleNamespace(answer=answer)

    turn = world.Exchange(0, "u", "a b c .", "a", "b", "c", 0, "recall")
    steps = [job.JobStep(turn, 1, [index], []) for index in range(6)]
    script = SimpleNamespace(step=iter(steps).__next__, size=SMALL)
    judge = SimpleNamespace(text=lambda reply: "a b c .", right=lambda turn, text: True)
    found = list(job._rows({name: way(name) for name in report.WAYS}, script, judge, 6))
    k, r, f, p = report.WAYS
    order = [k, r, f, p, r, f, p, k, f, p, k, r, p, k, r, f, k, r, f, p, r, f, p, k]
    assert [name for name, _ in calls] == order == [n for row in found for n in row["order"]]
    given = [what if name in (k, r) else what[0] for name, what in calls]
    assert given == [steps[i // 4] if order[i] in (k, r) else i // 4 for i in range(24)]


def test_the_true_reply_stays_whatever_was_answered(scene):
    engine, weaving, script = scene
    n_wrong = 0
    while not script.full or n_wrong < 6:
        step = script.step()
        reply = weaving.answer(step, 6)
        kept = [t for _, tokens in script.kept for t in tokens]
        assert weaving.chat.tokens() == script.head + kept
        n_wrong += list(reply.tokens) != step.reply[1:]
        engine.check_integrity()
    assert reply.details["prefilled"] < 130, "only the new turn and the corrected reply before it"


def test_other_tokens_than_those_of_the_other_ways_are_noticed(scene):
    _, weaving, script = scene
    step = script.step()
    wrong = job.JobStep(step.turn, 0, [*step.prompt[:-2], 9, step.prompt[-1]], step.reply)
    with pytest.raises(AssertionError, match="not the one"):
        weaving.answer(wrong, 6)


def test_rows_are_counted_before_the_first_token_only(scene):
    _, weaving, script = scene
    step = script.step()
    reply = weaving.answer(step, 6)
    assert reply.n_computed == len(step.prompt) - len(script.head)  # the system message was there


@pytest.mark.parametrize("size", [SMALL, job.JobSize(turns=99, tokens=9_999, cap=330)])
def test_script_stays_within_the_cap_and_asks_what_is_in_the_context(scene, size):
    script = job.Script(scene[0], scene[2].head, size)
    for _ in range(80):
        step = script.step()
        kept = [turn.index for turn, _ in script.kept]
        assert len(step.prompt) <= size.cap and (kept[0] == 0 or len(step.prompt) > 160)
        assert step.turn.asks and step.turn.stated in kept
        assert kept == list(range(kept[0], kept[0] + len(kept)))
        assert step.prompt[: len(script.head)] == script.head


@pytest.mark.parametrize(
    ("exact", "text", "right"),
    [
        (True, "Anna's river is cold .", True),
        (True, "the river of Anna is cold .", False),
        (True, "", False),
        (False, 'The value is "Cold".', True),
        (False, "The value is hot.", False),
    ],
)
def test_judge(scene, exact, text, right):
    turn = world.Exchange(0, "u", "Anna's river is cold .", "Anna", "river", "cold", 0, "recall")
    assert job.Judge(scene[0], exact=exact).right(turn, text) is right


# ---- baselines


def prompts():
    """A context that grows, is pruned in front, and grows again."""
    ids = torch.randint(10, 2000, (90,), generator=torch.Generator().manual_seed(3)).tolist()
    pruned = ids[:7] + ids[20:80]
    return [ids[:40], ids[:60], ids[:7] + ids[20:60], pruned, pruned[:50] + ids[80:]]


# seven shared tokens are not worth a masked pass, unless one insists
@pytest.mark.parametrize(("least", "shared"), [(None, [0, 40, 0, 47, 50]), (0, [0, 40, 7, 47, 50])])
def test_prefix_cache_gives_the_logits_of_a_full_prefill(plain, monkeypatch, least, shared):
    if least is not None:
        monkeypatch.setattr(baselines, "WORTH_IT", least)
    cached, full = PrefixCache(plain, ()), FullPrefill(plain, ())
    reused = []
    for prompt in prompts():
        n = cached.crop(prompt)
        reused.append(n)
        wanted, _ = full.forward(prompt, None)
        found, cached._cache = cached.forward(prompt[n:], cached._cache)
        cached._tokens = prompt
        assert cached._cache.get_seq_length() == len(prompt)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-9)
    assert reused == shared


def test_prefix_cache_takes_its_own_decoded_tokens_into_account(plain):
    cached, full = PrefixCache(plain, ()), FullPrefill(plain, ())
    prompt = prompts()[0]
    first = cached.answer(prompt, 5)
    longer = [*prompt, *first.tokens, 77, 78]
    assert cached.answer(longer, 5).tokens == full.answer(longer, 5).tokens
    assert len(cached._tokens) == len(longer) + 4 == cached._cache.get_seq_length()
    again = cached.answer(longer, 5)
    assert again.n_computed == 1 and again.tokens == full.answer(longer, 5).tokens


def test_full_prefill_decodes_as_transformers_does(plain):
    prompt, full = prompts()[1], FullPrefill(plain, {2})
    wanted = plain.model.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
    found = full.answer(prompt, 6)
    assert list(found.tokens) == wanted[0, len(prompt) :].tolist()
    assert found.n_computed == len(prompt) and found.total >= found.ttft > 0
    stop = found.tokens[0]
    assert FullPrefill(plain, {stop}).answer(prompt, 6).tokens == (stop,)


# ---- words


def hand_made(phase, ttft, right, index):
    cell = {"computed": 10, "answer_ms": 2 * ttft, "idle_ms": 1.0, "right": right, "text": "x",
            "first_as_full": True, "text_as_full": right}  # fmt: skip
    ways = {
        way: cell | {"ttft_ms": ttft * k}
        for way, k in (("kvweave", 1), ("reuse", 0.5), ("full", 5), ("prefix", 4))
    }
    extra = {"exact": 7, "reused": 80, "repaired": 3, "prefilled": 10, "moved": 83}
    ways["kvweave"] |= extra
    return {"turn": index, "phase": phase, "n_tokens": 100, **ways}


def test_summary_is_the_median_of_pruned_turns():
    rows = [hand_made("fill", 900.0, True, 0)]
    rows += [hand_made("prune", t, t != 4.0, i) for i, t in enumerate((1.0, 4.0, 2.0))]
    found = report.summarise(rows)["ways"]
    assert found["kvweave"]["ttft_ms"] == 2 and found["full"]["ttft_ms"] == 10
    assert found["kvweave"]["speedup"] == 5 and found["prefix"]["speedup"] == 1.25
    assert found["kvweave"]["total_ms"] == 5 and found["reuse"]["speedup"] == 10
    assert (found["kvweave"]["right"], found["kvweave"]["asked"]) == (2, 3)
    assert found["kvweave"]["text_as_full"] == 2


def test_filling_is_one_line_and_each_pruned_turn_one():
    stream = io.StringIO()
    console = Console(file=stream, width=100)
    rows: list[dict[str, object]] = []
    for index in range(30):
        rows.append(hand_made("fill" if index < 3 else "prune", 2.0, index % 2 == 0, index))
        report.show(rows, console)
    lines = stream.getvalue().splitlines()
    assert sum("filled: 3 turns" in line for line in lines) == 1
    assert sum(line.startswith("turn ") for line in lines) == 2  # the heading, every 25 rows
    assert [int(x.split()[0]) for x in lines if x[:4].strip().isdigit()] == list(range(1, 28))
