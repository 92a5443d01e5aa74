"""A device that fails in the middle of a choice: the answer fails, with the reason, and nothing else does."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from days import one_in
from needs import only_on_cpu
from run.backend import ids, transformers

from kvweave import Context, Engine
from kvweave.errors import NoSpace, StoreError
from kvweave.weave.answer import request_from

SPECS = [
    "flexicache:24,overlap=0,page=4,every=8",
    "h2o:24,below=rest,every=8",
    "kvzip:16,int8=16,below=rest,every=8",
]
pytestmark = only_on_cpu("of a GPU rows below memory rest in the host's, and not in a file")
N_NEW = 24  # tokens of an answer
CODES = [errno.ENOSPC, errno.EIO]
STEP = min(3, int(os.environ.get("KVWEAVE_EVERY", "1")))  # of the slow ones: which requests fail
MANY = min(1000, int(os.environ.get("KVWEAVE_STEPS", "2000")) // 2)  # contexts of the slow one


ROOM, WRITE, READ = "posix_fallocate", "pwrite", "preadv"  # what a device is asked for


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch, nth: int, code: int, what: str = ROOM
) -> Iterator[list[int]]:
    """Have the ``nth`` request for room in a file fail, or write to or read of it, and all later ones;
    yield those there were."""
    real, asked = getattr(os, what), list[int]()

    def request(number: int, *given: Any) -> Any:
        if not is_below(number):
            return real(number, *given)
        asked.append(number)
        if len(asked) >= nth:
            raise OSError(code, os.strerror(code))
        return real(number, *given)

    with monkeypatch.context() as patched:
        patched.setattr(os, what, request)
        yield asked


def is_below(number: int | str) -> bool:
    """Tell whether a descriptor is of a file below memory."""
    try:
        return "kvweave-below-" in os.readlink(f"/proc/self/fd/{number}")
    except FileNotFoundError:  # the one that lists them
        return False


def sheets() -> int:
    """Return how many files below memory this process has open or mapped."""
    gc.collect()
    mapped = Path("/proc/self/maps").read_text().count("kvweave-below-")
    return mapped + sum(map(is_below, os.listdir("/proc/self/fd")))


def held(engine: Engine) -> int:
    """Return the bytes that are charged to contexts."""
    return sum(n for _, n in engine.shelf.charged())


def talk(engine: Engine, spec: str) -> tuple[Context, Callable[[int], tuple[int, ...]]]:
    """Open a context; return it and how its next answer is asked for."""
    context = engine.context("c", keep=spec)

    def answer(turn: int) -> tuple[int, ...]:
        context.append(ids(90 - 60 * bool(turn), 2 + turn).tolist())
        return context.generate(max_tokens=N_NEW, ignore_eos=True).tokens

    return context, answer


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.sampled
def test_wherever_the_device_fails_nothing_is_lost(
    spec: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layer by layer, at the prompt, while decoding, in a later turn: one after the other."""
    runner = transformers("llama")
    with Engine(runner, base="", denoise="never") as engine:
        with failing(monkeypatch, 10**6, code) as asked:
            _, ask = talk(engine, spec)
            wanted, n_first = [ask(0)], len(asked)
            wanted.append(ask(1))
        engine.close_context("c")
        assert len(asked) > n_first >= len(runner.layers), "nothing grew in the second turn"
        before, files = held(engine), sheets()
        shift = CODES.index(code) * STEP // 2  # each code fails other requests, unless all
        for nth in {*(1 + i for i in one_in(STEP, len(asked), shift)), len(asked)}:
            context, ask = talk(engine, spec)
            with failing(monkeypatch, nth, code):
                turn = 0
                if nth > n_first:
                    assert ask(0) == wanted[0]
                    turn = 1
                with pytest.raises(StoreError) as told:
                    ask(turn)
            assert isinstance(told.value, NoSpace) == (code == errno.ENOSPC) and told.value.hint
            engine.check_integrity()
            state = context.session.state
            state.rows.check_integrity()
            assert state.n_bytes == dict(engine.shelf.charged()).get(state.name, 0)
            n_said = 90 + turn * (len(wanted[0]) + 30)
            assert context.n_tokens == n_said
            again = context.generate(max_tokens=N_NEW, ignore_eos=True).tokens
            if not turn:
                assert again == wanted[0]
            assert len(again) == N_NEW and state.rows.forms["below"]
            engine.check_integrity()
            engine.close_context("c")
            del context, ask, state, told  # a traceback holds its frames
            assert (held(engine), sheets()) == (before, files)


def failed(
    engine: Engine, spec: str, monkeypatch: pytest.MonkeyPatch, fault: tuple[str, int, int]
) -> tuple[Context, int]:
    """Return a context of two answers, of which the second met a fault, once it answered again, and how
    many tokens it had said."""
    what, nth, code = fault
    context, ask = talk(engine, spec)
    ask(0)
    n_said = context.n_tokens
    with failing(monkeypatch, nth, code, what), pytest.raises(StoreError) as told:
        ask(1)
    assert told.value.hint and ("read" if what == READ else "put") in told.value.message
    assert isinstance(told.value, NoSpace) == (code == errno.ENOSPC)
    engine.check_integrity()
    state = context.session.state
    state.rows.check_integrity()
    assert state.n_bytes == dict(engine.shelf.charged()).get(state.name, 0)
    return context, n_said + 30


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux")
@pytest.mark.parametrize("what", [READ, WRITE])
@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.sampled
def test_rows_that_cannot_be_read_back_fail_the_answer_that_wants_them(
    spec: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing else: the process goes on, and so does the context once the device does."""
    with Engine(transformers("llama"), base="", denoise="never") as engine:
        _, ask = talk(engine, spec)
        ask(0)
        with failing(monkeypatch, 10**6, errno.EIO, what) as asked:
            ask(1)
        engine.close_context("c")
        assert asked, "nothing was read or written in the second turn"
        files = sheets()
        for nth in {1, len(asked) // 2}:
            context, n_said = failed(engine, spec, monkeypatch, (what, max(1, nth), errno.EIO))
            assert context.n_tokens == n_said
            with failing(monkeypatch, 10**6, errno.EIO, what):
                again = context.generate(max_tokens=N_NEW, ignore_eos=True)
            assert len(again.tokens) == N_NEW and again.plan.drift != 0
            engine.check_integrity()
            engine.close_context("c")
            del context, again
            assert sheets() == files


def test_a_file_that_ends_too_early_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a mapped file that was SIGBUS."""
    with Engine(transformers("llama"), base="", denoise="never") as engine:
        context, ask = talk(engine, SPECS[1])
        ask(0)
        with monkeypatch.context() as patched:
            patched.setattr(os, READ, lambda *_: 0)
            with pytest.raises(StoreError, match="not all there"):
                ask(1)
        engine.check_integrity()
        assert len(context.generate(max_tokens=2, ignore_eos=True).tokens) == 2


def descriptors() -> int:
    """Return how many files this process has open."""
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs Linux")
def test_contexts_that_come_and_go_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some are forked, some fail, some are closed under an answer; each takes files, and all give them back."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    runner = transformers("llama")
    with Engine(runner, base="", denoise="never", budget=2000 * runner.row_bytes) as engine:
        seen, most = [], 0
        for i in range(MANY):
            context = engine.context("c", keep=SPECS[i % len(SPECS)])
            context.append(ids(60, i).tolist())
            if i % 5 == 4:
                with failing(monkeypatch, 1 + i % 3, errno.ENOSPC), pytest.raises(NoSpace):
                    context.generate(max_tokens=9, ignore_eos=True)
            else:
                context.generate(max_tokens=9, ignore_eos=True)
                assert context.session.state.rows.forms["below"]
            if i % 5 == 3:
                twin = engine.fork(context, "d")
                twin.begin(*request_from(9, {"ignore_eos": True}))
                for _ in range(5):
                    engine.loop.step()
                most = max(most, sheets())
                engine.close_context("d")
                del twin
            engine.close_context("c")
            del context
            engine.check_integrity()
            assert not list(tmp_path.iterdir()), "a file with a name"
            if i % 20 == 19:
                seen.append((held(engine), sheets(), descriptors(), engine.shelf.n_bytes))
        assert most > 0, "nothing was below"
        assert {found[:3] for found in seen} == {seen[0][:3]} and seen[0][:2] == (0, 0)
        assert seen[-1][3] <= engine.shelf.budget
