"""A client of ``kvweave serve`` with the verbs of `kvweave.Engine` (extra ``client``: httpx)."""

from kvweave.client.api import Client
from kvweave.client.context import RemoteContext
from kvweave.client.files import RemoteFiles
from kvweave.client.turn import RemoteTurn

__all__ = ["Client", "RemoteContext", "RemoteFiles", "RemoteTurn"]
