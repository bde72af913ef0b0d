"""What 02, 03, 04 and 10 share: a run of ``vllm bench forward`` that times the batches of an experiment's plan."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rackbook.experiments import live
from rackbook.importers.kernel_profiles import SUFFIX, KernelProfiles, read_kernel_profiles
from rackbook.runs import Run


class Wanted(Protocol):
    """The parameters of a notebook that say which run it shows; its plan takes further ones."""

    source: str
    cluster: str


def run_of(topic: str, params: Wanted) -> Run | None:
    """The run that a notebook shows beside the published points, measured on ``cluster`` if ``source`` says so.

    Args:
        topic: the experiment.
        params: all parameters of its notebook.

    Raises:
        ParameterError: a ``source`` that is not allowed.
        DataError: a stored run that was never finished, or is damaged.
        RackbookError: the cluster cannot do it, or it failed on the way.
    """

    def measure() -> Run:
        from rackbook.measurements import bare_steps  # what talks to vLLM is imported when it is needed

        return bare_steps.measure(topic, params)

    return live.run_of(topic, params.source, measure)


def kernel_times(run: Run, row: Mapping[str, Any]) -> KernelProfiles | None:
    """The kernel times of one timed batch on every rank; None if the run holds none.

    Args:
        run: the run.
        row: one of its points: bench_stage, bench_case, hardware, model.

    Raises:
        DataError: the kernel times are not what they should be.
    """
    stage, case = row["bench_stage"], row["bench_case"].partition("=")[0]
    if not any(file.startswith(f"{stage}.{case}.rank") and file.endswith(SUFFIX) for file in run.files):
        return None
    return read_kernel_profiles(
        run.path / f"{stage}.{case}", stage=None, hardware=row["hardware"], model=row["model"], nsight_forwards=1
    )
