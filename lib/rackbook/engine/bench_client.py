"""Running the benchmark client to its end, and nothing of it beyond that."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rackbook.engine import readiness
from rackbook.engine.tether import tethered
from rackbook.errors import RackbookError

_MAIN_RUN = "Starting main benchmark run"
_TAIL_LINES = 25


def run_client(
    command: Sequence[str], log: Path, *, environment: Mapping[str, str] | None = None, timeout_s: float = 3600.0
) -> float | None:
    """Run the client to its end; its processes end with this call, however it ends.

    Args:
        command: of :func:`rackbook.engine.bench.arguments`.
        log: file for what it prints.
        environment: its variables; those of this process if None.
        timeout_s: longest time.

    Returns:
        Share of one core that the client used between the start of the measured part and its end, in percent; None
        where the system does not tell.

    Raises:
        RackbookError: it cannot be started, failed, or took too long; with the end of its log.
    """
    with log.open("wb") as out:
        client = subprocess.Popen(  # noqa: S603 - a list, no shell
            tethered(command), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env=None if environment is None else dict(environment), start_new_session=True,
        )  # fmt: skip
        try:
            share = _wait(client, log, time.monotonic() + timeout_s)
        except TimeoutError:
            message = f"the benchmark client took longer than {timeout_s:g} s; the end of its log:\n{_end(log)}"
            raise RackbookError(message) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(client.pid, signal.SIGKILL)
            client.wait()
    if client.returncode == 127:
        raise RackbookError(f"the benchmark client cannot be started: {_end(log)}")
    if client.returncode:
        raise RackbookError(f"the benchmark client ended with status {client.returncode}; its log:\n{_end(log)}")
    return share


def _end(log: Path) -> str:
    return readiness.tail(log, _TAIL_LINES) or "(nothing)"


def _wait(client: subprocess.Popen[bytes], log: Path, deadline: float) -> float | None:
    """Wait for the client's end and measure how busy it was once the clock of the benchmark ran."""
    start: tuple[float, float] | None = None
    last: tuple[float, float] | None = None
    while client.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError
        cpu = _cpu_s(client.pid)
        if cpu is not None and (start is not None or _MAIN_RUN in log.read_text("utf-8", errors="replace")):
            last = (time.monotonic(), cpu)
            start = start or last
        with contextlib.suppress(subprocess.TimeoutExpired):
            client.wait(0.1)
    if start is None or last is None or last[0] - start[0] < 0.3:  # too short to tell from the clock's ticks
        return None
    return 100 * (last[1] - start[1]) / (last[0] - start[0])


def _cpu_s(pid: int) -> float | None:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text("ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
