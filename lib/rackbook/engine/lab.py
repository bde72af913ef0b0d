"""The CPU lab: a real vLLM that serves a small mixture of experts on this machine's cores.

What it measures is real, and comparable with nothing but itself: the arithmetic, the network and the kernels of a rack
are not here. What is here is vLLM's own scheduler, engine, API server and data-parallel coupling.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rackbook import cache
from rackbook.engine import lab_install, lab_model
from rackbook.engine.lab_install import LabError, Say
from rackbook.engine.readiness import free_port
from rackbook.engine.server import START_TIMEOUT_S, Server, serve
from rackbook.engine.starting import Command
from rackbook.errors import ParameterError

SERVED_MODEL = "lab"
_KV_CACHE_GIB = 1


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
        ranks = ("--data-parallel-size", f"{num_ranks}") if num_ranks > 1 else ()
        settings = {
            "VLLM_CPU_KVCACHE_SPACE": f"{_KV_CACHE_GIB}",
            "VLLM_CPU_OMP_THREADS_BIND": cores_by_rank(sorted(os.sched_getaffinity(0)), num_ranks),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "",  # compiling vLLM's imports anew in each of its processes takes minutes
        }
        return Command(
            role="server",
            arguments=(
                # the program `vllm` looks for a distribution of that name and does not find this one
                f"{self.python}", "-W", "ignore", "-m", "vllm.entrypoints.openai.api_server",
                "--host", "127.0.0.1", "--port", f"{port}", "--model", f"{model}",
                "--served-model-name", SERVED_MODEL, "--dtype", _dtype(model), "--enforce-eager", *ranks,
                *extra_arguments,
            ),
            environment=settings | dict(environment or {}),
        )  # fmt: skip

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


def cores_by_rank(cores: Sequence[int], num_ranks: int) -> str:
    """Share out the cores: equally, one left to the API server and the client where there are more cores than ranks.

    vLLM's own choice gives every data-parallel rank the same core, which makes the ranks wait for each other.

    Args:
        cores: numbers of the cores that may be used.
        num_ranks: data-parallel ranks.

    Returns:
        Cores of each rank, as vLLM reads it: ranks between bars, cores between commas.
    """
    each = max(1, (len(cores) - 1) // num_ranks)
    start = len(cores) - each * num_ranks if len(cores) > num_ranks else 0
    shares = [[cores[(start + rank * each + place) % len(cores)] for place in range(each)] for rank in range(num_ranks)]
    return "|".join(",".join(str(core) for core in share) for share in shares)


def _dtype(model: Path) -> str:
    """The type of a model's weights, named because vLLM otherwise rounds 32-bit weights to 16 bits."""
    try:
        return str(json.loads((model / "config.json").read_text("utf-8"))["dtype"])
    except (OSError, ValueError, LookupError) as problem:
        raise LabError(f"{model} is no model of the lab: its config.json gives no dtype ({problem})") from problem


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
