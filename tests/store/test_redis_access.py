"""Ways to a Redis: passwords, users, databases, sockets, TLS, a cluster."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from needs import APT, PIP, lack
from store import servers
from store.values import (
    aligned,
    asking,
    assert_gone,
    assert_holds,
    content,
    filled,
    put_one,
    store,
)

from kvweave.errors import StoreError
from kvweave.store.tier.base import Get, Outcome, Put
from kvweave.store.tier.redis import Redis

library = pytest.importorskip("redis", reason=lack("redis-py is not installed", PIP, "redis"))


def refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(StoreError, match=why) as caught:
        call()
    assert caught.value.hint and "secret" not in str(caught.value)


@servers.needs_redis
def test_passwords_users_and_databases(tmp_path: Path) -> None:
    acl = "user writer on >secret ~mine:* +@all"
    server = servers.redis(tmp_path, "--requirepass", "secret", "--user", *acl.split()[1:])
    try:
        at = f"127.0.0.1:{server.port}"
        refused(lambda: Redis(f"redis://:wrong@{at}"), "invalid username-password")
        refused(lambda: Redis(f"redis://writer:wrong@{at}"), "invalid username-password")
        refused(lambda: Redis(f"redis://{at}"), "Authentication required")
        refused(lambda: Redis(f"redis://{at}/99", password="secret"), "out of range")
        one = Redis(f"redis://{at}/1", password="secret", prefix="mine:")
        two = Redis(f"redis://:secret@{at}/2", prefix="mine:")
        writer = Redis(f"redis://writer:secret@{at}/1", prefix="mine:")
        elsewhere = Redis(f"redis://writer@{at}", password="secret", prefix="other:")
        store(one, "a", b"one")
        store(two, "a", b"second")
        assert_holds(writer, "a", b"one")
        assert_holds(two, "a", b"second")
        outcome = put_one(elsewhere, "a", b"x")
        assert outcome.state == "failed" and "permission" in outcome.why.lower()
        (found,) = elsewhere.look(["a"])
        assert isinstance(found, Outcome) and found.state == "failed"
        assert elsewhere.get([Get("a", 0, [aligned(1)])])[0].state == "failed"
        assert elsewhere.discard(["a"])[0].state == "failed"
        for tier in (one, two, writer, elsewhere):
            tier.close()
    finally:
        server.stop()


@servers.needs_redis
def test_a_unix_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("s")
    path = folder / "s"  # a path of a socket has at most 107 bytes
    server = servers.redis(
        folder, "--unixsocket", str(path), answers=lambda: servers.listens(0, str(path))
    )
    try:
        tier = Redis(f"unix://{path}?db=3")
        store(tier, "a", content("a", 300_000))
        assert_holds(tier, "a", content("a", 300_000))
        tier.close()
        refused(lambda: Redis(f"unix://{folder / 'nobody'}"), "No such file")
    finally:
        server.stop()


@servers.needs_redis
@pytest.mark.skipif(
    shutil.which("openssl") is None,
    reason=lack("no openssl to make a certificate", APT, "openssl"),
)
def test_tls(tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvweave".split()
    words += ["-addext", "subjectAltName=IP:127.0.0.1"]
    words += ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run(words, check=True, capture_output=True)
    port = servers.free_port()
    options = ["--tls-port", str(port), "--tls-auth-clients", "no"]
    options += ["--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    server = servers.redis(tmp_path, *options, answers=lambda: servers.listens(port))
    try:
        tier = Redis(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}")
        data = content("a", 3_000_000)
        store(tier, "a", data)
        for _ in range(3):
            assert_holds(tier, "a", data)
        get = asking("a", data, 1_000_001, 12_345)
        assert tier.get([get])[0].ok and filled(get) == data[1_000_001:1_012_346]
        tier.close()
        refused(lambda: Redis(f"rediss://127.0.0.1:{port}"), "certificate verify failed")
        refused(lambda: Redis(f"redis://127.0.0.1:{port}", timeout=1.0), "losed|no answer|reset")
    finally:
        server.stop()


@servers.needs_redis
@pytest.mark.slow
def test_a_cluster(tmp_path: Path) -> None:
    options = ["--cluster-enabled", "yes", "--cluster-config-file", str(tmp_path / "nodes")]
    server = servers.redis(tmp_path, *options, "--cluster-port", str(servers.free_port()))
    try:
        with contextlib.closing(library.Redis("127.0.0.1", server.port)) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            end = time.monotonic() + 20
            while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO"):
                assert time.monotonic() < end
                time.sleep(0.05)
        tier = Redis(f"redis+cluster://127.0.0.1:{server.port}")
        values = {f"k{i}": content(f"k{i}", 1 + 40_000 * i) for i in range(12)}
        puts = [Put(key, [memoryview(data)]) for key, data in values.items()]
        assert all(outcome.ok for outcome in tier.put(puts))
        assert put_one(tier, "k3", b"other").state == "exists"
        for key, data in values.items():
            assert_holds(tier, key, data)
        assert sorted(tier.keys()) == sorted(values)
        assert tier.n_bytes == sum(map(len, values.values()))
        with server.frozen():
            begin = time.monotonic()
            states = [
                tier.get([Get("k1", 0, [aligned(9)])], deadline=time.monotonic() + 0.2)[0].state
                for _ in range(5)
            ]
            assert set(states) <= {"late", "failed"} and time.monotonic() - begin < 1.5
        end = time.monotonic() + 20
        while not tier.discard(["k0", "k1"])[1].ok and time.monotonic() < end:
            time.sleep(0.05)
        assert_gone(tier, "k1")
        tier.close()
    finally:
        server.kill()
