"""Sending many small rows against one packed region, over TCP on the loopback address.

A proxy for reading a request's KV rows from another machine. What carries over: a call per row costs the sending
thread time in proportion to the rows, a gathered or packed send does not. What does not: NIXL and UCX post
descriptors to a network card instead of calling the kernel for every row, and no network is in between here.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import polars as pl

import rackbook
from rackbook.errors import ParameterError, RackbookError
from rackbook.hostwork.row_receiver import DONE, HEAD
from rackbook.hostwork.sampling import interleaved

MAX_VECTORS = 1024
"""Pieces of one gathered send, at most; Linux's IOV_MAX."""

POOL_BYTES = 64 * 1024 * 1024
"""The rows lie scattered in memory of this size, as the blocks of a KV cache do."""


class TransferError(RackbookError, RuntimeError):
    """The receiving process ended or does not answer."""


class _Rows:
    """The rows of one transfer, scattered over a pool, and the region that they are packed into."""

    def __init__(self, num_rows: int, row_bytes: int, generator: np.random.Generator) -> None:
        capacity = max(POOL_BYTES // row_bytes, num_rows)
        pool = np.frombuffer(generator.bytes(capacity * row_bytes), dtype=np.uint8).reshape(capacity, row_bytes)
        self.places = generator.permutation(capacity)[:num_rows]
        self.pool = pool
        self.views = [memoryview(pool[place]) for place in self.places]
        self.region = np.ascontiguousarray(pool[self.places])

    def row_by_row(self, connection: socket.socket) -> None:
        for view in self.views:
            connection.sendall(view)

    def gathered(self, connection: socket.socket) -> None:
        for start in range(0, len(self.views), MAX_VECTORS):
            part = self.views[start : start + MAX_VECTORS]
            sent, size = connection.sendmsg(part), sum(view.nbytes for view in part)
            while sent < size:  # the kernel took less: go on from the middle of a row
                left = sent
                rest = []
                for view in part:
                    rest += [view[left:]] if left < view.nbytes else []
                    left = max(0, left - view.nbytes)
                sent += connection.sendmsg(rest)

    def packed_then_sent(self, connection: socket.socket) -> None:
        np.take(self.pool, self.places, axis=0, out=self.region)
        connection.sendall(self.region)

    def already_packed(self, connection: socket.socket) -> None:
        connection.sendall(self.region)


METHODS: dict[str, Callable[[_Rows, socket.socket], None]] = {
    "row by row": _Rows.row_by_row,
    "gathered": _Rows.gathered,
    "packed, then sent": _Rows.packed_then_sent,
    "one packed region": _Rows.already_packed,
}


def measure(
    row_counts: Sequence[int],
    *,
    row_bytes: int,
    budget_s: float = 4.0,
    relative_halfwidth: float = 0.03,
    seed: int = 0,
) -> pl.DataFrame:
    """Time every way to send rows, at every number of rows.

    Args:
        row_counts: rows of a transfer.
        row_bytes: bytes of a row.
        budget_s: time for all of it, shared out evenly over the numbers of rows.
        relative_halfwidth: see :func:`rackbook.hostwork.sampling.interleaved`.
        seed: of where the rows lie.

    Returns:
        One row per way and number of rows: row_send, num_rows, row_bytes, transfer_p50_ms (first byte to the
        receiver's answer) with its interval transfer_low_ms and transfer_high_ms, sender_cpu_ms (CPU time of the
        sending thread), gb_per_s, num_repeats, tight, missing_reason.

    Raises:
        ParameterError: no numbers of rows, or one below 1, or rows of no bytes.
        TransferError: the receiver failed.
    """
    if not row_counts or min(*row_counts, row_bytes) < 1:
        raise ParameterError(
            f"got row_counts = {list(row_counts)}, row_bytes = {row_bytes}; allowed: at least one row and one byte"
        )
    generator = np.random.default_rng(seed)
    found = []
    with _receiver() as connection:
        for num_rows in sorted(row_counts):
            rows = _Rows(num_rows, row_bytes, generator)
            cpu_ms: dict[str, list[float]] = {name: [] for name in METHODS}
            variants = {name: _timed(connection, rows, name, cpu_ms[name]) for name in METHODS}
            for run in variants.values():
                run()
            for times in cpu_ms.values():
                times.clear()
            share = budget_s / len(row_counts)
            sampled = interleaved(variants, budget_s=share, relative_halfwidth=relative_halfwidth, max_repeats=100)
            for name, samples in sampled.items():
                bounds = samples.interval
                found.append(
                    {
                        "row_send": name,
                        "num_rows": num_rows,
                        "row_bytes": row_bytes,
                        "transfer_p50_ms": bounds.estimate,
                        "transfer_low_ms": bounds.low,
                        "transfer_high_ms": bounds.high,
                        "sender_cpu_ms": float(np.median(cpu_ms[name])),
                        "gb_per_s": num_rows * row_bytes / bounds.estimate * 1e-6,
                        "num_repeats": bounds.num_values,
                        "tight": samples.tight,
                        "missing_reason": None if bounds.low is not None else "interval: it takes 6 repeats",
                    }
                )
    return pl.DataFrame(found, infer_schema_length=None)


def _timed(connection: socket.socket, rows: _Rows, name: str, cpu_ms: list[float]) -> Callable[[], float]:
    send, head = METHODS[name], HEAD.pack(rows.region.nbytes)

    def once() -> float:
        cpu_before, before = time.thread_time_ns(), time.perf_counter_ns()
        try:
            connection.sendall(head)
            send(rows, connection)
            cpu_ms.append((time.thread_time_ns() - cpu_before) * 1e-6)
            answer = connection.recv(1)
        except OSError as problem:
            raise TransferError(f"the receiver of the rows does not answer ({problem})") from None
        if answer != DONE:
            raise TransferError("the receiver of the rows ended in mid-transfer")
        return (time.perf_counter_ns() - before) * 1e-6

    return once


@contextmanager
def _receiver() -> Iterator[socket.socket]:
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "rackbook.hostwork.row_receiver", str(os.getpid())],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            env=os.environ | {"PYTHONPATH": str(Path(rackbook.__file__).resolve().parents[1])},
        )  # fmt: skip
        try:
            port = process.stdout.readline().strip()
            if not port:
                log.seek(0)
                words = log.read().decode(errors="replace").strip().splitlines() or ["(none)"]
                raise TransferError(f"the receiver of the rows did not start; last words: {words[-1]}")
            with socket.create_connection(("127.0.0.1", int(port)), timeout=30.0) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield connection
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(2)
            process.kill()
            process.wait()
            process.stdout.close()
