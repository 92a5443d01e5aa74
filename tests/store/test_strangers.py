"""What somebody else put on a tier that engines share: a sweep says what it is, or passes over it."""

from __future__ import annotations

from typing import Any

import pytest
from needs import PIP, lack

from kvweave.errors import InvalidArgument, StoreError
from kvweave.store.collect import ROOM, sweep
from kvweave.store.tier.s3 import Archive

obstore = pytest.importorskip("obstore", reason=lack("obstore is not installed", PIP, "obstore"))
stores = pytest.importorskip("obstore.store")
DIGEST = "0123456789abcdef" * 2


def _with(**objects: bytes) -> Archive:
    tier = Archive(stores.MemoryStore(), prefix="p")
    for name, data in objects.items():
        obstore.put(tier._store, f"p/{name}.kv", data)
    return tier


@pytest.mark.parametrize("name", [f"{DIGEST}.RAW kv", f"{DIGEST}.{'r' * 165}"])
def test_what_no_record_is_called_is_passed_over(name: str) -> None:
    tier = _with(**{name: b"x", f"{DIGEST}.raw": b"y"})
    assert sweep(tier, set, set()).removed == [f"{DIGEST}.raw"]
    assert obstore.head(tier._store, f"p/{name}.kv")["size"] == 1


@pytest.mark.parametrize("said", [b"[" * 20_000, b"", b"{" + b" " * ROOM + b"}"])
def test_an_index_that_says_nothing(said: bytes) -> None:
    tier = _with(**{"index.77": said, f"{DIGEST}.raw": b"y"})
    with pytest.raises(InvalidArgument, match=r"77 \(nobody knows where"):
        sweep(tier, set, set())
    assert sweep(tier, set, set(), retired=["77"]).removed == [f"{DIGEST}.raw"]


def test_an_index_as_large_as_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = _with(**{"index.77": b"x"})
    monkeypatch.setattr(tier, "look", lambda keys, deadline=None: [1 << 60] * len(keys))
    with pytest.raises(InvalidArgument, match=r"77 \(nobody knows where"):
        sweep(tier, set, set())


def test_a_sweep_that_fails_leaves_though_the_server_is_left_alone() -> None:
    tier = _with(**{f"{DIGEST}.raw": b"y"})

    class Failing:
        exceptions = obstore.exceptions

        def __getattr__(self, name: str) -> Any:
            return getattr(obstore, name)

        def list(self, *args: Any, **options: Any) -> Any:
            raise OSError("500 InternalError")

    tier._api = Failing()
    with pytest.raises(StoreError, match="500"):
        sweep(tier, set, set())
    left = {meta["path"] for page in obstore.list(tier._store) for meta in page}
    assert left == {f"p/{DIGEST}.raw.kv", "p/spare.kv"}
