"""Whom a client trusts: with HTTPS those of certifi or `SSL_CERT_FILE`, with plain HTTP nobody is asked."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import certifi
import pytest
from faces import FACES, faces
from needs import APT, lack

from kvweave.client import peer
from kvweave.errors import Unreachable

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None,
    reason=lack("no openssl to make a certificate", APT, "openssl"),
)


class Nothing(BaseHTTPRequestHandler):
    """Has no chunks."""

    def do_GET(self) -> None:
        body = b'{"contexts": [], "data": [], "next": null}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that signed itself, its key beside it."""
    folder = tmp_path_factory.mktemp("tls")
    key, made = folder / "key.pem", folder / "certificate.pem"
    words = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=kvweave".split()
    words += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(made)]
    subprocess.run(words, check=True, capture_output=True)
    return made


@pytest.fixture(scope="module")
def url(certificate: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Nothing)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


@needs_openssl
@pytest.mark.parametrize("face", FACES)
def test_https_is_of_those_that_are_trusted(
    face: str, url: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faces(face) as make:
        strange = url.replace("https", "HTTPS")
        for each in (url, strange):
            with make(each, retries=0) as client, pytest.raises(Unreachable, match="verify failed"):
                client.summaries()
        with monkeypatch.context() as patch:
            patch.setattr(certifi, "where", lambda: str(certificate))
            with make(url, retries=0) as client:
                assert client.summaries() == []
        # of what is not on this machine the environment says it
        monkeypatch.setattr(peer, "_is_local", lambda url: False)
        monkeypatch.setenv("NO_PROXY", "*")
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        for each in (url, strange):
            with make(each, retries=0) as client:
                assert client.summaries() == []


@pytest.mark.parametrize("face", FACES)
def test_plain_http_reads_nobodys_certificate(face: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("certificates were read")

    monkeypatch.setattr(ssl, "create_default_context", read)
    with faces(face) as make, make("http://127.0.0.1:9", retries=0) as client:
        with pytest.raises(Unreachable):  # nothing listens there
            client.summaries()
        with pytest.raises(AssertionError, match="were read"):
            make("https://127.0.0.1:9")
