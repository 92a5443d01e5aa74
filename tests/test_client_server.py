"""The client against a real server: what it gives is what the engine gives."""

from __future__ import annotations

import dataclasses
import math
import threading

import httpx
import pytest
from faces import FACES, faces
from loaded import short_runner
from served import served

from kvweave import AsyncClient, Client, Context, Engine, Memory, MemoryBudget, errors
from kvweave.chunk.files import Files
from kvweave.client import (
    AsyncRemoteContext,
    AsyncRemoteFiles,
    AsyncRemoteMemory,
    RemoteContext,
    RemoteFiles,
    RemoteMemory,
)
from kvweave.client.edits import EditVerbs
from kvweave.memory import FirstSentences, MemoryBlocks, MemoryTool
from kvweave.run.sampling import Sampling
from kvweave.weave.parts import Part
from kvweave.weave.template import Ref, Template

A = "Nina's river is wide . so well then we saw it .\n"
B = "Yuki's metal is sharp . so well .\n"
SYSTEM = "keep the notes ."
KEYS = {"key-of-anna": "anna", "key-of-berta": "berta"}


@pytest.fixture
def runner():
    return short_runner()


@pytest.fixture
def engine(runner):
    with Engine(runner, repair="none") as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture
def server(engine):
    with served(engine) as server:
        yield server


@pytest.fixture(params=FACES)
def make(request):
    with faces(request.param) as make:
        yield make


@pytest.fixture
def client(server, make):
    with make(server.url) as client:
        yield client


# --- the same script


def plain(value, about=lambda number: number):
    """Return what must be equal: no times, and of parts no inner states of the context; ``about``
    is put around floats."""
    if isinstance(value, Part):
        return (value.uid, value.id, value.name, value.start, value.stop)
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        gone = ("at", "created", "last_used", "ttft", "weave", "total", "idle")
        return {k: plain(v, about) for k, v in value.items() if k not in gone}
    if isinstance(value, list | tuple):
        return [plain(each, about) for each in value]
    return about(value) if isinstance(value, float) else value


def near(number):
    return pytest.approx(number, rel=1e-3, abs=1e-6)


def failure(call, *args, **options):
    with pytest.raises(errors.KVWeaveError) as caught:
        call(*args, **options)
    return type(caught.value).__name__, caught.value.message, caught.value.hint, caught.value.data


def file_script(weaver):
    """All the file verbs; yields what each gave."""
    files = weaver.files
    yield weaver.put("docs/a", A)
    yield weaver.put_many([("docs/b", B), ("docs/c", [5, 6, 7])], kind="memory")
    yield weaver.put("docs/c", "late rain .", replace=True)
    yield files.ls(), files.ls("docs/*", sort="n_tokens", reverse=True, limit=2), files.ls("no*")
    yield files.stat("docs/b"), files.stat("#2")
    yield files.cp("docs/a", "faq", dry_run=True), files.cp("docs/a", "faq")
    yield files.mv("docs/", "old/"), files.ls()
    yield files.pin("old/*"), files.find(pinned=True), files.find(kind="memory", min_tokens=9)
    yield failure(files.rm, "**")
    yield files.unpin(""), files.find("**", pinned=False, tier="none", unused_since=4e9)
    yield weaver.place("old/b", "none"), weaver.place("old/*", "none", dry_run=True)
    yield weaver.denoise(), files.find(tier="none"), weaver.can("move").ok
    yield files.du(by="kind"), files.du("old/", by="dir"), files.du()
    yield files.rm("faq", dry_run=True), files.rm("old/b"), files.ls()
    yield failure(files.stat, "old/aa"), failure(files.stat, "#99"), failure(files.ls, "nothing/")
    yield failure(weaver.put, "old/a", B), failure(weaver.put, "x*", B)
    yield failure(weaver.put, "x", ""), failure(files.cp, "old/a", "old/c")
    yield failure(weaver.put, "x", "so " * 5000), failure(files.rm, "")


def context_script(weaver, settle):
    """Everything a context can do; yields what each verb gave."""
    weaver.put("docs/a", A)
    weaver.put("docs/b", B)
    template = "keep the notes .{docs}{docs/b} what about {q}"
    ctx = weaver.compose(template, docs=["docs/a"], q="Yuki's metal", repair="random", share=0.3)
    yield ctx.name, ctx.parts, ctx.n_tokens, ctx.preview(), ctx.plan
    yield ctx.generate(8, ignore_eos=True, logprobs=2), ctx.check()
    settle()
    ctx.drop("docs/a")
    yield ctx.parts, ctx.preview(), ctx.weave(), ctx.check()
    yield "".join(ctx.stream(5, temperature=0.7, seed=3)), ctx.weave(repair="full")
    settle()
    twin = weaver.fork(ctx, "twin")
    yield twin.append_slice("docs/a", 2, 9), twin.append_chunk("#1"), twin.append("so well .")
    yield twin.insert(1, [5, 6], name="five-six"), twin.insert_chunk(0, "docs/b")
    yield twin.replace(0, "then we saw it"), twin.parts, ctx.parts
    late = weaver.fork(twin, "late")
    yield late.amend(1, "so well ."), late.amend("docs/b", [7, 8], kind="tool"), late.preview()
    yield late.amend(0, "late rain .", role="user"), late.parts, late.weave()
    yield failure(late.amend, 0, [5], role="user"), failure(late.amend, "nothing", "x")
    with late.edit() as edit:
        edit.amend(-1, "so well .")
        edit.amend("docs/b", "late rain .")
        edit.drop("docs/b")
    yield late.parts, late.replace(0, "we saw it"), late.parts
    settle()
    weaver.close_context("late")
    twin.leave((0, 5), (7, twin.n_tokens))
    twin.reorder([2, 1, 0, *range(3, len(twin.parts))])
    twin.drop(twin.parts[0], "docs/a[2:9]", -1)
    yield twin.parts, twin.index("docs/b"), twin.weave(), twin.tokens()
    with twin.edit() as edit:
        edit.insert_slice(1, "docs/a", 0, 4)
        edit.append("late rain .")
        edit.drop("docs/b")
    yield twin.parts, twin.insert_slice(0, "docs/b", 3, 5), twin.namespace
    yield (
        failure(twin.drop, "nothing"),
        failure(twin.drop, 99),
        failure(twin.reorder, [0]),
        failure(twin.leave, (3, 2)),
    )
    yield failure(twin.drop, 0, mode="evict"), failure(twin.append_slice, "docs/a", 5, 5)
    yield failure(twin.append_chunk, "docs/aa"), failure(twin.append, "x", name="docs/a")
    yield failure(twin.generate, 5000), failure(weaver.files.rm, "docs/*")
    pair = [weaver.compose("so {docs/a} well", name=name) for name in ("one", "two")]
    yield [answer.text for answer in weaver.generate_many(pair, 4, ignore_eos=True)]
    settle()
    for name in ("one", "two"):
        weaver.close_context(name)
    yield sorted(weaver.contexts), weaver.get_context("twin").name
    weaver.close_context("twin")
    yield sorted(weaver.contexts), failure(weaver.get_context, "twin")
    yield failure(weaver.close_context, "nothing"), failure(weaver.compose, "{hole}")
    yield failure(weaver.compose, "x", values={"y": "z"}), failure(weaver.context, "a*")
    yield failure(weaver.compose, "{x}", x=3), weaver.files.du()


def chat_script(weaver, settle):
    """A conversation that is pruned."""
    chat = weaver.context("chat/1", system=SYSTEM, share=0.5, prune="evict")
    for line in (A, "what about Nina's river .", B):
        yield chat.ask(line, 4, ignore_eos=True)
        settle()
    yield chat.oldest(), chat.n_tokens
    chat.drop(chat.oldest())
    chat.drop(chat.oldest(), mode="forget")
    yield chat.parts, chat.preview(), chat.message("user", "Lena's river is wide .")
    before = chat.snapshot()
    yield chat.begin(Sampling(max_tokens=3), chat=True).run()
    settle()
    chat.restore(before)
    yield chat.parts, chat.weave(), failure(chat.drop, 0), failure(weaver.context, "chat/1")
    chat.close()
    empty = weaver.context("empty", max_drift=None)
    yield failure(empty.weave), failure(empty.oldest), weaver.files.ls(), empty.n_tokens


def history_script(weaver, settle):
    """A context that is edited, looked back at, and brought back."""
    weaver.put("docs/a", A)
    ctx = weaver.context("chat/1", system=SYSTEM)
    ctx.append_chunk("docs/a")
    ctx.append(B)
    ctx.generate(3, ignore_eos=True)
    settle()
    with ctx.edit() as edit:
        edit.drop("docs/a")
        edit.append("late rain .", name="docs/b")
    past = getattr(ctx, "history", ctx)
    yield past.log(), past.version, past.diff(1), past.diff(3, 2), ctx.why(), ctx.why().says
    ctx.revert(2)
    yield past.log(), [p.name for p in ctx.parts], past.version, ctx.why()
    yield failure(ctx.revert, 99), failure(past.diff, 99)
    weaver.rename_context("chat/1", "chat/2")
    yield sorted(weaver.contexts), failure(weaver.rename_context, "chat/1", "chat/3")


SMALL = MemoryBudget(window=60, summaries=60, summary=30, recalled=60, warm=10**6)


class Near:
    """A memory in this process, with the few verbs that a client has beside those of `Memory`."""

    def __init__(self, engine, context):
        context = engine.get_context(context)
        self.memory = Memory(engine, context, budget=SMALL, summarise=FirstSentences(None))
        self.tool, blocks = MemoryTool(self.memory), MemoryBlocks(self.memory)
        self.blocks, self.add_block, self.set_block = lambda: list(blocks), blocks.add, blocks.set
        self.append_block, self.replace_block = blocks.append, blocks.replace

    def __getattr__(self, name):
        return getattr(self.memory, name)


def memory_script(weaver, settle):
    """A conversation that outgrows its window, is recalled, written to, and undone."""
    chat = weaver.context("chat", system=SYSTEM)
    if isinstance(weaver, Engine):
        memory = Near(weaver, "chat")
    else:
        memory = weaver.memory("chat", budget=SMALL, summarise="sentences", sentences=0)
        assert list(weaver.memories) == ["chat"]

    def rest():
        settle()
        while isinstance(memory, Near) and memory.idle(settle=False):
            pass

    def items(pattern="**"):  # a server computes KV when it has the time
        return [dataclasses.replace(item, tier="none") for item in memory.items(pattern)]

    for key, value in {"Anna": "cold", "Omar": "hot", "Mei": "loud", "Ravi": "tame"}.items():
        yield memory.ask(f"so well {key}'s river is {value} . then we saw it", 4)
        rest()
    yield (
        failure(memory.tell, "late rain .", "tool"),
        memory.tell("late rain ."),
        memory.settle(),
        memory.n_steps,
        memory.root,
    )
    zones = ("anchor", "recalled", "summary", "turn")
    yield [memory.zone(zone) for zone in zones], items("chat/*")
    rest()
    yield memory.ask("what about Anna's river", 8), [memory.zone(zone) for zone in zones]
    rest()
    for by in ("embedding", "attention"):
        yield memory.search("what about Omar's river", by, 2)
    yield memory.search("chat/u-*", "name"), memory.recall("chat/u-001", "name"), chat.parts
    yield memory.release(), failure(memory.release, "chat/u-001")
    yield memory.write("notes/plan", "Mei's song is loud ."), memory.read("notes/plan")
    yield memory.recall([*map(int, chat.tokens()[-4:])], n=1), memory.write("notes/b", [5, 6, 7])
    yield failure(memory.write, "notes/plan", "x", replace=False), failure(memory.write, "a*", "x")
    yield memory.rename("notes/", "old/"), memory.delete("old/b"), items("old/")
    yield failure(memory.read, "old/c"), failure(memory.delete, "old/c"), items("no*")
    yield memory.anchor("me", "so well ."), failure(memory.anchor, "me", "x"), chat.parts
    yield memory.add_block("you", "late .", 9), memory.append_block("me", "then"), memory.blocks()
    yield memory.set_block("you", "so"), memory.replace_block("me", "well", "late"), memory.blocks()
    yield failure(memory.set_block, "you", "x" * 10), failure(memory.replace_block, "me", "no", "x")
    for call in (
        {"command": "create", "path": "/memories/a.md", "file_text": "one\ntwo"},
        {"command": "insert", "path": "/memories/a.md", "insert_line": 1, "insert_text": "late"},
        {"command": "str_replace", "path": "/memories/a.md", "old_str": "two", "new_str": "rain"},
        {"command": "view", "path": "/memories/a.md", "view_range": [2, -1]},
        {"command": "rename", "old_path": "/memories/a.md", "new_path": "/memories/b.md"},
        {"command": "create", "path": "/elsewhere/a.md", "file_text": "one"},
        {"command": "view", "path": "/memories"},
    ):
        yield memory.tool(call)
    rest()
    yield "".join(memory.stream("what about Mei's river", 8, recall=None)), chat.parts
    rest()
    for _ in range(memory.n_steps):
        yield memory.undo(), chat.tokens(), items(), [memory.zone(zone) for zone in zones]
    yield memory.undo(), memory.n_steps
    memory.close()
    yield len(weaver.files.find("memory/**")), weaver.files.find(pinned=True), chat.parts


def leftover_script(weaver, settle):
    """What fails, is closed, is a slice or is long ago; yields what is known of it then."""
    chat = weaver.context("chat", system=SYSTEM)
    for options in ({"max_tokens": 9000}, {"max_drift": 0.1}):
        yield failure(chat.ask, A, **options), weaver.files.ls(), chat.parts
        yield getattr(chat, "history", chat).log()
    yield chat.message("user", A).name
    chat.close()
    yield sorted(weaver.contexts), failure(weaver.get_context, "chat")
    chat = weaver.context("chat", system=SYSTEM)
    weaver.put("docs/a", A)
    chat.append_slice("docs/a", 2, 5)
    chat.amend("docs/a[2:5]", "so well .")
    past = getattr(chat, "history", chat)
    yield [
        [each.start for each in past.diff(1).added],
        *(each.amends for each in past.diff(1).added),
    ]
    for _ in range(60):
        chat.append([5])
        chat.drop(-1)
    yield len(past.log()), chat.parts
    weaver.place("docs/a", "none")
    yield weaver.compress("docs/a", "full"), weaver.files.stat("docs/a")
    yield weaver.compress("docs/a", "h2o:4", to="docs/b").refs, weaver.files.ls("docs/*")[1].refs


def same(runner, server_of, script):
    with Engine(runner, repair="none") as engine:
        wanted = [plain(each, near) for each in script(engine, lambda: None)]
    server, client = server_of
    found = [plain(each) for each in script(client, server.settle)]
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a == b, f"step {i} of {script.__name__}"


def test_file_verbs_give_what_the_engines_give(runner, server, client):
    same(runner, (server, client), lambda weaver, _: file_script(weaver))


def test_contexts_give_what_the_engines_give(runner, server, client):
    same(runner, (server, client), context_script)


def test_a_pruned_chat_goes_as_the_engines(runner, server, client):
    same(runner, (server, client), chat_script)


def test_history_is_what_the_engines_is(runner, server, client):
    same(runner, (server, client), history_script)


def test_what_failed_or_ended_leaves_what_it_leaves_in_an_engine(runner, server, client):
    same(runner, (server, client), leftover_script)


@pytest.mark.slow
def test_a_memory_does_what_the_engines_does(runner, server, client):
    same(runner, (server, client), memory_script)


def test_an_edit_of_another_version_is_refused(client):
    ctx = client.compose(f"{SYSTEM} {A}")
    version = ctx.version
    with ctx.edit(version=version) as edit:
        added = edit.append(B)
    assert added.part.uid == ctx.parts[-1].uid and edit.version == ctx.version > version
    with pytest.raises(errors.ContextChanged) as caught, ctx.edit(version=version) as edit:
        edit.drop(added.part)
    assert (caught.value.wanted, caught.value.found) == (version, ctx.version)


def test_templates_and_references_go_through(client):
    client.put("docs/a", A)
    ctx = client.compose(Template("so {one} {two}"), one=Ref("docs/a"), two=(Ref("#1"), "docs/a"))
    id = client.files.stat("docs/a").id
    assert [p.name for p in ctx.parts if p.id == id] == ["docs/a", "#1", "docs/a"]
    with pytest.raises(errors.InvalidArgument, match="cannot be int"):
        client.compose("{n}", n=3)


EXCUSED = {
    "put_rows": "tensors do not travel",
    "contexts_of": "a key has one namespace",
    "check_integrity": "of the process",
    "audit": "of the process: a server audits while it is idle",
    "answer_part": "the server's own, when an answer is out",
    "append_pieces": "part of compose",
    "set_base": "the server's own, when a context is opened",
    "closed": "of the process",
    "opening": "a step of the server's tasks",
    "step": "several verbs in one step: of the process",
    **dict.fromkeys(
        ("putting", "weaving", "checking", "refining", "wove", "answered", "request")
        + ("beginning", "telling", "settling", "searching", "recalling", "idling"),
        "steps of the server's tasks",
    ),
}


@pytest.mark.parametrize(
    ("here", "there"),
    [
        (Engine, (Client, AsyncClient)),
        (Context, (RemoteContext, AsyncRemoteContext)),
        (Files, (RemoteFiles, AsyncRemoteFiles)),
        (Memory, (RemoteMemory, AsyncRemoteMemory)),
    ],
)
def test_the_clients_have_every_verb(here, there):
    def public(kind):
        return {name for name in dir(kind) if not name.startswith("_")}

    for kind in there:
        missing = public(here) - public(kind)
        assert missing <= EXCUSED.keys(), f"{kind.__name__} lacks {missing - EXCUSED.keys()}"
    assert public(there[0]) == public(there[1]), "two faces of one client"


def test_no_excuse_is_left_over():
    there = {*dir(Client), *dir(RemoteContext), *dir(RemoteFiles), *dir(RemoteMemory)}
    assert not EXCUSED.keys() & there


# --- what only a server has


@pytest.fixture
def other(server):
    """Another client of the same server."""
    with Client(server.url) as other:
        yield other


def test_restoring_a_version_drops_nothing_that_others_added(client, other):
    ctx = client.context("chat/1", system=SYSTEM)
    before = ctx.snapshot()
    with ctx.edit(version=before.version) as edit:
        edit.append(A)
    theirs = other.get_context("chat/1").append(B)
    with pytest.raises(errors.ContextChanged) as caught:
        ctx.restore(before, version=edit.version)
    assert (caught.value.wanted, caught.value.found) == (edit.version, ctx.version)
    assert ctx.parts[-1] == theirs and len(ctx.parts) == 3
    ctx.restore(before, version=ctx.version)
    assert ctx.parts == before.parts


def test_restoring_goes_by_one_version_whatever_others_do_meanwhile(client, other, monkeypatch):
    """Somebody drops a part, and adds one, between what is read and what is sent."""
    ctx = client.context("chat/1", system=SYSTEM)
    before = ctx.snapshot()
    first, _, real = ctx.append(A), ctx.append(B), EditVerbs.drop.edit

    def drop(*args, **options):
        monkeypatch.undo()
        there = other.get_context("chat/1")
        there.drop(first)
        there.append("late rain .")
        return real(*args, **options)

    monkeypatch.setattr(EditVerbs.drop, "edit", drop)
    ctx.restore(before)
    assert ctx.parts == before.parts


def test_answers_come_piece_by_piece_and_hanging_up_stops_them(server, client):
    ctx = client.compose(f"{SYSTEM} {A}")
    pieces = ctx.stream(2000, ignore_eos=True)
    assert next(pieces)
    assert server.driver.stats()["active"] == 1
    pieces.close()
    server.settle()
    assert server.driver.stats()["cancelled"] == 1
    assert client.compose("so well").generate(1).finish in ("stop", "length")


def test_an_interrupted_message_is_taken_back(server, client):
    chat = client.context("chat/1", system=SYSTEM)
    before = chat.snapshot()
    chat.message("user", A)
    turn = chat.begin(Sampling(max_tokens=2000, ignore_eos=True), chat=True)
    next(turn.stream())
    with pytest.raises(errors.InvalidArgument, match="did not end"):
        turn.finish()
    turn.cancel()
    chat.restore(before)
    assert chat.parts == before.parts
    chat.drop(0)
    with pytest.raises(errors.InvalidArgument, match="not all of its parts"):
        chat.restore(before)


def test_a_context_is_busy_while_it_answers(client, monkeypatch):
    monkeypatch.setattr("kvweave.serve.routes.named.GRACE_SECONDS", 0.0)
    # who is refused leaves no answer behind, and never waits for one
    monkeypatch.setattr("kvweave.client.settle.SETTLE_SECONDS", math.inf)
    ctx = client.compose(f"{SYSTEM} {A}")
    pieces = ctx.stream(2000, ignore_eos=True)
    next(pieces)
    for edit in (lambda: ctx.drop(-1), lambda: ctx.generate(1), ctx.close):
        with pytest.raises(errors.ContextBusy, match="under way"):
            edit()
    pieces.close()


@pytest.mark.parametrize("verb", ["drop", "generate", "close", "fork", "stream", "append"])
def test_after_hanging_up_a_context_is_free_at_once(client, verb):
    ctx = client.compose(f"{SYSTEM} {A}")
    pieces = ctx.stream(2000, ignore_eos=True)
    next(pieces)
    pieces.close()
    arguments = {"drop": [0], "generate": [1], "fork": ["twin"], "stream": [1], "append": ["so"]}
    found = getattr(client.get_context(ctx.name), verb)(*arguments.get(verb, []))
    assert verb != "stream" or list(found)


def test_while_a_memory_answers_nothing_else_is_done_and_undo_takes_all_of_it_back(
    client, monkeypatch
):
    monkeypatch.setattr("kvweave.serve.routes.named.GRACE_SECONDS", 0.0)
    chat = client.context("chat", system=SYSTEM)
    memory = client.memory(chat, budget=SMALL, summarise="sentences")
    memory.tell(A)
    wanted = chat.tokens(), [entry.name for entry in client.files.ls()]
    pieces = memory.stream("so ?", 2000, ignore_eos=True)
    assert next(pieces)
    for verb in (lambda: memory.write("a", "x"), memory.undo, memory.idle, chat.close):
        with pytest.raises(errors.ContextBusy):
            verb()
    pieces.close()
    assert memory.undo() == "ask" and memory.n_steps == 1
    assert (chat.tokens(), [entry.name for entry in client.files.ls()]) == wanted
    assert client.get_memory("chat").ask("so ?", 2).finish
    memory.close()
    with pytest.raises(errors.MemoryNotFound, match="has no memory"):
        client.get_memory("chat")


def test_a_memory_goes_with_its_context_when_that_is_renamed(client):
    chat = client.context("chat", system=SYSTEM)
    memory = client.memory(chat, budget=SMALL, summarise="sentences")
    memory.tell(A)
    chat.rename("talk")
    other = client.memory(client.context("chat", system=SYSTEM), summarise="sentences")
    assert [part.name for part in memory.zone("turn")] == ["chat/u-000"] and not other.n_steps
    assert memory.tell(A).name == "talk/u-001" and other.zone("turn") == []
    assert (memory.name, memory.n_steps, memory.undo()) == ("talk", 2, "tell")


def test_an_answer_of_a_memory_that_fails_puts_all_back(server, client, monkeypatch):
    chat = client.context("chat", system=SYSTEM)
    memory = client.memory(chat, budget=SMALL, summarise="sentences", sentences=0)
    for key in ("Anna", "Omar", "Mei", "Ravi", "Lena"):
        memory.tell(f"so well {key}'s river is cold . then we saw it")
    server.settle()
    wanted = chat.tokens(), memory.items(), [entry.name for entry in client.files.ls()]
    loop = server.driver.engine.loop

    def fail(*_):
        raise errors.OverBudget(1, 1, 0)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_forward", fail)
        with pytest.raises(errors.KVWeaveError):
            memory.ask("what about Anna's river", 4)
    server.settle()
    assert (chat.tokens(), memory.items(), [e.name for e in client.files.ls()]) == wanted
    assert memory.ask("what about Anna's river", 4).text
    assert memory.undo() == "ask" and chat.tokens() == wanted[0]


class Dropping(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Lets each request through, and loses the first answer to each."""

    def __init__(self):
        self.blocking, self.awaited = httpx.HTTPTransport(), httpx.AsyncHTTPTransport()
        self.lost = set()

    def handle_request(self, request):
        found = self.blocking.handle_request(request)
        found.read()
        return self._or_lost(request, found)

    async def handle_async_request(self, request):
        found = await self.awaited.handle_async_request(request)
        await found.aread()
        return self._or_lost(request, found)

    def _or_lost(self, request, found):
        what = (request.method, request.url.path, request.headers.get("idempotency-key"))
        if what in self.lost:
            return found
        self.lost.add(what)
        raise httpx.ReadError("lost")

    def close(self):
        self.blocking.close()

    async def aclose(self):
        await self.awaited.aclose()


@pytest.mark.slow
def test_what_changes_something_happens_once_though_its_answer_is_lost(server, make):
    with make(server.url, transport=Dropping()) as client:
        id = client.put("docs/a", A).id
        assert client.put_many([("docs/b", B)])[0].name == "docs/b"
        ctx = client.context("chat/1", system=SYSTEM)
        ctx.append_chunk("docs/a")
        with ctx.edit(version=ctx.version) as edit:
            edit.append(B)
        ctx.message("user", "so ?")
        assert [part.id for part in ctx.parts].count(id) == 1 and len(ctx.parts) == 4
        twin = ctx.fork("twin")
        assert sorted(client.contexts) == ["chat/1", "twin"] and len(twin.parts) == 4


def test_two_threads_share_a_client(client):
    client.put("docs/a", A)
    texts = {}

    def work(n):
        texts[n] = client.compose("so {docs/a} ask", name=f"c{n}").generate(6).text

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4 and len(set(texts.values())) == 1


def test_status_and_health(client):
    client.put("docs/a", A)
    client.context("chat/1")
    assert client.health()["status"] == "ok"
    status = client.status()
    assert (status["chunks"], status["contexts"], status["namespace"]) == (1, 1, "")
    assert client.files.about("docs/a")["names"] == ["docs/a"]


def test_keys_see_their_own_chunks_only(engine, make):
    with served(engine, keys=KEYS) as server:
        with make(server.url) as nobody:
            assert nobody.health()["status"] == "ok"
            with pytest.raises(errors.KeyRefused, match="needs an API key"):
                nobody.files.ls()
        with make(server.url, "key-of-eve") as eve, pytest.raises(errors.KeyRefused):
            eve.put("docs/a", A)
        with make(server.url, "key-of-anna") as anna, make(server.url, "key-of-berta") as berta:
            assert anna.put("docs/a", A).id and berta.files.ls() == []
            anna.context("chat/1")
            assert berta.contexts == {} and list(anna.contexts) == ["chat/1"]
            with pytest.raises(errors.ChunkNotFound):
                berta.compose("{docs}", docs=["docs/a"])
            with pytest.raises(errors.ContextNotFound):
                berta.close_context("chat/1")


def test_a_quota_is_told(engine, make):
    with served(engine, quota_chunks=1) as server, make(server.url) as client:
        client.put("docs/a", A)
        with pytest.raises(errors.OverQuota) as caught:
            client.put("docs/b", B)
        assert caught.value.quota == 1 and [e.name for e in client.files.ls()] == ["docs/a"]


def test_durable_needs_a_home(runner, client, make, tmp_path):
    with pytest.raises(errors.InvalidArgument, match="no home directory"):
        client.put("docs/a", A, durable=True)
    assert client.files.ls() == []
    with Engine(runner, home=tmp_path / "home") as engine, served(engine) as server:
        with make(server.url) as other:
            other.put("docs/a", A, durable=True)
        assert engine.shelf.levels()[1][1] > 0


def test_a_stopped_server_is_unreachable(engine, make):
    with served(engine) as server:
        client = make(server.url)
        client.put("docs/a", A)
    with client, pytest.raises(errors.Unreachable, match=server.url):
        client.files.ls()
