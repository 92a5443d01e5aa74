"""What is kept of responses and conversations: counted once, found by id, forgotten whole.

python -m pytest tests/serve/test_kept_items.py
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from loaded import bundled_runner

from kvweave.errors import OverQuota
from kvweave.serve.chat.sealed import seal
from kvweave.serve.responses import store as stores
from kvweave.serve.responses.compact import given
from kvweave.serve.responses.items import digest, fresh
from kvweave.serve.responses.records import Compaction, StoredResponse
from kvweave.serve.responses.store import NamespaceStore

ASKED = "Anna's river is cold ."
Json = dict[str, Any]


def said(text: str, id: str, role: str = "user") -> Json:
    content = [{"type": "input_text" if role == "user" else "output_text", "text": text}]
    return {"type": "message", "id": id, "role": role, "content": content}


def summary(id: str, *covered: Json) -> Json:
    told = {"summary": id, "covers": [digest(item) for item in covered]}
    return {"type": "compaction", "id": id, "encrypted_content": seal(told)}


def record(id: str, items: list[Json], covered: str = "", **more: Any) -> Compaction:
    out = tuple(item for item in items if item.get("id") in covered.split())
    return Compaction(id, "so", tuple(items), out, 0, 0, 0, 0, **more)


def response(id: str, items: list[Json], output: list[Json] | None = None) -> StoredResponse:
    return StoredResponse({"id": id, "output": output or []}, tuple(items))


def recounted(store: NamespaceStore) -> tuple[int, int, dict[str, set[str]]]:
    """The bytes of both kinds and the items by id, counted anew: slow, and sure."""
    kept = [r.all_items for r in store.responses.values()]
    kept += [c.items for c in store.compactions.values()]
    told = [c.items for c in store.conversations.values()]
    sizes, found = [], {}
    for holders in (kept, told):
        once = {id(item): item for items in holders for item in items}
        n = sum(len(json.dumps(item)) for item in once.values())
        sizes.append(n + 8 * sum(map(len, holders)))
        for item in once.values():
            found.setdefault(item["id"], set()).add(digest(item))
    own = [len(json.dumps(r.body | {"output": []})) for r in store.responses.values()]
    own += [len(json.dumps(c.summary)) for c in store.compactions.values()]
    return sizes[0] + sum(own), sizes[1], found


def check(store: NamespaceStore) -> None:
    n_kept, n_said, found = recounted(store)
    assert (store.n_bytes, store.said.n_bytes) == (n_kept, n_said)
    for id in [*found, "nobody"]:
        item = store.item(id)
        assert (digest(item) in found[id]) if item is not None else id not in found


@pytest.mark.parametrize("seed", range(6))
def test_every_item_is_counted_once_and_found_while_it_is_held(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MOST_BYTES", 9_000)
    rng, store = random.Random(seed), NamespaceStore()
    ids = [f"m{i}" for i in range(12)]  # so that clients use them again
    talks = [store.open(None, {}) for _ in range(3)]
    for n in range(300):
        known = [item for r in store.responses.values() for item in r.all_items]
        own = [said("x" * rng.randint(0, 300), rng.choice(ids)) for _ in range(rng.randint(0, 3))]
        own += rng.sample(known, min(len(known), rng.randint(0, 2)))  # references
        deed = rng.random()
        if deed < 0.4:
            before = rng.choice([(), *(r.all_items for r in store.responses.values())])
            store.keep(response(f"r{n}", [*before, *own], [said("so", f"o{n}", "assistant")]))
        elif deed < 0.5 and store.responses:
            store.drop(rng.choice(list(store.responses)))
        elif deed < 0.65:
            store.keep_compaction(record(f"c{n}", [*own, summary(f"c{n - 1}", *own)]))
        elif deed < 0.7 and store.compactions:
            try:
                store.take_back(rng.choice(list(store.compactions)), undone=True)
            except OverQuota:
                pass
        elif deed < 0.9:
            rng.choice(talks).add(own)
        elif deed < 0.97 and (talk := rng.choice(talks)).items:
            talk.drop(rng.choice(talk.items)["id"])
        else:
            store.expire(time.time() - 0.001)
            talks = [store.open(None, {}) for _ in range(3)] if not store.conversations else [
                *store.conversations.values()
            ]  # fmt: skip
        check(store)
        assert store.n_bytes <= stores.MOST_BYTES
    store.expire(time.time() + 1)
    check(store)
    assert (store.n_bytes, store.said.n_bytes, len(store.kept), len(store.said)) == (0, 0, 0, 0)


@pytest.mark.slow
def test_forgetting_takes_as_long_as_there_is_to_forget() -> None:
    store = NamespaceStore()
    for i in range(2000):
        store.keep(response(f"r{i}", [said("x", f"m{i}/{k}") for k in range(40)]))
    begun = time.perf_counter()
    store.expire(time.time() + 1)
    assert time.perf_counter() - begun < 4, "a look at all items for each response took 12 s"


def test_an_id_that_is_used_again_takes_nothing_away() -> None:
    talk = NamespaceStore().open("t", {})
    first, second = said("first", "__fake_id__"), said("second", "__fake_id__")
    talk.add([first])
    talk.add([second, first])
    talk.add([first, second, said("third", "__fake_id__")])  # all of it sent again
    assert [item["content"][0]["text"] for item in talk.items] == ["first", "second", "third"]
    assert len({item["id"] for item in talk.items}) == 3
    assert fresh(talk.by_id, [second]) == []
    chunk = said("x", "a") | {"content": [{"type": "chunk", "name": "first"}]}
    refusal = [said("x", "b") | {"content": [{"type": "refusal", "refusal": x}]} for x in "pq"]
    assert len(fresh({}, [said("first", "a"), chunk, *refusal])) == 4, "they say something else"


# ---- summaries


def nested() -> tuple[list[Json], dict[str, Compaction]]:
    u0, a0 = said("u0", "u0"), said("a0", "a0", "assistant")
    a1, u1 = said("a1", "a1", "assistant"), said("u1", "u1")
    c1 = summary("c1", a0)
    known = {"c1": record("c1", [u0, a0], "a0")}
    shown = given([u0, a0, c1, a1, u1], known)
    known["c2"] = record("c2", shown, "c1 a1")
    return [u0, a0, c1, a1, u1, summary("c2", c1, a1), said("a2", "a2", "assistant")], known


@pytest.mark.parametrize(
    ("undone", "wanted"),
    [
        ("", "u0 c2 u1 a2"),
        ("c2", "u0 c1 a1 u1 a2"),
        ("c1 c2", "u0 a0 a1 u1 a2"),
    ],
)
def test_what_is_undone_is_as_it_was(undone: str, wanted: str) -> None:
    items, known = nested()
    for id in undone.split():
        known[id].undone = True
    assert [item["id"] for item in given(items, known)] == wanted.split()
    short = [item for item in items if item["id"] in ("u0", "u1", "c2", "a2")]
    order = [short[i] for i in (0, 2, 1, 3)]  # as a client has it that sent the rest away
    assert [item["id"] for item in given(order, known)] == wanted.split()
    again = [*items, said("u1", "u2"), said("u1", "u3")]
    assert [item["id"] for item in given(again, known)] == [*wanted.split(), "u2", "u3"]


def test_thousands_of_summaries_are_undone_one_in_the_other() -> None:
    known: dict[str, Compaction] = {}
    items = [said("u", "u")]
    for i in range(3000):
        known[f"c{i}"] = record(f"c{i}", items, undone=True)
        items = [summary(f"c{i}")]
    assert [item["id"] for item in given(items * 3, known)] == ["u"]
    many = [summary(f"x{i}", said("a", "a")) for i in range(16_000)]
    begun = time.perf_counter()
    assert len(given([said("a", "a"), *many], {})) == 16_000
    assert time.perf_counter() - begun < 5


def test_what_is_undone_stays_so_while_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    items, known = nested()
    store = NamespaceStore()
    for each in known.values():
        store.keep_compaction(each)
        store.take_back(each.id, undone=True)
        each.used -= 100
    given(items[-2:], store.compactions)  # a client that sends the last summary alone
    store.expire(time.time() - 50)
    assert [i["id"] for i in given(items[-2:], store.compactions)] == "u0 a0 a1 u1 a2".split()
    # or what is stored leads to them, though nobody asked for an answer
    talk = store.open("t", {})
    talk.add(items)
    for each in known.values():
        each.used -= 100
    store.expire(time.time() - 50)
    assert set(store.compactions) == {"c1", "c2"}
    # too much of other things does not undo it either
    monkeypatch.setattr(stores, "MOST_BYTES", store.n_bytes * 3)
    for i in range(20):
        store.keep(response(f"r{i}", [said("x" * 200, f"x{i}")]))
        store.keep_compaction(record(f"d{i}", [said("x" * 200, f"y{i}")]))
        check(store)
        assert store.n_bytes <= stores.MOST_BYTES
    assert {"c1", "c2"} < set(store.compactions)
    with pytest.raises(OverQuota):
        for id in [c for c in store.compactions if c[0] == "d"] * 2:
            store.take_back(id, undone=True)
            store.keep_compaction(record(f"{id}+", [said("x" * 500, f"{id}+")]))
            store.take_back(f"{id}+", undone=True)
    # and it goes with what led to it
    store.close("t")
    store.expire(time.time() + 1)
    assert not store.compactions and store.n_bytes == 0


def test_a_message_of_anthropics_leads_to_its_summary() -> None:
    store = NamespaceStore()
    block = {"type": "compaction", "content": "so", "encrypted_content": seal({"id": "c1"})}
    inner = record("c1", [{"role": "user", "content": "x"}], of="messages", undone=True)
    outer = record("c2", [{"role": "assistant", "content": [block]}], of="messages")
    for each in (inner, outer):
        store.keep_compaction(each)
    inner.used -= 100
    store.expire(time.time() - 50)
    assert set(store.compactions) == {"c1", "c2"}
    outer.used -= 100
    store.expire(time.time() - 50)
    assert not store.compactions


# ---- through the server


def ask(caller: Any, given: Any, **more: Any) -> Any:
    body = {"model": "kvweave", "temperature": 0, "max_output_tokens": 6, "input": given}
    return caller("POST", "/v1/responses", body | more)


def test_ids_of_clients(serve: Any) -> None:
    anna = serve().anna
    anna("POST", "/v1/conversations", {"name": "t"})
    for text in ("first", "second"):
        item = {"type": "message", "role": "user", "id": "__fake_id__", "content": text}
        (told,) = anna("POST", "/v1/conversations/t/items", {"items": [item]})["data"]
        assert told["content"][0]["text"] == text
        assert anna("GET", f"/v1/conversations/t/items/{told['id']}") == told
    listed = anna("GET", "/v1/conversations/t/items?order=asc")["data"]
    assert [item["content"][0]["text"] for item in listed] == ["first", "second"]
    # who deletes a response takes no item from another
    first = ask(anna, [{"role": "user", "id": "msg_1", "content": ASKED}])
    refers = [{"type": "item_reference", "id": "msg_1"}]
    second = ask(anna, refers)
    anna("DELETE", f"/v1/responses/{second['id']}")
    third = ask(anna, refers, previous_response_id=first["id"])
    path = f"/v1/responses/{third['id']}/input_items?order=asc&limit="
    listed = anna("GET", f"{path}100")["data"]
    assert len({item["id"] for item in listed}) == len(listed) == 3
    for id in (first["id"], third["id"]):
        anna("DELETE", f"/v1/responses/{id}")
    body = {"model": "kvweave", "input": refers}
    assert "msg_1" in anna.error("POST", "/v1/responses", body)["message"]


def test_a_namespace_that_is_not_read_is_named(serve: Any) -> None:
    anna = serve().anna
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "c", "output": "x"}
    items = [
        call | {"namespace": "disk"},
        result | {"name": "look"},
        {"role": "user", "content": "x"},
    ]
    told = ask(anna, items)
    assert told["kvweave"]["ignored"] == ["input.0.namespace", "input.1.name"]
    told = anna("POST", "/v1/conversations", {"name": "t", "items": items})
    assert told["kvweave"]["ignored"] == ["items.0.namespace", "items.1.name"]
    told = anna("POST", "/v1/conversations/t/items", {"items": items[:1]})
    assert told["kvweave"] == {"ignored": ["items.0.namespace"]}


def test_what_a_conversation_may_hold_counts_what_is_under_way(
    serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    anna, store = served.anna, served.app.state.kvweave.responses.of("anna")
    item = {"type": "message", "role": "user", "id": "x", "content": "y" * 3000}
    anna("POST", "/v1/conversations", {"name": "t", "items": [item] * 20})
    assert len(store.conversations["t"].items) == 1
    anna("DELETE", "/v1/conversations/t/items/x")
    anna.error("DELETE", "/v1/conversations/t/items/x", None, 404)
    assert store.said.n_bytes == 0
    ask(anna, ASKED, conversation="t")
    check(store)
    monkeypatch.setattr(stores, "MOST_BYTES", store.said.n_bytes + 500)
    more = [{"role": "user", "content": "z" * 600}]
    body = {"model": "kvweave", "input": more, "conversation": "t"}
    assert anna.error("POST", "/v1/responses", body, 429)["what"] == "bytes of conversations"
    check(store)


def test_every_token_of_the_text_has_its_logprob(serve: Any) -> None:
    anna = serve(runner=bundled_runner()).anna  # which says words
    more = {"include": ["message.output_text.logprobs"], "max_output_tokens": 12}
    asked = f"{ASKED} what about Anna's river"
    text = ask(anna, asked, **more)["output"][0]["content"][0]["text"]
    assert len(text) > 12
    chat = {"model": "kvweave", "temperature": 0, "max_tokens": 12, "logprobs": True}
    for stop in ([], [text[4:9] + "~"], [text[6:10]], [text[-3:] + "~"]):
        (part,) = ask(anna, asked, **more, stop=stop)["output"][0]["content"]
        messages = [{"role": "user", "content": asked}]
        reply = anna("POST", "/v1/chat/completions", chat | {"messages": messages, "stop": stop})
        (choice,) = reply["choices"]
        assert part["text"] == choice["message"]["content"]
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert [entry["token"] for entry in part["logprobs"]] == tokens, stop
        assert "".join(tokens).strip().startswith(part["text"].strip())
