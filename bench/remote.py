"""How fast are the remote tiers on loopback, against bytes through a bare socket?"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import common
import numpy as np
import torch
import xxhash

from kvweave.store.tier.base import Get, Put, Tier
from kvweave.store.tier.redis import Redis

KIB, MIB, GB = 1 << 10, 1 << 20, 1e9
SIZES = (64 * KIB, MIB, 4 * MIB)
N_VALUES = 8
PEER = """
import socket, sys
n = int(sys.argv[1])
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sock, _ = listener.accept()
sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
space = memoryview(bytearray(n))
while what := sock.recv(1):
    if what == b"g":
        sock.sendall(space)
        continue
    done = 0
    while done < n:
        done += sock.recv_into(space[done:])
    sock.sendall(b"+")
"""
NODE = """
import sys
from kvweave.store.tier.mooncake import Cluster, Mooncake
node = Mooncake(Cluster(master=sys.argv[1], segment=int(sys.argv[2])), slots=1)
print("ready", flush=True)
sys.stdin.read()
"""


class Way(Protocol):
    """One way to keep values of a size elsewhere, each put once until all are cleared."""

    def put(self, i: int) -> None: ...
    def get(self, i: int) -> None: ...
    def clear(self) -> None: ...


class Space:
    """A value to send, and room for one that comes."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.value = np.random.default_rng(0).integers(0, 255, n, dtype=np.uint8).data
        self.into = np.ones(n, np.uint8).data
        self.sum = xxhash.xxh3_64_intdigest(self.value)


class Bare:
    """A process that takes bytes and gives bytes."""

    def __init__(self, space: Space, port: int) -> None:
        self.space = space
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put(self, i: int) -> None:
        self.sock.sendmsg([b"p"])
        self.sock.sendall(self.space.value)
        assert self.sock.recv(1) == b"+"

    def get(self, i: int) -> None:
        self.sock.sendall(b"g")
        done = 0
        while done < self.space.n:
            done += self.sock.recv_into(self.space.into[done:])

    def clear(self) -> None:
        pass


class OfTier:
    """A tier, with or without checksums."""

    def __init__(self, space: Space, tier: Tier, *, checked: bool) -> None:
        self.space, self.tier = space, tier
        self.sums = [space.sum] if checked else None

    def put(self, i: int) -> None:
        (outcome,) = self.tier.put([Put(f"v{i}", [self.space.value])])
        assert outcome.ok, outcome

    def get(self, i: int) -> None:
        (outcome,) = self.tier.get([Get(f"v{i}", 0, [self.space.into], self.sums)])
        assert outcome.ok, outcome

    def clear(self) -> None:
        discard(self.tier)


class Together:
    """A tier, ``N_VALUES`` values in one call; nothing is done for those before the last."""

    def __init__(self, space: Space, tier: Tier) -> None:
        self.space, self.tier = space, tier
        self.rooms = [np.ones(space.n, np.uint8).data for _ in range(N_VALUES)]

    def put(self, i: int) -> None:
        if (i + 1) % N_VALUES == 0:
            keys = [f"v{i - j}" for j in range(N_VALUES)]
            puts = [Put(key, [self.space.value]) for key in keys]
            assert all(outcome.ok for outcome in self.tier.put(puts))

    def get(self, i: int) -> None:
        if (i + 1) % N_VALUES == 0:
            gets = [Get(f"v{i - j}", 0, [room]) for j, room in enumerate(self.rooms)]
            assert all(outcome.ok for outcome in self.tier.get(gets))

    def clear(self) -> None:
        discard(self.tier)


class RedisPy:
    """The usual client; what it returns is copied to where it is wanted."""

    def __init__(self, space: Space, port: int) -> None:
        import redis

        self.space, self.client = space, redis.Redis(port=port)

    def put(self, i: int) -> None:
        self.client.set(f"py{i}", self.space.value)

    def get(self, i: int) -> None:
        self.space.into[:] = self.client.get(f"py{i}")

    def clear(self) -> None:
        self.client.delete("py0", *self.client.scan_iter("py*"))


def discard(tier: Tier) -> None:
    """Remove what was put, of at most 256 values."""
    assert all(outcome.ok for outcome in tier.discard([f"v{i}" for i in range(256)]))


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def started(words: Sequence[str], port: int = 0) -> Iterator[subprocess.Popen[str]]:
    """Run a server while inside, from when it listens on ``port``, if that is not 0."""
    quiet = os.environ | {"GLOG_minloglevel": "3"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(words, text=True, env=quiet, **pipes) as process:  # type: ignore[call-overload]
        try:
            for _ in range(500 if port else 0):
                with contextlib.suppress(OSError):
                    socket.create_connection(("127.0.0.1", port), 1).close()
                    break
                time.sleep(0.02)
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def redis(folder: str) -> Iterator[int]:
    """Run a Redis or Valkey that keeps everything in memory and yield its port."""
    port = free_port()
    program = shutil.which("redis-server") or shutil.which("valkey-server") or ""
    words = [program, "--bind", "127.0.0.1", "--port", str(port), "--dir", folder, "--save", ""]
    with started(words, port):
        yield port


@contextlib.contextmanager
def mooncake(space: Space) -> Iterator[Tier]:
    """Run a master and a node and yield a tier of a third process: ours."""
    os.environ.setdefault("GLOG_minloglevel", "3")
    from kvweave.store.tier.mooncake import Cluster, Mooncake

    port, metrics = free_port(), free_port()
    program = str(Path(sys.executable).with_name("mooncake_master"))
    words = [program, f"--rpc_port={port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
    words.append("--default_kv_lease_ttl=20")  # ms: values are discarded between rounds
    at, segment = f"127.0.0.1:{port}", str(max(256 * MIB, 8 * N_VALUES * space.n))
    with (
        started([*words, f"--metrics_port={metrics}"], port),
        started([sys.executable, "-c", NODE, at, segment]) as node,
    ):
        assert node.stdout is not None and "ready" in node.stdout.readline()
        tier = Mooncake(Cluster(at))
        try:
            yield tier
        finally:
            tier.close()


def have(module: str) -> bool:
    """Say whether a module that a way needs is there, and loads."""
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        return False
    words = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def measure(n: int, rounds: int, calls: int) -> dict[str, Any]:
    """Put and get values of ``n`` bytes by every way in turns; each round is ``calls`` of each."""
    space = Space(n)
    with contextlib.ExitStack() as stack:
        peer = stack.enter_context(started([sys.executable, "-c", PEER, str(n)]))
        assert peer.stdout is not None
        bare = Bare(space, int(peer.stdout.readline()))
        stack.callback(bare.sock.close)
        ways: dict[str, Way] = {"socket": bare}
        if shutil.which("redis-server") or shutil.which("valkey-server"):
            port = stack.enter_context(redis(stack.enter_context(tempfile.TemporaryDirectory())))
            tier = Redis(f"redis://127.0.0.1:{port}")
            stack.callback(tier.close)
            ways["redis"] = OfTier(space, tier, checked=False)
            ways["redis, checked"] = OfTier(space, tier, checked=True)
            ways["redis, 8 together"] = Together(space, tier)
            if have("redis"):
                ways["redis-py"] = RedisPy(space, port)
                stack.callback(ways["redis-py"].client.close)
        if have("mooncake.store"):
            far = stack.enter_context(mooncake(space))
            ways["mooncake"] = OfTier(space, far, checked=False)
            ways["mooncake, 8 together"] = Together(space, far)
        found: dict[str, Any] = {}
        for what in ("put", "get"):
            clock, cpu = take_turns(ways, what, rounds, calls)
            gb = n * calls / GB
            found[what] = {
                "gb_per_s": {way: common.median([gb / t for t in clock[way]]) for way in ways},
                "of_socket": {
                    way: common.compare(clock["socket"], clock[way])
                    for way in ways
                    if way != "socket"
                },
                "cpu_s_per_gb": {way: common.median([t / gb for t in cpu[way]]) for way in ways},
            }
    return found


Times = dict[str, list[float]]


def take_turns(ways: dict[str, Way], what: str, rounds: int, n_calls: int) -> tuple[Times, Times]:
    """Return the seconds of clock and of this process's CPUs, of each way in each round."""
    clock: Times = {way: [] for way in ways}
    cpu: Times = {way: [] for way in ways}
    names = list(ways)
    for turn in range(rounds + 1):
        for way in names[turn % len(names) :] + names[: turn % len(names)]:
            if what == "put" or not turn:
                ways[way].clear()
            if what == "get" and not turn:
                for i in range(n_calls):
                    ways[way].put(i)
            call: Callable[[int], None] = getattr(ways[way], what)

            def work(call: Callable[[int], None] = call) -> None:
                for i in range(n_calls):
                    call(i)

            times = common.took(work, torch.device("cpu"))
            if turn:  # the first one only warms up
                clock[way].append(times[0])
                cpu[way].append(times[1])
    return clock, cpu


def tables(found: dict[str, Any]) -> list[Any]:
    """Return what is shown: speed, and its ratio to the bare socket's."""
    rows = [
        (
            f"{what} {size}",
            way,
            speed,
            each["of_socket"].get(way, {}).get("median", 1.0),
            each["cpu_s_per_gb"][way],
        )
        for size, both in found["sizes"].items()
        for what, each in both.items()
        for way, speed in each["gb_per_s"].items()
    ]
    columns = ("values", "way", "GB/s", "of the socket", "CPU-s/GB")
    return [common.table("Remote tiers on loopback, one caller", columns, rows)]


def main(words: Sequence[str] | None = None) -> None:
    """Run it, print a table, and write bench/results/remote.json."""
    parser = common.parser(__doc__, rounds=15)
    parser.add_argument("--mib", type=int, default=64, help="MiB of one round")
    parser.add_argument("--quick", action="store_true", help="one size, one round")
    options = parser.parse_args(words)
    torch.set_num_threads(options.threads)
    sizes, rounds, total = SIZES, options.rounds, options.mib * MIB
    if options.quick:
        sizes, rounds, total = SIZES[:1], 1, MIB
    found: dict[str, Any] = {"sizes": {}, "machine": common.machine(torch.device("cpu"))}
    with common.progress("remote tiers", len(sizes)) as step:
        for n in sizes:
            calls = max(N_VALUES, min(256, total // n) // N_VALUES * N_VALUES)
            found["sizes"][f"{n // KIB} KiB"] = measure(n, rounds, calls)
            step(f"{n // KIB} KiB")
    common.report(json.loads(json.dumps(found)), tables(found), options, "remote")


if __name__ == "__main__":
    main()
