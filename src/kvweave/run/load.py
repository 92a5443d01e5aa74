"""Checkpoints and hub ids to models, and a caller's model to one of our own."""

from __future__ import annotations

import copy
import logging
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.utils import logging as bars

from kvweave.errors import InvalidArgument, ModelUnusable
from kvweave.run.trouble import said

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
SMALL = 1 << 29  # bytes of weights that load without a progress bar
WORDS = ("tokenizer*", "vocab*", "merges*", "spiece*", "tekken*", "*.tiktoken", "*.model")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
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
    _check_path(path)
    small = sum(f.stat().st_size for f in Path(path).glob("*.safetensors")) < SMALL
    shown = bars.is_progress_bar_enabled()
    try:
        if small and Path(path).is_dir():
            bars.disable_progress_bar()  # type: ignore[no-untyped-call]
        stored = AutoConfig.from_pretrained(path).get_text_config().dtype
        kind, why = choose_dtype(dtype, stored, where, has_bf16_units())
        log.info("%s runs in %s: %s", path, kind, why)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=kind, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path) if _has_words(path) else None
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


def _check_path(path: str) -> None:
    """Refuse at once what can only be a mistyped directory: the hub would be asked for long."""
    if Path(path).exists():
        return
    parent = Path(path).parent
    if HUB_ID.fullmatch(path) and (parent == Path() or not parent.is_dir()):
        return
    raise ModelUnusable(path, "there is no such directory")


def _has_words(path: str) -> bool:
    """Whether there is a tokenizer to load; a hub id is taken to have one."""
    where = Path(path)
    return not where.is_dir() or any(any(where.glob(each)) for each in WORDS)
