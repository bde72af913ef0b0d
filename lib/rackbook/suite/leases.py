"""Whose turn it is on this machine, and with which of its GPUs, whichever processes run the executions."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rackbook.errors import RackbookError
from rackbook.suite.executions import MACHINE

VISIBLE = "CUDA_VISIBLE_DEVICES"

_EVERY_S = 1.0


def visible() -> list[str]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all that the driver lists."""
    if VISIBLE in os.environ:
        return [word.strip() for word in os.environ[VISIBLE].split(",") if word.strip()]
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        done = subprocess.run(  # noqa: S603 - found on the path
            [tool, "--query-gpu=index", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        )
    except subprocess.TimeoutExpired:
        raise RackbookError("nvidia-smi does not answer; name the GPUs with --gpus 0,1") from None
    return done.stdout.split() if done.returncode == 0 else []


def folder() -> Path:
    """Where the locks lie: one place for all processes of a user, wherever each has its temporary files.

    RACKBOOK_LEASES names another one: whoever has the same shares this machine.
    """
    if named := os.environ.get("RACKBOOK_LEASES"):
        return Path(named)
    shared = Path("/tmp")  # noqa: S108 - the folder made in it is private
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / f"rackbook-leases-{os.getuid()}"


@contextmanager
def held(alone: Sequence[str]) -> Iterator[None]:
    """Hold a turn as :meth:`Leases.turn` gives it; whoever has some of it is waited for, and the user is told."""
    leases, said = Leases([]), False
    while (taken := leases.turn(alone)) is None:
        if not said:
            why = "a measurement runs alone, and another run is at work" if alone else "another run measures here"
            print(f"waits: {why}", file=sys.stderr, flush=True)
            said = True
        time.sleep(_EVERY_S)
    try:
        yield
    finally:
        leases.give_back(taken)


class Leases:
    """The GPUs that this process may hand out, and its turn on this machine and on others.

    Args:
        gpus: their names, as CUDA_VISIBLE_DEVICES has them.
        place: where the locks lie; :func:`folder` if None.
    """

    def __init__(self, gpus: list[str], place: Path | None = None) -> None:
        self.gpus = gpus
        self._folder = place or folder()
        self._held: dict[str, int] = {}

    def take(self, count: int) -> list[str] | None:
        """Take GPUs that nobody holds.

        Returns:
            Their names; None if there are not enough at the moment, and then none is held.
        """
        taken: list[str] = []
        for gpu in self.gpus:
            if len(taken) == count:
                break
            if (held := self._lock(gpu, fcntl.LOCK_EX)) is not None:
                taken.append(held)
        if len(taken) < count:
            self.give_back(taken)
            return None
        return taken

    def turn(self, alone: Sequence[str]) -> list[str] | None:
        """Take the right to start: what is wanted alone, and a share of this machine unless that is among it.

        Args:
            alone: MACHINE, or the words for something elsewhere.

        Returns:
            What to give back; None if somebody else has some of it, and then none is held.
        """
        wanted = dict.fromkeys(alone, fcntl.LOCK_EX)
        wanted.setdefault(MACHINE, fcntl.LOCK_SH)
        taken: list[str] = []
        for name, how in wanted.items():
            if (held := self._lock(name, how)) is None:
                self.give_back(taken)
                return None
            taken.append(held)
        return taken

    def give_back(self, taken: list[str]) -> None:
        """Let others have it."""
        for name in taken:
            os.close(self._held.pop(name))

    def _lock(self, name: str, how: int) -> str | None:
        """Take a lock; the word by which it is given back, None if somebody has it."""
        self._folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        file = "".join(c if c.isalnum() else "-" for c in name)[:60]
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        descriptor = os.open(self._folder / f"{file}-{digest}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        word = name if how == fcntl.LOCK_EX else f"{name}, share {descriptor}"
        self._held[word] = descriptor
        return word
