"""What a Mooncake cluster is, and how to become a part of it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from kvweave.chunk.background import within
from kvweave.errors import StoreError
from kvweave.store.tier.remote import library

JOINING = 10.0  # seconds a master may take to let us in


@dataclass(frozen=True)
class Cluster:
    """A Mooncake cluster, and what this process is in it."""

    master: str = "127.0.0.1:50051"
    """Its address for requests."""
    listing: str = ""
    """``host:port`` of the master's metrics server, which alone can list keys; may be left out."""
    host: str = "127.0.0.1"
    """This machine, as the other nodes reach it."""
    segment: int = 0
    """Bytes of memory lent to the cluster; what is in them goes with this process."""
    protocol: str = "tcp"
    """``tcp`` or ``rdma``."""
    devices: str = ""
    """Names of RDMA devices."""
    replicas: int = 1
    """Nodes that each value is kept on."""


def join(cluster: Cluster) -> tuple[Any, Any]:
    """Return a store that has joined the cluster, and how its values are kept.

    Raises InvalidArgument where the package is missing, StoreError when nobody lets us in.
    """
    needs = "; it needs libibverbs, librdmacm, libnuma and libcurl"
    found = library("mooncake.store", "mooncake", needs=needs)
    store, config = found.MooncakeDistributedStore(), found.ReplicateConfig()
    config.replica_num = cluster.replicas
    c = cluster
    host, _, port = c.master.rpartition(":")

    def enter() -> Any:
        # The store itself tries for a minute and a half.
        socket.create_connection((host, int(port)), JOINING).close()
        words = c.host, "P2PHANDSHAKE", c.segment, 0, c.protocol, c.devices, c.master
        return store.setup(*words)

    try:
        why = within(JOINING, enter, "it", lambda why: store.close())
    except (OSError, ValueError, StoreError) as error:
        why = str(error)
    if why:
        hint = "is mooncake_master running there, and are protocol and devices right?"
        raise StoreError(f"no way into Mooncake at {c.master}: {why}", hint=hint)
    return store, config
