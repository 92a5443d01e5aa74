"""A private PostgreSQL server for tests: on a socket in a directory of its own, stopped by its pid."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from needs import APT, PIP, lack


def _binaries() -> Path | None:
    for where in (None, *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)):
        found = shutil.which("initdb", path=None if where is None else str(where))
        if found:
            return Path(found).resolve().parent
    return None


NAME = ".s.PGSQL.5432"
BINARIES = _binaries()
LACKING = ""
if BINARIES is None:
    LACKING = lack("no PostgreSQL server here", APT, "postgresql")
elif find_spec("psycopg") is None:
    LACKING = lack("psycopg is not installed", PIP, "psycopg[binary]")


class Server:
    """One server; `fresh` makes indexes in it."""

    def __init__(self, directory: Path) -> None:
        assert BINARIES is not None
        self.directory, self._n = directory, 0
        # It refuses to run as root.
        self._as = {"user": "nobody", "group": "nogroup"} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(directory, "nobody", "nogroup")
        self._do("initdb", "-D", directory / "data", "-U", "kvweave", "-A", "trust", "-N")
        self.start()

    def _do(self, name: str, *arguments: object) -> None:
        assert BINARIES is not None
        command = [str(BINARIES / name), *map(str, arguments)]
        environment = {**os.environ, "LC_ALL": "C.UTF-8"}
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            env=environment,
            cwd=self.directory,
            **self._as,
        )

    def start(self) -> None:
        assert BINARIES is not None
        command = [
            BINARIES / "postgres", "-D", self.directory / "data", "-k", self.directory,
            "-c", "listen_addresses=", "-c", "fsync=off", "-c", "max_connections=60",
        ]  # fmt: skip
        with open(self.directory / "log", "ab") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, cwd=self.directory, **self._as
            )
        import psycopg

        for _ in range(300):
            try:
                psycopg.connect(self._url()).close()
                return
            except psycopg.OperationalError:
                time.sleep(0.1)
        raise RuntimeError((self.directory / "log").read_text())

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        self.process.send_signal(how)
        self.process.wait(30)

    def _url(self, schema: str = "public") -> str:
        return (
            f"postgresql://kvweave@/postgres?host={self.directory}&options=-csearch_path%3D{schema}"
        )

    def fresh(self) -> str:
        """Return the address of an index that is not there yet."""
        import psycopg

        self._n += 1
        with psycopg.connect(self._url(), autocommit=True) as db:
            db.execute(f"CREATE SCHEMA test{self._n}")
        return self._url(f"test{self._n}")


class Wire:
    """A socket before a server's, on which questions or answers can get lost without a word."""

    def __init__(self, server: Server, directory: Path) -> None:
        self.loses: set[str] = set()
        self._there, self.directory = str(server.directory / NAME), directory
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(directory / NAME))
        self._socket.listen()
        self._open: list[socket.socket] = [self._socket]
        self._broken: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def of(self, url: str) -> str:
        """Return an index's address by this way."""
        return re.sub(r"host=[^&]*", f"host={self.directory}", url)

    def heal(self) -> None:
        """Lose nothing more; the server learns which connections are gone."""
        self.loses = set()
        for each in self._broken:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                mine, theirs = self._socket.accept()[0], socket.socket(socket.AF_UNIX)
                theirs.connect(self._there)
                self._open += [mine, theirs]
                for pair, what in (((mine, theirs), "questions"), ((theirs, mine), "answers")):
                    threading.Thread(target=self._pass, args=(*pair, what), daemon=True).start()

    def _pass(self, source: socket.socket, to: socket.socket, what: str) -> None:
        lost = False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                lost = lost or what in self.loses  # then this connection is broken for good
                if not lost:
                    to.sendall(data)
        with suppress(OSError):
            if lost or self.loses:
                self._broken += [source, to]
            else:
                to.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


@contextmanager
def running() -> Iterator[Server]:
    directory = Path(tempfile.mkdtemp(prefix="kvpg-"))
    server = None
    try:
        server = Server(directory)
        yield server
    finally:
        if server is not None:
            server.stop()
        shutil.rmtree(directory, ignore_errors=True)
