"""Which files of the library and its data a kernel reads; runs in the kernel, before the first cell.

Imports nothing of the library, so that everything a notebook imports is seen.
"""

from __future__ import annotations

import json
import os
import sys

State = tuple[int, ...] | None


def state(path: str | os.PathLike[str]) -> State:
    """What tells a file from what it was: size, times of change of content and of inode, and inode; None without one.

    A file that is replaced keeps none of the last two, whatever its name, its size and the time that was copied to it.
    """
    try:
        about = os.stat(path)  # noqa: PTH116
    except OSError:
        return None
    return about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_ino


def start(into: str) -> None:
    """Write the names of all files and folders that are read from here on, again after each cell that adds some.

    Args:
        into: JSON file: the :func:`state` in which each file was first read, by name: the source files of the library
            that are imported, and everything else under one of the folders of RACKBOOK_TRACE_ROOTS. A folder is one
            whose content was listed.
    """
    roots = tuple(root + os.sep for root in os.environ.get("RACKBOOK_TRACE_ROOTS", "").split(os.pathsep) if root)
    found: dict[str, State] = {}
    written = -1
    pid = os.getpid()

    def seen(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.listdir", "os.scandir"):
            return
        path = arguments[0]
        if path is None or isinstance(path, int):
            return
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if (name + os.sep).startswith(roots):
            writes = event == "open" and len(arguments) > 2 and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if not writes:
                name = _source(name)
                if name not in found:
                    found[name] = state(name)  # before it is opened: a change after this is one too many, not missed

    def imported() -> None:
        """Add modules that were loaded without being seen: before the start, or from a cache elsewhere."""
        for name, module in list(sys.modules.items()):
            if name.partition(".")[0] == "rackbook" and (file := getattr(module, "__file__", None)):
                found.setdefault(file, state(file))

    def write(*_: object) -> None:
        nonlocal written
        imported()
        if os.getpid() != pid or len(found) == written:
            return
        listed = dict(found)
        with open(f"{into}.partial", "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(listed, file)
        os.replace(f"{into}.partial", into)  # noqa: PTH105
        written = len(listed)

    imported()
    sys.addaudithook(seen)
    get_ipython().events.register("post_run_cell", write)  # noqa: F821 - defined in every kernel


def _source(name: str) -> str:
    """The source of a compiled module, which is the file that counts; any other name as it is."""
    folder, cache, compiled = name.rpartition(f"{os.sep}__pycache__{os.sep}")
    return f"{folder}{os.sep}{compiled.partition('.')[0]}.py" if cache and compiled.endswith(".pyc") else name
