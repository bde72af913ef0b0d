"""Which files of the library and its data a kernel reads; runs in the kernel, before the first cell.

Imports nothing of the library, so that everything a notebook imports is seen.
"""

from __future__ import annotations

import json
import os
import sys


def start(into: str) -> None:
    """Write the names of all files and folders that are read from here on, again after each cell that adds some.

    Args:
        into: JSON file of two lists: ``modules`` (source files of the library) and ``read`` (everything else under
            one of the folders of RACKBOOK_TRACE_ROOTS; a folder is one whose content was listed).
    """
    roots = tuple(root + os.sep for root in os.environ.get("RACKBOOK_TRACE_ROOTS", "").split(os.pathsep) if root)
    found: set[str] = set()
    written: tuple[int, int] = (-1, -1)
    pid = os.getpid()

    def seen(event: str, arguments: tuple) -> None:
        if event not in ("open", "os.listdir", "os.scandir"):
            return
        path = arguments[0]
        if path is None or isinstance(path, int):
            return
        name = os.path.abspath(os.fsdecode(path))  # noqa: PTH100
        if (name + os.sep).startswith(roots) and not name.endswith(".pyc"):
            writes = event == "open" and len(arguments) > 2 and arguments[2] & (os.O_WRONLY | os.O_RDWR)
            if not writes:
                found.add(name)

    def write(*_: object) -> None:
        nonlocal written
        modules = {
            file
            for name, module in list(sys.modules.items())
            if name.partition(".")[0] == "rackbook" and (file := getattr(module, "__file__", None))
        }
        if os.getpid() != pid or (len(modules), len(found)) == written:
            return
        written = len(modules), len(found)
        with open(f"{into}.partial", "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump({"modules": sorted(modules), "read": sorted(found)}, file)
        os.replace(f"{into}.partial", into)  # noqa: PTH105

    sys.addaudithook(seen)
    get_ipython().events.register("post_run_cell", write)  # noqa: F821 - defined in every kernel
