"""``rackbook`` with experiments for small notebooks: ``python small_sweep.py sweep …``, to be started and killed."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path

FILE = Path(__file__).resolve()
TOPICS = ("one", "two", "dots")


def main() -> None:
    """Run the command line."""
    import small_notebooks

    class Params(small_notebooks.Params):
        source: str = "published"

    for topic in TOPICS:
        name = f"rackbook.experiments.{topic}"
        module = types.ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.Params = Params
        sys.modules[name] = module
    from rackbook.cli import main as command_line

    command_line()


def start(*arguments: object, environment: dict[str, str] | None = None, **options) -> subprocess.Popen:
    """Start it as a process of its own."""
    command = [sys.executable, str(FILE), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment or dict(os.environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        **options,
    )  # fmt: skip


def run(*arguments: object, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run it to its end: exit status, what it printed, what it complained."""
    process = start(*arguments, environment=environment)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


if __name__ == "__main__":
    main()
