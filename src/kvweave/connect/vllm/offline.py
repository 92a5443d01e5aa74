"""A model as a vLLM server loads it, in this process: what a calibration is measured with, or what is recorded."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its worker is in this process; read on import
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from vllm import LLM, SamplingParams
from vllm.platforms import current_platform

from kvweave.connect.vllm.backend import VllmBackend
from kvweave.connect.vllm.record import EXTENSION, record
from kvweave.errors import InvalidArgument, KVWeaveError, ModelUnusable
from kvweave.probe.trace import PageTrace
from kvweave.run.sample import Sampling

# on CPUs vLLM takes so much of all memory, whatever is free; of that we have it take so much
FRACTION, OF_FREE = 0.92, 0.8
ROOM = ("gpu_memory_utilization", "kv_cache_memory_bytes")
SPACE = "VLLM_CPU_KVCACHE_SPACE"


@contextmanager
def loaded(model: str, options: Mapping[str, Any]) -> Iterator[VllmBackend]:
    """Load a checkpoint as a server would with ``options``, the arguments of vLLM's `LLM`.

    Raises ModelUnusable, CannotMove where it cannot be woven inside vLLM, and InvalidArgument for several
    workers.
    """
    if options.get("tensor_parallel_size", 1) != 1:
        reason = "of several workers each has its own heads, and takes no calibration"
        raise InvalidArgument("vllm", reason, "leave tensor_parallel_size out")
    transfer = {
        "kv_connector": "KVWeaveConnector",
        "kv_connector_module_path": "kvweave.connect.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }
    ours = {
        "worker_cls": "kvweave.connect.vllm.worker.KVWeaveWorker",
        "kv_transfer_config": transfer,
    }
    with _started(model, dict(options) | ours) as llm:
        [host] = llm.collective_rpc(lambda worker: worker.kvweave_connector().host)
        yield host.backend


@contextmanager
def recorder(model: str, options: Mapping[str, Any]) -> Iterator[Callable[..., PageTrace]]:
    """Load a checkpoint likewise; yield `record` in it. Raises ModelUnusable."""
    with _started(model, dict(options) | {"worker_extension_cls": EXTENSION}) as llm:
        yield partial(record, llm)


def params_of(sampling: Sampling) -> SamplingParams:
    """Return how vLLM draws what a shell command asks for."""
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos")
    return SamplingParams(**{name: getattr(sampling, name) for name in names})


@contextmanager
def _started(model: str, options: dict[str, Any]) -> Iterator[LLM]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of what vLLM does
            quiet = {"enforce_eager": True, "use_tqdm_on_load": False}
            llm = LLM(model, **(quiet | _room(options) | options))
    except KVWeaveError:
        raise
    except Exception as error:  # of whatever kind: it is all of what vLLM was given
        failed = ModelUnusable(model, f"vLLM says: {error}")
        failed.hint = """its options go behind --vllm: --vllm '{"gpu_memory_utilization": 0.5}'"""
        raise failed from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def _room(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what has vLLM take no more memory than is free, which on CPUs it does not look at; nothing
    where somebody has said how much."""
    if not current_platform.is_cpu() or os.environ.get(SPACE) or {*ROOM} & {*options}:
        return {}
    try:
        from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node
    except ImportError:  # another version than the tested one
        return {}
    nodes = [get_memory_node_info(node) for node in get_visible_memory_node()]
    free = min((node.available_memory / node.total_memory for node in nodes), default=1.0)
    return {ROOM[0]: round(min(FRACTION, OF_FREE * free), 2)}
