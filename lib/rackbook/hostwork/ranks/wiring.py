"""Connections between ranks: they meet at one address, learn where the others listen, and connect where they must."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterable
from typing import Any

GREETING = "rackbook ranks 1"
MEET_S = 30.0
"""Time within which all ranks must have come."""


class WiringError(Exception):
    """Ranks that cannot be connected or no longer are; the message says which and what to do."""


Star = dict[int, socket.socket]
"""Rank 0's connections to all others, or another rank's one to rank 0."""


class Links:
    """The open connections of one rank.

    Attributes:
        rank: this rank.
        num_ranks: all ranks.
    """

    def __init__(self, rank: int, num_ranks: int, peers: dict[int, socket.socket], star: dict[int, socket.socket]):
        self.rank, self.num_ranks = rank, num_ranks
        self._peers, self._star = peers, star

    def send(self, peer: int, data: bytes) -> None:
        """Send a vector.

        Raises:
            WiringError: the peer is gone.
        """
        try:
            self._peers[peer].sendall(data)
        except OSError as problem:
            raise self._lost(peer, problem) from None

    def receive(self, peer: int, size: int) -> bytes:
        """Wait for a vector.

        Raises:
            WiringError: the peer is gone or silent.
        """
        try:
            data = self._peers[peer].recv(size, socket.MSG_WAITALL)
        except OSError as problem:
            raise self._lost(peer, problem) from None
        if len(data) < size:
            raise self._lost(peer, None)
        return data

    def gather(self, value: Any) -> list[Any] | None:
        """Collect one plain value per rank at rank 0, in order; None on the other ranks."""
        if self.rank:
            _write(self._star[0], value)
            return None
        return [value, *(_read(self._star[peer], f"rank {peer}") for peer in range(1, self.num_ranks))]

    def close(self) -> None:
        """Close every connection."""
        for connection in (*self._peers.values(), *self._star.values()):
            with contextlib.suppress(OSError):
                connection.close()

    def _lost(self, peer: int, problem: OSError | None) -> WiringError:
        if isinstance(problem, BlockingIOError):
            return WiringError(f"rank {self.rank} of {self.num_ranks}: rank {peer} has not answered in time")
        return WiringError(
            f"rank {self.rank} of {self.num_ranks}: rank {peer} has closed its connection: it ended or was killed"
        )


def listen(host: str, port: int) -> socket.socket:
    """Open the address at which the ranks meet.

    Args:
        host: address of this machine.
        port: 0 for any free one.

    Raises:
        WiringError: the port is taken, or the address is not of this machine.
    """
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as problem:
        listener.close()
        raise WiringError(
            f"cannot listen on port {port} of {host}: {problem.strerror}; end what uses it or give another port, "
            "0 for any free one"
        ) from None
    listener.listen(1024)
    return listener


def connect(
    rank: int,
    num_ranks: int,
    partners: Iterable[int],
    *,
    host: str,
    port: int,
    meeting: socket.socket | None = None,
    silent_s: float = 60.0,
) -> Links:
    """Meet the other ranks and connect to the partners.

    Args:
        rank: this rank.
        num_ranks: all ranks.
        partners: ranks to connect to; each of them must name this one too.
        host: address of rank 0's machine.
        port: where rank 0 listens.
        meeting: rank 0's listening socket, from :func:`listen`; None on the other ranks.
        silent_s: how long to wait for a silent partner later on.

    Raises:
        WiringError: a rank does not come in time, or comes twice.
    """
    deadline = time.monotonic() + MEET_S
    if rank:
        star: Star = {0: _reach(host, port, deadline, "rank 0")}
        own = listen(star[0].getsockname()[0], 0)
        _write(star[0], {"greeting": GREETING, "rank": rank, "ranks": num_ranks, "at": own.getsockname()})
        answer = _read(star[0], "rank 0")
        if "refused" in answer:
            raise WiringError(f"rank {rank}: {answer['refused']}")
        places = answer["places"]
    else:
        guests = _receive_guests(num_ranks, meeting, deadline)
        own = listen(guests[0].getsockname()[0] if guests else host, 0)
        star, places = _exchange_places(num_ranks, guests, own.getsockname())
    peers = _connect_peers(rank, set(partners), places, own, deadline)
    own.close()
    for connection in peers.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The kernel's own timeout: Python's would add a poll to every receive.
        connection.settimeout(None)
        timeout = struct.pack("ll", int(silent_s), int(silent_s % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    for connection in star.values():
        connection.settimeout(None)
    return Links(rank, num_ranks, peers, star)


def _receive_guests(num_ranks: int, meeting: socket.socket | None, deadline: float) -> list[socket.socket]:
    if meeting is None:
        raise WiringError("rank 0 needs the listening socket at which the others meet")
    guests: list[socket.socket] = []
    for number in range(num_ranks - 1):
        try:
            guests.append(_accept(meeting, deadline))
        except TimeoutError:
            raise WiringError(
                f"{num_ranks - 1 - number} of {num_ranks} ranks did not come to {meeting.getsockname()[0]} port "
                f"{meeting.getsockname()[1]} within {MEET_S:g} s; check that all of them were started and reach it"
            ) from None
    return guests


def _exchange_places(num_ranks: int, guests: list[socket.socket], own: Any) -> tuple[Star, list[Any]]:
    places, star = {0: own}, {}
    for guest in guests:
        hello = _read(guest, "a rank that came to the meeting")
        if not isinstance(hello, dict) or hello.get("greeting") != GREETING:
            raise WiringError("something that is no rank connected to the meeting's port; give another port")
        rank, size = hello["rank"], hello["ranks"]
        if size != num_ranks or rank in places or not 0 < rank < num_ranks:
            refusal = f"rank {rank} of {size} came to a meeting of {num_ranks} where {sorted(places)} are present"
            _write(guest, {"refused": refusal})
            raise WiringError(f"{refusal}; is another run using this port?")
        places[rank], star[rank] = hello["at"], guest
    in_order = [places[rank] for rank in range(num_ranks)]
    for guest in star.values():
        _write(guest, {"places": in_order})
    return star, in_order


def _connect_peers(
    rank: int, partners: set[int], places: list[Any], own: socket.socket, deadline: float
) -> dict[int, socket.socket]:
    peers = {}
    for peer in sorted(p for p in partners if p < rank):
        peers[peer] = _reach(*places[peer], deadline, f"rank {peer}")
        peers[peer].sendall(struct.pack("<I", rank))
    for _ in [p for p in partners if p > rank]:
        try:
            connection = _accept(own, deadline)
        except TimeoutError:
            missing = sorted(p for p in partners if p > rank and p not in peers)
            raise WiringError(f"rank {rank}: no connection from ranks {missing} within {MEET_S:g} s") from None
        (peer,) = struct.unpack("<I", connection.recv(4, socket.MSG_WAITALL))
        peers[peer] = connection
    return peers


def _accept(listener: socket.socket, deadline: float) -> socket.socket:
    listener.settimeout(max(0.01, deadline - time.monotonic()))
    connection, _ = listener.accept()
    connection.settimeout(MEET_S)
    return connection


def _reach(host: str, port: int, deadline: float, who: str) -> socket.socket:
    while True:
        try:
            return socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
        except OSError as problem:
            if time.monotonic() >= deadline:
                raise WiringError(f"{who} at {host} port {port} cannot be reached: {problem}") from None
            time.sleep(0.02)


def _write(connection: socket.socket, value: Any) -> None:
    text = json.dumps(value).encode()
    connection.sendall(struct.pack("<I", len(text)) + text)


def _read(connection: socket.socket, who: str) -> Any:
    try:
        head = connection.recv(4, socket.MSG_WAITALL)
        size = struct.unpack("<I", head)[0] if len(head) == 4 else 0
        text = connection.recv(size, socket.MSG_WAITALL) if 0 < size < 1 << 28 else b""
        return json.loads(text)
    except (OSError, ValueError) as problem:
        raise WiringError(f"{who} closed its connection or sent no valid message ({type(problem).__name__})") from None
