"""All-reduces over plain TCP sockets, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from rackbook.hostwork.ranks import lanes
from rackbook.hostwork.ranks.schedules import ADD, EXCHANGE, SEND, doubling, ring_neighbours
from rackbook.hostwork.ranks.wiring import Links


class DoublingOverSockets:
    """Recursive doubling; the whole vector in every message."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._steps = doubling(links.rank, links.num_ranks)
        self._vector = b""

    def put(self, values: Sequence[int]) -> None:
        """Take this rank's numbers."""
        self._vector = lanes.encode(values, self._links.num_ranks)

    def run(self) -> None:
        """Add up over all ranks; every rank holds the sum then."""
        links, vector = self._links, self._vector
        size = len(vector)
        for kind, peer in self._steps:
            if kind == EXCHANGE:
                links.send(peer, vector)
                vector = lanes.add(vector, links.receive(peer, size))
            elif kind == SEND:
                links.send(peer, vector)
            elif kind == ADD:
                vector = lanes.add(vector, links.receive(peer, size))
            else:
                vector = links.receive(peer, size)
        self._vector = vector

    def result(self) -> list[int]:
        """The sum."""
        return lanes.decode(self._vector)


class RingOverSockets:
    """A ring: the vector in N pieces, N − 1 steps to add them up and N − 1 to hand the sums round."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._before, self._after = ring_neighbours(links.rank, links.num_ranks)
        self._pieces: list[bytes] = []

    def put(self, values: Sequence[int]) -> None:
        """Take this rank's numbers; as many as a multiple of the ranks."""
        vector = lanes.encode(values, self._links.num_ranks)
        size = len(vector) // self._links.num_ranks
        self._pieces = [vector[start : start + size] for start in range(0, len(vector), size)]

    def run(self) -> None:
        """Add up over all ranks; every rank holds the sum then."""
        links, pieces, num_ranks = self._links, self._pieces, self._links.num_ranks
        before, after, rank, size = self._before, self._after, links.rank, len(self._pieces[0])
        for step in range(num_ranks - 1):
            links.send(after, pieces[(rank - step) % num_ranks])
            into = (rank - step - 1) % num_ranks
            pieces[into] = lanes.add(pieces[into], links.receive(before, size))
        for step in range(num_ranks - 1):
            links.send(after, pieces[(rank + 1 - step) % num_ranks])
            pieces[(rank - step) % num_ranks] = links.receive(before, size)

    def result(self) -> list[int]:
        """The sum."""
        return lanes.decode(b"".join(self._pieces))
