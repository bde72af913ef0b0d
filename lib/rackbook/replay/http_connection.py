"""One kept-alive HTTP/1.1 connection with one exchange at a time, on an asyncio transport.

A general client spends most of its time on what a replay does not need: sessions, redirects, cookies, and a task for
each answer. This one writes bytes that were prepared before, and notes when the first token and the end arrive.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

MAX_ANSWER_BYTES = 256 * 2**20
"""A longer answer is an error: no completion is that long."""

_FIRST_TOKEN = (b'"choices":[{', b'"choices": [{')


@dataclass(eq=False)
class Exchange:
    """A request and what came back.

    Attributes:
        index: of the request in its load.
        sent_ns: when it was handed to the connection; monotonic clock.
        reused: the connection had carried an exchange before.
        first_ns: when the first answer bytes with a token came; 0 before.
        done_ns: when the answer was complete or had failed; 0 before.
        status: HTTP status; 0 before.
        body: of the answer, as far as it came.
        problem: what went wrong with the connection; empty if nothing did.
    """

    index: int
    sent_ns: int = 0
    reused: bool = False
    first_ns: int = 0
    done_ns: int = 0
    status: int = 0
    body: bytearray = field(default_factory=bytearray)
    problem: str = ""


class Connection(asyncio.Protocol):
    """Sends one request after the other and reads each answer: by length, in chunks, or to the end of the connection.

    Args:
        ended: called with this connection and the exchange once it is complete or has failed.
        lost: called with this connection when it is closed, after ``ended`` for an exchange in flight.
    """

    def __init__(self, ended: Callable[[Connection, Exchange], None], lost: Callable[[Connection], None]) -> None:
        self.exchange: Exchange | None = None
        self.closed = False
        self._ended, self._lost = ended, lost
        self._transport: asyncio.Transport | None = None
        self._used = False
        self._reset()

    def _reset(self) -> None:
        self._raw = bytearray()
        self._in_body = False
        self._keep = True
        self._left: int | None = None  # bytes of a body of known length that are still to come
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast("asyncio.Transport", transport)

    def send(self, exchange: Exchange, head: bytes, body: bytes) -> None:
        """Write a request.

        Raises:
            RuntimeError: the connection is closed or carries an exchange.
        """
        if self.exchange is not None or self.closed or self._transport is None:
            raise RuntimeError(f"request {exchange.index}: the connection is not idle")
        self.exchange = exchange
        exchange.reused, self._used = self._used, True
        exchange.sent_ns = time.monotonic_ns()
        if len(body) < 65_536:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)

    def abort(self) -> None:
        """Close at once; an exchange in flight fails."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Read what came; ends the exchange when it is complete."""
        now_ns, exchange = time.monotonic_ns(), self.exchange
        if exchange is None:  # bytes that nobody asked for
            self.abort()
            return
        self._raw += data
        try:
            complete = (self._in_body or self._read_head(exchange)) and self._read_body(exchange)
        except ValueError as problem:
            exchange.problem = f"not an HTTP/1.1 answer: {problem}"
            self._end(exchange)
            self.abort()
            return
        if not exchange.first_ns and exchange.body and any(mark in exchange.body for mark in _FIRST_TOKEN):
            exchange.first_ns = now_ns
        if complete:
            keep = self._keep
            self._end(exchange, idle=keep)
            if not keep:
                self.abort()

    def eof_received(self) -> bool:
        """The server closes its side: so do we."""
        return False

    def connection_lost(self, problem: Exception | None) -> None:
        """Fail the exchange in flight, unless its answer ends with the connection."""
        self.closed = True
        if (exchange := self.exchange) is not None:
            ends_here = self._in_body and self._left is None and not self._chunked and problem is None
            if not ends_here:
                what = str(problem) if problem else "closed by the server"
                got = "before the answer began" if not exchange.status else "in the middle of the answer"
                exchange.problem = f"connection lost {got}: {what}"
            self._end(exchange)
        self._lost(self)

    def _end(self, exchange: Exchange, *, idle: bool = False) -> None:
        exchange.done_ns = time.monotonic_ns()
        self._reset()
        if not idle:
            self.closed = True
        self.exchange = None
        self._ended(self, exchange)

    def _read_head(self, exchange: Exchange) -> bool:
        while True:
            end = self._raw.find(b"\r\n\r\n")
            if end < 0:
                if len(self._raw) > 65_536:
                    raise ValueError("no end of the header within 64 KiB")
                return False
            first, *lines = bytes(self._raw[:end]).split(b"\r\n")
            del self._raw[: end + 4]
            if not first.startswith(b"HTTP/1.") or not first[9:12].isdigit():
                raise ValueError(f"got {first[:80]!r}")
            status = int(first[9:12])
            if status >= 200:  # the others are interim
                break
        exchange.status, self._in_body = status, True
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        self._keep = first.startswith(b"HTTP/1.1") and headers.get(b"connection") != b"close"
        if headers.get(b"transfer-encoding") == b"chunked":
            self._chunked = True
        elif (length := headers.get(b"content-length")) is not None:
            self._left = int(length)
        else:
            self._keep = False
        return True

    def _read_body(self, exchange: Exchange) -> bool:
        """Move body bytes to the exchange; whether it is complete."""
        if len(exchange.body) + len(self._raw) > MAX_ANSWER_BYTES:
            raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
        if self._chunked:
            return self._read_chunks(exchange)
        taken = self._raw if self._left is None else self._raw[: self._left]
        exchange.body += taken
        if self._left is None:
            self._raw = bytearray()
            return False
        self._left -= len(taken)
        del self._raw[: len(taken)]
        return self._left == 0

    def _read_chunks(self, exchange: Exchange) -> bool:
        raw = self._raw
        while (end := raw.find(b"\r\n")) >= 0:
            size = int(raw[:end].split(b";")[0], 16)
            begin = end + 2
            if size == 0:
                return raw.endswith(b"\r\n\r\n")
            if len(raw) < begin + size + 2:
                return False
            exchange.body += raw[begin : begin + size]
            del raw[: begin + size + 2]
        return False
