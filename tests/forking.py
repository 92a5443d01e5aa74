"""Processes of their own that do not import anew what a server needs: that takes four seconds of a CPU.

One process imports it and forks for whoever asks. What was forked is as ``python -c CODE WORDS`` would be.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent
# What can be imported in processes of their own. Read before any test: some have `bench` there while they run,
# and its `serve.py` would be found for the tests' folder.
IMPORTABLE = os.pathsep.join([str(TESTS), *filter(None, sys.path)])
COMMAND = [sys.executable, "-m", "kvweave.cli"]
MAIN = "import sys; from kvweave.cli import main; sys.exit(main())"
HOST = f"""
import sys
sys.path.insert(0, {str(TESTS)!r})
from kvweave.cli.start import uncollected
with uncollected():
    from kvweave.cli import main
    import kvweave.serve.app, kvweave.engine
import forking
forking.serve()
"""
LARGEST = 1 << 18  # bytes of one request
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of Linux; the second since 6.1


class Forked:
    """A process that was forked, as `subprocess.Popen` shows one."""

    def __init__(self, host: Host, pid: int, out: int) -> None:
        self.pid, self.returncode, self._host = pid, None, host
        self.stdout = os.fdopen(out)
        self._ended = os.pidfd_open(pid)

    returncode: int | None

    def poll(self) -> int | None:
        """Return its status, None while it runs."""
        return self._status(0)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def wait(self) -> int | None:
        """Wait for its end; return its status."""
        return self._status(None)

    def __enter__(self) -> Forked:
        return self

    def __exit__(self, *_: object) -> None:
        self.communicate()

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for its end; return what else it says. Raises TimeoutExpired."""
        if self._status(timeout) is None:
            raise subprocess.TimeoutExpired(f"fork {self.pid}", timeout or 0)
        with self.stdout:
            return self.stdout.read(), None

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self._ended], [], [], timeout)[0]:
            self.returncode = self._host.ask({"wait": self.pid})
            os.close(self._ended)
        return self.returncode


class Host:
    """What forks."""

    def __init__(self) -> None:
        self.link, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        env = os.environ | {"PYTHONPATH": IMPORTABLE}
        with far:
            self.process = subprocess.Popen([sys.executable, "-c", HOST], stdin=far, env=env)
        atexit.register(self.close)

    def ask(self, request: Mapping[str, Any], fds: Sequence[int] = ()) -> int:
        socket.send_fds(self.link, [json.dumps(request).encode()], fds)
        return int(self.link.recv(64))

    def close(self) -> None:
        self.link.close()
        self.process.wait(30)


@cache
def _host() -> Host:
    return Host()


def fork(
    code: str,
    words: Sequence[str],
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Forked:
    """Run ``code`` with these arguments in a process of its own, its errors appended to ``log``."""
    out, theirs = os.pipe()
    errors = os.open(log or os.devnull, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    request = {"code": code, "words": list(words), "cwd": str(cwd or Path.cwd())}
    try:
        pid = _host().ask(request | {"env": dict(env or os.environ)}, [theirs, errors])
    finally:
        os.close(theirs)
        os.close(errors)
    return Forked(_host(), pid, out)


class Instead:
    """What the benches that start servers take of `subprocess`, by a fork."""

    PIPE = subprocess.PIPE

    @staticmethod
    def Popen(words: Sequence[str], *, env: Mapping[str, str], stdout: int, text: bool) -> Forked:
        assert [*words[:3]] == COMMAND and stdout == subprocess.PIPE and text
        return fork(MAIN, words[3:], env=env, log=Path("/dev/stderr"))


def in_huge_pages() -> None:
    """Have the memory of this process in pages of 2 MiB, where Linux can: a fork takes a third of the time
    then, and touches fewer pages for the first time."""
    libc, size = ctypes.CDLL(None), 2 << 20
    maps = Path("/proc/self/maps")
    for line in maps.read_text().splitlines() if maps.exists() else ():
        where, may, _, _, inode, *name = line.split()
        start, end = (int(at, 16) for at in where.split("-"))
        if may == "rw-p" and inode == "0" and name != ["[stack]"]:
            for at in range(-(-start // size) * size, end - size + 1, size):
                for advice in (MADV_HUGEPAGE, MADV_COLLAPSE):
                    libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(size), advice)


def serve() -> None:
    """Fork when told to, until nobody tells any more. A fork comes back, and runs its code."""
    import gc

    gc.collect()
    gc.freeze()
    in_huge_pages()
    link = socket.socket(fileno=os.dup(0))
    while True:
        data, fds, _, _ = socket.recv_fds(link, LARGEST, 2)
        if not data:
            return
        told = json.loads(data)
        if "wait" in told:
            answer = os.waitstatus_to_exitcode(os.waitpid(told["wait"], 0)[1])
        elif (answer := os.fork()) == 0:
            link.close()
            return _become(told, fds)
        for fd in fds:
            os.close(fd)
        link.send(str(answer).encode())


def _become(told: dict[str, Any], fds: list[int]) -> None:
    import tempfile

    null = os.open(os.devnull, os.O_RDONLY)
    for fd, number in zip((null, *fds), range(3), strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(told["cwd"])
    os.environ.clear()
    os.environ.update(told["env"])
    tempfile.tempdir = None  # it goes by the environment
    sys.argv = ["-c", *told["words"]]
    exec(told["code"], {"__name__": "__main__"})
