"""One connection to a Redis or Valkey server, without copies.

The protocol is RESP2 as redis.io documents it ("Redis serialization protocol specification"): a
request is an array of bulk strings, replies come in the order of requests. Values go from the
caller's buffers to the socket, and from the socket into the caller's buffers.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from urllib.parse import parse_qs, unquote, urlsplit

from kvweave.errors import InvalidArgument
from kvweave.store.tier.limit import Limit, TimeUp

PORT = 6379
LINE = 1 << 14  # bytes: the buffer for headers; no line is longer
SHORT = 1 << 16  # bytes: no bulk reply that is not a value is longer
AT_ONCE = 64  # buffers in one system call

Reply = bytes | int | None | list["Reply"]


class LostConnection(Exception):
    """The server is not there, or not any more."""


class AccessDenied(Exception):
    """The server does not want us: password, user, database."""


class ServerSaid(Exception):
    """An error reply to one request; the connection is fine. ``code`` is its first word."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.code = text.split(" ")[0]


class NotResp(Exception):
    """What came is no answer to what was asked; the connection cannot be used any more."""


@dataclass(frozen=True)
class ServerAddress:
    """Where a server is and who we are there; the password is not shown."""

    host: str = ""
    port: int = PORT
    path: str = ""  # of a unix socket, instead of host and port
    user: str = ""
    password: str = field(default="", repr=False)
    database: int = 0
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def parse(
        cls, url: str, password: str = "", tls: ssl.SSLContext | None = None
    ) -> ServerAddress:
        """Read ``redis[s]://[user[:password]@]host[:port][/database]`` or ``unix://...path?db=n``.

        Raises InvalidArgument.
        """
        hint = "use redis://host:6379/0, rediss://host (TLS) or unix:///path/to/socket?db=0"
        try:
            parts = urlsplit(url)
            scheme, port = parts.scheme, parts.port or PORT
            inside = parse_qs(parts.query).get("db", ["0"])[0]
            database = int(inside if scheme == "unix" else parts.path.strip("/") or "0")
        except ValueError as error:
            raise InvalidArgument("url", "port or database is no number", hint) from error
        where = unquote(parts.path) if scheme == "unix" else parts.hostname
        if scheme not in ("redis", "rediss", "unix") or not where or database < 0:
            raise InvalidArgument("url", "not the address of a Redis server", hint)
        user, secret = unquote(parts.username or ""), unquote(parts.password or "")
        made = cls(user=user, password=password or secret, database=database)
        if scheme == "unix":
            return cls(**(made.__dict__ | {"path": where}))
        if scheme == "rediss" and tls is None:
            tls = ssl.create_default_context()
        return cls(**(made.__dict__ | {"host": where, "port": port, "tls": tls}))

    def __str__(self) -> str:
        return self.path or f"{self.host}:{self.port}"


def command(*words: bytes | str | int) -> bytes:
    """Return a request."""
    parts = [b"*%d\r\n" % len(words)]
    for word in words:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def set_command(key: bytes, value: Sequence[memoryview]) -> list[memoryview]:
    """Return the buffers of a request that stores ``value``."""
    n = sum(part.nbytes for part in value)
    head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(key), key, n)
    body = [part.cast("B") for part in value if part.nbytes]
    return [memoryview(head), *body, memoryview(b"\r\n")]


def _lost(error: OSError) -> Exception:
    return TimeUp() if isinstance(error, TimeoutError) else LostConnection(str(error))


class Wire:
    """A connection that has been let in. Not for several threads at the same time.

    Every method that waits raises TimeUp at the end of its limit, and LostConnection. After these and after
    NotResp the connection is of no use.
    """

    def __init__(self, server: ServerAddress, limit: Limit) -> None:
        """Connect; raise Refused when the server does not let us in."""
        self._data = memoryview(bytearray(LINE))
        self._start = self._end = 0  # of what is in ``_data`` and not used yet
        try:
            self._sock = self._connect(server, limit)
        except OSError as error:
            raise _lost(error) from error
        try:
            self._enter(server, limit)
        except BaseException:
            self.close()
            raise

    def _connect(self, server: ServerAddress, limit: Limit) -> socket.socket:
        if server.path:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.settimeout(limit.left())
                sock.connect(server.path)
            except BaseException:
                sock.close()
                raise
            return sock
        sock = socket.create_connection((server.host, server.port), timeout=limit.left())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if server.tls is None:
            return sock
        try:
            sock.settimeout(limit.left())
            return server.tls.wrap_socket(sock, server_hostname=server.host)
        except BaseException:
            sock.close()
            raise

    def _enter(self, server: ServerAddress, limit: Limit) -> None:
        asked: list[list[str | int]] = [
            ["SELECT", server.database] if server.database else ["PING"]
        ]
        if server.password:
            asked.insert(0, ["AUTH", *filter(None, [server.user, server.password])])
        for words in asked:
            try:
                answer = self.ask(limit, *words)
            except ServerSaid as error:
                raise AccessDenied(str(error)) from error
            if answer not in (b"OK", b"PONG"):
                raise NotResp(f"{answer!r} to {words[0]}")

    def is_idle(self) -> bool:
        """Say whether nothing came that nobody asked for, such as the end of the connection."""
        waits = select.poll()
        waits.register(self._sock, select.POLLIN)
        return self._start == self._end and not waits.poll(0)

    def ask(self, limit: Limit, *words: bytes | str | int) -> Reply:
        """Send one request and return its reply; raise ServerSaid."""
        self.send([memoryview(command(*words))], limit)
        return self.reply(limit)

    def send(self, buffers: Sequence[memoryview], limit: Limit) -> None:
        """Send all buffers, one after the other."""
        waiting = deque(buffers)
        while waiting:
            try:
                self._sock.settimeout(limit.left())
                if isinstance(self._sock, ssl.SSLSocket):
                    n = self._sock.send(waiting[0])
                else:
                    n = self._sock.sendmsg(list(islice(waiting, AT_ONCE)))
            except OSError as error:
                raise _lost(error) from error
            while waiting and n >= waiting[0].nbytes:
                n -= waiting.popleft().nbytes
            if n:
                waiting[0] = waiting[0][n:]

    def reply(self, limit: Limit, depth: int = 0) -> Reply:
        """Read one short reply; raise ServerSaid for an error, NotResp for anything strange."""
        kind, rest = self.header(limit)
        if kind == b"+":
            return rest
        n = self._number(rest)
        if kind == b":":
            return n
        if n < 0:
            return None
        if kind == b"$" and n <= SHORT:
            found = bytearray(n)
            self.read([memoryview(found)], limit)
            return bytes(found)
        if kind == b"*" and n <= SHORT and depth < 2:
            return [self.reply(limit, depth + 1) for _ in range(n)]
        raise NotResp(f"{kind!r} of {n}")

    def bulk(self, limit: Limit) -> int:
        """Read the header of a value and return its bytes, which `read` has to take."""
        kind, rest = self.header(limit)
        n = self._number(rest)
        if kind != b"$" or n < 0:
            raise NotResp(f"{kind!r}, not a value")
        return n

    def header(self, limit: Limit) -> tuple[bytes, bytes]:
        """Read the first line of a reply, as its kind and the rest; raise ServerSaid for errors."""
        line = self._line(limit)
        kind, rest = line[:1], line[1:]
        if kind == b"-":
            raise ServerSaid(rest.decode(errors="replace"))
        if kind not in (b"+", b":", b"$", b"*"):
            raise NotResp(f"{line[:40]!r} begins no reply")
        return kind, rest

    def read(self, buffers: Sequence[memoryview], limit: Limit) -> None:
        """Fill the buffers with the bytes of a value, and take its end."""
        for view in (buffer.cast("B") for buffer in buffers if buffer.nbytes):
            done = min(view.nbytes, self._end - self._start)
            view[:done] = self._data[self._start : self._start + done]
            self._start += done
            while done < view.nbytes:  # nothing is held now, so what comes behind it can be
                n = self._receive([view[done:], self._data], limit)
                self._start, self._end = 0, max(0, n - (view.nbytes - done))
                done += n - self._end
        while self._end - self._start < 2:
            self._fill(limit)
        if bytes(self._data[self._start : self._start + 2]) != b"\r\n":
            raise NotResp("a value is longer than it says")
        self._start += 2

    def close(self) -> None:
        """Let go of the socket."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def _number(self, text: bytes) -> int:
        if not text.lstrip(b"-").isdigit() or len(text) > 20:
            raise NotResp(f"{text[:40]!r} is no number")
        try:
            return int(text)
        except ValueError as error:
            raise NotResp(f"{text[:40]!r} is no number") from error

    def _line(self, limit: Limit) -> bytes:
        while True:
            held = bytes(self._data[self._start : self._end])
            found = held.find(b"\r\n")
            if found >= 0:
                self._start += found + 2
                return held[:found]
            self._fill(limit)

    def _fill(self, limit: Limit) -> None:
        """Take more into the small buffer; at least one byte."""
        held = self._end - self._start
        if held == LINE:
            raise NotResp("a line without end")
        if self._start:
            self._data[:held] = bytes(self._data[self._start : self._end])
            self._start, self._end = 0, held
        self._end += self._receive([self._data[held:]], limit)

    def _receive(self, views: Sequence[memoryview], limit: Limit) -> int:
        """Receive into the first of the views, and where that is possible on into the others."""
        try:
            self._sock.settimeout(limit.left())
            if isinstance(self._sock, ssl.SSLSocket):
                n = self._sock.recv_into(views[0])
            else:
                n = self._sock.recvmsg_into(views)[0]
        except OSError as error:
            raise _lost(error) from error
        if n == 0:
            raise LostConnection("the server closed the connection")
        return n
