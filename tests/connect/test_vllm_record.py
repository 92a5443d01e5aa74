"""What is recorded inside vLLM is what transformers' own attention says, and vLLM's answers are as ever.

Needs vLLM: `make setup-vllm`, then `make test-vllm`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import numpy as np
import oracle
import torch
import vllm_requests
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig
from vllm import LLM, SamplingParams

from kvweave import Engine, Runner, Sampling
from kvweave.cli import home, main
from kvweave.connect.vllm import record as recording
from kvweave.connect.vllm.record import EXTENSION, RequestWatch, record
from kvweave.errors import InvalidArgument
from kvweave.probe import PageTrace, Recording
from kvweave.probe import record as embedded

ROOT = Path(__file__).parents[2]
CLOSE = 3e-5  # of mass, which is rounded to 1/65535
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, detokenize=False)


def prompt(n=200):
    return np.random.default_rng(5).integers(3, 300, n).tolist()


def sliding(where):
    """Save a tiny Gemma 3; return where."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=300, hidden_size=128, intermediate_size=128, num_hidden_layers=6, sliding_window=48,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=1024,
        query_pre_attn_scalar=32, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return vllm_requests.saved(Gemma3ForCausalLM(config), where)


def llm_of(checkpoint, **more):
    return LLM(
        checkpoint, skip_tokenizer_init=True, dtype="float32", block_size=32, max_model_len=512, max_num_seqs=4,
        max_num_batched_tokens=128, num_gpu_blocks_override=400, worker_extension_cls=EXTENSION, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return vllm_requests.checkpoint_at(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(checkpoint):
    made = llm_of(checkpoint, enforce_eager=True)
    yield made
    made.llm_engine.engine_core.shutdown()


def answers(llm, prompts, sampling=GREEDY):
    asked = [{"prompt_token_ids": tokens} for tokens in prompts]
    return [list(r.outputs[0].token_ids) for r in llm.generate(asked, sampling, use_tqdm=False)]


def worker(llm):
    return vllm_requests.core(llm).model_executor.driver_worker.worker


def compare(llm, checkpoint, folder, page):
    """Hold a recording against transformers' attention and the embedded recorder's."""
    how, plain = Recording(page, block=7), answers(llm, [prompt()])[0]
    trace = record(llm, prompt(), folder / "a.kvt", GREEDY, how, {"task": "none"})
    assert trace.notes["tokens"] == plain == answers(llm, [prompt()])[0]
    assert (
        trace.n_steps == 39
        and trace.header.by.startswith("vLLM ")
        and trace.notes["task"] == "none"
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    with Engine(Runner(model), base="") as engine:
        sampling = Sampling(max_tokens=40, ignore_eos=True)
        own = embedded(engine, prompt(), folder / "b.kvt", sampling, how)
    found, mine = trace.whole(), own.whole()
    assert own.notes["tokens"] == plain and trace.header.heads == own.header.heads
    assert found.tokens.tolist() == plain[:-1] and np.abs(found.mass - mine.mass).max() < CLOSE
    assert (found.access == mine.access).mean() > 0.999
    layers = oracle.attention_of(model, prompt() + plain, [2] * len(model.model.layers))
    for step in range(39):
        slot = 200 + step
        rows = torch.cat([layer[:, slot, : slot + 1] for layer in layers]).double()
        pages = torch.zeros(len(rows), slot // page + 1, dtype=torch.float64)
        pages.index_add_(1, torch.arange(slot + 1) // page, rows)
        assert np.abs(found.mass[:, : pages.shape[1], step] - pages.numpy()).max() < CLOSE


# The first, with vLLM's extension of another class of workers: it extends that one for good.


def test_beside_the_connector(checkpoint, tmp_path):
    """Where requests are woven too: the rows of one that is were computed elsewhere, and it is refused."""
    made, path = (
        vllm_requests.vllm_of(checkpoint, worker_extension_cls=EXTENSION),
        tmp_path / "a.kvt",
    )
    try:
        trace = record(made, prompt(), path, GREEDY)
        assert trace.notes["tokens"] == answers(made, [prompt()])[0]
        parts = [(True, prompt(100)), (False, prompt(30))]
        woven = vllm_requests.Case(prompt(100) + prompt(30), parts, ("none", 0.0), 40)
        for _ in range(2):  # its chunk is computed; then placed
            with pytest.raises(InvalidArgument, match="nothing was recorded"):
                record(made, woven.tokens, path, woven.sampling)
        assert PageTrace(path).notes["tokens"] == trace.notes["tokens"], "the one before stays"
        assert record(made, prompt(), path, GREEDY).n_steps == 39
    finally:
        made.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("page", [1, 16])
def test_mass_is_what_attention_pays(page, llm, checkpoint, tmp_path):
    """Also when the prompt's rows are in vLLM's prefix cache, as they are behind a request of it."""
    compare(llm, checkpoint, tmp_path, page)


def test_ends(llm, tmp_path):
    said = record(llm, prompt(), tmp_path / "a.kvt", GREEDY).notes["tokens"]
    stops = GREEDY.clone()
    stops.stop_token_ids = [said[9]]
    trace = record(llm, prompt(), tmp_path / "a.kvt", stops)
    n = said.index(said[9])
    assert trace.notes["tokens"] == said[: n + 1] and trace.n_steps == n
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)
    assert record(llm, prompt(5), tmp_path / "a.kvt", one).n_steps == 0


def test_a_report_of_it(llm, tmp_path, capsys):
    trace = record(llm, prompt(), tmp_path / "a.kvt", GREEDY, Recording(page=4), {"label": "there"})
    assert main(["probe", "report", str(trace.path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    assert found["label"] == "there"


def watched(llm, path, asked=None, said=None, **how):
    """Watch a request, or several; return the answers, and what was said at the end."""
    how = {"page": 16, "block": 7} | how
    llm.reset_prefix_cache()
    assert (
        worker(llm).kvweave_watch(str(path), 200, how["page"], ("cover", 0.95), how["block"])
        is None
    )
    found = answers(llm, asked or [prompt()])
    return found, worker(llm).kvweave_watched(found[0] if said is None else said(found[0]), {})


def test_a_row_that_vllm_begins_behind_the_end_is_left_out(llm, tmp_path):
    path = tmp_path / "a.kvt"
    _, why = watched(llm, path, said=lambda tokens: tokens[:-1])
    assert why is None and PageTrace(path).n_steps == 38
    path = tmp_path / "b.kvt"
    for n in (30, 0):
        _, why = watched(llm, path, said=lambda tokens, n=n: tokens[:n])
        assert f"39 steps of an answer of {n} tokens" in why and not path.exists()
    _, why = watched(llm, path, said=lambda tokens: [tokens[0] + 1, *tokens[1:]])
    assert "39 steps" in why and not path.exists()


def test_what_is_not_one_request_seen_from_its_beginning_is_no_trace(llm, tmp_path):
    path, plain = tmp_path / "a.kvt", answers(llm, [prompt(), prompt(90)])
    found, why = watched(llm, path, [prompt(), prompt(90)])
    assert found == plain and "nothing was recorded" in why and not path.exists()
    llm.reset_prefix_cache()
    answers(llm, [prompt()])
    assert worker(llm).kvweave_watch(str(path), 200, 16, ("cover", 0.95), 64) is None
    assert worker(llm).kvweave_watch(str(path), 200, 16, ("cover", 0.95), 64) == "a recording runs"
    answers(llm, [prompt()])  # of whose rows most are there
    assert "follows 0 of this request" in worker(llm).kvweave_watched(plain[0], {})
    assert not path.exists() and worker(llm).kvweave_watched([], {}) == "no recording runs"
    assert record(llm, prompt(), path, GREEDY).notes["tokens"] == plain[0]


@pytest.mark.parametrize("fault", ["blocks", "window", "keys"])
def test_attention_that_the_kernel_does_not_pay_is_no_trace(fault, llm, tmp_path, monkeypatch):
    """Rows are changed in vLLM's own blocks; or we are wrong in a layer."""
    begins = RequestWatch._begins

    def changed(self, *args):
        begins(self, *args)
        if len(self.inputs) != 3:
            return
        if fault == "blocks":
            self.modules[1].kv_cache.mul_(1.02)
        elif fault == "window":
            info = self.infos[1]
            self.infos[1] = type(info)(
                info.shape, info.rotation, recording.Mask(window=50), info.group
            )
        else:
            self.rows[1].keys.mul_(1.05)

    path = tmp_path / "a.kvt"
    monkeypatch.setattr(RequestWatch, "_begins", changed)
    with pytest.raises(InvalidArgument, match="layer 1 attends otherwise in slot 203"):
        record(llm, prompt(), path, GREEDY)
    assert not path.exists()
    monkeypatch.undo()
    assert record(llm, prompt(), path, GREEDY).n_steps == 39


def test_refusals(llm, tmp_path, monkeypatch):
    path = tmp_path / "a.kvt"
    for wrong in (
        {"prompt": []}, {"notes": {"text": "x"}}, {"sampling": SamplingParams(n=2)},
        {"path": tmp_path / "missing" / "a.kvt"},
    ):  # fmt: skip
        with pytest.raises(InvalidArgument):
            record(**{"llm": llm, "prompt": prompt(), "path": path, "sampling": GREEDY} | wrong)
    with pytest.raises(Exception, match="maximum context length is 512"):  # vLLM's own
        record(llm, prompt(600), path, GREEDY)
    parallel = llm.llm_engine.vllm_config.parallel_config
    monkeypatch.setattr(parallel, "world_size", 2)
    with pytest.raises(InvalidArgument, match="some heads"):
        record(llm, prompt(), path, GREEDY)
    monkeypatch.undo()
    monkeypatch.setattr(parallel, "worker_extension_cls", "")
    with pytest.raises(InvalidArgument, match="worker_extension_cls="):
        record(llm, prompt(), path, GREEDY)
    monkeypatch.undo()
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(world_size=1),
        model_config=SimpleNamespace(dtype=torch.float32),
    )
    kept = SimpleNamespace(kv_cache_torch_dtype=torch.uint8, kv_cache_dtype="fp8")
    assert "keeps rows in fp8" in recording._why_not(config, {"a": kept})
    assert not path.exists()
    assert record(llm, prompt(), path, GREEDY).n_steps == 39


# Those behind here have a vLLM of their own, at whose end the groups of the process are gone.


def test_of_windows_compiled_and_in_two_groups_of_caches(tmp_path):
    where = sliding(tmp_path / "model")
    made = llm_of(where)
    try:
        compare(made, where, tmp_path, 5)
    finally:
        made.llm_engine.engine_core.shutdown()


def test_from_the_shell(tmp_path, capsys):
    """With the bundled model: what the same command records in the embedded engine, draws and text and all."""
    args = ["probe", "record", "Anna's river is cold", "--model", str(home.BUNDLED), "--json", "-q"]
    args += ["--max-tokens", "50", "--page", "2", "--label", "there", "--out"]
    told, traces = [], []
    for name, more in (("a.kvt", []), ("b.kvt", ["--vllm", '{"dtype": "float32"}'])):
        assert main([*args, str(tmp_path / name), *more]) == 0
        told.append(json.loads(capsys.readouterr().out))
        traces.append(PageTrace(tmp_path / name))
    own, there = traces
    assert there.header.by.startswith("vLLM ") and not own.header.by.startswith("vLLM ")
    for key in ("prompt", "prompt_tokens", "tokens", "label", "steps", "pages"):
        assert told[0][key] == told[1][key] != [], key
    assert there.header.page == 2 and there.n_steps > 9
    assert np.abs(there.whole().mass - own.whole().mass).max() < 1e-3


def test_the_page_says_how(tmp_path, monkeypatch):
    """Its block is run with the bundled model, text and all."""
    text = (ROOT / "docs" / "probe.md").read_text()
    (code,) = [
        each
        for each in re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
        if "import LLM" in each
    ]
    monkeypatch.chdir(tmp_path)
    there = {}
    try:
        exec(
            compile(
                code.replace(
                    '"path/or/hf-id"', f'{str(home.BUNDLED)!r}, dtype="float32", enforce_eager=True'
                ),
                "docs/probe.md",
                "exec",
            ),
            there,
        )
    finally:
        there["llm"].llm_engine.engine_core.shutdown()
    with Engine(str(home.BUNDLED)) as engine:
        asked = there["trace"].notes["prompt_tokens"]
        own = embedded(engine, asked, tmp_path / "b.kvt", Sampling(max_tokens=64))
    assert there["trace"].notes["tokens"] == own.notes["tokens"]
    assert (
        there["trace"].notes["text"].strip()
        == own.notes["text"].strip().removesuffix("<|end|>").strip()
    )
    assert np.abs(there["trace"].whole().mass - own.whole().mass).max() < 1e-3
