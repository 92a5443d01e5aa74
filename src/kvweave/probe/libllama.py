"""llama.cpp's C interface, out of a wheel: the library, its tokenizer, what a GGUF file says.

xllamacpp's module exports llama.h; llama-cpp-py-sync has declarations that were made of the same
header (its own library asks for glibc 2.38). pyproject.toml pins the two together, and what they must
agree on is compared when they are loaded: structs go by value, so one field more would be silence.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from kvweave.errors import InvalidArgument

HINT = "pip install 'kvweave[llamacpp]'"
ERROR = 4  # level of a line that is logged
UINT32, INT32, ARRAY = 4, 5, 9  # types of GGUF
# What llama.cpp says by itself where the declarations fit; one field more or less, and these are others.
DEFAULTS = {
    "n_ctx": 512, "n_batch": 2048, "n_ubatch": 512, "n_seq_max": 1, "rope_scaling_type": -1,
    "flash_attn_type": -1, "yarn_ext_factor": -1.0, "yarn_beta_slow": -1.0, "defrag_thold": -1.0,
    "type_k": 1, "type_v": 1, "offload_kqv": True, "no_perf": True, "swa_full": True, "kv_unified": False,
}  # fmt: skip
# Of ggml.h, ggml-backend.h and gguf.h, which the declarations leave out.
MORE = """
const char * ggml_get_name(const struct ggml_tensor * tensor);
size_t ggml_nbytes(const struct ggml_tensor * tensor);
int64_t ggml_nrows(const struct ggml_tensor * tensor);
int64_t ggml_nelements(const struct ggml_tensor * tensor);
void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);
struct gguf_context;
struct gguf_init_params { bool no_alloc; void ** ctx; };
struct gguf_context * gguf_init_from_file(const char * fname, struct gguf_init_params params);
void gguf_free(struct gguf_context * ctx);
int64_t gguf_find_key(const struct gguf_context * ctx, const char * key);
int gguf_get_kv_type(const struct gguf_context * ctx, int64_t key_id);
int gguf_get_arr_type(const struct gguf_context * ctx, int64_t key_id);
size_t gguf_get_arr_n(const struct gguf_context * ctx, int64_t key_id);
const void * gguf_get_arr_data(const struct gguf_context * ctx, int64_t key_id);
"""


@dataclass(frozen=True, slots=True)
class LlamaLibrary:
    """llama.cpp as it was loaded: ``by`` is its name, ``said`` the errors that it logged."""

    ffi: Any
    lib: Any  # functions of llama.h
    ggml: Any  # those of `MORE`
    by: str
    said: list[str]
    log: Any  # what it logs by; must outlive it


@cache
def library() -> LlamaLibrary:
    """Load llama.cpp, once. Raises InvalidArgument.

    ``LLAMA_CPP_LIB`` names another library than xllamacpp's, of the same llama.h.
    """
    given = os.environ.get("LLAMA_CPP_LIB")
    try:
        ffi = import_module("llama_cpp_py_sync._cffi_bindings").ffi
        more = import_module("cffi").FFI()
        more.include(ffi)
        more.cdef(MORE)
        path = given or _exporting()
        by = Path(given).name if given else f"xllamacpp {metadata.version('xllamacpp')}"
        lib, ggml = ffi.dlopen(path), more.dlopen(path)
        said = lib.llama_context_default_params()
    except (ImportError, OSError, AttributeError) as error:
        raise InvalidArgument("gguf", f"llama.cpp cannot be loaded: {error}", HINT) from error
    for name, wanted in DEFAULTS.items():
        if (found := getattr(said, name)) != wanted:
            why = (
                f"{by} is of another llama.h than its declarations: {name} is {found}, not {wanted}"
            )
            raise InvalidArgument("gguf", why, f"{HINT}, where both are of one")
    errors: list[str] = []

    def log(level: int, text: Any, _: Any) -> None:
        if level == ERROR:
            errors.append(ffi.string(text).decode(errors="replace").strip())

    kept = ffi.callback("ggml_log_callback", log)
    lib.llama_log_set(kept, ffi.NULL)
    lib.llama_backend_init()
    return LlamaLibrary(ffi, lib, ggml, f"llama.cpp ({by})", errors, kept)


def _exporting() -> str:
    """Return the path of xllamacpp's module, which is not imported. Raises ImportError."""
    found = util.find_spec("xllamacpp")
    for folder in (found and found.submodule_search_locations) or ():
        for path in Path(folder).glob("xllamacpp*.so"):
            return str(path)
    raise ImportError("xllamacpp has no library here")


def said_of(model: Any, key: str) -> str | None:
    """Return what a model's file says under a key that is no list; None: nothing."""
    the = library()
    out = the.ffi.new("char[]", 256)
    n = the.lib.llama_model_meta_val_str(model, key.encode(), out, len(out))
    return None if n < 0 else the.ffi.string(out).decode(errors="replace")


def listed(path: Path, key: str) -> list[int] | None:
    """Return the whole numbers that a GGUF file lists under a key; None: it has no such list."""
    ffi, lib = library().ffi, library().ggml
    file = lib.gguf_init_from_file(str(path).encode(), {"no_alloc": True})
    if file == ffi.NULL:
        return None
    try:
        at = lib.gguf_find_key(file, key.encode())
        if at < 0 or lib.gguf_get_kv_type(file, at) != ARRAY:
            return None
        kinds = {UINT32: "uint32_t *", INT32: "int32_t *"}
        kind = kinds.get(lib.gguf_get_arr_type(file, at))
        if kind is None:
            return None
        n = lib.gguf_get_arr_n(file, at)
        return list(ffi.unpack(ffi.cast(kind, lib.gguf_get_arr_data(file, at)), n))
    finally:
        lib.gguf_free(file)


class FileWords:
    """The tokenizer of a GGUF file, as far as it is used as one of transformers."""

    def __init__(self, vocab: Any) -> None:
        self._vocab = vocab

    def __call__(self, text: str) -> dict[str, list[int]]:
        """Return ``input_ids``, what the file puts in front of a text (BOS) among them."""
        lib, said = library().lib, text.encode()

        def cut(out: Any, room: int) -> int:
            return int(lib.llama_tokenize(self._vocab, said, len(said), out, room, True, True))

        return {"input_ids": _filled("llama_token[]", cut)}

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, special ones too."""
        ffi, lib = library().ffi, library().lib
        ids = ffi.new("llama_token[]", list(tokens))

        def join(out: Any, room: int) -> int:
            return int(lib.llama_detokenize(self._vocab, ids, len(ids), out, room, False, True))

        return bytes(n & 255 for n in _filled("int8_t[]", join)).decode(errors="replace")


def _filled(kind: str, fill: Callable[[Any, int], int]) -> list[int]:
    """Return what ``fill`` writes to an array; of too small a one it says how much it takes."""
    ffi = library().ffi
    out = ffi.new(kind, 1)
    n = fill(out, 0)
    if n < 0:
        out = ffi.new(kind, -n)
        n = fill(out, -n)
    return list(ffi.unpack(out, n)) if n else []
