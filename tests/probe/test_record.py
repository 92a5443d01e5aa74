"""What is recorded is what transformers' own attention says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch

from kvweave import Engine, Runner, Sampling
from kvweave.errors import ContextTooLong, InvalidArgument, KVWeaveError
from kvweave.keep.tokens.access import Rule
from kvweave.probe import PageTrace, Recording, record, recorder

KINDS = ("llama", "gemma3", "gpt_oss_sinks", "gpt_neox", "deepseek_v3_latent")
GREEDY = Sampling(max_tokens=40, ignore_eos=True)


def made(kind: str) -> tuple[Any, Engine]:
    torch.manual_seed(3)
    model = oracle.build(*oracle.MODELS[kind])
    return model, Engine(Runner(model), base="")


def prompt(n: int = 37) -> list[int]:
    return np.random.default_rng(5).integers(3, 101, n).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.sampled
def test_mass_is_what_attention_pays(kind: str, page: int, tmp_path: Path) -> None:
    model, engine = made(kind)
    with engine:
        how = Recording(page, Rule("cover", 0.9), block=7)
        trace = record(engine, prompt(), tmp_path / "a.kvt", GREEDY, how, {"task": "none"})
        n_heads = [info.shape.k_heads for info in engine.runner.layers]
        plain = engine.context("c", repair="full").parts  # the engine is left as it was
        assert not plain
    said = trace.notes["tokens"]
    assert len(said) == 40 and trace.n_steps == 39 and trace.notes["task"] == "none"
    assert trace.header.prompt == 37
    tokens = prompt() + said
    wanted = oracle.attention_of(model, tokens, n_heads)
    found = trace.whole()
    assert found.tokens.tolist() == said[:-1]
    for step in range(trace.n_steps):
        slot = 37 + step
        rows = torch.cat([layer[:, slot, : slot + 1] for layer in wanted]).double()
        pages = torch.zeros(len(rows), slot // page + 1, dtype=torch.float64)
        pages.index_add_(1, torch.arange(slot + 1) // page, rows)
        mine = torch.from_numpy(found.mass[:, : pages.shape[1], step]).double()
        assert (mine - pages).abs().max() < 1e-5
        assert not found.mass[:, pages.shape[1] :, step].any()
        read = how.rule.read(pages)
        covered = (pages * torch.from_numpy(found.access[:, : pages.shape[1], step])).sum(1)
        # the fewest: as many as by transformers, but where two pages are as good as equal
        assert (covered >= 0.9 * pages.sum(1) - 1e-6).all()
        assert (
            read.sum(1) == torch.from_numpy(found.access[..., step].sum(1))
        ).float().mean() > 0.98


def test_it_says_what_a_plain_answer_says(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine:
        context = engine.context("c", repair="full")
        context.append(prompt())
        wanted = context.generate(40, temperature=0, ignore_eos=True).tokens
        trace = record(engine, prompt(), tmp_path / "a.kvt", GREEDY)
    assert tuple(trace.notes["tokens"]) == tuple(wanted)


def test_a_stop_token_ends_it(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine:
        said = record(engine, prompt(), tmp_path / "a.kvt", GREEDY).notes["tokens"]
        end = said[9]
        some = Sampling(max_tokens=40, ignore_eos=True, stop_tokens=(end,))
        again = record(engine, prompt(), tmp_path / "b.kvt", some)
        assert again.notes["tokens"] == said[: said.index(end) + 1]
        assert again.n_steps == said.index(end)
        one = record(engine, prompt(), tmp_path / "c.kvt", Sampling(max_tokens=1, ignore_eos=True))
        assert one.n_steps == 0 and one.notes["tokens"] == said[:1] and list(one) == []


def test_refusals_come_before_a_file(tmp_path: Path) -> None:
    _, engine = made("llama")
    path = tmp_path / "a.kvt"
    with engine:
        for wrong in ([], [3, 101], [-1], "text"):
            with pytest.raises(InvalidArgument):
                record(engine, wrong, path)
        with pytest.raises(ContextTooLong):
            record(engine, prompt(), path, Sampling(max_tokens=2000))
        with pytest.raises(InvalidArgument):
            Recording(page=0)
    assert not path.exists()
    _, own = made("diffllama")
    with own, pytest.raises(InvalidArgument, match="shows nobody"):
        record(own, prompt(), path)
    with Engine(Runner(oracle.build("llama", {})), base="") as again, pytest.raises(KVWeaveError):
        record(again, prompt(), tmp_path / "missing" / "a.kvt", GREEDY)


def test_what_is_there_when_it_is_cut_off_is_readable(tmp_path: Path) -> None:
    _, engine = made("llama")
    path = tmp_path / "a.kvt"

    class Enough(Exception):
        pass

    def stop(_: int) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise Enough

    left = 20
    with engine, pytest.raises(Enough):
        record(engine, prompt(), path, GREEDY, Recording(block=8), progress=stop)
    assert PageTrace(path).n_steps == 16


def test_steps_of_many_pages_are_written_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are as long as bytes allow, and what they say is the same."""
    _, engine = made("llama")
    with engine:
        whole = record(engine, prompt(), tmp_path / "a.kvt", GREEDY, Recording(page=1))
        heads = len(whole.header.heads)
        monkeypatch.setattr(recorder, "HELD", 5 * heads * 60 * 4)
        short = record(engine, prompt(), tmp_path / "b.kvt", GREEDY, Recording(page=1))
    assert [some.n for some in whole] == [39] and max(some.n for some in short) <= 8
    assert np.array_equal(whole.whole().mass, short.whole().mass)
    assert np.array_equal(whole.whole().access, short.whole().access)


@pytest.mark.parametrize(
    "text", ["cover:0", "cover:1.2", "top:0.5", "over:2", "cober:0.9", "top:x", "over:nan"]
)
def test_rules_that_make_no_sense(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Rule.parse(text)


def test_rules() -> None:
    mass = torch.tensor([[0.1, 0.5, 0.0, 0.1, 0.3]])

    def read(text: str) -> list[int]:
        return Rule.parse(text).read(mass)[0].nonzero().flatten().tolist()

    assert read("cover:0.8") == [1, 4] and read("cover:0.85") == [0, 1, 4]
    assert read("cover:1") == [0, 1, 3, 4] and read("top:1") == [1] and read("top:3") == [0, 1, 4]
    assert read("top:9") == [0, 1, 3, 4] and read("over:0.1") == [1, 4]
    assert str(Rule.parse("top:8")) == "top:8"
