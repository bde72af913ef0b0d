"""Executing one notebook with papermill: what counts as success, and how a failure is saved."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackbook.startup import without_iri_grammar
from rackbook.suite import artefacts, kernels, memory, nursery, outcomes
from rackbook.suite.tasks import Task

with without_iri_grammar():
    import nbformat
    from jupyter_client import AsyncKernelManager
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.clientwrap import PapermillNotebookClient
    from papermill.engines import NBClientEngine, papermill_engines
    from papermill.exceptions import PapermillExecutionError
    from papermill.execute import execute_notebook, raise_for_execution_errors
    from traitlets.config import Config

_ENGINE = "rackbook"
_START_TIMEOUT_S = 120
_IOPUB_TIMEOUT_S = 60  # nbclient's 4 s are too few for a large output on a busy machine


class KernelStartError(RuntimeError):
    """The kernel did not come up, so no cell has run."""


@dataclass
class _Job:
    """The state of the execution that goes on in this process; papermill builds its engine itself."""

    task: Task
    on_kernel: Callable[[int], None]
    deadline: float | None = None
    cause: str = outcomes.NOTEBOOK
    exit_status: int | None = None
    watch: memory.Watch | None = None

    def remaining_s(self, _cell: object) -> float:
        """How long the next cell may take: nbclient limits cells, the limit here is for all of them together."""
        now = time.monotonic()
        if self.deadline is None:  # the first cell: a slow start of the kernel is not the notebook's time
            self.deadline = now + self.task.timeout_s
        return max(0.5, self.deadline - now)


def execute(task: Task, on_kernel: Callable[[int], None] = lambda _group: None) -> outcomes.Outcome:
    """Execute a notebook, save it whatever happens, and write its charts.

    Success means: no cell has an error, the last code cell shows verdicts, and every chart is written. Papermill's own
    word is not enough: it calls a notebook complete whose kernel was killed or whose cell called ``sys.exit(0)``.

    Args:
        task: what to execute.
        on_kernel: called with the kernel's process group as soon as there is one.

    Returns:
        What became of it; the same is in the metadata of the saved notebook.
    """
    logging.getLogger("papermill").setLevel(logging.ERROR)  # names and types were checked before, better than there
    start = time.monotonic()
    task.scratch.mkdir(parents=True, exist_ok=True)
    saved = task.scratch / "executed.ipynb"
    reason, index = "", None
    job = _Job(task, on_kernel)
    killed_before = memory.system_kills()
    try:
        execute_notebook(
            str(task.path), str(saved), parameters=task.values, engine_name=_ENGINE, kernel_name="python3",
            cwd=str(task.work or task.path.parent), progress_bar=False, request_save_on_cell_execute=False,
            start_timeout=_START_TIMEOUT_S, job=job,
        )  # fmt: skip
        content = nbformat.read(saved, as_version=4)
    except PapermillExecutionError as problem:
        content = nbformat.read(saved, as_version=4)
        reason = f"{problem.ename}: {problem.evalue}" if problem.evalue else problem.ename
        index = _marked_cell(content)
    except KernelStartError as problem:
        content = nbformat.read(task.path, as_version=4)
        without_outputs(content)
        reason, job.cause = str(problem), outcomes.START
    try:
        artefacts.add_pictures(content)
        if task.charts is not None:
            artefacts.write_charts(content, task.charts)
    except artefacts.ChartError as problem:
        if not reason:
            reason, index = str(problem), problem.cell
            content, index = _with_failed_cell(content, index, "ChartError", reason, saved)
    if job.cause == outcomes.KILLED and memory.system_kills() > killed_before:
        job.cause = outcomes.NO_MEMORY
    outcome = outcomes.Outcome(
        notebook=task.notebook,
        succeeded=not reason,
        reason=outcomes.without_colour(reason),
        failed_cell=None if index is None else _code_cell_number(content, index),
        parameters=task.parameters,
        given=tuple(task.values),
        duration_s=round(time.monotonic() - start, 3),
        run=task.run,
        cause=job.cause if reason else "",
        task=task.id,
    )
    outcomes.write(content, task.executed, outcome)
    return outcome


def without_outputs(content: dict[str, Any]) -> None:
    """Take the outputs of an earlier execution away, in place."""
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None


class _KernelManager(AsyncKernelManager):
    """Jupyter's manager, which takes kernels from the nursery of this process if it has one."""

    async def _async_launch_kernel(self, kernel_cmd: list[str], **options: Any) -> None:
        address = os.environ.get(nursery.ADDRESS)
        launch = self.provisioner.launch_kernel

        async def fork(command: list[str], **more: Any) -> Any:
            environment = more["env"] | {"JPY_PARENT_PID": str(os.getpid())}
            process = nursery.fork(address, self.connection_file, environment, str(more.get("cwd") or Path.cwd()))
            if process is None:  # it is gone, and so are its kernels; a fresh interpreter does as well
                return await launch(command, **more)
            self.provisioner.process = process
            self.provisioner.pid = self.provisioner.pgid = process.pid
            return self.provisioner.connection_info

        if address:
            self.provisioner.launch_kernel = fork
        await super()._async_launch_kernel(kernel_cmd, **options)


class _Client(PapermillNotebookClient):
    """Papermill's client, which tells its kernel's process group and ends whatever that group leaves behind."""

    job: _Job
    _group: int | None = None
    _process: Any = None

    def start_new_kernel(self, **options: Any) -> None:
        super().start_new_kernel(**options)
        self._group, self._process = self.km.provisioner.pgid, self.km.provisioner.process
        self.job.on_kernel(self._group)
        if self.job.task.memory_bytes is not None:
            self.job.watch = memory.Watch(self._group, self.job.task.memory_bytes)

    def end_group(self) -> None:
        """Kill what a cell started and did not end; nothing is left to do after the last cell."""
        if self._process is not None:
            self.job.exit_status = self._process.poll()
        if self.job.watch is not None:
            self.job.watch.end()
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, signal.SIGKILL)


class _Engine(NBClientEngine):
    """Papermill's engine with our transport, one retry of a kernel that does not start, and an end that is checked."""

    @classmethod
    def execute_managed_notebook(
        cls, nb_man: Any, kernel_name: str, *, job: _Job, start_timeout: int, **_: Any
    ) -> None:
        problem: Exception | None = None
        for attempt in (1, 2):
            scratch = job.task.scratch / str(attempt)
            try:
                cls._run(nb_man, kernel_name, job, start_timeout, scratch)
            except Exception as caught:  # of zmq, the system or Jupyter; an error of a cell's own never gets here
                if outcomes.is_full(caught):
                    raise
                if _last_started(nb_man.nb) is None:
                    problem = caught
                    continue
                name, value, job.cause = _explained(caught, job)
                _mark(nb_man, name, value)
            _check_end(nb_man)
            return
        message = f"the kernel did not start, tried twice: {type(problem).__name__}: {problem}"
        raise KernelStartError(message) from problem

    @staticmethod
    def _run(nb_man: Any, kernel_name: str, job: _Job, start_timeout: int, scratch: Path) -> None:
        environment = kernels.private_environment(scratch, job.task.trace) | job.task.environment
        os.environ["JUPYTER_PATH"] = environment["JUPYTER_PATH"]  # the kernel is looked up in this process
        os.environ["JUPYTER_PREFER_ENV_PATH"] = environment["JUPYTER_PREFER_ENV_PATH"]
        client = _Client(
            nb_man, kernel_name=kernel_name, kernel_manager_class=_KernelManager,
            config=Config(KernelManager=kernels.connection(scratch)),
            startup_timeout=start_timeout, timeout_func=job.remaining_s, iopub_timeout=_IOPUB_TIMEOUT_S,
            shutdown_kernel="immediate", record_timing=False, coalesce_streams=True,
            log=logging.getLogger("papermill"),
        )  # fmt: skip
        client.job = job
        try:
            client.execute(env=environment)
        finally:
            client.end_group()


papermill_engines.register(_ENGINE, _Engine)


def _explained(problem: Exception, job: _Job) -> tuple[str, str, str]:
    """Name, text and cause of what ended an execution from outside its cells."""
    if isinstance(problem, DeadKernelError):
        if job.watch is not None and job.watch.exceeded_bytes:
            used, allowed = (n / 2**30 for n in (job.watch.exceeded_bytes, job.watch.limit_bytes))
            return "MemoryLimit", f"the notebook used {used:.2f} GiB of memory, allowed: {allowed:.2f}", outcomes.MEMORY
        if job.exit_status == -signal.SIGKILL:
            return "KernelDied", "the kernel ended in this cell: killed, or out of memory", outcomes.KILLED
        how = "" if job.exit_status is None else f" ({_ended(job.exit_status)})"
        return "KernelDied", f"the kernel ended in this cell: it crashed or ended itself{how}", outcomes.NOTEBOOK
    if isinstance(problem, CellTimeoutError):
        limit_s = job.task.timeout_s
        hint = "raise it: --timeout of `rackbook run`, timeout_s in the file of a sweep"
        return "TimeLimit", f"the notebook ran past its limit of {limit_s:g} s; {hint}", outcomes.TIME
    return type(problem).__name__, str(problem), outcomes.NOTEBOOK


def _ended(status: int) -> str:
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def _last_started(content: Any) -> int | None:
    started = [i for i, c in enumerate(content.cells) if c.metadata.get("papermill", {}).get("start_time")]
    return started[-1] if started else None


def _mark(nb_man: Any, name: str, value: str, index: int | None = None) -> None:
    """Put an error into the cell that was running, so that papermill saves it as the failing one."""
    index = _last_started(nb_man.nb) if index is None else index
    cell = nb_man.nb.cells[index or 0]
    cell.setdefault("outputs", []).append(_error(name, value))
    nb_man.cell_exception(cell, cell_index=index)


def _error(name: str, value: str) -> Any:
    return nbformat.v4.new_output("error", ename=name, evalue=value, traceback=[f"{name}: {value}"])


def _check_end(nb_man: Any) -> None:
    code = [i for i, cell in enumerate(nb_man.nb.cells) if cell.cell_type == "code"]
    for index in code:
        for output in nb_man.nb.cells[index].outputs:
            if output.output_type != "error":
                continue
            if output.ename == "SystemExit":  # papermill takes an exit with status 0 for a success
                output.evalue = f"status {output.evalue or 0}: the notebook stopped before its end"
                nb_man.cell_exception(nb_man.nb.cells[index], cell_index=index)
            return
    if code and artefacts.verdicts(nb_man.nb) is None:
        value = "the last code cell shows no verdicts; it must end with experiment.CHECKS.judge(evidence)"
        _mark(nb_man, "NotebookIncomplete", value, code[-1])


def _with_failed_cell(content: Any, index: int, name: str, value: str, saved: Path) -> tuple[Any, int | None]:
    content.cells[index].outputs.append(_error(name, value))
    content.cells[index].metadata.papermill["status"] = "failed"
    content.cells[index].metadata.papermill["exception"] = True
    content.metadata.papermill["exception"] = True
    with contextlib.suppress(PapermillExecutionError):
        raise_for_execution_errors(content, str(saved))
    marked = nbformat.read(saved, as_version=4)
    return marked, _marked_cell(marked)


def _marked_cell(content: Any) -> int | None:
    """Index of the cell with the error, papermill's inserted markers counted."""
    for index, cell in enumerate(content.cells):
        if any(output.output_type == "error" for output in cell.get("outputs", [])):
            return index
    return None


def _code_cell_number(content: Any, index: int) -> int:
    return sum(cell.cell_type == "code" for cell in content.cells[: index + 1])
