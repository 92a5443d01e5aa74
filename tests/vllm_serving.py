"""vLLM's own server with the plugin, as a process; for tests that have vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

import kvweave

MODEL = Path(kvweave.__file__).parent / "demo" / "model"
TRANSFER = """{"kv_connector": "KVWeaveConnector", "kv_role": "kv_both",
 "kv_connector_module_path": "kvweave.connect.vllm.connector",
 "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"budget": "256MiB"}}"""


def command(port, transfer=TRANSFER):
    return [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL),
        "--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--dtype", "float32", "--block-size", "32", "--max-model-len", "1024",
        "--max-num-seqs", "8", "--worker-cls", "kvweave.connect.vllm.worker.KVWeaveWorker",
        "--kv-transfer-config", transfer,
    ]  # fmt: skip


ENVIRONMENT = os.environ | {
    "VLLM_PLUGINS": "kvweave",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
ENVIRONMENT.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the other tests' own


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@dataclass
class VllmServer:
    """A server that runs."""

    url: str
    process: subprocess.Popen

    def kill(self) -> None:
        """Kill it with the processes it made: vLLM's engine outlives its server otherwise."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


@contextmanager
def vllm_server(log, environment=None, port=0, **more):
    """Start a server, wait until it takes requests, and end it afterwards."""
    port = port or free_port()
    env = ENVIRONMENT | (environment or {})
    with log.open("w") as out:
        process = subprocess.Popen(
            command(port, **more), stdout=out, stderr=out, env=env, start_new_session=True
        )
    found = VllmServer(f"http://127.0.0.1:{port}", process)
    try:
        until = time.monotonic() + 900
        while True:
            assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            try:
                if httpx.get(f"{found.url}/health").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield found
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            found.kill()
