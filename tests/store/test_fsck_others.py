"""`kvweave fsck --repair` where not all that lies there is this home's, or its model is told wrongly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import tiny
from weaving import text

from kvweave import Engine
from kvweave.cli.app import main
from kvweave.store.codec import parse
from kvweave.store.record.encode import encode


def put(home: Path | None, *tiers: str, model: str = "llama", seed: int = 0) -> None:
    with Engine(tiny(model), home=home, repair="none", tiers=tiers or None) as engine:
        for i in range(3):
            engine.put(f"n/{i}", text(20, seed + i))
            engine.place(f"n/{i}", "disk")


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama", "qwen3"])
@pytest.mark.parametrize("is_damaged", [False, True], ids=["whole", "damaged"])
def test_records_of_others_stay_where_the_spec_does_not_say_that_it_is_shared(
    tmp_path: Path, model: str, is_damaged: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """An engine is not asked for ``shared=yes`` again, and runs; nor is who repairs its home."""
    there = tmp_path / "there"
    put(tmp_path / "one", f"disk path={there} shared=yes")
    with Engine(
        tiny(), home=tmp_path / "one", repair="none", tiers=(f"disk path={there}",)
    ) as engine:
        engine.shelf.save(int(engine.files.stat("n/0").id))
    put(tmp_path / "two", spec := f"disk path={there}", model=model, seed=7)
    owner = (there / "owner.json").read_text()
    if is_damaged:
        (there / "owner.json").write_text("{")
    before = names(there)
    command = ["fsck", str(tmp_path / "two"), "--tier", spec, "--repair"]
    assert main([*command, "--discard-strays"]) == 0
    assert names(there) == before and len(before) == 3 + 3 + 3 + 1  # for sweeps
    assert (there / "owner.json").read_text() == owner
    assert "0 spoilt, 0 missing, 0 of chunks" in capsys.readouterr().out


def test_a_directory_whose_owner_is_damaged_is_not_emptied_by_who_takes_it_over(
    tmp_path: Path,
) -> None:
    """A home gives the tier of another one by mistake: what lies there is strays to it."""
    there, spec = tmp_path / "there", f"disk path={tmp_path / 'there'}"
    put(tmp_path / "one", spec)
    put(tmp_path / "two", seed=7)
    (there / "owner.json").write_text("{")
    before = {name for name in names(there) if name.endswith(".kv")}
    assert len(before) == 3
    command = ["fsck", str(tmp_path / "two"), "--tier", spec, "--repair", "--discard-strays"]
    main(command)
    assert before <= names(there), "it was taken over, and emptied, in one run"
    main(command)
    assert not before & names(there), "asked for again, of what is this home's now"


def test_a_cache_of_engines_without_a_home_stays_nobodys(tmp_path: Path) -> None:
    there, spec = tmp_path / "there", f"disk path={tmp_path / 'there'}"
    put(None, spec)
    put(tmp_path / "home")
    before = names(there)
    command = ["fsck", str(tmp_path / "home"), "--tier", spec]
    for more in ([], ["--repair"], ["--repair", "--discard-strays"]):
        assert main([*command, *more]) == 0
        assert names(there) - {"owner.lock"} == before
    put(None, spec, seed=7)  # it is not refused


def test_a_model_that_no_record_is_of_condemns_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``model.json`` has no checksum: with one digit changed it is the fingerprint of another model."""
    home, file = tmp_path / "home", tmp_path / "home" / "model.json"
    put(home)
    said, before = json.loads(file.read_text()), names(home / "kv")
    said["weights"] = said["weights"][:-1] + ("1" if said["weights"][-1] == "0" else "0")
    file.write_text(json.dumps(said))
    assert main(["fsck", str(home)]) == 1
    assert "3 of 3 records of its chunks are of another model" in capsys.readouterr().out
    assert file.exists() and names(home / "kv") == before
    assert main(["fsck", str(home), "--repair", "--discard-strays"]) == 0
    assert not file.exists() and names(home / "kv") == before
    assert "model.json.damaged-1" in names(home)
    with Engine(tiny(), home=home, repair="none") as engine:
        assert [entry.tier for entry in engine.files.ls()] == ["disk"] * 3
        engine.put("more", text(20, 9))
    assert main(["fsck", str(home)]) == 0


def test_a_record_that_alone_says_another_model_is_told_and_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    put(home)
    first = min((home / "kv").glob("*.kv"))
    with Engine(tiny(), home=home, repair="none") as engine:
        (kv,) = [engine.shelf.get(int(r.id)) for r in engine.table if r.digest.hex() in first.name]
    assert kv is not None
    first.write_bytes(b"".join(encode(kv, parse("raw"), "ab" * 16, first.name.split(".")[0])))
    before = names(home / "kv")
    for more in ([], ["--repair"], ["--repair"]):
        assert main(["fsck", str(home), *more]) == 1
        assert "1 of 3 records of its chunks are of another model" in capsys.readouterr().out
        assert names(home / "kv") == before and (home / "model.json").exists()
