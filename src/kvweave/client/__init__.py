"""Clients of ``kvweave serve`` with the verbs of `kvweave.Engine`, one that blocks and one that is
awaited (extra ``client``: httpx)."""

from kvweave.client.api import AsyncClient, Client
from kvweave.client.context import AsyncRemoteContext, RemoteContext
from kvweave.client.files import AsyncRemoteFiles, RemoteFiles
from kvweave.client.memory import AsyncRemoteMemory, RemoteMemory
from kvweave.client.turn import AsyncRemoteTurn, RemoteTurn

__all__ = [
    "AsyncClient",
    "AsyncRemoteContext",
    "AsyncRemoteFiles",
    "AsyncRemoteMemory",
    "AsyncRemoteTurn",
    "Client",
    "RemoteContext",
    "RemoteFiles",
    "RemoteMemory",
    "RemoteTurn",
]
