"""What was learned is believed as it was written, or not at all: a bound with one other digit is a lie."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import tiny
from weaving import flat

from kvweave import Engine
from kvweave.errors import CorruptChunk, FormatTooNew
from kvweave.weave.audit import AuditCell, Auditor
from kvweave.weave.calibration import Calibration
from kvweave.weave.learned import write_learned
from kvweave.weave.shift import LEAST

CELL = AuditCell("none", 0.0, False, "raw", "raw", "forget")


def audited() -> Auditor:
    made = Auditor()
    for _ in range(LEAST + 1):
        made.saw(CELL, 0.125, None)
    return made


def save(what: str, file: Path) -> Any:
    if what == "calibration":
        flat(s25=0.125).save(file)
    else:
        write_learned(file, audited().told(tiny().fingerprint))
    return read(what, file)


def read(what: str, file: Path) -> Any:
    if what == "calibration":
        return Calibration.load(file)
    return list(Auditor.load(file, tiny().fingerprint).report())


@pytest.mark.parametrize("what", ["calibration", "audits"])
def test_one_bit_changes_nothing_unseen(tmp_path: Path, what: str) -> None:
    file, rng = tmp_path / "it.json", random.Random(what)
    wanted, whole, refused = save(what, file), file.read_bytes(), 0
    places = [i for i, byte in enumerate(whole) if chr(byte).isdigit()]
    for at in rng.sample(places, min(20, len(places))):
        spoilt = bytearray(whole)
        spoilt[at] ^= 1
        file.write_bytes(spoilt)
        try:
            assert read(what, file) == wanted
        except CorruptChunk as error:
            assert error.hint
            refused += 1
    assert refused


def change(told: Any, path: tuple[Any, ...], value: Any) -> Any:
    at = told
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return told


@pytest.mark.parametrize(
    ("what", "path", "value"),
    [
        ("audits", ("cells", 0, "aim"), "much"),
        ("audits", ("cells", 0, "aim"), float("nan")),
        ("audits", ("cells", 0, "n_promised"), None),
        ("audits", ("cells", 0, "window", 3), float("nan")),
        ("audits", ("cells", 0, "cell", "share"), "0.15"),
        ("audits", ("cells",), 7),
        ("calibration", ("curves", 0, "weights"), [1.0]),
        ("calibration", ("curves", 0, "bounds"), []),
        ("calibration", ("curves", 0, "low", 0), float("nan")),
        ("calibration", ("n",), float("inf")),
        ("calibration", ("coverage",), 10**400),
    ],
)
def test_what_no_one_can_reckon_with_is_refused_when_it_is_read(
    tmp_path: Path, what: str, path: tuple[Any, ...], value: Any
) -> None:
    """An earlier version wrote no checksum; what is of no form raised in the midst of an answer."""
    file = tmp_path / "it.json"
    save(what, file)
    told = json.loads(file.read_text())
    del told["sum"]
    file.write_text(json.dumps(told))
    assert read(what, file), "what has none is believed"
    file.write_text(json.dumps(change(told, path, value)))
    with pytest.raises(CorruptChunk):
        read(what, file)
    file.write_text("[" * 100_000)
    with pytest.raises(CorruptChunk):
        read(what, file)


@pytest.mark.parametrize("how", ["damaged", "later"])
def test_audits_that_are_not_read_are_not_written_over(tmp_path: Path, how: str) -> None:
    home, file = tmp_path / "home", tmp_path / "home" / "audit.json"
    home.mkdir()
    save("audits", file)
    told = json.loads(file.read_text())
    if how == "later":
        del told["sum"]
        write_learned(file, change(told, ("cells", 0, "cell", "kernel"), "fused"))
        with pytest.raises(FormatTooNew):
            read("audits", file)
    else:
        file.write_text(json.dumps(change(told, ("cells", 0, "window", 0), 0.25)))
    before = file.read_bytes()
    with Engine(tiny(), home=home, repair="none", audit=1.0) as engine:
        engine.shadow.auditor.saw(CELL, 0.5, None)
    names = {path.name: path.read_bytes() for path in home.glob("audit*")}
    assert before in names.values()
    assert (names["audit.json"] == before) == (how == "later")
