"""The blocks of docs/tiers.md that need servers, run against real ones, in order.

``py`` blocks are those; ``python`` blocks run without a server, in tests/test_docs.py.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from store import servers

PAGE = Path(__file__).parents[2] / "docs" / "tiers.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
FIRST = """
from kvweave.store.tier.base import Get, Put
into = memoryview(bytearray(2))
"""


def run(number: int, name: str, **ports: int) -> None:
    """Execute a block with the ports of servers that run instead of the usual ones."""
    text = BLOCKS[number]
    assert name in text
    for usual, port in ports.items():
        assert usual.strip("p") in text
        text = text.replace(f":{usual.strip('p')}", f":{port}")
    exec(compile(FIRST + text, str(PAGE), "exec"), {"__name__": "docs"})


def test_every_block_is_run() -> None:
    assert len(BLOCKS) == 3


@servers.needs_redis
def test_redis(tmp_path: Path) -> None:
    server = servers.redis(tmp_path)
    try:
        run(0, "Redis(", p6379=server.port)
    finally:
        server.stop()


@servers.needs_mooncake
def test_mooncake(tmp_path: Path) -> None:
    os.environ.setdefault("GLOG_minloglevel", "3")
    master, metrics = servers.mooncake_master(tmp_path)
    try:
        run(1, "Mooncake", p50051=master.port, p9003=metrics)
    finally:
        master.kill()


@servers.needs_moto
@pytest.mark.slow
def test_s3(tmp_path: Path) -> None:
    server = servers.moto(tmp_path)
    try:
        assert servers.put(f"http://127.0.0.1:{server.port}/kvweave") == 200
        run(2, "S3Store", p9000=server.port)
    finally:
        server.kill()
