"""Record inside llama.cpp: a GGUF model as an engine that `record` drives.

Without flash attention a graph has each layer's softmax as a tensor, ``kq_soft_max-LAYER``, and the
callback of an evaluation is shown it: it is asked whether it wants a tensor, then told that it is there.

A sequence that only grows takes one cell of the cache after the other, in that of sliding layers too where
it is as long (``swa_full``): cell, slot and position are one number. The tensor has more cells, up to a
multiple of 256, which nothing attends to; that this is so is looked at in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from kvweave.chunk.identity import ModelFingerprint
from kvweave.errors import InvalidArgument
from kvweave.probe.libllama import FileWords, library, listed, said_of
from kvweave.probe.recorder import SLICE
from kvweave.run.base import LayerInfo, Work
from kvweave.run.rotary import STATIC
from kvweave.store.kv import LayerShape

SHOWN = b"kq_soft_max-"  # the layer's number follows
KV_TYPES = {"f32": 0, "f16": 1}  # of ggml. A quantised V takes flash attention, which shows nothing
OFF, NO_VOCAB = 0, 0  # of flash attention, of tokenizers
ROUNDING = 1e-3  # what a row may pay over all there is
BLOCK = 1 << 20  # bytes of a file at once


class GrowingRows:
    """The rows of a sequence that only grows, as far as a recording asks for them; llama.cpp has them."""

    def __init__(self, model: GGUF) -> None:
        self.n, self._model = 0, model

    def reserve(self, n: int) -> None:
        """Make room for ``n`` rows: a new context, without any."""
        self.n = 0
        self._model.open(n)


class GGUF:
    """A model in llama.cpp, on the CPU, in the place of an engine; one sequence at a time.

    ``kv`` is how keys and values are kept: "f16", as llama.cpp keeps them, or "f32". Raises InvalidArgument
    for a file that is none, and for a model whose attention is not seen row by row.
    """

    device = torch.device("cpu")

    def __init__(self, path: str | Path, kv: str = "f16") -> None:
        if kv not in KV_TYPES:
            raise InvalidArgument("kv", f"{kv!r}", f"one of {', '.join(KV_TYPES)}")
        if not Path(path).is_file():
            raise InvalidArgument(
                "gguf", f"there is no file {str(path)!r}", "give the path of a .gguf file"
            )
        self.path, self.kv, self._the = Path(path), kv, library()
        self.by = self._the.by
        self._context: Any = None
        # layer -> [head, cell], of a pass that is watched
        self._seen: dict[int, Tensor] | None = None
        self._trouble: BaseException | None = None  # in the callback
        self._callback = self._the.ffi.callback(
            "ggml_backend_sched_eval_callback", self._show, error=False, onerror=self._failed
        )
        about = self._the.lib.llama_model_default_params()
        about.n_gpu_layers = 0
        self._model = self._the.lib.llama_model_load_from_file(str(path).encode(), about)
        if self._model == self._the.ffi.NULL:
            raise self._refusal("llama.cpp does not load it")
        try:
            self._look()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> GGUF:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the model; it is of no use then."""
        self._free()
        if self._model is not None:
            self._the.lib.llama_model_free(self._model)
        self._model = None

    @property
    def runner(self) -> GGUF:
        """What runs passes: itself."""
        return self

    def require_run(self) -> None:
        """Do nothing: what cannot be run was refused when it was loaded."""

    def new_rows(self) -> GrowingRows:
        """Return rows of another sequence; the last one is forgotten when room is made."""
        return GrowingRows(self)

    def open(self, n: int) -> None:
        """Begin a sequence of up to ``n`` rows. Raises InvalidArgument where there is no room."""
        self._free()
        how = self._the.lib.llama_context_default_params()
        how.n_ctx, how.n_batch, how.n_ubatch = n, SLICE, SLICE
        how.n_threads = how.n_threads_batch = torch.get_num_threads()
        how.flash_attn_type, how.swa_full, how.cb_eval = OFF, True, self._callback
        how.type_k = how.type_v = KV_TYPES[self.kv]
        self._context = self._the.lib.llama_init_from_model(self._model, how)
        if self._context == self._the.ffi.NULL:
            self._context = None
            raise self._refusal(f"llama.cpp makes no context of {n} rows")

    def forward(self, works: Sequence[Work]) -> list[Tensor]:
        """Run the next rows of the sequence, the one row of a work with an observer before its eyes.

        Return the logits [1, vocab] behind the last row. Raises InvalidArgument.
        """
        (work,) = works
        rows: Any = work.rows
        observer, slot = work.observer, rows.n
        tokens = np.ascontiguousarray(work.tokens, np.int32)
        logits, seen = self._decode(tokens, watched=observer is not None)
        rows.n += len(tokens)
        if observer is not None:
            observer.begin()
            for layer, weights in enumerate(self._checked(seen, slot)):
                observer.see(layer, 0, 0, weights[:, None])
            observer.end()
        return [torch.from_numpy(logits)[None]]

    def _decode(
        self, tokens: NDArray[np.int32], watched: bool
    ) -> tuple[NDArray[np.float32], dict[int, Tensor]]:
        """Run tokens; return the logits [vocab] behind the last, and what layers showed."""
        ffi, lib = self._the.ffi, self._the.lib
        seen: dict[int, Tensor] = {}
        self._seen = seen if watched else None
        try:
            batch = lib.llama_batch_get_one(ffi.from_buffer("llama_token[]", tokens), len(tokens))
            status = lib.llama_decode(self._context, batch)
        finally:
            trouble, self._trouble, self._seen = self._trouble, None, None
        if trouble is not None:
            raise trouble
        found = ffi.NULL if status else lib.llama_get_logits_ith(self._context, -1)
        if found == ffi.NULL:
            raise self._refusal(f"llama.cpp decodes nothing: status {status}")
        logits = np.frombuffer(ffi.buffer(found, 4 * self.n_vocab), np.float32).copy()
        return logits, seen

    def _show(self, tensor: Any, ask: bool, _: Any) -> bool:
        """Say whether a tensor is wanted; once it is there, copy it."""
        if self._seen is None:
            return False
        ffi, lib = self._the.ffi, self._the.ggml
        name = ffi.string(lib.ggml_get_name(tensor))
        if ask or not name.startswith(SHOWN):
            return bool(name.startswith(SHOWN))
        layer, heads = int(name[len(SHOWN) :]), lib.ggml_nrows(tensor)
        found = np.empty((heads, lib.ggml_nelements(tensor) // heads), np.float32)
        if layer in self._seen or found.nbytes != lib.ggml_nbytes(tensor):
            raise self._refusal(f"layer {layer} has not one softmax in float32")
        lib.ggml_backend_tensor_get(tensor, ffi.from_buffer(found), 0, found.nbytes)
        self._seen[layer] = torch.from_numpy(found)
        return True

    def _failed(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        self._trouble = self._trouble or error

    def _checked(self, seen: dict[int, Tensor], slot: int) -> list[Tensor]:
        """Return each layer's attention [head, slot] of the row in ``slot``.

        Raises InvalidArgument unless cells are slots: those of later rows, and of none, pay nothing, and
        the row sees itself in its own.
        """
        found = [seen.get(layer, torch.zeros(0, 0)) for layer in range(len(self.layers))]
        itself = False
        for layer, (info, weights) in enumerate(zip(self.layers, found, strict=True)):
            behind = weights[:, slot + 1 :]
            if weights.shape[0] != info.n_queries or weights.shape[1] <= slot or behind.any():
                raise self._refusal(
                    f"layer {layer} does not see row by row what is in front of {slot}"
                )
            if not float(weights.sum(1).max()) <= 1 + ROUNDING:
                raise self._refusal(f"a head of layer {layer} attends to more than all there is")
            itself |= bool(weights[:, slot].any())
        if not itself:
            raise self._refusal(f"no head sees the row of slot {slot} in cell {slot}")
        return [weights[:, : slot + 1] for weights in found]

    def _look(self) -> None:
        """Find out what the model is. Raises InvalidArgument."""
        lib, model = self._the.lib, self._model
        kind = said_of(model, "general.architecture")
        causal = said_of(model, f"{kind}.attention.causal")
        shared = said_of(model, f"{kind}.attention.shared_kv_layers")
        behind = lib.llama_model_is_diffusion(model) or causal == "false"
        for is_so, why in (
            (lib.llama_model_is_recurrent(model), "it keeps a state, which has no pages"),
            (lib.llama_model_is_hybrid(model), "layers of it keep a state, which has no pages"),
            (lib.llama_model_has_encoder(model), "it has an encoder"),
            (behind, "a row sees what is behind it"),
            (shared not in (None, "0"), "layers of it attend to rows of others"),
        ):
            if is_so:
                raise self._refusal(f"{kind}: {why}")
        vocab = lib.llama_model_get_vocab(model)
        self.n_vocab = lib.llama_vocab_n_tokens(vocab)
        self.limit = lib.llama_model_n_ctx_train(model)
        self.ends = frozenset(t for t in range(self.n_vocab) if lib.llama_vocab_is_eog(vocab, t))
        self.tokenizer = None if lib.llama_vocab_type(vocab) == NO_VOCAB else FileWords(vocab)
        self.layers = self._layers(f"{kind}.attention.head_count_kv")
        self.fingerprint = self._fingerprint()

    def _layers(self, key: str) -> list[LayerInfo]:
        """Return the layers of which one row shows its attention. Raises InvalidArgument."""
        n = self._the.lib.llama_model_n_layer(self._model)
        self.open(1)
        _, seen = self._decode(np.zeros(1, np.int32), watched=True)
        self._free()
        if sorted(seen) != list(range(n)):
            raise self._refusal(f"{len(seen)} of its {n} layers show their attention")
        k_heads = listed(self.path, key) or [self._the.lib.llama_model_n_head_kv(self._model)] * n
        heads = [len(seen[layer]) for layer in range(n)]
        if len(k_heads) != n or any(k < 1 or q % k for q, k in zip(heads, k_heads, strict=True)):
            raise self._refusal(f"{heads} query heads of layers do not share {k_heads} kv heads")
        shapes = [LayerShape(k, 1, k, 1) for k in k_heads]  # widths are nobody's concern here
        return [
            LayerInfo(shape, STATIC, group=q // shape.k_heads)
            for q, shape in zip(heads, shapes, strict=True)
        ]

    def _fingerprint(self) -> ModelFingerprint:
        """Return what the file is, by all of it; of a model in several files, by the one that was given."""
        digest = xxhash.xxh3_128()
        with self.path.open("rb") as file:
            while block := file.read(BLOCK):
                digest.update(block)
        out = self._the.ffi.new("char[]", 256)
        self._the.lib.llama_model_desc(self._model, out, len(out))
        kind = self._the.ffi.string(out).decode(errors="replace")
        name = f"{kind}:{self.path.name}"
        return ModelFingerprint(name, digest.hexdigest(), "", f"kv {self.kv}", "")

    def _free(self) -> None:
        if self._context is not None:
            self._the.lib.llama_free(self._context)
        self._context = None

    def _refusal(self, why: str) -> InvalidArgument:
        said = "; ".join(self._the.said[-2:])
        self._the.said.clear()
        hint = "a model whose layers all are plain attention (docs/probe.md)"
        return InvalidArgument("gguf", f"{self.path.name}: {why}{said and f' ({said})'}", hint)
