"""A server in a process of its own, for tests that hurt it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from forking import Forked, fork

# the shell's entry point, with the engine's own check of itself before it closes
MAIN = """
import sys
from kvweave.cli import main
from kvweave.engine import Engine
close = Engine.close
def check_and_close(engine):
    engine.check_integrity()
    close(engine)
Engine.close = check_and_close
sys.exit(main())
"""
START_SECONDS = 180.0  # importing torch on a busy machine


@dataclass
class Launched:
    """A running server; all it may write is below ``directory``."""

    process: Forked
    url: str
    port: int
    directory: Path

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def client(self, key: str = "", timeout: float = 120.0) -> httpx.Client:
        """A client of this server, which never retries."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def rss(self) -> int:
        """Return the bytes of memory the process has now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(next(x.split()[1] for x in status.splitlines() if "VmRSS" in x))

    def n_files(self) -> int:
        """Return how many file descriptors the process has open."""
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def settle(self, seconds: float = 60.0) -> dict[str, Any]:
        """Wait until nothing waits or runs; return what /health says then."""
        until = time.monotonic() + seconds
        with self.client() as client:
            while True:
                told: dict[str, Any] = client.get("/health").json()
                if not told["waiting"] and not told["active"]:
                    return told
                assert time.monotonic() < until, f"still busy: {told}"
                time.sleep(0.05)

    def kill(self) -> None:
        """End the process as a power cut would, as far as a process can tell."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def stop(self, by: str = "TERM") -> None:
        """Let it end by itself; that must not take long, nor may its engine be broken."""
        self.process.send_signal(getattr(signal, f"SIG{by}"))
        try:
            self.process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        log = (self.directory / "log").read_text()
        assert self.process.returncode == 0 and "Traceback" not in log, log[-4000:]


def launch(directory: Path, *options: str, keys: Sequence[str] = ()) -> Launched:
    """Start a server of the bundled model with a home below ``directory``."""
    for name in ("cwd", "user", "tmp"):
        (directory / name).mkdir(parents=True, exist_ok=True)
    environment = os.environ | {
        "HOME": str(directory / "user"),
        "TMPDIR": str(directory / "tmp"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("KVWEAVE_KEYS", None)
    environment |= {"KVWEAVE_KEYS": ",".join(keys)} if keys else {}
    words = ["serve", "--port", "0", "--json", "--home", str(directory / "home"), *options]
    process = fork(MAIN, words, directory / "cwd", environment, directory / "log")
    ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline() if ready else ""
    if not line:
        process.kill()
        process.communicate()
        raise AssertionError("it did not start: " + (directory / "log").read_text()[-4000:])
    told = json.loads(line)
    return Launched(process, told["url"], told["port"], directory)


@contextmanager
def launched(directory: Path, *options: str, keys: Sequence[str] = ()) -> Iterator[Launched]:
    """Start a server, and end it gracefully; on an error at once."""
    server = launch(directory, *options, keys=keys)
    try:
        yield server
        if server.process.poll() is None:
            server.stop()
    finally:
        if server.process.poll() is None:
            server.kill()
