"""A model as a vLLM server loads it, in this process: what a calibration is measured with, or what is recorded."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its worker is in this process; read on import
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from vllm import LLM, SamplingParams

from kvweave.connect.vllm.backend import VllmBackend
from kvweave.connect.vllm.record import EXTENSION, record
from kvweave.errors import KVWeaveError, ModelUnusable
from kvweave.probe.trace import PageTrace
from kvweave.run.sample import Sampling


@contextmanager
def loaded(model: str, options: Mapping[str, Any]) -> Iterator[VllmBackend]:
    """Load a checkpoint as a server would with ``options``, the arguments of vLLM's `LLM`.

    Raises ModelUnusable, and CannotMove where it cannot be woven inside vLLM.
    """
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
        llm = LLM(model, **({"enforce_eager": True} | options))
    except KVWeaveError:
        raise
    except Exception as error:  # of whatever kind: it is all of what vLLM was given
        raise ModelUnusable(model, f"vLLM says: {error}") from error
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
