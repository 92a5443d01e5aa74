"""Builds and drives the shim (shim.c), and makes of a directory what a power cut leaves of it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import needs
import pytest

NAMES = "open read write sync rename unlink size list stat make lock".split()
BITS = OPEN, READ, WRITE, SYNC, RENAME, UNLINK, SIZE, LIST, STAT, MAKE, LOCK = tuple(
    1 << bit for bit in range(len(NAMES))
)
KINDS = dict(zip(BITS, NAMES, strict=True))
WRITING = OPEN | WRITE | SYNC | RENAME | SIZE
READING = OPEN | READ | LIST
FAIL, SHORT, HANG, DROP = range(4)
EVER = 1 << 60
PAGE = 4096


class _Struct(ctypes.Structure):
    """`struct control` of shim.c."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("on", "ops")),
        *((name, ctypes.c_int32) for name in ("error", "mode")),
        *((name, ctypes.c_int64) for name in ("first", "last", "seen", "hits")),
        *((name, ctypes.c_double) for name in ("seconds", "skew")),
        *((name, ctypes.c_uint32) for name in ("n_lost", "named")),
        ("aim", ctypes.c_char * 512),
        ("only", ctypes.c_char * 128),
        ("roots", ctypes.c_char * 512 * 2),
        ("shadow", ctypes.c_char * 512),
        ("what", ctypes.c_char * 768),
        ("boot", ctypes.c_char * 512),
    ]


class Control:
    """The file through which every process under the shim is told what to fail."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():
            path.write_bytes(bytes(ctypes.sizeof(_Struct)))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Struct))
        self.raw = _Struct.from_buffer(self._map)

    def aim(
        self, ops: int, where: Path, *, error: int = errno.EIO, mode: int = FAIL, first: int = 0,
        count: int = EVER, seconds: float = 0.0, only: str = "",
    ) -> None:  # fmt: skip
        """Hit matching calls number ``first`` to ``first + count`` from now on."""
        raw = self.raw
        raw.on = 0
        raw.ops, raw.error, raw.mode, raw.seconds = ops, error, mode, seconds
        raw.first, raw.last, raw.seen, raw.hits = first, first + count, 0, 0
        raw.aim, raw.only, raw.what = os.fsencode(where), only.encode(), b""
        raw.on = 1

    def off(self) -> None:
        self.raw.on = 0

    @contextmanager
    def aimed(self, *args: object, **options: object) -> Iterator[Control]:
        self.aim(*args, **options)  # type: ignore[arg-type]
        try:
            yield self
        finally:
            self.off()

    @property
    def site(self) -> str:
        """What was hit last: the call, and which kind of file (digits and hex are one)."""
        op, _, path = bytes(self.raw.what).split(b"\0")[0].decode().partition(" ")
        name = Path(path.removesuffix(" (deleted)")).name
        kind = "*" + name[name.find(".") :] if "." in name else "a directory"
        return f"{KINDS[int(op)]} {kind}" if op else ""

    # ---- power cuts

    def watch(self, shadow: Path, *roots: Path) -> None:
        """From now on only what is synced under ``roots`` survives `power_cut`; what is there does."""
        shutil.rmtree(shadow, ignore_errors=True)
        shadow.mkdir()
        for root in roots:
            for directory, dirs, files in os.walk(root):
                lines = []
                for name in (*dirs, *files):
                    path = Path(directory) / name
                    ino = path.lstat().st_ino
                    lines.append(f"{ino} {name}\n")
                    if name in files and path.is_file():
                        os.link(path, shadow / f"k.{ino}")
                        shutil.copyfile(path, shadow / f"d.{ino}")
                (shadow / _listing(directory)).write_text("".join(lines))
        for i in range(2):
            self.raw.roots[i].value = os.fsencode(roots[i]) if i < len(roots) else b""
        self.raw.n_lost = 0
        self.raw.shadow = os.fsencode(shadow)

    def unwatch(self) -> None:
        """Whoever opens from now on is behind another boot."""
        self.raw.shadow = b""
        boot = self.path.with_name("boot")
        boot.write_text(f"{uuid.uuid4()}\n")
        self.raw.boot = os.fsencode(boot)


def _listing(directory: str | Path) -> str:
    return "D." + str(directory).replace("/", "%")


def power_cut(shadow: Path, *roots: Path, rng: random.Random | None = None) -> None:
    """Leave of ``roots`` what was synced; with ``rng`` also any pages and names that happened to be."""
    for root in roots:
        fresh = root.with_name(root.name + "~cut")
        _rebuild(shadow, root, fresh, rng)
        shutil.rmtree(root)
        fresh.rename(root)


def _rebuild(shadow: Path, path: Path, to: Path, rng: random.Random | None) -> None:
    to.mkdir()
    now = {e.name: e.inode() for e in os.scandir(path)} if path.is_dir() else {}
    listing = shadow / _listing(path)
    lines = listing.read_text().splitlines() if listing.exists() else []
    synced = {name: int(ino) for ino, name in (line.split(" ", 1) for line in lines)}
    for name, ino in (now if rng is not None and rng.random() < 0.5 else synced).items():
        if (shadow / _listing(path / name)).exists() or (path / name).is_dir():
            _rebuild(shadow, path / name, to / name, rng)
        else:
            (to / name).write_bytes(_content(shadow, ino, path / name, rng))


def _content(shadow: Path, ino: int, path: Path, rng: random.Random | None) -> bytes:
    old = _read(shadow / f"d.{ino}")
    if rng is None:
        return old
    there = path.exists() and path.lstat().st_ino == ino
    new, lost = _read(path if there else shadow / f"k.{ino}"), _read(shadow / f"l.{ino}")
    made = bytearray(new if rng.random() < 0.5 else new[: len(old)].ljust(len(old), b"\0"))
    for at in range(0, len(made), PAGE):
        page = at // PAGE
        if rng.random() < 0.5 or lost[page : page + 1] == b"\1":
            n = len(made[at : at + PAGE])
            made[at : at + n] = old[at : at + n].ljust(n, b"\0")
    return bytes(made)


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def build(directory: Path) -> Path:
    """Compile the shim; skips the test where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip(needs.lack("no C compiler", needs.APT, "gcc", "libc6-dev"))
    made = directory / "shim.so"
    source = Path(__file__).with_name("shim.c")
    command = [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(made), str(source), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(needs.lack("the C compiler finds no headers", needs.APT, "gcc", "libc6-dev"))
    return made
