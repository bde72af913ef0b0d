"""The kernels of the suite: this very Python, private files, and no network port."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rackbook import pictures
from rackbook.suite import nursery

LONGEST_BASE = 40
"""Most characters of the folder in which scratch folders are made: the paths of sockets in them must stay short."""

_PREFIX, _LOCK = "rb-", "lock"
_LONGEST_SOCKET_PATH = 90  # the system allows about 104 bytes, "/k-ipc-5" and a margin go off


def environment(base: dict[str, str] | None = None) -> dict[str, str]:
    """The variables under which "python3" means the kernel of this environment.

    A kernel of the same name in the user's home or on JUPYTER_PATH would otherwise come first.

    Args:
        base: the variables to start from; those of this process if None.
    """
    found = dict(os.environ if base is None else base)
    own = str(Path(sys.prefix) / "share" / "jupyter")
    others = [entry for entry in found.get("JUPYTER_PATH", "").split(os.pathsep) if entry and entry != own]
    found["JUPYTER_PATH"] = os.pathsep.join([own, *others])
    found["JUPYTER_PREFER_ENV_PATH"] = "1"
    return found


def private_environment(scratch: Path, trace: Path | None = None) -> dict[str, str]:
    """The variables of one job's kernel: its own history, profile, runtime and temporary files, all under ``scratch``.

    Creates the folders. The kernel draws no pictures: :func:`rackbook.suite.artefacts.add_pictures` does.

    Args:
        scratch: private folder of the kernel.
        trace: file for the names of what the kernel reads, see :mod:`rackbook.suite.tracing`; None to keep none.
    """
    folders = {"IPYTHONDIR": "ipython", "JUPYTER_RUNTIME_DIR": "runtime", "TMPDIR": "tmp"}
    for name in folders.values():
        (scratch / name).mkdir(parents=True, exist_ok=True)
    private = {variable: str(scratch / name) for variable, name in folders.items()}
    base = {name: value for name, value in environment().items() if name != nursery.ADDRESS}
    if trace is not None:
        first = scratch / "ipython" / "profile_default" / "startup" / "00-trace.py"
        first.parent.mkdir(parents=True, exist_ok=True)
        first.write_text(f"__import__('rackbook.suite.tracing').suite.tracing.start({str(trace)!r})\n", "utf-8")
    return base | private | {pictures.LATER: "1"}


def connection(scratch: Path) -> dict[str, str]:
    """Where one kernel listens: Unix sockets in ``scratch``; loopback ports if the path is too long for a socket."""
    if len(os.fsencode(scratch / "k-ipc-5")) > _LONGEST_SOCKET_PATH:
        return {"transport": "tcp", "connection_file": str(scratch / "k.json")}
    return {"transport": "ipc", "connection_file": str(scratch / "k.json")}


def scratch_base() -> Path:
    """Where scratch folders are made: the default for temporary files, or a shorter one if that is too long."""
    default = Path(tempfile.gettempdir())
    short = Path("/tmp")  # noqa: S108 - the folders made in it are private
    return short if len(str(default)) > LONGEST_BASE and os.access(short, os.W_OK) else default


@contextmanager
def scratch_folder() -> Iterator[str]:
    """A temporary folder whose path is short enough for sockets where that is possible.

    Those that killed runs left behind go first: a folder is in use as long as its lock is held.
    """
    base = scratch_base()
    for abandoned in base.glob(f"{_PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError), abandoned.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(abandoned.parent, ignore_errors=True)
    with (
        tempfile.TemporaryDirectory(prefix=_PREFIX, dir=base, ignore_cleanup_errors=True) as folder,
        (Path(folder) / f"{_LOCK}.new").open("wb") as lock,
    ):
        with contextlib.suppress(OSError):  # without locks it is left behind if this process is killed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            Path(lock.name).rename(Path(folder) / _LOCK)  # held before anybody sees it
        yield folder
