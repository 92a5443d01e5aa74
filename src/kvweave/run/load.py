"""Checkpoints and hub ids to models, and a caller's model to one of our own."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as bars

from kvweave.errors import InvalidArgument, ModelUnusable
from kvweave.run.find import find
from kvweave.run.trouble import said

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
SMALL = 1 << 29  # bytes of weights that load without a progress bar
WORDS = ("tokenizer*", "vocab*", "merges*", "spiece*", "tekken*", "*.tiktoken", "*.model")
SETTINGS = "tokenizer_config.json"
BYTES = 256  # words a tokenizer of bytes has at least; it needs no file for them
# flags of x86 (AMX, AVX-512) and of ARM, as Linux names them
BF16_UNITS = frozenset({"amx_bf16", "avx512_bf16", "bf16"})

log = logging.getLogger("kvweave.run")


def load(path: str, dtype: str, device: str) -> tuple[PreTrainedModel, Any]:
    """Load a checkpoint directory or hub id: a model on its device, and a tokenizer or None.

    Raises ModelUnusable, InvalidArgument.
    """
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    if dtype not in DTYPES:
        raise InvalidArgument("dtype", f"{dtype!r}", f"one of {', '.join(DTYPES)}")
    found = find(path)
    small = sum(f.stat().st_size for f in Path(found.path).glob("*.safetensors")) < SMALL
    shown = bars.is_progress_bar_enabled()
    try:
        if small and Path(found.path).is_dir():
            bars.disable_progress_bar()  # type: ignore[no-untyped-call]
        stored = AutoConfig.from_pretrained(found.path).get_text_config().dtype
        kind, why = choose_dtype(dtype, stored, where, has_bf16_units())
        log.info("%s runs in %s: %s", path, kind, why)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            found.path, dtype=kind, output_loading_info=True
        )
        tokenizer = _tokenizer(found.path, found.files)
        model, info = loaded
    except Exception as error:
        raise ModelUnusable(path, said(error)) from error
    finally:
        if shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]
    for problem in ("missing_keys", "mismatched_keys"):
        if info.get(problem):
            some = ", ".join(str(k) for k in sorted(info[problem], key=str)[:3])
            raise ModelUnusable(path, f"{problem.replace('_', ' ')} in the weights: {some}")
    return model.to(where), tokenizer


def load_tokenizer(path: str) -> Any:
    """Load the tokenizer of a checkpoint alone; None if it has none. Raises ModelUnusable."""
    found = find(path)
    try:
        return _tokenizer(found.path, found.files)
    except Exception as error:
        raise ModelUnusable(path, said(error)) from error


def choose_dtype(
    wanted: str, stored: torch.dtype | None, device: str, bf16_units: bool
) -> tuple[Any, str]:
    """Return the dtype to load a checkpoint in (``"auto"``: as it is stored), and why."""
    if wanted != "auto":
        return getattr(torch, wanted), "it was asked for"
    if not device.startswith("cpu"):
        return "auto", "the checkpoint is stored so"
    if stored != torch.bfloat16:
        # float32 as it is; float16 would lose bits in bfloat16 and is slow on most CPUs
        return torch.float32, f"the checkpoint is stored in {stored}"
    if bf16_units:
        return torch.bfloat16, "the checkpoint is stored so, and this CPU has units for it"
    return torch.float32, "this CPU has no units for bfloat16, which would take about twice as long"


def has_bf16_units(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU multiplies bfloat16 in units of its own; False where nothing tells."""
    try:
        return not BF16_UNITS.isdisjoint(cpuinfo.read_text().split())
    except OSError:
        return False


def twin(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """Return a model of the same structure that shares every weight of ``model``.

    Its configuration, training flags, hooks and buffers that no checkpoint holds are its own, so
    that what is done to it does not show in ``model``. Raises ModelUnusable.
    """
    weights = [*model.parameters(), *model.state_dict(keep_vars=True).values()]
    try:
        own = copy.deepcopy(model, {id(weight): weight for weight in weights})
    except Exception as error:
        raise ModelUnusable(name, f"its modules cannot be copied: {error}") from error
    return own.eval()  # type: ignore[no-untyped-call, no-any-return]


def _tokenizer(path: str, files: Iterable[str]) -> Any:
    """Load the tokenizer there is, or None.

    Asked for one that is not there, transformers either fails or makes one of a few special tokens,
    to which every text is nothing.
    """
    words = [file for file in files if any(fnmatch(file, each) for each in WORDS)]
    if words and words != [SETTINGS]:
        return AutoTokenizer.from_pretrained(path)
    if words:
        try:
            tokenizer = AutoTokenizer.from_pretrained(path)
            if len(tokenizer.get_vocab()) >= BYTES:
                return tokenizer
        except Exception as error:
            log.info("%s: %s", path, said(error))
    log.warning("%s came without a tokenizer: it takes and gives token ids", path)
    return None
