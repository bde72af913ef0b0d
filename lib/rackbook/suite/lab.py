"""JupyterLab on the notebooks."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from rackbook.locations import NOTEBOOKS
from rackbook.suite import kernels


def start(options: Sequence[str] = ()) -> int:
    """Become JupyterLab: on the notebooks' folder, with this environment's kernel, reachable from this machine only.

    Args:
        options: more options of JupyterLab, e.g. ``--no-browser``.
    """
    command = [sys.executable, "-m", "jupyterlab", "--ip=127.0.0.1", f"--notebook-dir={NOTEBOOKS}", *options]
    if os.geteuid() == 0:  # the rule in a container; Jupyter's refusal guards servers that others can reach
        command.append("--allow-root")
    sys.stdout.flush()
    os.execve(sys.executable, command, kernels.environment())  # noqa: S606 - our own interpreter
