"""One rank: connect, build the algorithms, answer commands."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from rackbook.hostwork.ranks import over_torch, schedules, timing, wiring
from rackbook.hostwork.ranks.over_sockets import DoublingOverSockets, RingOverSockets
from rackbook.hostwork.ranks.wiring import Links

OVER_SOCKETS = {"doubling over sockets": DoublingOverSockets, "ring over sockets": RingOverSockets}

ALGORITHMS = (*over_torch.FACTORIES, *OVER_SOCKETS)
"""Every all-reduce that can be timed, by name."""


class Member:
    """A rank that is connected and ready.

    Args:
        rank: this rank.
        num_ranks: all ranks.
        algorithms: names out of :data:`ALGORITHMS`; those over torch must be importable.
        links: this rank's connections.
        store: file at which the torch ranks of one machine meet; None to meet by the launcher's environment.
    """

    def __init__(self, rank: int, num_ranks: int, algorithms: Sequence[str], links: Links, store: str | None) -> None:
        self.rank, self.num_ranks, self.links = rank, num_ranks, links
        if any(name in over_torch.FACTORIES for name in algorithms):
            over_torch.join(rank, num_ranks, store)
        self._built: dict[str, Any] = {
            name: OVER_SOCKETS[name](links) if name in OVER_SOCKETS else over_torch.FACTORIES[name](rank, num_ranks)
            for name in algorithms
        }
        self._turn = 0
        gc.collect()
        gc.disable()  # a collection in one rank would make all others wait

    def block(self, algorithm: str, num_turns: int) -> dict[str, Any]:
        """Time a block; every rank must be told the same blocks in the same order."""
        found = timing.block(self._built[algorithm], self.rank, self.num_ranks, self._turn, num_turns)
        self._turn += 1 + num_turns
        return found


def links(rank: int, num_ranks: int, host: str, port: int, meeting: socket.socket | None) -> Links:
    """Connect this rank to all that any of its algorithms over sockets talks to."""
    return wiring.connect(rank, num_ranks, schedules.partners(rank, num_ranks), host=host, port=port, meeting=meeting)


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however that happens; Linux only.

    Args:
        parent: the parent's process id, taken before the fork: it may have ended since.
    """
    if sys.platform.startswith("linux"):
        set_parent_death_signal = 1
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
