"""The CPU lab: a real vLLM that serves a small mixture of experts on this machine's cores.

What it measures is real, and comparable with nothing but itself: the arithmetic, the network and the kernels of a rack
are not here. What is here is vLLM's own scheduler, engine, API server and data-parallel coupling.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rackbook import cache
from rackbook.engine import lab_install, lab_model, lab_settings
from rackbook.engine.lab_install import LabError, Say
from rackbook.engine.readiness import free_port
from rackbook.engine.server import START_TIMEOUT_S, Server, serve
from rackbook.engine.starting import Command
from rackbook.errors import ParameterError


class Lab:
    """The lab's environment, models and servers.

    Attributes:
        folder: the environment; need not exist before :meth:`install`.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """Name the environment: ``folder``, or where RACKBOOK_LAB or the pins say if None."""
        self.folder = Path(folder) if folder is not None else lab_install.folder()

    @property
    def python(self) -> Path:
        """The interpreter that has vLLM."""
        return lab_install.python(self.folder)

    @property
    def is_installed(self) -> bool:
        """Whether it is complete."""
        return lab_install.is_installed(self.folder)

    def install(self, progress: Say | None = None) -> Lab:
        """Install what is missing: minutes the first time, nothing afterwards.

        Args:
            progress: takes a line every few seconds; standard error if None.

        Returns:
            The lab itself.

        Raises:
            LabError: this machine cannot run it, or pip fails.
        """
        lab_install.install(self.folder, progress or _to_stderr)
        return self

    def model(self, folder: Path | None = None, **shape: object) -> Path:
        """Write a model, as :func:`rackbook.engine.lab_model.write` does.

        Args:
            folder: where; one in the cache that the shape names if None.
            shape: fields of :class:`rackbook.engine.lab_model.Shape`, e.g. ``**lab_model.COMPUTE_DOMINATED``.

        Returns:
            The folder, which is also the tokenizer's.
        """
        return lab_model.write(folder or cache.folder("lab-models") / lab_model.name(**shape), **shape)

    def command(
        self,
        model: Path,
        port: int,
        num_ranks: int = 1,
        extra_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Command:
        """What starts a server: see :meth:`server` for the arguments."""
        if num_ranks < 1:
            raise ParameterError(f"num_ranks: got {num_ranks}, allowed: 1 or more")
        return Command(
            role="server",
            arguments=lab_settings.server(
                str(self.python), str(model), port, num_ranks, _dtype(model), extra_arguments
            ),
            environment=lab_settings.environment(num_ranks) | dict(environment or {}),
        )

    def server(
        self,
        num_ranks: int = 1,
        model: Path | None = None,
        port: int | None = None,
        extra_arguments: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        *,
        timeout_s: float = START_TIMEOUT_S,
        progress: Say | None = None,
    ) -> Server:
        """Start a server and wait until it answers.

        Args:
            num_ranks: data-parallel ranks; the experts of every layer are shared by all of them.
            model: folder of a model; the default shape if None.
            port: on 127.0.0.1; a free one if None.
            extra_arguments: more options of vLLM's API server; they win over the lab's own.
            environment: variables that win over the lab's own.
            log: what it prints; in the cache, named by the port, if None.
            timeout_s: longest time until it answers.
            progress: takes a line every few seconds; standard error if None.

        Returns:
            The server; use it in a ``with`` block. Requests name the model ``lab`` (``server.model``).

        Raises:
            LabError: the lab is not installed.
            ServerError: it does not start.
        """
        if not self.is_installed:
            raise LabError(f"the CPU lab is not installed at {self.folder}: run `rackbook engine up`")
        chosen = free_port() if port is None else port
        command = self.command(model or self.model(), chosen, num_ranks, extra_arguments, environment)
        return serve(
            [command], f"http://127.0.0.1:{chosen}", log or cache.folder("engine") / f"server-{chosen}.log",
            timeout_s=timeout_s, say=progress,
        )  # fmt: skip


def _dtype(model: Path) -> str:
    """The type of a model's weights."""
    try:
        return str(json.loads((model / "config.json").read_text("utf-8"))["dtype"])
    except (OSError, ValueError, LookupError) as problem:
        raise LabError(f"{model} is no model of the lab: its config.json gives no dtype ({problem})") from problem


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
