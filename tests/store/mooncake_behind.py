"""A Mooncake cluster for tests: a master, a node, and one member that does not leave."""

from __future__ import annotations

import itertools
import os
import sys
from pathlib import Path
from typing import Any

from store import servers

from kvweave.store.tier import mooncake
from kvweave.store.tier.mooncake import Cluster

os.environ.setdefault("GLOG_minloglevel", "3")  # before it is loaded: it writes to stderr
JOIN = mooncake.join
NUMBERS = itertools.count()
SEGMENT = 64 << 20  # bytes of the node
LEASE = 100  # milliseconds
NODE = """
import os, sys, time
from kvweave.store.tier.mooncake import Cluster, Mooncake
parent = os.getppid()
node = Mooncake(Cluster(master=sys.argv[1], segment=int(sys.argv[2])), slots=1)
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(0.5)
"""


class Staying:
    """A store that does not leave its cluster when it is closed."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def close(self) -> int:
        return 0


class Behind:
    """A master and a node in processes of their own, started again after a test killed them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.up: list[servers.Server] = []
        self.metrics = 0
        self.member: tuple[Cluster, Staying, Any] | None = None

    @property
    def cluster(self) -> Cluster:
        if not self.up or any(server.process.poll() is not None for server in self.up):
            self.stop()
            master, self.metrics = servers.mooncake_master(
                self.folder, f"--default_kv_lease_ttl={LEASE}", "--client_ttl=2"
            )
            self.up = [master]
            self.up.append(self.node())
        return Cluster(f"127.0.0.1:{self.up[0].port}", f"127.0.0.1:{self.metrics}")

    def node(self) -> servers.Server:
        log = self.folder / f"node-{next(NUMBERS)}.log"
        words = [sys.executable, "-c", NODE, f"127.0.0.1:{self.up[0].port}", str(SEGMENT)]
        return servers.Server(words, 0, log, lambda: b"ready" in log.read_bytes())

    def join(self, cluster: Cluster) -> tuple[Any, Any]:
        if self.member is None or self.member[0] != cluster:
            self.leave()
            store, config = JOIN(cluster)
            self.member = cluster, Staying(store), config
        return self.member[1:]

    def leave(self) -> None:
        if self.member is not None:
            self.member[1].store.close()
        self.member = None

    @property
    def master(self) -> servers.Server:
        assert self.cluster
        return self.up[0]

    def stop(self) -> None:
        self.leave()
        for server in reversed(self.up):
            server.kill()
        self.up = []
