"""A small completions server that answers, or misbehaves, as it is told; for the client's tests and its bench.

Run as a program it echoes at once: it prints its port and serves until its standard input closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Seen:
    """A request as it arrived: which one it was on this server, its headers (lower case) and its body."""

    number: int
    headers: dict[str, str]
    body: dict


@dataclass(frozen=True)
class Answer:
    """What to do with a request.

    ``kind``: "tokens", "status" (an HTTP error), "reset" (TCP reset), "hang" (never), "cut" (close in mid-answer),
    "event" (an error inside the stream), "garbage" (no HTTP), "die" (the whole server goes).
    """

    kind: str = "tokens"
    delay_s: float = 0.0
    status: int = 500
    close: bool = False  # says that it will close the connection, and leaves that to the client
    unsized: bool = False  # an answer that ends with its connection
    in_pieces: bool = False


Script = Callable[[Seen], Answer]


@dataclass
class _Connection(asyncio.Protocol):
    server: CompletionsServer
    raw: bytearray = field(default_factory=bytearray)
    transport: asyncio.Transport | None = None

    def __hash__(self) -> int:
        return id(self)

    def connection_made(self, transport: asyncio.Transport) -> None:
        self.transport = transport
        self.server.connections.add(self)
        self.server.num_connections += 1

    def connection_lost(self, problem: Exception | None) -> None:
        self.server.connections.discard(self)

    def data_received(self, data: bytes) -> None:
        self.raw += data
        while (end := self.raw.find(b"\r\n\r\n")) >= 0:
            length = 0
            at = self.raw.find(b"Content-Length: ", 0, end)
            if at >= 0:
                stop = self.raw.find(b"\r\n", at)
                length = int(self.raw[at + 16 : stop])
            if len(self.raw) < end + 4 + length:
                return
            head, body = bytes(self.raw[:end]), bytes(self.raw[end + 4 : end + 4 + length])
            del self.raw[: end + 4 + length]
            self.server.handle(self, head, body)

    def reset(self) -> None:
        raw = self.transport.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()


class CompletionsServer:
    """Serves in a thread of its own while it is entered as a context."""

    def __init__(self, script: Script | None = None, *, num_engines: int = 1) -> None:
        self.script = script
        self.num_engines = num_engines
        self.pinning = True
        self.counted = dict.fromkeys(range(num_engines), 0)
        self.seen: list[Seen] = []
        self.connections: set[_Connection] = set()
        self.num_connections = 0
        self.port = 0
        self._ready = threading.Event()

    def __enter__(self) -> CompletionsServer:
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve()), daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # it died as its script said
            self._loop.call_soon_threadsafe(self.stop)
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self) -> None:
        self._loop, self._stopped = asyncio.get_running_loop(), asyncio.Event()
        self._server = await self._loop.create_server(lambda: _Connection(self), "127.0.0.1", 0, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stopped.wait()

    def stop(self) -> None:
        self._server.close()
        for connection in list(self.connections):
            connection.reset()
        self._stopped.set()

    def handle(self, connection: _Connection, head: bytes, body: bytes) -> None:
        if self.script is None:  # the bench: nothing is parsed but the prompt's length
            answer, seen = Answer(), None
            num_tokens, stream = body.count(b",", body.rfind(b"[")) + 1, b'"stream":true' in body.replace(b" ", b"")
        else:
            first, *lines = head.decode().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            if first.startswith("GET "):
                self._look_up(connection, first.split()[1])
                return
            seen = Seen(len(self.seen), headers | {"": first}, json.loads(body) if body else {})
            self.seen.append(seen)
            answer = self.script(seen)
            num_tokens, stream = len(seen.body.get("prompt", [])), bool(seen.body.get("stream"))
            rank = int(headers.get("x-data-parallel-rank", 0)) if self.pinning else 0
            self.counted[rank] = self.counted.get(rank, 0) + num_tokens
        if answer.delay_s:
            self._loop.call_later(answer.delay_s, self._answer, connection, answer, num_tokens, stream)
        else:
            self._answer(connection, answer, num_tokens, stream)

    def _look_up(self, connection: _Connection, path: str) -> None:
        lines = [f'vllm:prompt_tokens_total{{engine="{rank}"}} {count}' for rank, count in self.counted.items()]
        text = {
            "/health": "",
            "/version": '{"version":"0.0.1"}',
            "/v1/models": '{"data":[{"id":"scripted"}]}',
            "/metrics": "\n".join(["# TYPE vllm:prompt_tokens_total counter", *lines, ""]),
        }[path]
        answer = f"HTTP/1.1 200 OK\r\nContent-Length: {len(text)}\r\n\r\n{text}"
        connection.transport.write(answer.encode())

    def _answer(self, connection: _Connection, answer: Answer, num_tokens: int, stream: bool) -> None:
        if answer.kind == "hang" or connection.transport.is_closing():
            return
        if answer.kind == "reset":
            connection.reset()
        elif answer.kind == "die":
            self.stop()
        elif answer.kind == "garbage":
            connection.transport.write(b"SSH-2.0-nothing\r\n\r\n")
        elif answer.kind == "status":
            body = b'{"error":{"message":"out of order"}}'
            connection.transport.write(
                b"HTTP/1.1 %d No\r\nContent-Length: %d\r\n\r\n%b" % (answer.status, len(body), body)
            )
        else:
            self._tokens(connection, answer, num_tokens, stream)

    def _tokens(self, connection: _Connection, answer: Answer, num_tokens: int, stream: bool) -> None:
        usage = b'{"prompt_tokens":%d,"completion_tokens":1}' % num_tokens
        keep = b"Connection: close\r\n" if answer.close else b""
        if stream:
            events = [
                b'data: {"id":"c","choices":[{"index":0,"text":" a","finish_reason":"length"}]}\n\n',
                b'data: {"id":"c","choices":[],"usage":%b}\n\n' % usage,
                b"data: [DONE]\n\n",
            ]
            if answer.kind == "event":
                events[1] = b'data: {"error":{"message":"the engine died"}}\n\n'
            parts = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n%b\r\n" % keep]
            parts += [b"%x\r\n%b\r\n" % (len(event), event) for event in events] + [b"0\r\n\r\n"]
        else:
            body = b'{"choices":[{"index":0,"text":" a"}],"usage":%b}' % usage
            size = b"" if answer.unsized else b"Content-Length: %d\r\n" % len(body)
            parts = [b"HTTP/1.1 200 OK\r\n%b%b\r\n" % (size, keep), body]
        whole = b"".join(parts)
        if answer.kind == "cut":
            connection.transport.write(whole[: len(whole) // 2])
            connection.transport.close()
        elif answer.in_pieces:
            pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
            for number, piece in enumerate(pieces):
                self._loop.call_later(0.001 * number, connection.transport.write, piece)
        else:
            connection.transport.write(whole)
        if answer.unsized:
            connection.transport.close()


async def _echo() -> None:
    server = CompletionsServer()
    task = asyncio.create_task(server.serve())
    while not server.port:
        await asyncio.sleep(0.01)
    print(server.port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.stop()
    await task


if __name__ == "__main__":
    asyncio.run(_echo())
