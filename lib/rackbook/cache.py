"""What is made once and kept between runs, beside the user's other caches; losing it costs time and nothing else."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path


def folder(kind: str) -> Path:
    """Where things of one kind are kept; need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rackbook" / kind


def kept(
    kind: str, name: str, make: Callable[[], bytes], whole: Callable[[bytes], bool] = lambda content: bool(content)
) -> bytes:
    """Read what was kept, or make it and keep it.

    Args:
        kind: folder within the cache.
        name: file name; says everything that the content depends on.
        make: makes the content.
        whole: tells whether a kept content is complete; what is not is made again.
    """
    path = folder(kind) / name
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        if whole(content):
            return content
    content = make()
    with contextlib.suppress(OSError):  # a read-only home or a full disk costs time, not the result
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{name}.{os.getpid()}.partial")
        partial.write_bytes(content)
        partial.replace(path)
    return content


def prune(kind: str, most: int) -> None:
    """Keep the newest files of a kind, at most so many."""
    with contextlib.suppress(OSError):
        files = sorted(folder(kind).iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in files[most:]:
            path.unlink(missing_ok=True)
