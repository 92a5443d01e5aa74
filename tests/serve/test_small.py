"""The small routes that clients of vLLM and of OpenAI ask; pages of other origins; lists of nothing."""

from __future__ import annotations

import asyncio
import base64
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
import torch
from loaded import bundled_runner, short_runner
from needs import need
from serving import Served

from kvweave.errors import InvalidArgument
from kvweave.run.embed import Embedding
from kvweave.serve.metrics import EngineSnapshot
from kvweave.serve.openai.vectors import _vector
from kvweave.serve.options import Options
from kvweave.weave.naming import holds_vectors, namespace_of

TEXT = "Anna's river is cold ."
ASK = [{"role": "system", "content": "keep the notes ."}, {"role": "user", "content": TEXT}]
PAGE = "https://app.example"


@pytest.fixture(scope="module")
def served() -> Any:
    from serving import KEYS

    from kvweave import Engine
    from kvweave.serve.app import create_app

    engine = Engine(bundled_runner(), repair="none")
    made = Served(engine, create_app(engine, Options(keys=KEYS, aliases=("other",))))
    made.start()
    yield made
    made.close()


def test_version_and_the_length_of_the_model(served: Served) -> None:
    assert served.anna("GET", "/version") == {"version": version("kvweave")}
    models = served.anna("GET", "/v1/models")["data"]
    assert [m["id"] for m in models] == ["kvweave", "other"]
    assert {m["max_model_len"] for m in models} == {served.engine.runner.limit}
    assert served.nobody("GET", "/version", status=401)


def test_tokens_of_a_prompt_and_back(served: Served) -> None:
    made = served.anna("POST", "/tokenize", {"prompt": TEXT, "return_token_strs": True})
    tokenizer = bundled_runner().tokenizer
    assert made["tokens"] == tokenizer.encode(TEXT)
    assert made["token_strs"] == tokenizer.convert_ids_to_tokens(made["tokens"])
    assert made["count"] == len(made["tokens"]) and made["max_model_len"] == 4096
    bare = served.anna("POST", "/tokenize", {"prompt": TEXT, "add_special_tokens": False})
    assert bare["tokens"] == tokenizer.encode(TEXT, add_special_tokens=False)
    back = served.anna("POST", "/detokenize", {"tokens": bare["tokens"], "model": "other"})
    assert back == {"prompt": tokenizer.decode(bare["tokens"])}


@pytest.mark.parametrize("more", [{}, {"continue_final_message": True}])
def test_tokens_of_messages_are_those_that_a_chat_is_computed_of(
    served: Served, more: dict[str, Any]
) -> None:
    messages = [*ASK, {"role": "assistant", "content": "cold"}] if more else ASK
    made = served.anna("POST", "/tokenize", {"messages": messages} | more)
    tokenizer = bundled_runner().tokenizer
    how = more or {"add_generation_prompt": True}
    wanted = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **how)
    assert made["tokens"] == list(wanted)
    body = {"model": "kvweave", "messages": messages, "max_tokens": 1} | more
    usage = served.anna("POST", "/v1/chat/completions", body)["usage"]
    assert usage["prompt_tokens"] == made["count"]


def test_tools_count_too(served: Served) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    made = served.anna("POST", "/tokenize", {"messages": ASK, "tools": [tool]})
    body = {"model": "kvweave", "messages": ASK, "tools": [tool], "max_tokens": 1}
    usage = served.anna("POST", "/v1/chat/completions", body)["usage"]
    bare = served.anna("POST", "/tokenize", {"messages": ASK})
    assert usage["prompt_tokens"] == made["count"] > bare["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, None),
        ("/tokenize", {"prompt": "a", "messages": ASK}, None),
        ("/tokenize", {"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
        ("/tokenize", {"messages": ASK, "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"messages": ASK, "chat_template": "x"}, "chat_template"),
        ("/detokenize", {"tokens": [10**6]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/v1/embeddings", {"model": "kvweave", "input": []}, "input"),
        ("/v1/embeddings", {"model": "kvweave", "input": ["a", ""]}, "input"),
        ("/v1/embeddings", {"model": "kvweave", "input": "a", "dimensions": 8}, "dimensions"),
        ("/v1/embeddings", {"model": "kvweave", "input": "a", "truncate": True}, "truncate"),
    ],
)
def test_what_makes_no_sense_is_refused(
    served: Served, path: str, body: dict[str, Any], param: str | None
) -> None:
    told = served.anna.error("POST", path, body)
    assert told["param"] == param or param is None


def test_a_name_that_is_no_model(served: Served) -> None:
    for path, body in (
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [5]}),
        ("/v1/embeddings", {"input": "a"}),
    ):
        told = served.anna.error("POST", path, body | {"model": "gpt"}, status=404)
        assert told["code"] == "model_not_found"


def test_vectors_are_those_of_transformers_own_forward(served: Served) -> None:
    texts = [TEXT, "Hugo's metal is hot ."]
    made = served.anna("POST", "/v1/embeddings", {"model": "kvweave", "input": texts})
    runner = bundled_runner()
    tokenizer, twin = runner.tokenizer, _plain_model()
    front = len(tokenizer.encode(""))  # what contexts begin with
    for each, text in zip(made["data"], texts, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([tokenizer.encode(text)])
            mean = twin.base_model(ids).last_hidden_state[0, front:].float().mean(0)
        assert np.allclose(each["embedding"], mean / mean.norm(), atol=2e-3)
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    again = served.anna("POST", "/v1/embeddings", {"model": "kvweave", "input": ids})
    assert again == made
    assert made["usage"]["prompt_tokens"] == sum(map(len, ids))
    packed = {"model": "kvweave", "input": texts[0], "encoding_format": "base64"}
    (each,) = served.anna("POST", "/v1/embeddings", packed)["data"]
    found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
    assert found.tolist() == made["data"][0]["embedding"]
    told = served.anna.error("POST", "/v1/embeddings", {"model": "kvweave", "input": "so " * 9000})
    assert told["code"] == "context_length_exceeded"


def test_the_openai_client_reads_them(served: Served) -> None:
    openai = need("openai")
    url = f"{served.client.base_url}/v1"
    client = openai.OpenAI(base_url=url, api_key="key-of-anna", http_client=served.client)
    packed = client.embeddings.create(model="kvweave", input=[TEXT])
    plain = client.embeddings.create(model="kvweave", input=[TEXT], encoding_format="float")
    assert packed.data[0].embedding == plain.data[0].embedding
    with pytest.raises(openai.BadRequestError, match="token"):  # of another model's tokenizer
        client.embeddings.create(model="kvweave", input=[[5, 99_999]])


def test_a_model_without_hidden_states_refuses(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.engine.runner.model, "get_output_embeddings", lambda: None)
    body = {"model": "kvweave", "input": TEXT}
    told = served.anna.error("POST", "/v1/embeddings", body, status=409)
    assert told["code"] == "cannot_run" and "hidden states" in told["message"]


@pytest.mark.parametrize("ends", ["well", "badly", "cancelled"])
def test_the_rows_of_a_vector_count_while_it_is_made(
    served: Served, monkeypatch: pytest.MonkeyPatch, ends: str
) -> None:
    seen: list[tuple[dict[str, int], float]] = []
    step, shelf = Embedding.step, served.engine.shelf

    def looked(self: Embedding) -> None:
        held = EngineSnapshot.of(served.engine)
        seen.append(({h: n for h, n in shelf.charged() if holds_vectors(h)}, held.vectors))
        assert held.bytes["ram"] >= held.vectors
        if ends == "badly":
            raise InvalidArgument("input", "so it is")
        step(self)

    monkeypatch.setattr(Embedding, "step", looked)
    body = {"model": "kvweave", "input": "so well then " * 200}
    if ends == "cancelled":
        tokens = bundled_runner().tokenizer.encode(str(body["input"]))

        async def given_up() -> None:
            task = asyncio.ensure_future(_vector(served.app.state.kvweave, "anna", [], tokens))
            while not seen:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        assert served.client.portal is not None
        served.client.portal.call(given_up)
    else:
        served.anna("POST", "/v1/embeddings", body, 200 if ends == "well" else 400)
    (charged,) = {tuple(each.items()) for each, _ in seen}
    ((holder, n_bytes),) = charged
    assert namespace_of(holder) == "anna" and n_bytes == seen[0][1]
    assert n_bytes >= 600 * served.engine.runner.row_bytes
    settled = served.on_engine(lambda engine: [h for h, _ in shelf.charged() if holds_vectors(h)])
    assert settled == []
    assert served.on_engine(EngineSnapshot.of).vectors == 0


def test_a_vector_that_memory_has_no_room_for_is_refused(serve: Any) -> None:
    small = short_runner().row_bytes * 300
    served = serve(engine_options={"budget": small})
    body = {"model": "kvweave", "input": "so well then " * 200}
    told = served.anna.error("POST", "/v1/embeddings", body, 503)
    assert told["code"] == "over_budget"
    assert served.anna("POST", "/v1/embeddings", body | {"input": "so well"})["data"]
    bounded = serve(quota=small)
    told = bounded.anna.error("POST", "/v1/embeddings", body, 429)
    assert told["code"] == "insufficient_quota"


def _plain_model() -> Any:
    from serving import BUNDLED
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(BUNDLED, dtype=torch.float32).eval()


def test_a_list_may_be_asked_for_nothing_of_it(serve: Any) -> None:
    served = serve()
    anna = served.anna
    anna.put("a/x", TEXT)
    anna("POST", "/v1/contexts", {"name": "c"}, 201)
    anna("POST", "/v1/contexts/c:append", {"text": TEXT})
    anna("POST", "/v1/memory/c:open", {}, 201)
    for path in ("/v1/contexts", "/v1/memory", "/v1/chunks"):
        assert anna("GET", path, params={"limit": 1})["data"]
        told = anna("GET", path, params={"limit": 0})
        assert told["data"] == [] and told["next"] is None
    assert anna("GET", "/v1/contexts/c:log", params={"limit": 0})["data"] == []
    item = {"type": "message", "role": "user", "content": TEXT}
    anna("POST", "/v1/conversations", {"name": "c", "items": [item]})
    none = anna("GET", "/v1/conversations/c/items", params={"limit": 0})
    assert none["data"] == [] and none["has_more"] and none["last_id"] is None
    first = anna("GET", "/v1/placements", params={"limit": 0})
    assert first["chunks"] == [] and first["more"]
    rest = anna("GET", "/v1/placements", params={"run": first["run"], "since": first["seq"]})
    assert next(c["names"] for c in rest["chunks"] if c["names"]) == ["a/x"]


# ---- pages of other origins


def _asked(served: Served, method: str, path: str, **headers: str) -> Any:
    return served.client.request(method, path, headers=headers, json=None)


def test_no_page_elsewhere_may_read_unless_it_is_named(serve: Any) -> None:
    served = serve(keys={})
    found = _asked(served, "GET", "/v1/models", Origin=PAGE)
    assert found.status_code == 200 and "access-control-allow-origin" not in found.headers
    assert _asked(served, "POST", "/tokenize", Origin=PAGE).status_code == 403


@pytest.mark.parametrize("keys", [{}, {"key-of-anna": "anna"}])
def test_a_page_that_is_named_may(serve: Any, keys: dict[str, str]) -> None:
    served = serve(keys=keys, cors_origins=(PAGE,))
    key = {"Authorization": "Bearer key-of-anna"} if keys else {}
    before = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    told = _asked(served, "OPTIONS", "/v1/chat/completions", **before)
    assert told.status_code == 200
    assert told.headers["access-control-allow-origin"] == PAGE
    assert "authorization" in told.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in told.headers
    body = {"prompt": TEXT}
    found = served.client.post("/tokenize", json=body, headers={"Origin": PAGE} | key)
    assert found.status_code == 200 and found.headers["access-control-allow-origin"] == PAGE
    for other in (
        "https://app.example:8443",
        "http://app.example",
        "https://x.app.example",
        "null",
    ):
        assert (
            _asked(served, "OPTIONS", "/tokenize", **before | {"Origin": other}).status_code == 400
        )
        found = served.client.post("/tokenize", json=body, headers={"Origin": other} | key)
        assert "access-control-allow-origin" not in found.headers
        assert found.status_code == (200 if keys else 403)
    if keys:  # an error can be read by the page, and nothing else without a key
        found = served.client.post("/tokenize", json=body, headers={"Origin": PAGE})
        assert found.status_code == 401
        assert found.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "origin",
    ["*", "", "app.example", "https://", "https://*.example", "https://app.example/", "null",
     "ftp://app.example", "https://App.example", "https://a@app.example", "https://app.example:x"],
)  # fmt: skip
def test_an_origin_is_one_or_refused(origin: str) -> None:
    with pytest.raises(InvalidArgument, match="origin"):
        Options(cors_origins=(origin,))
    assert Options(cors_origins=("http://[::1]:3000", "http://localhost:5173")).cors_origins


def test_what_goes_on_with_a_message_is_no_message_by_itself(serve):
    """Later prompts have the header before it, whoever wrote a part of it here."""
    served, fresh = serve().anna, serve().anna
    begun = [*ASK, {"role": "assistant", "content": "the river"}]
    more = {"model": "kvweave", "temperature": 0, "max_tokens": 6, "continue_final_message": True}
    told = served("POST", "/v1/chat/completions", {**more, "messages": begun})
    said = told["choices"][0]["message"]["content"]
    assert said
    for content in (said, "the river" + said):
        after = [
            *ASK,
            {"role": "assistant", "content": content},
            {"role": "user", "content": "so ?"},
        ]
        body = {"model": "kvweave", "messages": after}
        tokens = [anna("POST", "/tokenize", body)["tokens"] for anna in (served, fresh)]
        assert tokens[0] == tokens[1]


def test_what_is_far_too_long_is_counted_without_reading_all_of_it(serve, monkeypatch):
    served = serve().anna
    text = "Anna's river is wide . " * 400
    messages = [{"role": "user", "content": f"{i} {text}"} for i in range(60)]
    body = {"model": "kvweave", "messages": messages}
    state, read = served.client.app.state.kvweave, []
    whole = state.assembler.tokens
    monkeypatch.setattr(
        state.assembler, "tokens", lambda s, n: read.append(len(s.text)) or whole(s, n)
    )
    counted = served("POST", "/v1/messages/count_tokens", body)["input_tokens"]
    every = sum(len(m["content"]) for m in messages)
    assert sum(read) < every / 2
    one = served("POST", "/v1/messages/count_tokens", {**body, "messages": messages[:1]})
    assert abs(counted / (60 * one["input_tokens"]) - 1) < 0.1


def test_a_salt_that_is_to_keep_users_apart_is_refused(serve):
    body = {"model": "kvweave", "messages": ASK, "cache_salt": "mine"}
    assert serve().anna.error("POST", "/v1/chat/completions", body, 400)["param"] == "cache_salt"
