"""A vLLM that asks for a key asks for it before anything of ours is done."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="no vLLM here: make setup-vllm, then make test-vllm")

import httpx
from vllm_serving import vllm_server

import kvweave
from kvweave.connect.vllm.plugin import VERBS
from kvweave.errors import KeyRefused

KEY = "sk-vllm"
PATHS = (
    "/v1/chunks", "/v1/chunks/docs/a", "/v1/chunks/docs/a/text", "/v1/chunks:put", "/v1/placements",
    "/v1/completions", "/v1/chat/completions",
)  # fmt: skip
WRONG = ({}, {"Authorization": "Bearer no"}, {"Authorization": KEY}, {"X-Api-Key": KEY})
WOVEN = {
    "model": "demo", "prompt": "the sky", "max_tokens": 1,
    "kv_transfer_params": {"kvweave": {"parts": [{"chunk": "docs/none"}]}},
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    log = tmp_path_factory.mktemp("log") / "server.log"
    with vllm_server(log, {"VLLM_API_KEY": KEY}) as found:
        yield found.url


def test_nothing_of_ours_is_done_without_the_key(url):
    with kvweave.Client(url, key=KEY) as client:
        client.put("docs/a", "The museum opens at nine .")
    with httpx.Client(base_url=url) as web:
        for headers in WRONG:
            for path in PATHS:
                for method in VERBS:
                    body = None if method in ("GET", "HEAD") else WOVEN
                    # a chunk that is not there would be told: only behind the key
                    assert web.request(method, path, json=body, headers=headers).status_code == 401
    with kvweave.Client(url, key=KEY) as client:
        assert [entry.name for entry in client.files.ls("docs/")] == ["docs/a"]
    for key in (None, "no"):
        with kvweave.Client(url, key=key) as client, pytest.raises(KeyRefused):
            client.files.rm("docs/a")


def test_a_router_is_told_with_the_key_and_health_needs_none(url):
    headers = {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(f"{url}/v1/placements", headers=headers).is_success
    assert httpx.get(f"{url}/health/kvweave").json() == {"kvweave": True}
    told = httpx.post(f"{url}/v1/completions", json=WOVEN, headers=headers)
    assert told.status_code == 400 and "docs/none" in told.json()["error"]["message"]
