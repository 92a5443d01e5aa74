"""The loop over an engine without a model: exact sequences of works, then against a plain twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run.backend import ids, off
from torch.utils._python_dispatch import TorchDispatchMode

import kvweave.run.loop
from kvweave.errors import InvalidArgument, LoadFailed
from kvweave.run.base import NO_SLOTS, Ints, Rows, Steps, Work
from kvweave.run.loop import Loop, Request
from kvweave.run.sample import Sampling
from kvweave.weave.rereading import at_once

V = 24
END = 23  # the token that ends a reply


class Tape:
    """Rows that remember their tokens. ``poison`` fails the pass, ``nan`` spoils the logits of a
    slot, ``lost`` is what waiting for chunks raises, ``due`` the pass before which they arrive."""

    lossy = False

    def __init__(self, name: str, engine: Engine) -> None:
        self.name, self.engine = name, engine
        self.n = 0
        self.tokens, self.positions = np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.poison = self.nan = -1
        self.pending, self.due, self.lost = False, 0, False

    @property
    def arrived(self) -> bool:
        return len(self.engine.passes) >= self.due

    def reserve(self, n: int) -> None:
        more = max(0, n - len(self.tokens))
        self.tokens, self.positions = (
            np.pad(self.tokens, (0, more)),
            np.pad(self.positions, (0, more)),
        )

    def settle(self) -> None:
        if self.lost:
            raise LoadFailed(7, "the disk is gone")
        self.pending = False

    def forget(self) -> None:
        """Do without the chunks."""
        self.n, self.pending, self.lost = 0, False, False


class Engine:
    """Logits depend on all tokens and positions up to the row, and on nothing else."""

    n_vocab, ends = V, frozenset({END})
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, tokenizer: Any = None) -> None:
        self.tokenizer = tokenizer
        self.passes: list[list[tuple[str, list[int]]]] = []  # name and slots of each pass's works
        self.hook: Callable[[], None] = lambda: None

    def forward(self, works: Sequence[Work]) -> list[torch.Tensor]:
        self.passes.append([(work.rows.name, work.slots.tolist()) for work in works])
        assert len({id(work.rows) for work in works}) == len(works), "a context twice in a pass"
        return [self._one(work) for work in works]

    def _one(self, work: Work) -> torch.Tensor:
        rows = work.rows
        rows.settle()
        assert len(work.tokens) == len(work.positions) == work.n > 0
        assert work.slots[-1] < len(rows.tokens), "not reserved"
        assert work.slots[0] <= rows.n, "a hole in the slots"
        rows.tokens[work.slots], rows.positions[work.slots] = work.tokens, work.positions
        rows.n = max(rows.n, int(work.slots[-1]) + 1)
        self.hook()
        if rows.poison in work.slots:
            raise ValueError(f"{rows.name} is poisoned")
        if work.raw is not None:
            work.raw.extend(enumerate(work.tokens.tolist(), work.at))
        return torch.stack(
            [self._logits(rows, int(work.slots[i])) for i in work.want] or [torch.empty(0)]
        ).reshape(len(work.want), V)

    def _logits(self, rows: Tape, slot: int) -> torch.Tensor:
        if slot == rows.nan:
            return torch.full((V,), torch.nan)
        seen = [*rows.tokens[: slot + 1].tolist(), *rows.positions[: slot + 1].tolist()]
        return torch.from_numpy(np.random.default_rng(seen).normal(0, 2, V)).float()


def prompt(rows: Tape, *sizes: int, wants: bool = True) -> Steps[torch.Tensor | None]:
    """One work after the other, each of the next rows; a row's token tells what was sent before."""
    start, salt, logits = 0, 0, None
    for size in sizes:
        slots = np.arange(start, start + size)
        rows.reserve(start + size)
        want = slots[-1:] - start if wants else NO_SLOTS
        logits = yield Work(rows, (slots * 5 + salt) % V, slots, slots * 2, want)
        assert logits.shape == (len(want), V)
        salt = int(logits.argmax()) if len(want) else 0
        start += size
    return None if logits is None or not wants else logits[-1]


def request(key: int, rows: Tape, steps: Any, n: int | None = 4, **options: Any) -> Request:
    asked = None if n is None else Sampling(max_tokens=n, ignore_eos=True, **options)
    return Request(key, rows, steps, asked, tenant=options.pop("tenant", ""))


def started(*names: str, max_rows: int = 8) -> tuple[Engine, Loop, list[Tape]]:
    engine = Engine()
    return engine, Loop(engine, max_rows=max_rows), [Tape(name, engine) for name in names]


def finished(loop: Loop, *requests: Request) -> None:
    loop.run(lambda: not any(r.running for r in requests))
    loop.schedule.check_integrity()
    assert not loop.requests and not len(loop.schedule)


def alone(steps_of: Callable[[Tape], Any], n: int = 4) -> list[int]:
    """What a request gets that has an engine for itself."""
    _, loop, (rows,) = started("alone")
    r = request(0, rows, steps_of(rows), n)
    loop.add(r)
    finished(loop, r)
    assert r.finish == "length"
    return r.out


# ---- who runs when


def test_others_decode_in_every_step_while_a_job_with_several_works_prepares():
    engine, loop, (a, b) = started("a", "b", max_rows=4)
    first, second = request(1, a, prompt(a, 3), 9), request(2, b, prompt(b, 5, 0, 2, 0, 4), 3)
    loop.add(first)
    assert loop.step()
    loop.add(second)
    finished(loop, first, second)
    assert engine.passes == [
        [("a", [0, 1, 2])],
        [("a", [3]), ("b", [0, 1, 2])],
        [("a", [4]), ("b", [3, 4])],
        [("a", [5]), ("b", [5, 6])],
        [("a", [6]), ("b", [7, 8, 9])],
        [("a", [7]), ("b", [10])],
        [("a", [8]), ("b", [11])],
        [("a", [9]), ("b", [12])],
        [("a", [10])],
    ]
    assert second.out == alone(lambda rows: prompt(rows, 5, 0, 2, 0, 4), 3)
    assert first.out == alone(lambda rows: prompt(rows, 3), 9)


def test_a_job_gets_the_logits_of_all_its_pieces_at_once():
    engine, loop, (a,) = started("a", max_rows=4)
    sent = []

    def steps():
        a.reserve(10)
        every = np.arange(10)
        sent.append((yield Work(a, every, every, every, want=np.array([1, 3, 4, 9]))))
        return sent[0][-1]

    r = request(1, a, steps(), 1)
    loop.add(r)
    finished(loop, r)
    assert [len(slots) for ((_, slots),) in engine.passes] == [4, 4, 2]
    whole = [engine._logits(a, slot) for slot in (1, 3, 4, 9)]
    assert torch.equal(sent[0], torch.stack(whole))


def test_a_job_with_nothing_to_run_decodes_with_the_others():
    engine, loop, (a, b) = started("a", "b")
    at_once(engine, prompt(b, 3))
    engine.passes.clear()
    known = engine._logits(b, 2)

    def nothing():
        yield Work(b, NO_SLOTS, NO_SLOTS, NO_SLOTS)
        return known

    one, two = request(1, a, prompt(a, 2), 3), request(2, b, nothing(), 3)
    loop.add(one)
    loop.add(two)
    assert two.prepared and two.out == []
    finished(loop, one, two)
    assert engine.passes == [[("a", [0, 1])], [("a", [2]), ("b", [3])], [("a", [3]), ("b", [4])]]
    assert two.out == alone(lambda rows: prompt(rows, 3), 3)


def test_a_request_that_samples_nothing_ends_with_its_steps():
    _, loop, (a, b) = started("a", "b")
    r, empty = request(1, a, prompt(a, 3, 9, wants=False), None), request(2, b, prompt(b), 5)
    loop.add(r)
    loop.add(empty)
    assert empty.finish == "length" and empty.error is None and empty.out == []
    finished(loop, r)
    assert r.finish == "length" and r.prepared and a.n == 12 and r.out == []


def test_decoded_rows_go_on_where_the_steps_say():
    _, loop, (a,) = started("a")

    def steps():
        a.reserve(3)
        every = np.arange(3)
        logits = yield Work(a, every, every, np.array([0, 4, 11]), np.array([2]))
        r.raw, r.n_raw = [], 40
        return logits[0]

    r = request(1, a, steps(), 4)
    loop.add(r)
    finished(loop, r)
    assert a.positions[:6].tolist() == [0, 4, 11, 12, 13, 14]
    assert r.raw == [(40, r.out[0]), (41, r.out[1]), (42, r.out[2])]
    assert a.tokens[3:6].tolist() == r.out[:3] and (a.n, r.n_rows) == (6, 3)


def test_text_ends_before_a_stop_string_and_streams():
    words = SimpleNamespace(decode=lambda ids, **_: "".join(chr(97 + id) for id in ids))
    plain = alone(lambda rows: prompt(rows, 3), 6)
    engine = Engine(words)
    loop, a, b = Loop(engine), Tape("a", engine), Tape("b", engine)
    stop = words.decode(plain[2:4])
    r = request(1, a, prompt(a, 3), 9, stop=(stop,))
    ended = request(2, b, prompt(b, 3), 9, stop_tokens=(plain[1],))
    loop.add(r)
    loop.add(ended)
    finished(loop, r, ended)
    assert (r.text, r.finish) == (words.decode(plain[:2]), "stop") and "".join(r.fresh) == r.text
    assert (ended.out, ended.finish) == (plain[:2], "stop")


# ---- faults


def test_a_failing_pass_fails_only_who_is_at_fault():
    engine, loop, (a, b, c) = started("a", "b", "c")
    b.poison = 3
    three = [request(i, rows, prompt(rows, 2)) for i, rows in enumerate((a, b, c))]
    for r in three:
        loop.add(r)
    finished(loop, *three)
    assert [r.finish for r in three] == ["length", "error", "length"]
    assert isinstance(three[1].error, ValueError)
    good = alone(lambda rows: prompt(rows, 2))
    assert three[0].out == three[2].out == good and three[1].out == good[:2]
    assert engine.passes[2:6] == [
        [("a", [3]), ("b", [3]), ("c", [3])],
        [("a", [3])],
        [("b", [3])],
        [("c", [3])],
    ]
    assert engine.passes[6] == [("a", [4]), ("c", [4])]


def test_a_nan_row_is_its_own_requests_error():
    _, loop, (a, b) = started("a", "b")
    b.nan = 2
    two = [request(i, rows, prompt(rows, 2), logprobs=2) for i, rows in enumerate((a, b))]
    for r in two:
        loop.add(r)
    finished(loop, *two)
    assert [r.finish for r in two] == ["length", "error"]
    assert isinstance(two[1].error, InvalidArgument) and "nan" in str(two[1].error)
    assert len(two[1].out) == 1 and two[0].out == alone(lambda rows: prompt(rows, 2))


def raising(at: int, rows: Tape) -> Steps[torch.Tensor | None]:
    for i in range(at):
        rows.reserve(i + 1)
        yield Work(rows, np.array([i]), np.array([i]), np.array([i]))
    raise ValueError("a bug in a strategy")


@pytest.mark.parametrize("at", [0, 1, 2])
def test_what_a_jobs_own_steps_raise_is_its_error(at):
    _, loop, (a, b) = started("a", "b")
    good, bad = request(1, a, prompt(a, 2)), request(2, b, raising(at, b))
    loop.add(good)
    loop.add(bad)
    finished(loop, good, bad)
    assert (good.finish, bad.finish) == ("length", "error") and good.error is None
    assert isinstance(bad.error, ValueError) and not bad.prepared


def test_logits_of_a_wrong_shape_spoil_nobody_elses_sampling():
    _, loop, (a, b) = started("a", "b")

    def steps():
        yield Work(b, NO_SLOTS, NO_SLOTS, NO_SLOTS)
        return torch.zeros(1, V)

    good, bad = request(1, a, prompt(a, 2)), request(2, b, steps())
    loop.add(good)
    loop.add(bad)
    finished(loop, good, bad)
    assert (good.finish, bad.finish) == ("length", "error")


def test_who_fails_or_is_cancelled_while_preparing_may_clean_up():
    _, loop, (a, b) = started("a", "b", max_rows=4)
    closed = []

    def steps(rows):
        try:
            yield from prompt(rows, 20)
        finally:
            closed.append(rows.name)

    a.poison = 5
    bad, doomed = request(1, a, steps(a)), request(2, b, steps(b))
    loop.add(bad)
    loop.add(doomed)
    for _ in range(4):
        loop.step()
    assert closed == ["a"] and bad.finish == "error"
    loop.cancel(2)
    assert closed == ["a", "b"] and doomed.finish == "cancelled" and not doomed.prepared
    assert b.n and not loop.step()
    loop.cancel(2)  # gone already


def test_a_cancelled_request_keeps_its_rows_and_text():
    _, loop, (a,) = started("a")
    r = request(1, a, prompt(a, 2), 50)
    loop.add(r)
    for _ in range(3):
        loop.step()
    loop.cancel(1)
    assert (r.finish, r.prepared, len(r.out), a.n) == ("cancelled", True, 3, 4)
    assert not loop.step()


def test_a_key_that_is_running_is_refused():
    _, loop, (a, b) = started("a", "b")
    r = request(1, a, prompt(a, 2))
    loop.add(r)
    with pytest.raises(InvalidArgument):
        loop.add(request(1, b, prompt(b, 2)))
    finished(loop, r)
    assert b.n == 0


# ---- interruptions


def test_an_interrupted_pass_is_run_again():
    engine, loop, (a, b) = started("a", "b")
    two = [request(i, rows, prompt(rows, 3)) for i, rows in enumerate((a, b))]
    for r in two:
        loop.add(r)
    for _ in range(3):
        engine.hook = interrupt
        with pytest.raises(KeyboardInterrupt):
            loop.step()
        loop.schedule.check_integrity()
        engine.hook = lambda: None
        assert loop.step()
    finished(loop, *two)
    assert two[0].out == two[1].out == alone(lambda rows: prompt(rows, 3))


def test_a_token_whose_choice_was_interrupted_is_watched_once(monkeypatch):
    _, loop, (a, b) = started("a", "b")
    two = [request(i, rows, prompt(rows, 3)) for i, rows in enumerate((a, b))]
    seen: list[list[torch.Tensor]] = [[], []]
    for r, each in zip(two, seen, strict=True):
        r.watch = each.append
        loop.add(r)
    wanted = alone(lambda rows: prompt(rows, 3))
    choose, n_calls = kvweave.run.loop.sample, 0

    def sometimes(*asked: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls % 2:
            interrupt()
        return choose(*asked)

    monkeypatch.setattr(kvweave.run.loop, "sample", sometimes)
    n_interrupted = 0
    while any(r.running for r in two):
        try:
            loop.step()
        except KeyboardInterrupt:
            n_interrupted += 1
    assert n_interrupted >= 4
    for r, each in zip(two, seen, strict=True):
        assert r.out == wanted
        assert r.out == [int(logits.argmax()) for logits in each], "a row for each token, its own"


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_interrupted_steps_end_but_lose_nothing_of_the_others():
    engine, loop, (a, b, c) = started("a", "b", "c")

    def steps():
        yield from prompt(b, 3)
        interrupt()

    requests = [
        request(1, a, prompt(a, 3, 2)),
        request(2, b, steps()),
        request(3, c, prompt(c, 2)),
    ]
    for r in requests:
        loop.add(r)
    with pytest.raises(KeyboardInterrupt):
        loop.run(lambda: False)
    n_passes = len(engine.passes)
    finished(loop, *requests)
    assert [r.finish for r in requests] == ["length", "error", "length"]
    assert isinstance(requests[1].error, RuntimeError)
    assert requests[0].out == alone(lambda rows: prompt(rows, 3, 2))
    assert requests[2].out == alone(lambda rows: prompt(rows, 2))
    run = [each for each in engine.passes if ("a", [0, 1, 2]) in each or ("c", [0, 1]) in each]
    assert n_passes == 1 and len(run) == 1  # no row was run twice


def test_interrupted_sampling_is_done_again(monkeypatch):
    engine, loop, (a, b) = started("a", "b")
    two = [request(i, rows, prompt(rows, 3)) for i, rows in enumerate((a, b))]
    for r in two:
        loop.add(r)
    for _ in range(4):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(kvweave.run.loop, "sample", interrupt)
            loop.step()
        assert loop.step()
    assert not loop.requests and len(engine.passes) == 4
    assert two[0].out == two[1].out == alone(lambda rows: prompt(rows, 3))


# ---- chunks on their way


def test_decoding_goes_on_under_a_load_and_only_who_waits_alone_waits():
    engine, loop, (a, b, c) = started("a", "b", "c")
    b.pending, b.due = True, 3
    c.pending, c.due = True, 99
    three = [request(i, rows, prompt(rows, 2), 5) for i, rows in enumerate((a, b, c))]
    for r in three:
        loop.add(r)
    finished(loop, *three)
    assert engine.passes == [
        [("a", [0, 1])],
        [("a", [2])],
        [("a", [3])],
        [("a", [4]), ("b", [0, 1])],
        [("a", [5]), ("b", [2])],
        [("b", [3])],
        [("b", [4])],
        [("b", [5])],
        [("c", [0, 1])],
        [("c", [2])],
        [("c", [3])],
        [("c", [4])],
        [("c", [5])],
    ]


def test_of_those_that_all_wait_the_first_runs_alone():
    engine, loop, (a, b) = started("a", "b")
    two = [request(i, rows, prompt(rows, 2), 2) for i, rows in enumerate((a, b))]
    for r, rows in zip(two, (a, b), strict=True):
        rows.pending, rows.due = True, 99
        loop.add(r)
    finished(loop, *two)
    assert engine.passes == [[("a", [0, 1])], [("a", [2])], [("b", [0, 1])], [("b", [2])]]


def recovering(rows: Tape, *sizes: int) -> Steps[torch.Tensor | None]:
    """Begins again, without the chunks, when they do not come."""
    try:
        return (yield from prompt(rows, *sizes))
    except LoadFailed:
        rows.forget()
        return (yield from prompt(rows, 3, *sizes))


@pytest.mark.parametrize("arrived", [True, False])
def test_a_failed_load_is_thrown_into_the_steps_which_may_go_on(arrived):
    _, loop, (a, b) = started("a", "b", max_rows=6)
    b.pending, b.lost, b.due = True, True, 0 if arrived else 99
    two = [request(1, a, prompt(a, 2), 3), request(2, b, recovering(b, 7, 2), 3)]
    for r in two:
        loop.add(r)
    finished(loop, *two)
    assert [r.finish for r in two] == ["length", "length"]
    assert two[0].out == alone(lambda rows: prompt(rows, 2), 3)
    assert two[1].out == alone(lambda rows: prompt(rows, 3, 7, 2), 3)


def test_a_failed_load_that_nobody_catches_is_the_requests_error():
    _, loop, (a, b) = started("a", "b")
    b.pending = b.lost = True
    two = [request(1, a, prompt(a, 2)), request(2, b, prompt(b, 2))]
    for r in two:
        loop.add(r)
    finished(loop, *two)
    assert [r.finish for r in two] == ["length", "error"]
    assert isinstance(two[1].error, LoadFailed)


# ---- one copy to the host a step


class Syncs(TorchDispatchMode):
    """Counts what would wait for a device."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        names = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal")
        self.n += func.overloadpacket.__name__ in names
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Syncs]:
    with monkeypatch.context() as patched, Syncs() as syncs:
        for name in ("cpu", "tolist", "item", "__bool__", "__int__", "__float__", "to"):
            real = getattr(torch.Tensor, name)

            def wrapper(self, *args, _real=real, _name=name, **kwargs):
                syncs.n += _name in ("cpu", "tolist") or (_name == "to" and "cpu" in map(str, args))
                return _real(self, *args, **kwargs)

            patched.setattr(torch.Tensor, name, wrapper)
        yield syncs


KINDS = {
    "greedy": {},
    "drawn": {"temperature": 0.7, "seed": 3},
    "everything": {"temperature": 0.7, "seed": 3, "top_p": 0.8, "top_k": 9, "logprobs": 3},
    "nucleus": {"temperature": 0.7, "top_p": 0.9, "logprobs": 1},
}


def quiet(rows: Tape, n: int) -> Steps[torch.Tensor | None]:
    """One work, and no look at what comes back."""
    rows.reserve(n)
    slots = np.arange(n)
    return (yield Work(rows, slots, slots, slots, slots[-1:]))[0]


@pytest.mark.parametrize("kinds", [["greedy"], list(KINDS)])
@pytest.mark.parametrize("copies", [1, 4])
def test_a_step_copies_to_the_host_once(monkeypatch, kinds, copies):
    engine, loop, _ = started()
    requests = []
    for i, kind in enumerate(kinds * copies):
        rows = Tape(str(i), engine)
        requests.append(request(i, rows, quiet(rows, 1 + 9 * (i % 2)), 6, **KINDS[kind]))
        loop.add(requests[-1])
    while loop.requests:
        with counted(monkeypatch) as syncs:
            n_before = sum(len(r.out) for r in requests)
            loop.step()
        assert syncs.n == (sum(len(r.out) for r in requests) > n_before)
    assert all(r.finish == "length" for r in requests)


# ---- against a plain twin


@dataclass
class Spec:
    """One random request. Works are (rows written again, new rows) each."""

    works: list[tuple[int, int]]
    options: dict[str, Any]
    tenant: str
    raises: int = -1  # before which work its steps fail
    poison: int = -1
    nan: int = -1
    load: tuple[bool, int] | None = None  # chunks are lost, pass before which they are due
    cancel: int = -1  # after how many steps
    asks: int = 0  # step before which it comes

    def rows(self, name: str, engine: Engine) -> Tape:
        rows = Tape(name, engine)
        rows.poison, rows.nan = self.poison, self.nan
        if self.load is not None:
            rows.pending, (rows.lost, rows.due) = True, self.load
        return rows

    def steps(self, rows: Tape) -> Steps[torch.Tensor | None]:
        salt = 0
        while True:
            try:
                return (yield from self._compute(rows, salt))
            except LoadFailed:
                rows.forget()
                salt = 11

    def _compute(self, rows: Tape, salt: int) -> Steps[torch.Tensor | None]:
        end, logits = 0, None
        for i, (again, more) in enumerate(self.works):
            if i == self.raises:
                raise ValueError("raised")
            slots = np.arange(max(0, end - again), end + more)
            end += more
            rows.reserve(end)
            want = np.arange(i % 2, len(slots), 2)
            if i == len(self.works) - 1:
                want = np.arange(max(0, len(slots) - 2), len(slots))
            tokens = (slots * 5 + salt) % V
            logits = yield Work(rows, tokens, slots, slots * 3 // 2, want)
            assert logits.shape == (len(want), V)
            salt = int(logits.nan_to_num().argmax()) if len(want) else salt
        return logits[-1]


def plain(spec: Spec) -> tuple[list[int], str]:
    """Run a request by itself, without a loop, and sample as the books say."""
    engine = Engine()
    rows, out = spec.rows("twin", engine), []
    sampling = Sampling(**spec.options)
    made = torch.Generator()
    if sampling.seed is not None:
        made.manual_seed(sampling.seed)
    try:
        logits = driven(engine, spec.steps(rows))
        slot = rows.n
        position = int(rows.positions[slot - 1]) + 1
        while True:
            out.append(drawn(logits, sampling, made))
            if out[-1] == END and not sampling.ignore_eos:
                return out, "stop"
            if len(out) == sampling.max_tokens:
                return out, "length"
            rows.reserve(slot + 1)
            one = [np.array([value]) for value in (out[-1], slot, position, 0)]
            logits = engine.forward([Work(rows, *one)])[0][0]
            slot, position = slot + 1, position + 1
    except (ValueError, FloatingPointError):
        return out, "error"


def driven(engine: Engine, steps: Steps[torch.Tensor | None]) -> torch.Tensor:
    go: Callable[[], Work] = steps.__next__
    while True:
        try:
            work = go()
            found = engine.forward([work])[0] if work.n else torch.empty(0, V)
            go = partial(steps.send, found)
        except LoadFailed as error:
            go = partial(steps.throw, error)
        except StopIteration as done:
            return done.value


def drawn(logits: torch.Tensor, sampling: Sampling, made: torch.Generator) -> int:
    if not torch.isfinite(logits).all():
        raise FloatingPointError
    if not sampling.temperature:
        return int(logits.argmax())
    scaled, ids = (logits / sampling.temperature).sort(descending=True, stable=True)
    if sampling.top_k:
        scaled, ids = scaled[: sampling.top_k], ids[: sampling.top_k]
    probabilities = scaled.softmax(-1)
    kept = probabilities.cumsum(-1) - probabilities < sampling.top_p
    if sampling.top_p == 1 and not sampling.top_k:  # all of them, by id
        kept, ids = torch.ones(V, dtype=torch.bool), torch.arange(V)
        probabilities = (logits / sampling.temperature).softmax(-1)
    return int(ids[kept][torch.multinomial(probabilities[kept], 1, generator=made)])


options = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 6), "ignore_eos": st.booleans()},
    optional={"logprobs": st.integers(0, 3)},
).flatmap(
    lambda base: st.one_of(
        st.just(base),
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([0.5, 1.0, 2.0]),
                "seed": st.integers(0, 99),
                "top_p": st.sampled_from([1.0, 0.9, 0.3]),
                "top_k": st.sampled_from([0, 5]),
            }
        ).map(lambda more: base | more),
    )
)
never = st.just(-1)
specs = st.builds(
    Spec,
    works=st.builds(
        lambda first, rest, last: [(0, first), *rest, (max(1, last[0]), last[1])],
        st.integers(1, 9),
        st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6)), max_size=3),
        st.tuples(st.integers(0, 4), st.integers(0, 6)),
    ),
    options=options,
    tenant=st.sampled_from("ab"),
    raises=never | never | st.integers(0, 4),
    poison=never | never | st.integers(0, 25),
    nan=never | never | st.integers(0, 25),
    load=st.none() | st.none() | st.tuples(st.booleans(), st.integers(0, 9)),
    cancel=never | never | st.integers(0, 9),
    asks=st.integers(0, 6),
)


@settings(deadline=None)
@given(st.lists(specs, min_size=1, max_size=6), st.integers(1, 4), st.integers(2, 9))
def test_every_request_gets_what_it_gets_alone_however_they_are_packed(queue, batch, max_rows):
    engine = Engine()
    loop = Loop(engine, batch, max_rows)
    requests: dict[int, Request] = {}
    for step in range(1000):
        for key, spec in enumerate(queue):
            if spec.asks == step:
                rows = spec.rows(str(key), engine)
                steps, asked = spec.steps(rows), Sampling(**spec.options)
                requests[key] = Request(key, rows, steps, asked, spec.tenant)
                loop.add(requests[key])
            if spec.cancel >= 0 and spec.asks + spec.cancel == step:
                loop.cancel(key)
        running = bool(loop.requests)
        assert loop.step() == running
        loop.schedule.check_integrity()
        if not loop.requests and len(requests) == len(queue):
            break
    assert not loop.requests and not len(loop.schedule)
    assert all(sum(len(slots) for _, slots in works) <= max_rows for works in engine.passes)
    for key, spec in enumerate(queue):
        out, finish = plain(spec)
        r = requests[key]
        if r.finish == "cancelled":
            assert spec.cancel >= 0 and r.out == out[: len(r.out)]
        else:
            assert (r.out, r.finish) == (out, finish), spec
            assert (r.error is not None) == (finish == "error")


# ---- over engines with a model


def again(rows: Rows, tokens: Ints) -> Steps[torch.Tensor | None]:
    """All rows but the last two, then these and some of the others once more."""
    n = len(tokens)
    rows.reserve(n)
    for slots in (np.arange(n - 2), np.array([1, 4, 5, n - 2, n - 1])):
        logits = yield Work(rows, tokens[slots], slots, slots, np.array([len(slots) - 1]))
    return logits[0]


def test_packed_contexts_say_what_a_full_prefill_says(backend):
    loop = Loop(backend, max_batch=3, max_rows=7)
    requests = []
    for key, n in enumerate((9, 14, 8, 11)):
        rows = backend.new_rows()
        asked = Sampling(max_tokens=5, ignore_eos=True)
        requests.append(Request(key, rows, again(rows, ids(n, key)), asked))
        loop.add(requests[-1])
    finished(loop, *requests)
    for r, n in zip(requests, (9, 14, 8, 11), strict=True):
        tokens = np.concatenate([ids(n, r.key), r.out])
        every = np.arange(len(tokens) - 1)
        rows = backend.new_rows()
        rows.reserve(len(every))
        (logits,) = backend.forward([Work(rows, tokens[:-1], every, every, every[n - 1 :])])
        assert r.error is None and r.out == logits.argmax(-1).tolist()
        assert r.rows.n == len(every) and off(r.rows.read(0)[0], rows.read(0)[0]) < 1e-9
