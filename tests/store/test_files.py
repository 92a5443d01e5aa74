from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store.conformance import Conformance, Make
from store.values import assert_holds, content, put_one, store

from kvweave.errors import InvalidArgument
from kvweave.store.tier.base import Get, Tier
from kvweave.store.tier.files import FileTier


class TestFiles(Conformance):
    @pytest.fixture
    def make(self, tmp_path: Path) -> Make:
        numbers = itertools.count()
        return lambda capacity=None: FileTier(tmp_path / f"files-{next(numbers)}", capacity)

    def taken(self, n: int) -> int:
        return -(-n // 4096) * 4096

    def corrupt(self, tier: Tier, key: str) -> None:
        path = tier.path(key)  # type: ignore[attr-defined]
        data = bytearray(path.read_bytes())
        data[len(data) * 3 // 4] ^= 0x10
        path.write_bytes(data)

    def tear(self, tier: Tier, key: str) -> None:
        path = tier.path(key)  # type: ignore[attr-defined]
        os.truncate(path, path.stat().st_size // 2)

    @contextlib.contextmanager
    def slow(self, tier: Tier, seconds: float) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "preadv", slower(os.preadv, seconds))
            yield

    def lose(self, tier: Tier) -> None:
        shutil.rmtree(tier.directory)  # type: ignore[attr-defined]

    def reopen(self, tier: Tier) -> Tier:
        tier.close()
        return FileTier(tier.directory)  # type: ignore[attr-defined]


def slower(call: Callable[..., int], seconds: float) -> Callable[..., int]:
    def wait(*args: object) -> int:
        time.sleep(seconds)
        return call(*args)

    return wait


def test_a_value_is_a_file_and_nothing_else(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    store(tier, "docs-faq", b"hello", durable=True)
    assert sorted(os.listdir(tmp_path)) == ["docs-faq.kv", "files.lock"]
    assert (tmp_path / "docs-faq.kv").read_bytes() == b"hello"
    tier.close()


def test_what_a_crash_left_is_removed(tmp_path: Path) -> None:
    tmp_path.joinpath("~3.part").write_bytes(b"half")
    tmp_path.joinpath("a.kv").write_bytes(content("a", 5000))
    tier = FileTier(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "files.lock"]
    assert tier.n_bytes == 8192
    assert_holds(tier, "a", content("a", 5000))
    tier.close()


def test_one_process_at_a_time(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    with pytest.raises(InvalidArgument, match=f"open in process {os.getpid()}") as caught:
        FileTier(tmp_path)
    assert caught.value.hint
    tier.close()
    FileTier(tmp_path).close()


@pytest.mark.parametrize(("code", "state"), [(errno.ENOSPC, "full"), (errno.EIO, "failed")])
def test_a_disk_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, state: str
) -> None:
    tier = FileTier(tmp_path)
    store(tier, "a", content("a", 5000))

    def refuse(*args: object) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", refuse)
        assert put_one(tier, "a", content("a", 9000, 1)).state == state
    assert_holds(tier, "a", content("a", 5000))
    assert tier.n_bytes == 8192
    assert sorted(os.listdir(tmp_path)) == ["a.kv", "files.lock"]
    tier.check_integrity()
    tier.close()


def test_a_read_error_is_no_wrong_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = FileTier(tmp_path)
    store(tier, "a", content("a", 5000))

    def refuse(*args: object) -> int:
        raise OSError(errno.EIO, "bad sector")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", refuse)

        (outcome,) = tier.get([Get("a", 0, [memoryview(bytearray(10))])])
    assert outcome.state == "failed" and "bad sector" in outcome.why
    tier.close()
