"""Real servers for the tests of remote tiers: on loopback, on free ports, stopped by their pid."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from needs import APT, PIP, lack

START = 30.0  # seconds a server may take until it answers

REDIS = shutil.which("redis-server") or shutil.which("valkey-server")
MASTER = Path(sys.executable).with_name("mooncake_master")


def mooncake_lacks() -> str:
    """Return why Mooncake cannot be used here, empty if it can; asks a process of its own."""
    package = "mooncake-transfer-engine-non-cuda"
    if importlib.util.find_spec("mooncake") is None or not MASTER.exists():
        return lack(f"{package} is not installed", PIP, package)
    words = [sys.executable, "-c", "import mooncake.store"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    said = done.stderr.strip().splitlines() or [f"status {done.returncode}"]
    libraries = ("libibverbs1", "librdmacm1", "libnuma1", "libcurl4")
    return lack(f"Mooncake's library does not load ({said[-1]})", APT, *libraries)


NO_REDIS = lack("no redis-server or valkey-server here", APT, "redis-server")
NO_MOTO = lack("moto, flask or flask-cors is not installed", PIP, "moto[s3]", "flask", "flask-cors")
NO_MOONCAKE = mooncake_lacks()
needs_redis = pytest.mark.skipif(REDIS is None, reason=NO_REDIS)
needs_mooncake = pytest.mark.skipif(bool(NO_MOONCAKE), reason=NO_MOONCAKE)
needs_moto = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("moto", "flask", "flask_cors")),
    reason=NO_MOTO,
)


def free_port() -> int:
    """Return a port of loopback that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def listens(port: int, path: str = "") -> bool:
    """Say whether somebody takes connections at a port of loopback, or a path."""
    with socket.socket(socket.AF_UNIX if path else socket.AF_INET) as sock:
        sock.settimeout(1)
        return sock.connect_ex(path or ("127.0.0.1", port)) == 0


class Server:
    """A process of ours; ``port`` is where it answers."""

    def __init__(
        self, words: Sequence[str], port: int, log: Path, answers: Callable[[], bool] | None = None
    ) -> None:
        self.port = port
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
            )
        try:
            self._wait(answers or self._listens)
        except BaseException:
            self.kill()
            raise

    def _wait(self, answers: Callable[[], bool]) -> None:
        end = time.monotonic() + START
        while not answers():
            assert self.process.poll() is None, self.log.read_text(errors="replace")[-2000:]
            assert time.monotonic() < end, f"{self.process.args!r} does not answer"
            time.sleep(0.02)

    def _listens(self) -> bool:
        return listens(self.port)

    def kill(self) -> None:
        """SIGKILL, if it still runs."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)

    def stop(self) -> None:
        """Let it go properly; kill it if that takes too long."""
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
        self.kill()

    @contextlib.contextmanager
    def frozen(self, seconds: float | None = None) -> Iterator[None]:
        """Do not let it run while inside, or for ``seconds``."""
        os.kill(self.process.pid, signal.SIGSTOP)
        end = time.monotonic() + START
        while not self._stands_still():
            assert time.monotonic() < end, "it goes on"
            time.sleep(0.001)
        thaw = threading.Timer(seconds or START, self._thaw)
        thaw.start()
        try:
            yield
        finally:
            if seconds is None:
                self._thaw()
                thaw.cancel()
            thaw.join()

    def _stands_still(self) -> bool:
        """Say whether every thread has taken notice of SIGSTOP."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(task.read_text().rpartition(") ")[2][0] == "T" for task in tasks)

    def _thaw(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGCONT)


def redis(
    folder: Path, *options: str, port: int | None = None, answers: Callable[[], bool] | None = None
) -> Server:
    """Start a Redis that writes nothing to disk, unless ``options`` say otherwise."""
    assert REDIS is not None
    port = free_port() if port is None else port
    words = [REDIS, "--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder)]
    words += ["--save", "", "--appendonly", "no", "--daemonize", "no", *options]
    return Server(words, port, folder / f"redis-{port}.log", answers)


def mooncake_master(folder: Path, *options: str) -> tuple[Server, int]:
    """Start a Mooncake master whose ports are on loopback; return it and its metrics port."""
    port, metrics = free_port(), free_port()
    words = [str(MASTER), f"--rpc_port={port}", "--rpc_address=127.0.0.1", *options]
    words += [f"--metrics_port={metrics}", "--metrics_host=127.0.0.1"]
    return Server(words, port, folder / f"mooncake-{port}.log"), metrics


def moto(folder: Path) -> Server:
    """Start a server that speaks S3 and keeps everything in memory."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    return Server(words, port, folder / f"moto-{port}.log")


def put(url: str) -> int:
    """Send a PUT without a body, as a new S3 bucket needs, and return the status."""
    request = urllib.request.Request(url, method="PUT")
    with urllib.request.urlopen(request, timeout=START) as answer:
        return int(answer.status)
