"""What is left when pages go is what transformers says when it masks them, layer by layer, head by head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from probe import synthetic
from transformers import GenerationConfig
from zoo import tiny

from kvweave import Engine, Runner, Sampling
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.probe import Ablation, Eviction, PageTrace, Recording, ablate, record
from kvweave.probe.classes import CLASSES, EvictionCase, going, most
from kvweave.probe.trace import TraceHeader, write

KINDS = ("llama", "gemma3", "phi3_partial", "gpt_neox", "gpt_oss_sinks")
PAGE, PROMPT, STEPS = 4, 37, 60
MARKS = [3, 9, 20, 50]
WRONG = float("-inf")


def made(kind: str) -> tuple[Any, Engine]:
    torch.manual_seed(3)
    model = oracle.build(*oracle.MODELS[kind])
    return model, Engine(Runner(model), base="")


def recording(engine: Engine, path: Path, **notes: Any) -> PageTrace:
    prompt = np.random.default_rng(5).integers(3, 101, PROMPT).tolist()
    sampling = Sampling(max_tokens=STEPS + 1, ignore_eos=True)
    return record(engine, prompt, path, sampling, Recording(PAGE), notes)


def tokens_of(trace: PageTrace, found: Ablation) -> list[int]:
    """All that stands in front of what an ablation says."""
    return trace.notes["prompt_tokens"] + trace.notes["tokens"][: found.step + 1]


# ---- the twin: a full forward of transformers, in which masks are written out


def masks(model: Any, heads: list[int], n: int, first: int, gone: dict[Any, set[int]]) -> Any:
    """[1, query head, row, key] of each layer; rows from ``first`` on do not see what is gone."""
    config = model.config
    row, key = torch.arange(n)[:, None], torch.arange(n)[None]
    for layer, n_heads in enumerate(heads):
        seen = key <= row
        kinds = getattr(config, "layer_types", None)
        if kinds is not None and kinds[layer] == "sliding_attention":
            seen = seen & (row - key < config.sliding_window)
        each = []
        for head in range(n_heads):
            lost = torch.zeros(n, dtype=torch.bool)
            lost[sorted(gone.get((layer, head), ()))] = True
            own = seen & ~(lost[None] & (row >= first))
            each += [own] * (config.num_attention_heads // n_heads)
        bias = torch.zeros(1, len(each), n, n, dtype=torch.float64)
        yield bias.masked_fill(~torch.stack(each)[None], WRONG).to(oracle.DEVICE)


@contextmanager
def masked(model: Any, biases: list[torch.Tensor]) -> Iterator[None]:
    names = ("self_attn", "attention")
    modules = [m for name, m in model.named_modules() if name.split(".")[-1] in names]
    assert len(modules) == len(biases)

    def put(bias: torch.Tensor) -> Any:
        def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
            assert "attention_mask" in kwargs
            return args, kwargs | {"attention_mask": bias}

        return hook

    with ExitStack() as stack:
        for module, bias in zip(modules, biases, strict=True):
            handle = module.register_forward_pre_hook(put(bias), with_kwargs=True)
            stack.callback(handle.remove)
        yield


class Twin:
    """Decodes with one class of pages gone, by a whole forward for each token."""

    def __init__(self, engine: Engine, model: Any, trace: PageTrace, found: Ablation) -> None:
        self.model, self.trace, self.found = model, trace, found
        self.heads = [info.shape.k_heads for info in engine.runner.layers]

    def logits(self, name: str, said: list[int]) -> torch.Tensor:
        """[token, vocab] from the row on that is the first to see the eviction."""
        tokens = tokens_of(self.trace, self.found) + said
        gone = {
            head: {page * PAGE + i for page in pages for i in range(PAGE)}
            for head, pages in zip(self.trace.header.heads, self.found[name].pages, strict=True)
        }
        first = PROMPT + self.found.step
        biases = list(masks(self.model, self.heads, len(tokens), first, gone))
        kept = self.model.config._attn_implementation
        self.model.set_attn_implementation("eager")
        with torch.no_grad(), oracle.Float64(), masked(self.model, biases):
            logits = self.model(
                torch.tensor([tokens], device=oracle.DEVICE), use_cache=False
            ).logits[0, first:]
        self.model.set_attn_implementation(kept)
        return logits.cpu()

    def would_say(self, name: str, said: list[int]) -> list[int]:
        """What is greedy behind each part of ``said``: itself, if a greedy decode said it, and else not."""
        return self.logits(name, said[:-1]).argmax(-1).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled
def test_what_is_left_is_what_transformers_says(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvweave.probe.ablation.PIECE", 5)
    model, engine = made(kind)
    n = 12
    with engine:
        trace = recording(engine, tmp_path / "a.kvt", milestones=MARKS)
        found = ablate(engine, trace, how=Eviction(share=0.4, tokens=n, where="all"))
        assert not found.skipped and found.step == 30
        assert [r.name for r in found.results] == ["none", *CLASSES]
        twin = Twin(engine, model, trace, found)
    reference = list(found.reference)
    assert reference == twin.would_say("none", reference) == list(found["none"].said)
    assert len(reference) == n
    true = twin.logits("none", reference[:-1]).log_softmax(-1)
    changed = 0
    for one in found.results[1:]:
        logits = twin.logits(one.name, reference[:-1])
        right = (logits.argmax(-1) == torch.tensor(reference)).double().mean()
        kl = (true.exp() * (true - logits.log_softmax(-1))).sum(-1).mean()
        assert one.forced == pytest.approx(float(right)), one.name
        assert one.kl == pytest.approx(float(kl), rel=1e-4, abs=1e-9), one.name
        assert one.kl > 1e-7, "nothing went"
        said = list(one.said)
        assert len(said) == n and said == twin.would_say(one.name, said), one.name
        same = [a == b for a, b in zip(said, reference, strict=True)]
        assert one.free == pytest.approx(sum(same) / n)
        assert one.first_wrong == (None if all(same) else same.index(False))
        changed += said != reference
    assert changed or kind in ("phi3_partial", "gpt_neox"), "no token tells one class from another"


def test_the_control_is_the_greedy_decode_of_transformers(tmp_path: Path) -> None:
    model, engine = made("llama")
    with engine:
        trace = recording(engine, tmp_path / "a.kvt")
        found = ablate(engine, trace, ["random"], Eviction(0.3, 0.2))
        control = found["none"]
        assert found.step == 18 and len(found.reference) == STEPS - 18
        model.generation_config.eos_token_id = None
        config = GenerationConfig(max_new_tokens=STEPS - 18, do_sample=False, pad_token_id=0)
        tokens = torch.tensor([tokens_of(trace, found)], device=oracle.DEVICE)
        wanted = model.generate(tokens, generation_config=config)[0, tokens.shape[1] :].tolist()
    assert list(control.said) == wanted == trace.notes["tokens"][19:]
    assert (control.forced, control.free, control.first_wrong, control.kl) == (1, 1, None, 0)
    assert found.control == 1 and control.n_bytes == 0 and not any(control.pages)


def test_a_recording_that_was_drawn_is_told_from_its_control(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine:
        drawn = Sampling(max_tokens=STEPS, ignore_eos=True, temperature=2.0, seed=1)
        prompt = list(range(3, 3 + PROMPT))
        trace = record(engine, prompt, tmp_path / "a.kvt", drawn, Recording(PAGE))
        found = ablate(engine, trace, ["random"])
    assert found.control < 0.5 and found["none"].free == 1 and found["none"].forced == 1


def test_an_end_token_ends_it(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine:
        said = recording(engine, tmp_path / "a.kvt").notes["tokens"]
        at = next(i for i in range(45, STEPS) if said.index(said[i]) == i)
        stop = Sampling(max_tokens=STEPS, ignore_eos=True, stop_tokens=(said[at],))
        prompt = PageTrace(tmp_path / "a.kvt").notes["prompt_tokens"]
        trace = record(engine, prompt, tmp_path / "b.kvt", stop, Recording(PAGE))
        engine.runner.ends = frozenset((said[at],))
        found = ablate(engine, trace, how=Eviction(tokens=300))
        assert list(found.reference) == said[found.step + 1 : at + 1]
        for one in found.results:
            assert said[at] not in one.said[:-1] and len(one.said) <= len(found.reference)
            assert len(one.said) == len(found.reference) or one.said[-1] == said[at]
        # what a recording went on behind was no end
        on = ablate(engine, PageTrace(tmp_path / "a.kvt"), [], Eviction(0.5))
        assert list(on.reference) == said[31:]


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["llama", "gemma3", "deepseek_v3_latent", "gemma4_shared"])
def test_all_classes_free_the_same_bytes(kind: str, tmp_path: Path) -> None:
    _, engine = made(kind)
    with engine:
        trace = recording(engine, tmp_path / "a.kvt", milestones=MARKS)
        found = ablate(engine, trace, how=Eviction(share=0.35, tokens=2))
        again = ablate(engine, trace, how=Eviction(share=0.35, tokens=2))
        other = ablate(engine, trace, ["random"], Eviction(share=0.35, tokens=2, seed=1))
        shapes = [info.shape for info in engine.runner.layers]
    sizes = [
        8 * (shapes[i].k_dim + shapes[i].v_dim * shapes[i].v_heads // shapes[i].k_heads)
        for i, _ in trace.header.heads
    ]
    assert found.pages == 2 and len({one.n_bytes for one in found.results[1:]}) == 1
    for one in found.results[1:]:
        by_head = [len(own) * PAGE * size for own, size in zip(one.pages, sizes, strict=True)]
        assert one.n_bytes == sum(by_head) > 0, one.name
        assert all(len(set(own)) == len(own) for own in one.pages)
        assert {p for own in one.pages for p in own} <= set(range(10, 15))
    assert found == again and found["random"].pages != other["random"].pages
    assert found["stable"].pages != found["unstable"].pages


# ---- which pages


def case(path: Path, n_heads: int = 4, **notes: Any) -> EvictionCase:
    """Pages 3 to 7 may go at step 32: page p has the attention ``p`` of even heads, ``-p`` of odd ones; even
    heads read the same page in each step, odd ones all in turn. What comes later is the other way round."""
    mass = np.zeros((n_heads, 22, 80))
    access = np.zeros(mass.shape, bool)
    for step in range(80):
        there = (8 + step) // 4 + 1
        for head in range(n_heads):
            even = (head % 2 == 0) == (step < 32)
            order = np.arange(there) if even else np.arange(there)[::-1]
            mass[head, :there, step] = 0.01 + order / 100
            mass[head, there - 2 : there, step] = 1  # what is new is read whatever it says
            access[head, 0 if even else step % there, step] = True
    some = replace(synthetic.steps(mass), access=access)
    trace = synthetic.trace(path, some, 80, page=4, prompt=8, **notes)
    groups = [np.arange(i, i + 2) for i in range(0, n_heads, 2)]
    return EvictionCase(trace, 32, np.arange(3, 8), groups)


def names(case: EvictionCase, name: str, n: int) -> list[list[int]]:
    return [own.tolist() for own in going(CLASSES[name](case), case.groups, n)]


def test_milestones_are_pages_of_marked_steps(tmp_path: Path) -> None:
    # of step 0: page 2, which may not go; 4: page 3; 17: page 6; 18: page 6; 33: not yet decoded
    some = case(tmp_path / "a.kvt", milestones=[0, 4, 17, 18, 33])
    assert names(some, "milestone", 2) == [[3, 6]] * 4
    assert names(some, "other", 3) == [[4, 5, 7]] * 4
    assert most(CLASSES["milestone"](some), some.groups) == 2
    for notes in ({}, {"milestones": []}, {"milestones": [0]}, {"milestones": ["4"]}):
        for name in ("milestone", "other"):
            with pytest.raises(InvalidArgument, match="milestone"):
                CLASSES[name](case(tmp_path / "b.kvt", **notes))


def test_early_late_high_low(tmp_path: Path) -> None:
    some = case(tmp_path / "a.kvt")
    assert names(some, "early", 2) == [[3, 4]] * 4 and names(some, "late", 2) == [[6, 7]] * 4
    assert names(some, "high", 2)[0] == [6, 7] and names(some, "low", 2)[0] == [3, 4]
    # of an odd head page p has `there - 1 - p`, which grows with the step: old pages have had more of it
    slow = [
        np.mean(
            [
                (8 + t) // 4 - p
                for t in range(32)
                if p < (8 + t) // 4 + 1 - 2  # not among the newest two
            ]
        )
        for p in range(3, 8)
    ]
    best = sorted((np.argsort(-np.array(slow), kind="stable")[:2] + 3).tolist())
    assert names(some, "high", 2)[1] == names(some, "high", 2)[3] == best != [6, 7]


def test_half_of_the_heads(tmp_path: Path) -> None:
    some = case(tmp_path / "a.kvt")
    stable, unstable, all_heads = (
        names(some, name, n) for name, n in (("stable", 2), ("unstable", 2), ("scattered", 4))
    )
    assert [len(own) for own in stable] == [4, 0, 4, 0]
    assert [len(own) for own in unstable] == [0, 4, 0, 4]
    assert stable[0] == all_heads[0] and unstable[3] == all_heads[3]
    assert most(CLASSES["stable"](some), some.groups) == 2
    some = case(tmp_path / "b.kvt", 6)
    odd = EvictionCase(some.trace, 32, some.pages, [np.arange(3), np.arange(3, 6)])
    stable = names(odd, "stable", 2)  # six pages of three heads from two
    assert [len(own) for own in stable] == [3, 0, 3, 3, 3, 0]
    assert [len(own) for own in names(odd, "stable", 1)] == [2, 0, 1, 2, 1, 0]
    alone = EvictionCase(some.trace, 32, some.pages, [np.array([i]) for i in range(6)])
    with pytest.raises(InvalidArgument, match="no half"):
        CLASSES["stable"](alone)


def test_of_few_milestones_few_pages_go_in_all_classes(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine:
        trace = recording(engine, tmp_path / "a.kvt", milestones=[9])
        found = ablate(engine, trace, how=Eviction(share=0.5, tokens=2))
        assert (found.candidates, found.wanted, found.pages) == (5, 2, 1)
        assert {len(own) for own in found["early"].pages} == {1}
        more = ablate(engine, trace, ["early"], Eviction(share=0.5, tokens=2))
        assert more.pages == 2 and [r.name for r in more.results] == ["none", "early"]
        plain = recording(engine, tmp_path / "b.kvt")
        some = ablate(engine, plain, how=Eviction(tokens=2))
        assert [*some.skipped] == ["milestone", "other"]
        assert "names no steps" in some.skipped["milestone"]
        assert ablate(engine, plain, how=Eviction(tokens=2, where="all")).candidates == 14


# ---- refusals


def test_refusals_come_before_any_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, engine = made("llama")
    trace = recording(engine, tmp_path / "a.kvt")
    known = PageTrace(tmp_path / "a.kvt")

    def never(works: Any) -> None:
        raise AssertionError("a pass")

    monkeypatch.setattr(engine.runner, "forward", never)

    def refused(match: str, some: PageTrace = trace, *args: Any) -> None:
        with pytest.raises(InvalidArgument, match=match):
            ablate(engine, some, *args)

    with engine:
        refused("did you mean early", trace, ["erly"])
        refused("milestone: the trace names no", trace, ["early", "milestone"])
        refused("leaves none", trace, None, Eviction(0.001))
        refused("leaves none", trace, None, Eviction(0.999))
        refused("no page of 4 slots", trace, None, Eviction(0.1))
        with pytest.raises(ContextTooLong):
            ablate(engine, trace, None, Eviction(tokens=2000))
        for name, notes in {
            "prompt_tokens": {"tokens": known.notes["tokens"]},
            "tokens": {"prompt_tokens": known.notes["prompt_tokens"]},
            r"3 tokens, not 61": known.notes | {"tokens": [3, 4, 5]},
            "it has no tokens": known.notes | {"tokens": ["3"] * 61},
            r"not in 0\.\.": known.notes | {"tokens": [101] * 61},
        }.items():
            path = write(tmp_path / "b.kvt", trace.header, list(trace), **notes)
            refused(name, PageTrace(path))
        header = trace.header
        for other in (
            TraceHeader(PAGE, header.heads, PROMPT, model=header.model | {"weights": "0"}),
            TraceHeader(PAGE, header.heads, PROMPT),
            TraceHeader(PAGE, header.heads[::-1], PROMPT, model=header.model),
        ):
            path = write(tmp_path / "c.kvt", other, list(trace), **trace.notes)
            refused("another model", PageTrace(path))
    for wrong in (
        {"at": 0}, {"at": 1}, {"at": float("nan")}, {"share": 0}, {"share": 1.1},
        {"share": float("nan")}, {"tokens": 0}, {"where": "here"}, {"seed": -1},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            Eviction(**wrong)


def test_states_let_go_of_nothing(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine:
        trace = recording(engine, tmp_path / "a.kvt")
    runner = Runner(tiny("qwen3_next"))
    assert runner.can_run and any(info.mixer is not None for info in runner.layers)
    with Engine(runner, base="") as other, pytest.raises(InvalidArgument, match="keeps states"):
        ablate(other, trace)


def test_what_a_recording_notes_itself_is_no_note(tmp_path: Path) -> None:
    _, engine = made("llama")
    with engine, pytest.raises(InvalidArgument, match="prompt_tokens"):
        recording(engine, tmp_path / "a.kvt", prompt_tokens=[1])
    assert not (tmp_path / "a.kvt").exists()
