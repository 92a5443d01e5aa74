"""What is recorded inside llama.cpp is what transformers' own attention says of the same weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import ggufs
import numpy as np
import oracle
import pytest
import torch
from needs import need

from kvweave import Engine, Runner, Sampling
from kvweave.cli import home, main
from kvweave.errors import ContextTooLong, InvalidArgument
from kvweave.probe import PageTrace, Recording, ablate, libllama, record
from kvweave.probe.llamacpp import GGUF

need("xllamacpp"), need("llama_cpp_py_sync", "llama-cpp-py-sync"), need("gguf")
pytestmark = pytest.mark.skipif(oracle.DEVICE.type != "cpu", reason="llama.cpp runs on the CPU")

GREEDY = Sampling(max_tokens=40, ignore_eos=True)
# of mass, which is rounded to 1/65535; gemma's gelu is a table of halves in llama.cpp
KINDS = {"llama": 3e-5, "qwen3": 3e-5, "gemma3": 1e-3}
PROMPTS = {"short": 37, "long": 740}  # one pass; two, and cells padded to 768, then to 1024


def prompt(n: int = 37) -> list[int]:
    return np.random.default_rng(5).integers(3, 101, n).tolist()


def built(kind: str) -> Any:
    name, changes = oracle.MODELS[kind]
    if kind == "gemma3":
        changes = changes | {"query_pre_attn_scalar": oracle.BASE["head_dim"]}
    return oracle.build(name, changes, torch.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gguf")
    return {kind: ggufs.write(built(kind), folder / f"{kind}.gguf") for kind in KINDS}


def compare(trace: PageTrace, model: Any, allowed: float) -> None:
    """Hold the mass of every step, head and page against transformers' attention."""
    page, n = trace.header.page, trace.header.prompt
    tokens = trace.notes["prompt_tokens"] + trace.notes["tokens"]
    layers = oracle.attention_of(
        model, tokens, [model.config.num_key_value_heads] * len(model.model.layers)
    )
    counts = np.bincount(trace.header.layers, minlength=len(layers)).tolist()
    found = trace.whole()
    for step in range(trace.n_steps):
        slot = n + step
        # a layer of fewer kv heads: the mean over those that are one
        rows = [
            a[:, slot, : slot + 1].view(k, -1, slot + 1).mean(1)
            for a, k in zip(layers, counts, strict=True)
        ]
        heads = torch.cat(rows).double()
        pages = torch.zeros(len(heads), slot // page + 1, dtype=torch.float64)
        pages.index_add_(1, torch.arange(slot + 1) // page, heads)
        mine = torch.from_numpy(found.mass[..., step]).double()
        assert (mine[:, : pages.shape[1]] - pages).abs().max() < allowed, step
        assert not mine[:, pages.shape[1] :].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", PROMPTS)
@pytest.mark.parametrize("page", [1, 5])
@pytest.mark.sampled
def test_mass_is_what_attention_pays(
    kind: str, size: str, page: int, files: dict[str, Path], tmp_path: Path
) -> None:
    model, how, asked = built(kind), Recording(page), prompt(PROMPTS[size])
    with GGUF(files[kind], kv="f32") as there:
        trace = record(there, asked, tmp_path / "a.kvt", GREEDY, how, {"task": "none"})
    assert trace.header.by.startswith("llama.cpp (xllamacpp ")
    assert trace.header.prompt == len(asked) and trace.n_steps == 39
    compare(trace, model, KINDS[kind])
    with Engine(Runner(model), base="") as engine:
        own = record(engine, asked, tmp_path / "b.kvt", GREEDY, how)
    assert trace.notes["tokens"] == own.notes["tokens"]
    assert trace.header.heads == own.header.heads and trace.header.model != own.header.model
    assert np.abs(trace.whole().mass - own.whole().mass).max() < KINDS[kind]
    assert (trace.whole().access == own.whole().access).mean() > 0.999


def test_layers_have_kv_heads_of_their_own(tmp_path: Path) -> None:
    """A list in the file says how many; a query head is added to the kv head it shares."""
    model, n_heads, width = built("llama"), [2, 1, 2, 1], oracle.BASE["head_dim"]
    for layer in (1, 3):
        for projection in (
            model.model.layers[layer].self_attn.k_proj,
            model.model.layers[layer].self_attn.v_proj,
        ):
            projection.weight.data[width:] = projection.weight.data[:width]
    path = ggufs.write(model, tmp_path / "a.gguf", kv_heads=n_heads)
    with GGUF(path, kv="f32") as there:
        trace = record(there, prompt(), tmp_path / "a.kvt", GREEDY)
    assert trace.header.heads == ((0, 0), (0, 1), (1, 0), (2, 0), (2, 1), (3, 0))
    compare(trace, model, KINDS["llama"])


def test_quantised_weights(tmp_path: Path) -> None:
    """Weights, and what they are multiplied with, are off by up to 1/254 of the largest of 32."""
    model = built("llama")
    path = ggufs.write(model, tmp_path / "a.gguf", quantised=True)
    with GGUF(path) as there:
        trace = record(there, prompt(), tmp_path / "a.kvt", GREEDY)
    assert "Q8_0" in trace.header.model["model"]
    compare(trace, model, 0.03)
    with pytest.raises(AssertionError):
        compare(trace, model, 0.001)


def test_sequences_do_not_see_each_other(files: dict[str, Path], tmp_path: Path) -> None:
    """Halves of the usual cache are near floats; the second recording is the first again."""
    with GGUF(files["llama"]) as there, GGUF(files["llama"], kv="f32") as exact:
        some = [
            record(e, prompt(), tmp_path / "a.kvt", GREEDY).whole() for e in (there, exact, there)
        ]
    assert np.array_equal(some[0].mass, some[2].mass)
    off = np.abs(some[0].mass[..., 0] - some[1].mass[..., 0]).max()
    assert 1e-5 < off < 1e-2


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with Engine(str(home.BUNDLED)) as engine:
        model, tokenizer = engine.runner.model, engine.runner.tokenizer
        return ggufs.write(model, tmp_path_factory.mktemp("gguf") / "demo.gguf", tokenizer)


def test_a_model_of_words(demo: Path, tmp_path: Path) -> None:
    """Its text, its end, and the same tokens as the embedded engine's behind the same ones."""
    text = "<|system|> Anna's river is cold .<|end|><|user|> what about Anna's river<|end|><|assistant|>"
    with GGUF(demo, kv="f32") as there:
        trace = record(there, text, tmp_path / "a.kvt", Sampling(max_tokens=60))
    with Engine(str(home.BUNDLED), base="") as engine:
        asked = trace.notes["prompt_tokens"]
        own = record(engine, asked, tmp_path / "b.kvt", Sampling(max_tokens=60))
        ends = engine.runner.ends
        with pytest.raises(InvalidArgument, match="another model"):
            ablate(engine, trace)
        assert engine.runner.tokenizer.decode(asked).replace(" ", "") == text.replace(" ", "")
    assert trace.notes["tokens"] == own.notes["tokens"] and trace.notes["tokens"][-1] in ends
    assert trace.notes["text"].strip() == own.notes["text"].strip() != ""
    assert np.abs(trace.whole().mass - own.whole().mass).max() < 1e-4


def test_from_the_shell_and_reported(
    demo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "a.kvt", tmp_path / "a.html"
    args = [
        "--gguf",
        str(demo),
        "--out",
        str(path),
        "--max-tokens",
        "90",
        "--page",
        "2",
        "--ignore-eos",
    ]
    assert main(["probe", "record", "Anna's river is cold", *args, "--label", "there", "-q"]) == 0
    assert PageTrace(path).n_steps == 89
    capsys.readouterr()
    assert main(["probe", "report", str(path), "--json", "--out", str(page)]) == 0
    (found,) = json.loads(capsys.readouterr().out)["traces"]
    assert found["label"] == "there" and page.read_text().count("<svg") + page.read_text().count(
        "<img"
    )
    assert main(["probe", "replay", str(path), "--ranking", "recent", "--json"]) == 0
    assert main(["probe", "record", "x", *args, "--model", str(home.BUNDLED)]) != 0
    assert "one of them" in capsys.readouterr().err


def refusal(path: Path, **options: Any) -> str:
    with pytest.raises(InvalidArgument) as found, GGUF(path, **options):
        pass
    assert found.value.hint or "file" in str(found.value)
    return str(found.value)


def test_refusals(files: dict[str, Path], tmp_path: Path) -> None:
    path = tmp_path / "a.kvt"
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(files["llama"].read_bytes()[:9000])
    assert "there is no file" in refusal(tmp_path / "none.gguf")
    assert "llama.cpp does not load it (" in refusal(broken)
    assert "one of f32, f16" in refusal(files["llama"], kv="q8_0")
    with GGUF(files["llama"]) as there:
        for wrong in ([], [3, 101], [-1], "text"):
            with pytest.raises(InvalidArgument):
                record(there, wrong, path)
        with pytest.raises(ContextTooLong):
            record(there, prompt(1000), path, GREEDY)
    assert not path.exists()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("attention.causal", False, "sees what is behind"),
        ("attention.shared_kv_layers", 1, "rows of others"),
    ],
)
def test_models_that_are_not_seen_row_by_row(
    key: str, value: Any, says: str, tmp_path: Path
) -> None:
    path = ggufs.write(built("llama"), tmp_path / "a.gguf", more={f"llama.{key}": value})
    assert says in refusal(path)


@pytest.mark.parametrize("kind", ["is_recurrent", "is_hybrid", "has_encoder", "is_diffusion"])
def test_models_without_pages(
    kind: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt(monkeypatch).__dict__[f"llama_model_{kind}"] = lambda model: True
    assert "llama.gguf: llama: " in refusal(files["llama"])


@pytest.fixture
def anew() -> Iterator[None]:
    libllama.library.cache_clear()
    yield
    libllama.library.cache_clear()


def test_a_library_of_another_header_is_refused(
    files: dict[str, Path], anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(libllama.DEFAULTS, "yarn_ext_factor", 1.0)
    assert "another llama.h" in refusal(files["llama"])
    monkeypatch.undo()
    monkeypatch.setenv("LLAMA_CPP_LIB", "/nowhere/libllama.so")
    assert "pip install 'kvweave[llamacpp]'" in refusal(files["llama"])


class Hurt:
    """llama.h, with contexts made otherwise than asked for."""

    def __init__(self, lib: Any, **changes: Any) -> None:
        self.lib, self.changes = lib, changes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.lib, name)

    def llama_init_from_model(self, model: Any, how: Any) -> Any:
        for name, value in self.changes.items():
            setattr(how, name, value)
        return self.lib.llama_init_from_model(model, how)


def hurt(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Hurt:
    whole = libllama.library()
    lib = Hurt(whole.lib, **changes)
    monkeypatch.setattr("kvweave.probe.llamacpp.library", lambda: replace(whole, lib=lib))
    return lib


def test_what_is_not_seen_is_no_trace(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hurt(monkeypatch, flash_attn_type=1)
    assert "0 of its 4 layers show" in refusal(files["llama"])
    hurt(monkeypatch, swa_full=False)  # cells of sliding layers are taken again
    with GGUF(files["gemma3"]) as there, pytest.raises(InvalidArgument, match="row by row"):
        record(there, prompt(740), tmp_path / "a.kvt", GREEDY)


@pytest.mark.parametrize("wrong", ["later", "elsewhere", "short", "missing", "more"])
def test_cells_that_are_no_slots_are_refused(
    wrong: str, files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    decode = GGUF._decode

    def changed(self: GGUF, tokens: Any, watched: bool) -> Any:
        logits, seen = decode(self, tokens, watched)
        if watched and len(seen) == 4 and hasattr(self, "layers"):
            if wrong == "later":
                seen[2] = seen[2].roll(1, 1)
            elif wrong == "elsewhere":
                seen = {layer: weights.roll(-1, 1) for layer, weights in seen.items()}
                for weights in seen.values():
                    weights[:, -1] = 0
            elif wrong == "short":
                seen[2] = seen[2][:, :30]
            elif wrong == "missing":
                del seen[2]
            else:
                seen[2] = seen[2] * 1.01
        return logits, seen

    monkeypatch.setattr(GGUF, "_decode", changed)
    with GGUF(files["llama"]) as there, pytest.raises(InvalidArgument, match="gguf"):
        record(there, prompt(), tmp_path / "a.kvt", GREEDY)


def test_an_error_in_the_callback_comes_out(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with GGUF(files["llama"]) as there:
        monkeypatch.setattr("kvweave.probe.llamacpp.np.empty", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            record(there, prompt(), tmp_path / "a.kvt", GREEDY)
        monkeypatch.undo()
        assert record(there, prompt(), tmp_path / "a.kvt", GREEDY).n_steps == 39
