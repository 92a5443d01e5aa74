"""A model as a vLLM server loads it, in this process, for passes of ours: what a calibration of it is measured with."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its worker is in this process; read on import
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
from vllm import LLM

from kvweave.connect.vllm.backend import VllmBackend
from kvweave.errors import KVWeaveError, ModelUnusable


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
    try:
        llm = LLM(model, **({"enforce_eager": True} | dict(options) | ours))
    except KVWeaveError:
        raise
    except Exception as error:  # of whatever kind: it is all of what vLLM was given
        raise ModelUnusable(model, f"vLLM says: {error}") from error
    try:
        [host] = llm.collective_rpc(lambda worker: worker.kvweave_connector().host)
        yield host.backend
    finally:
        llm.llm_engine.engine_core.shutdown()
