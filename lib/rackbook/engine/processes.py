"""What Linux says about processes: who is who, who descends from whom, who holds a port."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_STATE, _PARENT, _SESSION, _START = 0, 1, 3, 19  # places after the name in /proc/PID/stat, proc(5)


@dataclass(frozen=True)
class Identity:
    """A process that cannot be taken for a later one with the same number.

    Attributes:
        pid: its number.
        start_ticks: clock ticks from the machine's start to the process's.
        boot: the machine's start.
    """

    pid: int
    start_ticks: int
    boot: str

    @property
    def is_alive(self) -> bool:
        """Whether this very process runs; one that ended and was not yet waited for does not."""
        fields = _stat(self.pid)
        if fields is None or fields[_STATE] in ("Z", "X"):
            return False
        return int(fields[_START]) == self.start_ticks and boot() == self.boot

    def send(self, signal_number: int) -> None:
        """Send a signal to this very process, if it runs."""
        with contextlib.suppress(ProcessLookupError):
            if self.is_alive:
                os.kill(self.pid, signal_number)


def identify(pid: int) -> Identity | None:
    """The identity of a running process; None if there is none of that number."""
    fields = _stat(pid)
    return None if fields is None else Identity(pid, int(fields[_START]), boot())


def boot() -> str:
    """What tells this start of the machine from the one before."""
    return (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, those that ended left out; a parent comes before its children."""
    children: dict[int, list[int]] = {}
    for other, fields in _all():
        if fields[_STATE] not in ("Z", "X"):
            children.setdefault(int(fields[_PARENT]), []).append(other)
    found, rest = [], [pid]
    while rest:
        new = children.get(rest.pop(0), [])
        found += new
        rest += new
    return found


def session_members(leader: Identity) -> list[int]:
    """Processes of the session that a process founded, whoever their parent is by now, those that ended left out.

    The system gives a session's number to nobody else while the session has a member.
    """
    now = identify(leader.pid)
    if (now is not None and now != leader) or boot() != leader.boot:
        return []
    return [pid for pid, f in _all() if int(f[_SESSION]) == leader.pid and f[_STATE] not in ("Z", "X")]


def command_line(pid: int) -> str:
    """The arguments of a process, blank between them; empty where they cannot be read."""
    try:
        return (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def listener(port: int) -> int | None:
    """The process that listens on a TCP port of this machine; None if nobody does or it is another user's."""
    inodes = set()
    for table in ("net/tcp", "net/tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / table).read_text("ascii").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for pid, _ in _all() if inodes else ():
        with contextlib.suppress(OSError):
            if any(str(link.readlink()) in inodes for link in (_PROC / str(pid) / "fd").iterdir()):
                return pid
    return None


def _all() -> Iterator[tuple[int, list[str]]]:
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None:
                yield int(entry.name), fields


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name, which may itself hold blanks and brackets."""
    try:
        return (_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    except OSError:
        return None
