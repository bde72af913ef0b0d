"""Whose turn it is on this machine, and with which of its GPUs, whichever processes run the executions."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from rackbook.errors import ParameterError, RackbookError
from rackbook.suite import locks
from rackbook.suite.executions import MACHINE

VISIBLE = "CUDA_VISIBLE_DEVICES"

_EVERY_S = 1.0
_LISTED = re.compile(r"^\s*(?:GPU (?P<index>\d+):|MIG ).*\(UUID: (?P<uuid>[^)\s]+)\)", re.MULTILINE)
_NAME = re.compile(r"\d+|(?:GPU|MIG)-\S+")


def visible() -> list[str]:
    """The GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all that the driver lists.

    As in CUDA, the list ends at the first word that names no GPU, like -1 or NoDevFiles, or one that stands there
    already. Each is called as it stands there: vLLM wants a number where a number was given.
    """
    if VISIBLE not in os.environ:
        return [index for index in listed() if index.isdigit()]
    found: dict[str, str] = {}
    for word in map(str.strip, os.environ[VISIBLE].split(",")):
        if (gpu := uuid(word)) is None or gpu in found:
            break
        found[gpu] = word
    return list(found.values())


def chosen(names: Sequence[str]) -> list[str]:
    """The GPUs that are named, if this process may use them.

    Raises:
        ParameterError: one is not among the visible ones, or is named twice.
    """
    allowed = visible()
    among = {uuid(name) for name in allowed}
    known = VISIBLE in os.environ or bool(listed())
    found: dict[str | None, str] = {}
    for name in names:
        gpu = uuid(name)
        if gpu is None or (known and gpu not in among):
            where = f"{VISIBLE} is {os.environ[VISIBLE]!r}" if VISIBLE in os.environ else "those that nvidia-smi lists"
            raise ParameterError(f"--gpus: got {name!r}, allowed: {', '.join(allowed) or 'none'} ({where})")
        if gpu in found:
            raise ParameterError(f"--gpus: got {found[gpu]!r} and {name!r}, which are the same GPU")
        found[gpu] = name
    return list(names)


def uuid(name: str) -> str | None:
    """What a GPU is called for good, whether its number, its UUID or the beginning of that is given.

    Returns:
        The UUID; the name itself where no driver tells; None for something that names no GPU.
    """
    if not _NAME.fullmatch(name):
        return None
    found = listed()
    if not found:
        return name
    if name in found:
        return found[name]
    matching = {each for each in found.values() if each.startswith(name)}
    return matching.pop() if len(matching) == 1 else None


@cache
def listed() -> dict[str, str]:
    """The GPUs of this machine as nvidia-smi lists them: UUID by number, and by itself for a part of a GPU (MIG).

    Empty where there is no driver.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    try:
        done = subprocess.run([tool, "-L"], capture_output=True, text=True, timeout=30)  # noqa: S603 - from the path
    except subprocess.TimeoutExpired:
        raise RackbookError("nvidia-smi does not answer, so nobody knows which GPUs are there") from None
    if done.returncode:
        return {}
    return {match["index"] or match["uuid"]: match["uuid"] for match in _LISTED.finditer(done.stdout)}


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
        gpus: their names, as CUDA_VISIBLE_DEVICES has them; a lock is called by the UUID.
        place: where the locks lie; :func:`folder` if None.
    """

    def __init__(self, gpus: list[str], place: Path | None = None) -> None:
        self.gpus = gpus
        self._folder = place or folder()
        self._held: dict[str, int] = {}
        self._shares = itertools.count(1)

    def take(self, count: int) -> list[str] | None:
        """Take GPUs that nobody holds.

        Returns:
            Their names; None if there are not enough at the moment, and then none is held.
        """
        taken: list[str] = []
        for gpu in self.gpus:
            if len(taken) == count:
                break
            if self._lock(uuid(gpu) or gpu, fcntl.LOCK_EX, gpu):
                taken.append(gpu)
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
            word = name if how == fcntl.LOCK_EX else f"{name}, share {next(self._shares)}"
            if not self._lock(name, how, word):
                self.give_back(taken)
                return None
            taken.append(word)
        return taken

    def give_back(self, taken: list[str]) -> None:
        """Let others have it."""
        for name in taken:
            os.close(self._held.pop(name))

    def _lock(self, name: str, how: int, word: str) -> bool:
        """Take a lock, to be given back by a word; False if somebody has it."""
        self._folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        file = "".join(c if c.isalnum() else "-" for c in name)[:60]
        digest = hashlib.sha256(name.encode()).hexdigest()[:8]
        path = self._folder / f"{file}-{digest}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not locks.taken(descriptor, how | fcntl.LOCK_NB, path):
            os.close(descriptor)
            return False
        self._held[word] = descriptor
        return True
