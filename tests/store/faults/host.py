"""A process under the shim that has the model loaded and forks: each fork is one engine's life."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NoReturn

from forking import IMPORTABLE, in_huge_pages
from store.faults.shim import Control

from kvweave.cli.start import uncollected


class Died(Exception):
    """The process ended without a result, or was given up (``hung``)."""


class Child:
    """One fork; it says things while it lives, and has a result if it ends by itself."""

    def __init__(self, host: Host, pid: int, link: Connection) -> None:
        self.host, self.pid, self.link = host, pid, link

    def hear(self, limit: float) -> Any:
        """Return what it says next; None when it is dead or says nothing for so long."""
        try:
            return self.link.recv() if self.link.poll(limit) else None
        except (EOFError, OSError):
            return None

    def result(self, limit: float = 120.0) -> Any:
        while (heard := self.hear(limit)) is not None:
            if heard[0] == "end":
                self.host.wait(self.pid)
                return heard[1]
            if heard[0] == "raised":
                self.host.wait(self.pid)
                raise Died(heard[1])
        code = self.kill()
        raise Died(f"no result within {limit} s, or it died: status {code}")

    def kill(self) -> int:
        """End it as a crash would; whatever it held is free on return."""
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        return self.host.wait(self.pid)


class Host:
    """Forks engines. ``shim`` is the library to preload, None for none."""

    def __init__(self, shim: Path | None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="kvf-"))  # short: it holds a socket
        self.control = Control(self.directory / "control")
        address = str(self.directory / "s")
        self.listener = Listener(address, "AF_UNIX")
        env = dict(os.environ, KVWEAVE_FAULTS=str(self.control.path), OMP_NUM_THREADS="1")
        env["PYTHONPATH"] = IMPORTABLE
        if shim is not None:
            env["LD_PRELOAD"] = str(shim)
        code = f"from store.faults import host; host.serve({address!r})"
        self.process = subprocess.Popen([sys.executable, "-c", code], env=env)
        self.link = self.listener.accept()

    def start(self, script: str, *args: Any) -> Child:
        """Fork, and run a function of `store.faults.scripts`, `stories`, `roaming` or `refusing` there."""
        self.link.send(("fork", script, args))
        return Child(self, self.link.recv(), self.listener.accept())

    def run(self, script: str, *args: Any, limit: float = 120.0) -> Any:
        return self.start(script, *args).result(limit)

    def last_word(self, script: str, *args: Any, limit: float = 120.0) -> Any:
        """As `run`, for what may end badly: return ("end", result) or ("raised", where, its hint)."""
        child = self.start(script, *args)
        heard = child.hear(limit)
        child.kill()
        return heard

    def wait(self, pid: int) -> int:
        self.link.send(("wait", pid, ()))
        return int(self.link.recv())

    def close(self) -> None:
        self.link.close()
        self.process.wait(30)
        self.listener.close()


def serve(address: str) -> None:
    """Fork when told to, until nobody tells any more."""
    with uncollected():
        from store.faults import refusing, roaming, scripts, stories

    known = {**vars(refusing), **vars(stories), **vars(roaming), **vars(scripts)}
    scripts.prepare()
    in_huge_pages()
    link = Client(address, "AF_UNIX")
    while True:
        try:
            what, first, args = link.recv()
        except EOFError:
            return
        if what == "wait":
            link.send(os.waitpid(first, 0)[1])
            continue
        assert threading.active_count() == 1, "a fork would not have the other threads"
        pid = os.fork()
        if pid == 0:
            link.close()
            _live(address, known[first], args)
        link.send(pid)


def _live(address: str, script: Any, args: tuple[Any, ...]) -> NoReturn:
    link = Client(address, "AF_UNIX")
    try:
        link.send(("end", script(link.send, *args)))
    except BaseException as error:
        link.send(("raised", traceback.format_exc(), str(getattr(error, "hint", ""))))
    os._exit(0)  # as it is: threads that hang do not matter
