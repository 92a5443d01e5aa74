"""Chunks whose rows no token made: placed as they are, kept, never computed.

The oracle is transformers: its own cache gets the same rows, turned by its own rotary module.
"""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from weaving import text

from kvweave import Engine
from kvweave.errors import ChunkLost, InvalidArgument
from kvweave.store.kv import KV


def some_rows(engine, n: int = 6, seed: int = 1) -> KV:
    generator = torch.Generator().manual_seed(seed)
    kv = engine.runner.new_kv(n)
    for tensor in (*kv.k, *kv.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype))
    return kv


@torch.no_grad()
def by_transformers(engine, pieces: list[list[int] | KV]) -> torch.Tensor:
    """Return the logits after the last token of text and rows, one piece after the other."""
    model, cache, n = engine.runner.model, DynamicCache(), 0
    model.set_attn_implementation("eager")
    try:
        for piece in pieces:
            size = piece.n_tokens if isinstance(piece, KV) else len(piece)
            at = torch.arange(n, n + size, device=model.device)[None]
            if isinstance(piece, KV):
                for layer, (k, v) in enumerate(zip(piece.k, piece.v, strict=True)):
                    k, v = k.transpose(0, 1)[None], v.transpose(0, 1)[None]
                    cos, sin = model.model.rotary_emb(v, at)
                    cache.update(apply_rotary_pos_emb(k, k, cos, sin)[0], v, layer)
            else:
                ids = torch.tensor([piece], device=model.device)
                logits = model(ids, position_ids=at, past_key_values=cache, use_cache=True).logits
            n += size
    finally:
        model.set_attn_implementation("kvweave")
    return logits[0, -1]


@pytest.mark.parametrize("repair", ["none", "auto", "full", "query", "first_k"])
def test_given_rows_count_like_those_of_a_prefix(engines, repair):
    engine = engines(base="")
    rows = some_rows(engine)
    engine.put_rows("learned", rows)
    first, question = text(5, 1), text(4, 2)
    context = engine.context("c", repair=repair, share=0.5)
    context.append(first)
    context.append_chunk("learned")
    context.append(question)
    answer = context.generate(3, logprobs=3, ignore_eos=True)
    wanted = by_transformers(engine, [first, rows, question]).log_softmax(-1)
    assert answer.choices[0].logprob == pytest.approx(float(wanted[answer.tokens[0]]), abs=1e-5)
    assert answer.tokens[0] == int(wanted.argmax())
    assert answer.plan.drift == 0 and all(span.exact for span in answer.plan.spans)
    assert context.check().kl < 1e-12


def test_stored_chunks_behind_them_are_approximate_and_full_repair_is_exact(engines):
    engine = engines(base="")
    rows = some_rows(engine)
    engine.put_rows("learned", rows)
    engine.put("a", text(9, 3))
    for repair, exact in (("none", False), ("full", True)):
        context = engine.compose("{learned}{a}", name=repair, repair=repair, share=1.0)
        context.append(text(3, 4))
        plan = context.weave()
        assert [s.exact for s in plan.spans] == [True, exact, exact]
        assert [s.n_repaired for s in plan.spans] == [0, 9 * exact, 0]
        check = context.check()
        assert (check.kl < 1e-12) == exact
        assert check.v_error[-1] < 1e-9 or not exact


def test_they_move_rest_on_disk_and_come_back(runner, tmp_path):
    question = text(4, 2)
    for again in (False, True):
        with Engine(runner, base="", home=tmp_path / "home", repair="none") as engine:
            if not again:
                engine.put_rows("learned", some_rows(engine))
                engine.put("a", text(7, 5))
            context = engine.compose("{a}{learned}", name="c")
            context.append(question)
            context.drop("a")  # the rows move to the front
            found = context.generate(2, ignore_eos=True).tokens
            wanted = by_transformers(engine, [some_rows(engine), question])
            assert found[0] == int(wanted.argmax())
            engine.place("learned", "disk", codec="raw")


def test_rows_are_written_again_where_others_removed_their_record(runner, tmp_path):
    """As a server that evicts does, or one that was begun anew: the verb that says where they are let go of
    the last ones there were, in memory."""
    shared = f"files path={tmp_path / 'shared'} shared=yes"
    with Engine(runner, base="", home=tmp_path / "home", tiers=[shared]) as engine:
        engine.put_rows("learned", some_rows(engine))
        engine.place("learned", "disk", codec="raw")
        for _ in range(2):
            context = engine.compose("{learned}", name="c")
            context.append(text(3, 1))
            context.weave()
            context.close()
            assert engine.files.stat("learned").tier == "ram"
            gone = list((tmp_path / "shared").rglob("*.raw.kv"))
            assert len(gone) == 1
            gone[0].unlink()
            engine.place("learned", "disk")
            assert engine.files.stat("learned").tier == "disk"
        assert engine.shelf.get(engine.files.stat("learned").id) is not None


def test_lost_rows_are_missed_not_made_up(engines):
    engine = engines(base="")
    engine.put_rows("learned", some_rows(engine))
    with pytest.raises(InvalidArgument, match="rows that no token made"):
        engine.place("**", "none")
    assert engine.files.stat("learned").tier == "ram"
    engine.shelf.drop(engine.files.stat("learned").id)
    context = engine.compose("{learned}", name="c")
    context.append(text(3, 1))
    with pytest.raises(ChunkLost, match="learned"):
        context.generate(1)
    assert engine.denoise() == 3  # the text; nothing of the rows
    engine.check_integrity()


def test_lossy_rows_are_not_exact(engines, tmp_path):
    engine = engines(base="", home=tmp_path / "home")
    engine.put_rows("learned", some_rows(engine))
    engine.place("learned", "disk", codec="int8")
    context = engine.compose("{learned}", name="c", repair="full")
    context.append(text(3, 1))
    assert context.weave().drift is None


@pytest.mark.parametrize("fault", ["layers", "heads", "dtype", "empty", "nan"])
def test_rows_that_are_not_the_models_are_refused(engines, fault):
    engine = engines(base="")
    kv = some_rows(engine)
    if fault == "layers":
        kv = KV(kv.k[1:], kv.v[1:])
    elif fault == "heads":
        kv = KV([k[:, :1] for k in kv.k], kv.v)
    elif fault == "dtype":
        kv = KV([k.float() for k in kv.k], [v.float() for v in kv.v])
    elif fault == "empty":
        kv = kv.rows(0, 0)
    else:
        kv.v[0][2, 0, 0] = float("nan")
    with pytest.raises(InvalidArgument):
        engine.put_rows("learned", kv)
    assert not engine.files.ls()
