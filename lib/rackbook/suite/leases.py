"""GPUs of this machine, handed out so that no two executions share one, whichever process runs them."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from rackbook.errors import RackbookError

VISIBLE = "CUDA_VISIBLE_DEVICES"


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


class Leases:
    """The GPUs that this process may hand out.

    Args:
        gpus: their names, as CUDA_VISIBLE_DEVICES has them.
        folder: where the locks lie; the same for all processes of a user on a machine if None.
    """

    def __init__(self, gpus: list[str], folder: Path | None = None) -> None:
        self.gpus = gpus
        self._folder = folder or Path(tempfile.gettempdir()) / f"rackbook-gpus-{os.getuid()}"
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
            if gpu not in self._held and self._lock(gpu):
                taken.append(gpu)
        if len(taken) < count:
            self.give_back(taken)
            return None
        return taken

    def take_named(self, name: str) -> list[str] | None:
        """Take something else that only one may use; None if somebody has it."""
        return [name] if name not in self._held and self._lock(name) else None

    def give_back(self, gpus: list[str]) -> None:
        """Let others have them."""
        for gpu in gpus:
            os.close(self._held.pop(gpu))

    def _lock(self, gpu: str) -> bool:
        self._folder.mkdir(mode=0o700, exist_ok=True, parents=True)
        name = "".join(c if c.isalnum() else "-" for c in gpu)
        held = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(held)
            return False
        self._held[gpu] = held
        return True
