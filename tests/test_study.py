"""The study's tasks against an interpreter that reads the prompt only, and its models against the tasks."""

from __future__ import annotations

import importlib
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from benches import BENCH, on_path
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvweave.keep.tokens.signals import PageSignals, apply

WEIGHTS = BENCH / "study" / "weights"
MODELS = ("gemma3", "olmo2", "qwen3")
FLOOR = 0.995  # of words, the worst family of the worst model
NOISE = 0.42  # of what weights scatter, for a model that errs: soon, later and hardly


@pytest.fixture(scope="module")
def study() -> Iterator[dict[str, ModuleType]]:
    with on_path():
        yield {
            n: importlib.import_module(f"study.{n}")
            for n in ("attention", "free", "pool", "tasks", "train", "score", "record", "learn")
        }


def thought(words: list[str]) -> list[str]:
    """Think anew: from the words of a prompt alone."""
    family, body = words[1].strip("<>"), words[2:-1]
    return globals()[f"think_{family}"](body)


def think_program(body: list[str]) -> list[str]:
    env: dict[str, int] = {"none": 0}
    out: list[str] = []
    for head, of, digit in zip(body[::3], body[1::3], body[2::3], strict=True):
        name = "n" + head[1:]
        env[name] = (env[of] + int(digit)) % 10
        out += [head, of, str(env[of]), digit, name, str(env[name])]
    return [*out, "<end>"]


def think_verify(body: list[str]) -> list[str]:
    chain = think_program(body)[:-1]
    return [
        *chain,
        "check",
        *(w for i in range(0, len(chain), 6) for w in chain[i + 4 : i + 6]),
        "<end>",
    ]


def think_walk(body: list[str]) -> list[str]:
    *edges, at = body
    to = {h[1:]: (d, n) for h, d, n in zip(edges[::3], edges[1::3], edges[2::3], strict=True)}
    out, total, here = [], 0, at[1:]
    while here in to:
        digit, after = to[here]
        total = (total + int(digit)) % 10
        out += ["h" + here, digit, after, str(total)]
        here = after[1:]
    return [*out, "<end>"]


def think_search(body: list[str]) -> list[str]:
    *lines, root = body
    table = {lines[i][1:]: lines[i + 1 : i + 5] for i in range(0, len(lines), 5)}
    out: list[str] = []

    def visit(name: str, above: int) -> None:
        digit, child, parent, _ = table[name]
        total = (above + int(digit)) % 10
        out.extend(["h" + name, digit, str(total), child])
        while child not in ("leaf", "none"):
            visit(child[1:], total)
            sibling = table[child[1:]][3]
            out.extend(["u" + name, str(total), sibling])
            child = sibling
        if parent == "none":
            out.append("none")

    visit(root[1:], 0)
    return [*out, "<end>"]


def think_sum(body: list[str]) -> list[str]:
    out, carry = [], 0
    for head, a, b in zip(body[::3], body[1::3], body[2::3], strict=True):
        carry, digit = divmod(int(a) + int(b) + carry, 10)
        out += [head, a, b, str(digit), str(carry)]
    return [*out, "<end>"]


def think_list(body: list[str]) -> list[str]:
    words = "so well then it was a day of rain and some light".split()
    at = words.index(body[-1])
    out: list[str] = []
    for head in body[:-1:2]:
        out += [head, *(words[(at + i) % 12] for i in range(4))]
        at += 4
    return [*out, "<end>"]


@pytest.mark.parametrize("family", ["program", "walk", "search", "sum", "verify", "list"])
@pytest.mark.parametrize("n_words", [24, 200, 1000])
def test_a_chain_follows_from_its_prompt(
    study: dict[str, ModuleType], family: str, n_words: int
) -> None:
    tasks = study["tasks"]
    known = set(tasks.vocabulary())
    for seed in range(20):
        task = tasks.make(family, n_words, str(seed))
        assert task.words[task.start :] == thought(task.words[: task.start])
        assert known.issuperset(task.words)
        assert set(task.phases) == set(range(task.start, len(task.words)))


@pytest.mark.parametrize("family", ["program", "walk", "search", "sum", "verify", "list"])
def test_a_need_is_what_decides_a_word(study: dict[str, ModuleType], family: str) -> None:
    """Other content in all the slots that a word needs, and nowhere else, is another word."""
    tasks = study["tasks"]
    for seed in range(10):
        task = tasks.make(family, 120, str(seed))
        for at, needs in task.needs.items():
            for slots in needs:
                assert max(slots) < at
                assert {task.words[s] for s in slots} == {task.words[at]}, "it is copied"
                if min(slots) < task.start:
                    assert len(slots) == 1
    if family == "list":
        assert not task.needs
        assert not task.milestones()


def test_milestones_are_values_taken_up_late(study: dict[str, ModuleType]) -> None:
    tasks = study["tasks"]
    task = tasks.make("program", 600, "x")
    chain = task.words
    made = {chain[i + 4]: i + 5 for i in range(task.start, len(chain) - 1, 6)}
    wanted: dict[int, int] = {}
    for i in range(task.start, len(chain) - 1, 6):
        if chain[i + 1] in made and i + 2 - made[chain[i + 1]] >= tasks.FAR:
            wanted[made[chain[i + 1]]] = wanted.get(made[chain[i + 1]], 0) + 1
    assert task.milestones() == wanted
    assert len(wanted) > 10


@pytest.fixture(scope="module")
def folder(study: dict[str, ModuleType], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few chains of each stage and size."""
    made = tmp_path_factory.mktemp("pool")
    for stage in range(len(study["pool"].STAGES)):
        for size in range(len(study["pool"].SIZES)):
            study["pool"].write((stage, size, 0.001, made))
    return made


@pytest.mark.parametrize("stage", [0, 3, 5])
def test_chains_under_other_names_follow_from_their_prompts(
    study: dict[str, ModuleType], folder: Path, stage: int
) -> None:
    pool, known = study["pool"], study["tasks"].vocabulary()
    draws = pool.Draws(folder, torch.device("cpu"))
    stored = np.load(pool.where(stage, 0, folder))["ids"].tolist()
    names: set[str] = set()
    for seed in range(6):
        batch = draws.batch(np.random.default_rng(seed), stage, 20_000, [1] * 6)
        again = draws.batch(np.random.default_rng(seed), stage, 20_000, [1] * 6)
        assert all(torch.equal(a, b) for a, b in zip(batch, again, strict=True))
        for ids, weight, family in zip(*batch, strict=True):
            words = [known[i] for i in ids.tolist() if i]
            start = words.index("go") + 1
            assert words[1] == f"<{list(study['tasks'].FAMILIES)[family]}>"
            assert words[start:] == thought(words[:start])
            assert (weight > 0).nonzero()[:, 0].tolist() == list(range(start, len(words)))
            assert ids.tolist() not in stored or not names.add(words[2])
    assert len(names) <= 6, "nearly all are under other names than those stored"


def test_words_that_are_no_copies_weigh_more(study: dict[str, ModuleType]) -> None:
    made = study["tasks"].program(random.Random(0), 4)
    weight = study["pool"].rows_of([made]).weight[0]
    hard = [at for at in range(made.start, len(made.words)) if weight[at] > 1]
    lines = range(made.start, len(made.words) - 1, 6)
    values = {at + 5 for at in lines}
    taken = {at + 2 for at in lines}
    assert set(hard) == values | taken


def test_chains_that_are_asked_are_not_trained_on(
    study: dict[str, ModuleType], folder: Path
) -> None:
    """Up to the names: no chain of the pool is one that is reported, under any names."""
    pool, tasks = study["pool"], study["tasks"]
    first = len(tasks.vocabulary()) - 3 * tasks.NAMES

    def plain(ids: list[int]) -> tuple[int, ...]:
        """Names as distances to the first one."""
        names = [(i - first) % tasks.NAMES for i in ids if i >= first]
        return tuple(
            first + (i - first) // 260 * 260 + ((i - first) - names[0]) % 260 if i >= first else i
            for i in ids if i
        )  # fmt: skip

    taught = {
        plain(row)
        for size in range(len(pool.SIZES))
        for row in np.load(pool.where(4, size, folder))["ids"].astype(int).tolist()
    }
    asked = [t for f in tasks.FAMILIES for t in study["score"].tasks(f, 8, 400)]
    assert not taught & {plain(row) for row in pool.rows_of(asked).ids.astype(int).tolist()}
    assert plain(pool.rows_of(asked[:1]).ids[0].astype(int).tolist()) in {
        plain(study["pool"].turned(torch.from_numpy(pool.rows_of(asked[:1]).ids.astype(int)), torch.tensor([7]))[0].tolist())
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_attention_without_masks_is_the_models_own(study: dict[str, ModuleType], name: str) -> None:
    """Rows that no window divides, of chains of two lengths."""
    made = [study["tasks"].make(f, 90, "x") for f in ("walk", "list")]
    ids = torch.from_numpy(study["pool"].rows_of(made).ids[:, :-3].astype("int64"))
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / name, dtype=torch.float32)
    found = []
    for how in ("eager", study["attention"].ATTENTION):
        model.set_attn_implementation(how)
        model.zero_grad()
        logits = model(input_ids=ids, use_cache=False).logits
        logits.square().mean().backward()
        found.append([logits.detach(), *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() < 1e-4 * a.norm()


@pytest.mark.slow
def test_words_of_all_chains_at_once_are_those_one_after_the_other(
    study: dict[str, ModuleType], tmp_path: Path
) -> None:
    """A model with noise in it makes faults, and what it says behind them follows from them."""
    made = study["score"].tasks("search", 3, 100)
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / "olmo2", dtype=torch.float32).eval()
    torch.manual_seed(0)
    for weight in model.parameters():
        if weight.ndim > 1:
            weight.data += NOISE * weight.std() * torch.randn_like(weight)
    model.save_pretrained(tmp_path / "noisy")
    AutoTokenizer.from_pretrained(WEIGHTS / "olmo2").save_pretrained(tmp_path / "noisy")
    with study["score"].opened("noisy", tmp_path) as engine:
        wanted = study["score"].decoded(engine, made)
    true = torch.from_numpy(study["pool"].rows_of(made).ids.astype("int64"))
    start, end = made[0].start, len(made[0].words)
    ids, settled = study["free"].said(model, true, start, end, seconds=600)
    assert ids[:, start:end].tolist() == wanted
    assert settled.tolist() == [end] * 3
    _, settled = study["free"].said(model, true, start, end, seconds=0.0)
    right = [sum(a == b for a, b in zip(r, t, strict=True)) for r, t in zip(wanted, true[:, start:end].tolist(), strict=True)]  # fmt: skip
    assert min(right) < end - start, "there are faults"
    for row, until, said in zip(true[:, :end].tolist(), settled.tolist(), wanted, strict=True):
        same = [a == b for a, b in zip(row[start:], said, strict=True)]
        assert until == (end if all(same) else start + same.index(False) + 1)


@pytest.mark.slow
def test_training_goes_on_where_it_was(
    study: dict[str, ModuleType], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train, cpu = study["train"], torch.device("cpu")
    monkeypatch.setitem(train.TOKENS, "cpu", (400, 400))
    monkeypatch.setattr(train, "POINT", 5)
    ticks = itertools.count()
    monkeypatch.setattr(train, "time", SimpleNamespace(monotonic=lambda: next(ticks) * 0.4))
    draws = study["pool"].Draws(folder, cpu)
    run = train.Run("qwen3", tmp_path, cpu)
    before = run.model.state_dict()["model.layers.1.mlp.up_proj.weight"].clone()
    train.learn(run, draws, 4, False)
    assert run.state.stage == len(train.STAGES) - 1, "time is what brings long chains at the latest"
    again = train.Run("qwen3", tmp_path, cpu)
    assert again.state == run.state
    assert (again.state.step, again.state.seconds) > (0, 4)
    for name, weight in run.model.state_dict().items():
        assert torch.equal(weight, again.model.state_dict()[name])
    after = again.model.state_dict()["model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(before, after)
    step = again.state.step
    train.learn(again, draws, 4, False)
    assert again.state.step == step, "the seconds were spent"
    train.learn(again, draws, again.state.seconds + 1, False)
    assert again.state.step > step
    assert [p["step"] for p in again.state.curve] == list(range(5, again.state.step + 1, 5))


def test_longer_chains_come_when_the_worst_family_is_mastered(
    study: dict[str, ModuleType],
) -> None:
    state = study["train"].State(stage=1)
    study["train"].follow(state, [[99.0] * 5 + [90], [100.0] * 6])
    assert state.stage == 1
    for _ in range(2):
        study["train"].follow(state, [[99.0] * 5 + [98], [100.0] * 6])
    assert state.stage == 2
    assert state.accuracy == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_knows_the_next_word(study: dict[str, ModuleType], name: str) -> None:
    """Behind the true words; docs/study.md says how far each gets by itself."""
    curve = json.loads((WEIGHTS / name / "curve.json").read_text())
    assert curve["tokens"] > 1_000_000
    assert (WEIGHTS / name / "model.safetensors").stat().st_size < 5 << 20
    model = AutoModelForCausalLM.from_pretrained(WEIGHTS / name, dtype=torch.float32).eval()
    ids = AutoTokenizer.from_pretrained(WEIGHTS / name).get_vocab()
    assert [ids[w] for w in study["tasks"].vocabulary()] == list(range(len(ids)))
    made = [t for f in study["tasks"].FAMILIES for t in study["score"].tasks(f, 2, 400)]
    rows = map(torch.from_numpy, study["pool"].rows_of(made))
    family = torch.arange(len(study["tasks"].FAMILIES)).repeat_interleave(2)
    batch = study["pool"].Batch(next(rows).long(), next(rows), family)
    with torch.inference_mode():
        _, found = study["train"].loss_of(model, batch, None)
    for family, right, n in zip(study["tasks"].FAMILIES, *found.tolist(), strict=True):
        assert n == sum(len(t.words) - t.start for t in made if t.family == family)
        assert right / n > FLOOR, family


@pytest.mark.slow
def test_a_model_thinks_by_itself(study: dict[str, ModuleType]) -> None:
    """`search` takes up most from afar; the models before these said a word in ten of it right."""
    with study["score"].opened("qwen3") as engine:
        found = study["score"].score(engine, "search", 2, 200)
    assert found["words"] > 180
    assert found["right"] > 0.99


@pytest.mark.slow
def test_the_predictor_learns_what_is_read_next(study: dict[str, ModuleType]) -> None:
    """Reads that go round in order: no page that was read lately is read next."""
    learn = study["learn"]
    rng = random.Random(0)

    def lesson() -> object:
        pages = 40
        signals, at = PageSignals(), rng.randrange(pages)
        for step in range(120):
            mass = torch.zeros(2, pages)
            mass[:, (at + step) % pages] = 1
            signals.see(mass, mass > 0)
        wanted = np.zeros((2, pages), np.float32)
        wanted[:, (at + 120) % pages] = 1
        return learn.Lesson(signals.rows().numpy(), wanted)

    weights = learn.learn([lesson() for _ in range(60)])
    hits = 0
    for _ in range(40):
        asked = lesson()
        scores = apply(weights, torch.from_numpy(asked.rows)).numpy()
        hits += int((scores.argmax(1) == asked.wanted.argmax(1)).all())
    assert hits >= 36
