"""``GET /v1/placements``: a snapshot, then what changed; each namespace by itself."""

from __future__ import annotations

import pytest

from kvweave.chunk.prints import prints
from kvweave.serve import placements as module

A = "Anna's river is cold . Omar's metal is sharp . so well then we saw it was a day of rain ."
B = "she went home with them for long time but nobody came back until very late or maybe not ."


def read(caller, run="", since=0, **more):
    return caller("GET", "/v1/placements", params={"run": run, "since": since} | more)


def test_a_snapshot_then_what_changed(serve, tmp_path):
    served = serve(home=tmp_path / "home")
    anna = served.anna
    first = anna.put("docs/a", A)
    found = read(anna)
    [chunk] = found["chunks"]
    assert found["snapshot"] and not found["more"] and not found["gone"]
    assert chunk["names"] == ["docs/a"] and chunk["id"] == first["id"] and chunk["tier"] == "ram"
    assert chunk["n_tokens"] == first["n_tokens"] and len(chunk["digest"]) == 32
    assert chunk["prints"] == [f"{x:016x}" for x in prints(A).hashes.tolist()]

    again = read(anna, found["run"], found["seq"])
    assert not again["snapshot"] and not again["chunks"] and again["seq"] == found["seq"]
    second = anna.put("docs/b", B)
    anna("POST", "/v1/chunks/docs/a:place", {"tier": "disk"})
    changed = read(anna, found["run"], found["seq"])
    told = {c["id"]: c["tier"] for c in changed["chunks"]}
    assert told == {second["id"]: "ram", first["id"]: "disk"} and not changed["snapshot"]

    anna("DELETE", "/v1/chunks/docs/a")
    anna("POST", "/v1/chunks/docs/b:place", {"tier": "none"})
    gone = read(anna, changed["run"], changed["seq"])
    assert sorted(gone["gone"]) == sorted([first["id"], second["id"]]) and not gone["chunks"]


def test_each_namespace_sees_its_own_and_its_own_numbers(serve):
    served = serve()
    before = read(served.berta)
    for i in range(3):
        served.anna.put(f"docs/{i}", f"{A} {i}")
    after = read(served.berta, before["run"], before["seq"])
    assert after["chunks"] == after["gone"] == [] and after["seq"] == before["seq"]
    assert len(read(served.anna)["chunks"]) == 3
    assert served.nobody.error("GET", "/v1/placements", status=401)


def test_pages_add_up(serve):
    served = serve()
    for i in range(5):
        served.anna.put(f"docs/{i}", f"{A} {i}")
    page = read(served.anna, limit=2)
    ids, run = [c["id"] for c in page["chunks"]], page["run"]
    while page["more"]:
        page = read(served.anna, run, page["seq"], limit=2)
        assert not page["snapshot"] and len(page["chunks"]) <= 2
        ids += [c["id"] for c in page["chunks"]]
    assert len(ids) == len(set(ids)) == 5


def test_who_knows_another_run_or_too_old_a_number_begins_anew(serve, monkeypatch):
    monkeypatch.setattr(module, "MAX_GONE", 2)
    served = serve()
    served.anna.put("docs/stays", B)
    found = read(served.anna)
    for run, since in (("other", found["seq"]), (found["run"], found["seq"] + 1)):
        anew = read(served.anna, run, since)
        assert anew["snapshot"] and len(anew["chunks"]) == 1
    for i in range(4):
        served.anna.put(f"docs/{i}", f"{A} {i}")
        served.anna("DELETE", f"/v1/chunks/docs/{i}")
    lost = read(served.anna, found["run"], found["seq"])
    assert lost["snapshot"] and [c["names"] for c in lost["chunks"]] == [["docs/stays"]]
    assert not read(served.anna, lost["run"], lost["seq"])["snapshot"]


def test_messages_have_the_prints_of_their_content(serve):
    served = serve()
    body = {"model": "kvweave", "max_tokens": 2, "messages": [{"role": "user", "content": A}]}
    served.anna("POST", "/v1/chat/completions", body)
    served.settle()
    told = {hash for c in read(served.anna)["chunks"] for hash in c["prints"]}
    assert {f"{x:016x}" for x in prints(A).hashes.tolist()} <= told


@pytest.mark.parametrize("wrong", [{"since": -1}, {"limit": -1}, {"limit": 65}, {"since": "x"}])
def test_what_makes_no_sense_is_refused(serve, wrong):
    served = serve()
    assert served.anna.error("GET", "/v1/placements", params=wrong, status=400)
