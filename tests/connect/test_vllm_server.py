"""vLLM's own server with the plugin: verbs on chunks, woven answers, refusals; real HTTP."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import httpx

import kvweave
from kvweave.errors import ChunkNotFound, NameTaken

MODEL = Path(kvweave.__file__).parent / "demo" / "model"
A = "Nina's river is wide . Anna's river is cold . Omar's lake is deep ."
B = "The sky was grey and then we saw it . so well then ."
PROMPT = f"{B} {A} what about Anna's river"
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


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    port, log = free_port(), tmp_path_factory.mktemp("log") / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(command(port), stdout=out, stderr=out, env=ENVIRONMENT)
    found = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + 240
        while True:
            assert server.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
            try:
                if httpx.get(f"{found}/health").is_success:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield found
    finally:
        server.terminate()
        server.wait(60)


def complete(url, said=None, **fields):
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, **fields}
    if said is not None:
        body["kv_transfer_params"] = {"kvweave": said}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=120)


def test_chunks_are_stored_named_and_removed_by_our_own_client(url):
    with kvweave.Client(url) as client:
        entry = client.put("verbs/a", A)
        assert entry.n_tokens == 17 and entry.tier == "ram"
        with pytest.raises(NameTaken):
            client.put("verbs/a", B)
        client.put("verbs/b", list(range(5, 400)))
        files = client.files
        assert sorted(e.name for e in files.ls("verbs/")) == ["verbs/a", "verbs/b"]
        files.mv("verbs/b", "verbs/c")
        files.rm("verbs/*")
        with pytest.raises(ChunkNotFound):
            files.stat("verbs/a")


def test_a_named_chunk_is_woven_and_the_response_says_so(url):
    with kvweave.Client(url) as client:
        client.put("docs/a", A, replace=True)
        client.put("docs/b", B, replace=True)
    parts = [{"chunk": "docs/b"}, {"chunk": "docs/a"}]
    reply = complete(url, {"parts": parts, "repair": "full"}).json()
    told = reply["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["drift"] == 0
    plain = complete(url).json()
    assert reply["choices"][0]["text"] == plain["choices"][0]["text"]
    assert "kvweave" not in (plain.get("kv_transfer_params") or {})
    told = complete(url, {"parts": parts, "repair": "none"}).json()["kv_transfer_params"]["kvweave"]
    assert told["woven"] and told["drift"] is None and told["reused"] >= 10


@pytest.mark.parametrize(
    ("said", "says"),
    [
        ({"parts": [{"chunk": "no/such"}]}, "no/such"),
        ({"pats": []}, "pats"),
        ({"repair": "magic"}, "magic"),
        ({"parts": [{"tokens": [0, 5000]}]}, "5000"),
        (7, "object"),
    ],
)
def test_what_cannot_be_woven_is_refused_in_vllms_shape_and_others_go_on(url, said, says):
    reply = complete(url, said)
    error = reply.json()["error"]
    assert reply.status_code == error["code"] == 400 and says in error["message"]
    assert error["type"] == "BadRequestError"
    assert complete(url).is_success


def test_a_long_put_that_is_hung_up_on_ends(url):
    with pytest.raises(httpx.ReadTimeout):
        httpx.put(f"{url}/v1/chunks/hung", json={"tokens": [7] * 1000}, timeout=0.02)
    assert complete(url).is_success
    assert httpx.get(f"{url}/v1/chunks", timeout=60).is_success


def test_a_start_that_would_lose_requests_is_refused():
    wrong = TRANSFER.replace('"recompute"', '"fail"')
    found = subprocess.run(
        command(free_port(), wrong), capture_output=True, text=True, env=ENVIRONMENT, timeout=240
    )
    assert found.returncode and "kv_load_failure_policy" in found.stdout + found.stderr
