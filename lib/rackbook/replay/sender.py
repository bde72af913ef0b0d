"""The event loop of a replay: sends each request when it is due, and notes what came back and when."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import json
import ssl
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np

from rackbook.replay.http_connection import Connection, Exchange
from rackbook.replay.loads import NONE, Load
from rackbook.replay.targets import Settings, Target, head

if TYPE_CHECKING:
    from collections.abc import Sequence

STALE_S = 0.5
"""A kept connection that closes within this time of a send, without an answer, had been closed by the server before."""

_SWEEP_S = 0.1


class Sender:
    """One replay; everything but ``interrupt`` runs in its event loop.

    Attributes:
        scheduled_ns: when each send was due, since the start; ``NONE`` where that was never known.
        exchanges: of each send; None if it was never sent.
        errors: what failed, by send.
        usage: prompt and completion tokens as the server counts them, by send that was answered.
        resent: sends repeated because the server had closed the connection that was kept.
        stopped: why the replay ended early; empty if it did not.
        interrupted: the user ended it.
        start_ns: of the replay; monotonic clock.
        cpu_s: CPU time of the loop during the replay.
    """

    def __init__(
        self, load: Load, bodies: Sequence[bytes], targets: Sequence[Target], settings: Settings, salt: str
    ) -> None:
        self._load, self._bodies, self._settings, self._salt = load, bodies, settings, salt
        self._heads = [head(target, settings) for target in targets]
        self._targets = targets
        # Ranks behind one address share its connections.
        self._idle: dict[str, list[Connection]] = {target.base_url: [] for target in targets}
        self._open: set[Connection] = set()
        self._ranks = load.rank.tolist()
        self._requests = load.request.tolist()
        self._think = load.think_ns.tolist()
        self._next = {before: index for index, before in enumerate(load.previous.tolist()) if before != NONE}
        # Sends that go out at once: those of one request, or each on its own; and how many answers they still wait for.
        self._group_of = {index: self._requests[index] if load.together else index for index in self._next.values()}
        self._group: dict[int, list[int]] = {}
        for index, name in self._group_of.items():
            self._group.setdefault(name, []).append(index)
        self._missing = {name: len(group) for name, group in self._group.items()}
        first = load.previous == NONE
        self._due = list(zip(load.at_ns[first].tolist(), np.flatnonzero(first).tolist(), strict=True))
        heapq.heapify(self._due)
        size = len(load)
        self.scheduled_ns = np.full(size, NONE)
        self.scheduled_ns[first] = load.at_ns[first]
        self.exchanges: list[Exchange | None] = [None] * size
        self.errors: dict[int, str] = {}
        self.usage: dict[int, tuple[int, int]] = {}
        self._flying: dict[int, Exchange] = {}
        self._left = size
        self.resent: set[int] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: set[asyncio.Task[None]] = set()
        self.stopped, self.interrupted = "", False
        self.start_ns, self.cpu_s = 0, 0.0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tls: ssl.SSLContext | None = None

    def interrupt(self) -> None:
        """End the replay; from any thread."""
        self.interrupted = True
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop, "interrupted by the user")

    async def run(self) -> None:
        """Send everything and wait for the last answer or the first failure."""
        self._loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        if any(target.base_url.startswith("https:") for target in self._targets):
            self._tls = ssl.create_default_context()
        sweep = asyncio.create_task(self._sweep())
        try:
            await self._open_ahead()
            before = time.thread_time()
            self.start_ns = time.monotonic_ns()
            if self.interrupted:
                self._stop("interrupted by the user")
            self._send_due()
            if self._left:
                await self._finished.wait()
            self.cpu_s = time.thread_time() - before
        finally:
            sweep.cancel()
            for task in self._connecting:
                task.cancel()
            for connection in list(self._open):
                connection.abort()
            await asyncio.sleep(0)

    async def _open_ahead(self) -> None:
        """Open the connections that the first sends need, so that these are not late."""
        for url in self._idle:
            ranks = [rank for rank, target in enumerate(self._targets) if target.base_url == url]
            chains = int(((self._load.previous == NONE) & np.isin(self._load.rank, ranks)).sum())
            for _ in range(min(chains, 8 * len(ranks))):
                try:
                    self._idle[url].append(await self._connect(url))
                except OSError:  # the first send will say what is wrong
                    break

    async def _connect(self, url: str) -> Connection:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        _, connection = await asyncio.wait_for(
            asyncio.get_running_loop().create_connection(
                lambda: Connection(self._ended, self._open.discard),
                parts.hostname,
                parts.port or (443 if secure else 80),
                ssl=self._tls if secure else None,
            ),
            min(self._settings.timeout_s, 10.0),
        )
        self._open.add(connection)
        return connection

    def _send_due(self) -> None:
        now = time.monotonic_ns() - self.start_ns
        while self._due and self._due[0][0] <= now and not self._finished.is_set():
            _, index = heapq.heappop(self._due)
            self._dispatch(index)
        self._arm(now)

    def _arm(self, now_ns: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._due and not self._finished.is_set() and self._loop is not None:
            self._timer = self._loop.call_later(max(self._due[0][0] - now_ns, 0) * 1e-9, self._send_due)

    def _dispatch(self, index: int) -> None:
        idle = self._idle[self._targets[self._ranks[index]].base_url]
        while idle:
            connection = idle.pop()
            if not connection.closed:
                self._send(connection, index)
                return
        task = asyncio.ensure_future(self._send_on_new(index))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    async def _send_on_new(self, index: int) -> None:
        try:
            connection = await self._connect(self._targets[self._ranks[index]].base_url)
        except (OSError, TimeoutError) as problem:
            self._fail(index, f"cannot connect: {str(problem) or 'timed out'}")
            return
        if self._finished.is_set():
            connection.abort()
        else:
            self._send(connection, index)

    def _send(self, connection: Connection, index: int) -> None:
        head, body = self._heads[self._ranks[index]], self._bodies[self._requests[index]]
        opening = b'{"cache_salt":"%b",' % self._salt.encode() if self._salt else b"{"
        exchange = Exchange(index)
        self.exchanges[index] = self._flying[index] = exchange
        connection.send(exchange, b"%b%d\r\n\r\n%b" % (head, len(opening) + len(body), opening), body)

    def _ended(self, connection: Connection, exchange: Exchange) -> None:
        index = exchange.index
        self._flying.pop(index, None)
        if not connection.closed:
            self._idle[self._targets[self._ranks[index]].base_url].append(connection)
        if self._finished.is_set():
            return
        if exchange.problem:
            waited_s = (exchange.done_ns - exchange.sent_ns) * 1e-9
            if exchange.reused and not exchange.status and waited_s < STALE_S and index not in self.resent:
                self.resent.add(index)
                self._dispatch(index)
                return
            self._fail(index, exchange.problem)
            return
        if error := self._read_answer(exchange):
            self._fail(index, error)
            return
        exchange.body = bytearray()
        self._left -= 1
        if (following := self._next.get(index)) is not None:
            self._follow(following, exchange.done_ns - self.start_ns)
        elif not self._left:
            self._finished.set()

    def _follow(self, following: int, answered_ns: int) -> None:
        """Schedule what goes out after an answer, unless it waits for those of other ranks as well."""
        name = self._group_of[following]
        self._missing[name] -= 1
        if self._missing[name]:
            return
        for index in self._group[name]:
            due = answered_ns + self._think[index]
            self.scheduled_ns[index] = due
            heapq.heappush(self._due, (due, index))
        self._send_due()

    def _read_answer(self, exchange: Exchange) -> str:
        """Note the token counts of an answer; what is wrong with it, if anything."""
        body = bytes(exchange.body)
        if exchange.status != 200:
            return f"HTTP {exchange.status}: {_excerpt(body)}"
        if self._settings.stream:
            events = body.rstrip()
            if not events.endswith(b"data: [DONE]"):
                at = body.find(b'"error"')
                return f"the stream ended without [DONE]: {_excerpt(body[at:] if at >= 0 else body[-200:])}"
            last = events.rfind(b"data: {")
            text = events[last + 6 : events.find(b"\n", last)]
            if (at := body.find(b'data: {"error"')) >= 0:
                return f"the server reports an error: {_excerpt(body[at:])}"
        else:
            text = body
        try:
            usage = json.loads(text)["usage"]
            self.usage[exchange.index] = (int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
        except (ValueError, KeyError, TypeError):
            return f"no token counts in the answer: {_excerpt(text)}"
        return ""

    def _fail(self, index: int, error: str) -> None:
        if not self._finished.is_set():
            self.errors[index] = error
            self._stop(f"request {self._requests[index]} on rank {self._ranks[index]}: {error}")

    def _stop(self, reason: str) -> None:
        if not self._finished.is_set():
            self.stopped = reason
            self._finished.set()

    async def _sweep(self) -> None:
        limit_ns = int(self._settings.timeout_s * 1e9)
        while True:
            await asyncio.sleep(min(_SWEEP_S, self._settings.timeout_s / 4))
            oldest = next(iter(self._flying.values()), None)
            if oldest is not None and time.monotonic_ns() - oldest.sent_ns > limit_ns:
                self._fail(oldest.index, f"no whole answer within {self._settings.timeout_s:g} s")


def _excerpt(body: bytes) -> str:
    text = " ".join(body.decode("utf-8", "replace").split())
    return text[:200] or "(empty)"
