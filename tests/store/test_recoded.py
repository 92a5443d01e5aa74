"""A chunk whose KV is on a tier in two codecs: what is let go of is gone, what is found is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from world import models

from kvweave import Engine

TOKENS = [*range(9, 29)]


def records(home: Path) -> list[str]:
    return sorted(path.name for path in (home / "kv").glob("*.kv"))


@pytest.mark.parametrize("codecs", [("raw", "int8"), ("int8", "raw"), ("raw", "int8", "int4")])
@pytest.mark.parametrize("verb", ["rm", "none", "memory"])
def test_what_is_let_go_of_leaves_no_record_in_any_codec(
    tmp_path: Path, codecs: tuple[str, ...], verb: str
) -> None:
    home = tmp_path / "home"
    with Engine(models.build("llama")[0], home=home, repair="none") as engine:
        kept = engine.put("kept", [*TOKENS, 40])
        engine.place("kept", "disk")
        before = records(home)
        engine.put("a", TOKENS)
        for codec in codecs:
            engine.place("a", "disk", codec=codec)
        assert len(records(home)) > len(before)
        if verb == "rm":
            engine.files.rm("a")
        else:
            engine.place("a", "none" if verb == "none" else engine.shelf.memory)
        assert records(home) == before, "KV of what was let go of is still on the disk"
        assert engine.shelf.tier(kept.id) == "disk"
        engine.check_integrity()


def test_a_record_that_is_found_is_told_to_the_index(tmp_path: Path) -> None:
    with Engine(models.build("llama")[0], home=tmp_path / "home", repair="none") as engine:
        entry = engine.put("a", TOKENS)
        engine.place("a", "disk")
        level = engine.shelf.mover.levels[0]
        held = level.forget(entry.id)  # as if another engine had written it
        assert held is not None
        level.book.stray(held.key, held.n_bytes)
        engine.shelf.on_tier(entry.id, "none", 0)
        assert engine.denoise() == 0
        assert engine.files.stat("a").tier == engine.shelf.tier(entry.id) == "disk"
        assert engine.files.stat("a").n_bytes == held.n_bytes
