"""What a router learns: from what it sent, from answers, from placements; by whom, for whom."""

from __future__ import annotations

import random

import pytest
from routing import CHAT, DONE, Reply, answered, event, streamed, until

from kvweave.chunk.prints import prints
from kvweave.route.choose import Chooser, chained
from kvweave.route.holding import Holding
from kvweave.route.options import RouteOptions
from kvweave.route.tenant import Tenants
from kvweave.route.wanted import names_in, prompt_of
from kvweave.route.worker import Worker, WorkerJob

WORDS = (
    "Anna Omar river metal cold sharp so well then we saw it was a day of rain and light".split()
)


def text(seed: int, n: int = 400) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choices(WORDS, k=n))


def chat(*contents: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


# ---- what a request asks about


def test_a_part_has_the_same_prints_in_any_request():
    page = text(1)
    alone = set(prints(page).hashes.tolist())
    parts = [{"type": "text", "text": "hi"}, {"type": "text", "text": page}]
    for body in (chat(page), chat("before", page, "behind"), chat(parts), {"prompt": [page, "x"]}):
        assert alone <= set(prompt_of(body).prints.hashes.tolist())


def test_named_chunks_are_found_each_once():
    body = chat([{"type": "chunk", "name": n} for n in ("docs/a", "docs/b", "docs/a", "#17")])
    found = prompt_of(body)
    assert found.names == ("docs/a", "docs/b") and found.by_id == ("#17",)


def test_token_ids_have_prints_too():
    tokens = [random.Random(1).randrange(200_000) for _ in range(2_000)]
    found = prompt_of({"prompt": tokens})
    assert found.prints.n_chars == 2_000
    moved = prompt_of({"prompt": [1, 2, 3, *tokens]})
    assert len(set(found.prints.hashes.tolist()) - set(moved.prints.hashes.tolist())) <= 1


@pytest.mark.parametrize(
    "body",
    [
        {}, {"messages": 3}, {"messages": [None, 1, {}, {"content": {"a": 1}}]}, {"prompt": None},
        {"messages": [{"content": [None, 3, {"type": "text"}, {"type": "chunk", "name": 7}]}]},
        {"prompt": [[1, "a", None], None, 3.5]}, {"prompt": [True]}, {"tools": [[]]},
        {"messages": [{"content": "\ud800"}]},
    ],
)  # fmt: skip
def test_whatever_a_body_is_has_prints(body):
    assert prompt_of(body).prints.n_chars >= 0
    assert names_in(body) == ()


def test_names_in_verbs_on_contexts():
    assert names_in({"chunk": "docs/a"}) == ("docs/a",)
    edits = [{"verb": "append", "chunk": "docs/b"}, {"verb": "drop", "parts": ["x"]}]
    assert names_in({"edits": edits}) == ("docs/b",)
    template = {
        "template": "use {docs/faq} and {docs} . {q}",
        "values": {"docs": ["a", "b/*", "#3"], "q": "x"},
    }
    assert set(names_in(template)) == {"docs/faq", "a"}
    assert names_in({"template": "{", "values": 3}) == ()


# ---- what a worker holds


def test_what_was_missed_was_the_oldest():
    held = Holding()
    for turn in range(4):
        held.sent(range(10 * turn, 10 * turn + 10))
    held.sent(range(10, 20))  # used again: the newest now
    held.missed(dict.fromkeys((*range(10, 15), *range(20, 25)), 5.0), 10.0)
    there = held.tiers(range(40))
    assert not set(range(10)) & there.keys(), "older than what was missed"
    assert not set(range(20, 30)) & there.keys(), "of its age"
    assert set(range(10, 20)) | set(range(30, 40)) == there.keys()


def test_placements_say_the_tier_and_what_is_gone():
    held = Holding()
    held.sent([1, 2, 3])
    held.begin("run")
    assert not held.tiers([1]), "another run of the worker: what was sent before is not there"
    held.placed(7, "disk", [1, 2])
    held.placed(8, "ram", [2, 3])
    held.end()
    assert held.tiers([1, 2, 3, 4]) == {1: "disk", 2: "ram", 3: "ram"}
    held.sent([1, 2])
    held.gone(7)
    assert held.tiers([1, 2, 3]) == {2: "ram", 3: "ram"}
    held.placed(8, "remote", [2, 3])
    held.sent([4])
    held.begin("run")  # events were lost: told anew, without chunk 8
    held.placed(9, "ram", [5])
    held.end()
    assert held.tiers(range(10)) == {4: "ram", 5: "ram"} and held.n_chunks == 1
    held.placed(9, "tape", [5])
    assert held.tiers([5]) == {5: "remote"}, "a tier that is not known is slow"


# ---- who knows


def test_tenants_have_nothing_in_common_and_strangers_are_not_kept():
    tenants = Tenants(100)
    anna, berta = tenants.of(b"Bearer anna"), tenants.of(b"Bearer berta")
    hashes = prints(text(1)).hashes
    assert not {*anna.ids(hashes)} & {*berta.ids(hashes)}
    assert anna.ids(hashes) == tenants.of(b"Bearer anna").ids(hashes)
    assert not tenants.all()
    assert tenants.keep(anna) is anna and tenants.of(b"Bearer anna") is anna
    assert tenants.of(b"") is not anna and tenants.of(None).digest == tenants.of(b"").digest


def test_who_has_most_forgets():
    tenants = Tenants(100)
    small, large = tenants.keep(tenants.of(b"a")), tenants.keep(tenants.of(b"b"))
    small.holding("w").sent(range(30))
    large.holding("w").sent(range(200))
    tenants.bound()
    assert len(small) == 30 and 0 < len(large) <= 70
    large.holding("w").forget()
    large.holding("w").placed(1, "ram", range(500))
    tenants.bound()
    assert len(small) == 30 and len(large) == 0


# ---- the choice


def chooser(policy="chunks", n=2, **more):
    made = Chooser(RouteOptions([f"http://w:{i}" for i in range(1, n + 1)], policy=policy, **more))
    return made, [Worker(f"http://w:{i}", kind="kvweave") for i in range(1, n + 1)]


def learnt(made, tenant, prompt, worker):
    choice = made.choose(tenant, prompt, [worker])
    made.sent(tenant, choice)


def test_chunks_go_where_most_seconds_are_saved_at_any_position():
    made, workers = chooser(n=3)
    tenant = Tenants(10**6).of(b"a")
    a, b, c = text(1), text(2, 800), text(3)
    learnt(made, tenant, prompt_of(chat(a)), workers[1])
    learnt(made, tenant, prompt_of(chat(c, b)), workers[2])
    choice = made.choose(tenant, prompt_of(chat(a, b, "so ?")), workers)
    assert choice.worker is workers[2], "b is longer, though a is the prefix"
    assert 0 < choice.saved and choice.n_there >= 0.6 * sum(choice.sizes)
    other = Tenants(10**6).of(b"b")
    assert made.choose(other, prompt_of(chat(a, b)), workers).n_there == 0


def test_a_slow_tier_and_a_queue_count():
    made, workers = chooser(n=2)
    tenant = Tenants(10**6).of(b"a")
    prompt = prompt_of(chat(text(1, 2000)))
    ids = tenant.ids(prompt.prints.hashes)
    tenant.holding(workers[0].name).placed(1, "remote", ids)
    tenant.holding(workers[1].name).placed(1, "ram", ids)
    assert made.choose(tenant, prompt, workers).worker is workers[1]
    workers[1].jobs.append(WorkerJob(10.0))
    assert made.choose(tenant, prompt, workers).worker is workers[0]
    workers[1].jobs[0].begun = True  # decoding holds nobody up
    assert made.choose(tenant, prompt, workers).worker is workers[1]


def test_a_conversation_does_not_move_for_a_moments_queue_where_there_is_a_crowd():
    made, workers = chooser(slots=100)
    tenant = Tenants(10**6).of(b"a")
    prompt = prompt_of(chat(text(1, 3000)))
    learnt(made, tenant, prompt, workers[0])
    there, gone = (made.choose(tenant, prompt, [worker]).seconds for worker in workers)
    wait = 3 * (gone - there)  # longer than it would take to compute all of it elsewhere
    workers[0].jobs.append(WorkerJob(wait))
    assert made.choose(tenant, prompt, workers).worker is workers[1]
    for worker in workers:  # what computes for one more keeps these waiting
        worker.jobs += [WorkerJob(0.0, begun=True) for _ in range(4)]
    assert made.choose(tenant, prompt, workers).worker is workers[0]
    workers[0].jobs.append(WorkerJob(20 * wait))
    assert made.choose(tenant, prompt, workers).worker is workers[1], "a long one is a long one"


def test_what_is_left_of_a_queue_goes_down_with_time_at_the_workers_own_speed(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kvweave.route.worker.time.monotonic", lambda: now[0])
    worker = Worker("http://w:1")
    with worker.job(1.0) as first, worker.job(2.0) as second:
        assert (first.queued, second.queued) == (0.0, 1.0)
    assert not worker.jobs
    one, other = WorkerJob(1.5, 0.5, since=now[0]), WorkerJob(1.5, since=now[0])
    worker.jobs += [one, other]
    assert worker.backlog == 3.0
    now[0] += 0.5
    assert worker.backlog == 2.0
    now[0] += 19.5
    assert worker.backlog == 0.0
    worker.first(one)  # 20 s for what costs say are 2, with the queue
    assert worker.slowness == pytest.approx(0.9 + 0.1 * 10)
    worker.busy(5)
    assert worker.elsewhere == 0, "it may have been ours that came or went"
    worker.busy(4)
    assert worker.elsewhere == 2 and worker.load == 4


def test_no_worker_gets_more_than_its_bound_of_the_mean_load():
    made, workers = chooser(n=4, slots=1)
    tenant = Tenants(10**6).of(b"a")
    prompt = prompt_of(chat(text(1, 3000)))
    learnt(made, tenant, prompt, workers[2])
    for n in range(1, 101):
        worker = made.choose(tenant, prompt, workers).worker
        job = WorkerJob(0.0)
        job.begun = True  # queues say nothing: only the bound holds it
        worker.jobs.append(job)
        assert len(worker.jobs) <= -(-1.25 * n // 4), "ceil(bound x mean)"
    assert len(workers[2].jobs) == 32 and {len(w.jobs) for w in workers} != {25}


def test_equals_are_chosen_alike_by_all_routers_and_evenly():
    made, workers = chooser(n=4)
    again, _ = chooser(n=4)
    found = []
    for seed in range(200):
        prompt = prompt_of(chat(text(seed, 50)))
        tenant = Tenants(10**6).of(b"a")
        one = made.choose(tenant, prompt, workers).worker
        assert again.choose(tenant, prompt, workers[::-1]).worker is one
        found.append(one.name)
    assert all(30 <= found.count(worker.name) <= 75 for worker in workers)


def test_a_worker_that_reuses_prefixes_is_known_by_prefixes():
    made, workers = chooser()
    for worker in workers:
        worker.kind = "prefix"
    tenant = Tenants(10**6).of(b"a")
    a, b = text(1), text(2)
    learnt(made, tenant, prompt_of(chat(a, b)), workers[0])
    assert made.choose(tenant, prompt_of(chat(b, a)), workers[:1]).n_there == 0
    front = made.choose(tenant, prompt_of(chat(a, text(3))), workers[:1])
    assert 0.4 * sum(front.sizes) < front.n_there < 0.6 * sum(front.sizes)
    assert set(front.there.values()) == {"gpu"}
    assert chained([1, 2])[1] != chained([2, 1])[1]


def test_a_vllm_with_kvweave_in_it_has_chunks_and_placements_but_no_contexts(workers, route):
    inside, other = workers(2)
    inside.inside = True
    inside.placements = lambda seen: Reply(
        {"run": "r", "seq": 1, "snapshot": True, "more": False, "chunks": [], "gone": []}
    )
    router = route([inside, other])
    kinds = {worker.name: worker.kind for worker in router.state.workers}
    assert kinds == {inside.name: "vllm", other.name: "prefix"}
    with router.client() as http:
        assert http.get("/v1/chunks/docs/a").status_code == 200
        assert http.get("/v1/contexts/c").status_code == 501
    assert inside.asked("/v1/chunks") and not other.asked("/v1/chunks")
    assert not inside.asked("/v1/contexts")


@pytest.mark.parametrize("policy", ["prefix", "hash", "random"])
def test_the_other_policies_choose(policy):
    made, workers = chooser(policy, 4)
    tenant = Tenants(10**6).of(b"a")
    found = [made.choose(tenant, prompt_of(chat(text(7))), workers).worker.name for _ in range(20)]
    assert (len(set(found)) == 1) == (policy != "random")
    left = [worker for worker in workers if worker.name != found[0]]
    assert made.choose(tenant, prompt_of(chat(text(7))), left).worker in left


# ---- end to end, with workers that do what a test says


def test_the_same_text_goes_to_the_same_worker_for_each_tenant(workers, route):
    both = workers(2, lambda seen: answered(n_prompt=500, n_cached=480), ours=True)
    router = route(both, probe=30)
    for key in ("key-of-anna", "key-of-berta"):
        for i in range(4):
            assert router.ask(f"{text(1)} {i}", key).status_code == 200
        homes = [w for w in both if any(key in s.headers["authorization"] for s in w.asked(CHAT))]
        assert len(homes) == 1
    assert len(router.state.tenants.all()) == 2


def test_answers_are_part_of_what_a_worker_has(workers, route):
    said = text(5, 300)
    plain = workers(2, lambda seen: answered(said), ours=True)
    router = route(plain, probe=30)
    router.ask("tell me")
    [tenant] = router.state.tenants.all()
    assert all_there(tenant, plain, said)
    halves = [event(said[:500]), event(said[500:]), DONE]
    streams = workers(2, lambda seen: streamed(*halves), ours=True)
    router = route(streams, probe=30)
    router.ask("tell me", stream=True)
    [tenant] = router.state.tenants.all()
    until(lambda: all_there(tenant, streams, said), "learning")  # after the last byte is sent


def all_there(tenant, workers, said):
    ids = tenant.ids(prints(said).hashes)
    return any(len(tenant.holding(w.name).tiers(ids)) == len(ids) for w in workers)


def test_usage_corrects_what_was_thought(workers, route):
    n_cached = [0]
    both = workers(2, lambda seen: answered(n_prompt=1000, n_cached=n_cached[0]), ours=True)
    router = route(both, probe=30)
    old, new = text(1, 1000), text(2, 1000)
    router.ask(old)
    [tenant] = router.state.tenants.all()
    assert tenant.letters > 4.05, "5000 characters were 1000 tokens"
    home = next(w for w in both if w.asked(CHAT))
    holding = tenant.holding(home.name)
    holding.sent(tenant.ids(prints(new).hashes))
    assert len(holding) > 100
    n_cached[0] = 0  # it has let go of all that
    router.ask(f"{old} again")
    ids = tenant.ids(prints(old).hashes)
    assert len(holding.tiers(ids)) == len(ids), "it has it again"
    n_cached[0] = 1000
    router.ask(f"{old} again")


def feed(pages):
    """Answer placements from a list; what is asked is kept."""
    asked = []

    def answer(seen):
        asked.append(seen.path)
        return Reply(pages[min(len(asked), len(pages)) - 1])

    return answer, asked


def page(run, seq, snapshot, chunks=(), gone=(), more=False):
    told = [{"id": i, "digest": "", "names": [], "tier": tier, "n_tokens": 1,
             "prints": [f"{x:016x}" for x in prints(said).hashes.tolist()]} for i, tier, said in chunks]  # fmt: skip
    return {
        "run": run,
        "seq": seq,
        "snapshot": snapshot,
        "more": more,
        "chunks": told,
        "gone": list(gone),
    }


def test_lost_events_are_told_anew(workers, route):
    both = workers(2, ours=True)
    a, b = text(1), text(2)
    pages = [
        page("r1", 1, True, [(1, "disk", a)], more=True),
        page("r1", 2, False, [(2, "ram", b)]),
        page("r1", 3, False, gone=[1]),
        page("r2", 9, True, [(5, "disk", a)]),  # the worker was started again
        page("r2", 9, False),
    ]
    answer, asked = feed(pages)
    both[0].placements = answer
    router = route(both, probe=0.05)
    router.ask("hi", "key-of-anna")
    [tenant] = router.state.tenants.all()
    holding = tenant.holding(both[0].name)
    ids = {said: tenant.ids(prints(said).hashes) for said in (a, b)}
    until(lambda: len(asked) >= 6, "following")
    assert set(holding.tiers(ids[a]).values()) == {"disk"} and not holding.tiers(ids[b])
    assert asked[:4] == [
        "/v1/placements?run=&since=0",
        "/v1/placements?run=r1&since=1",
        "/v1/placements?run=r1&since=2",
        "/v1/placements?run=r1&since=3",
    ]
    assert asked[4] == "/v1/placements?run=r2&since=9"
    prompt = prompt_of(chat(a))
    assert (
        router.state.chooser.choose(tenant, prompt, router.state.workers).worker.name
        == both[0].name
    )


@pytest.mark.parametrize("nonsense", [{}, [], {"run": "x"}, page("r", "x", True), {"snapshot": 1}])
def test_placements_that_make_no_sense_do_no_harm(workers, route, nonsense):
    [worker] = workers(1, ours=True)
    answer, asked = feed([nonsense])
    worker.placements = answer
    router = route([worker], probe=0.05)
    assert router.ask().status_code == 200
    until(lambda: len(asked) >= 3, "following")
    assert router.ask().status_code == 200
