"""A batch: plan which notebooks run with which values, run them, and say what came out."""

from __future__ import annotations

import fcntl
import shutil
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackbook import pictures
from rackbook.cores import whole_cores
from rackbook.errors import DataError, RackbookError
from rackbook.locations import runs_home, shown
from rackbook.suite import kernels, leases, locks, outcomes, pool, sweep_plan
from rackbook.suite.executions import Execution, Limits
from rackbook.suite.notebooks import Notebook
from rackbook.suite.progress import Progress
from rackbook.suite.tasks import Task

TIMEOUT_S = Limits().timeout_s


@dataclass(frozen=True)
class Folders:
    """Where a batch writes.

    Attributes:
        out: the folder that holds all the others.
    """

    out: Path

    @property
    def notebooks(self) -> Path:
        """Executed notebooks."""
        return self.out / "notebooks"

    @property
    def charts(self) -> Path:
        """One folder per notebook with its charts."""
        return self.out / "charts"

    @property
    def report(self) -> Path:
        """The report's page."""
        return self.out / "report" / "index.html"


def execute(
    notebooks: Sequence[Notebook],
    values: dict[str, dict[str, Any]],
    folders: Folders,
    *,
    jobs: int | None = None,
    timeout_s: float = TIMEOUT_S,
    meanwhile: Callable[[], object] = lambda: None,
) -> list[outcomes.Outcome]:
    """Execute notebooks in parallel and save each, whether it succeeds or fails.

    If one of them measures they run one after the other, while nothing else runs where it measures.

    What an earlier run left of these notebooks goes first, so that nothing old can pass for a result of this run.

    Args:
        notebooks: which.
        values: by notebook name, the parameters that are not left on their default.
        folders: where to.
        jobs: how many at a time; one per available core if None.
        timeout_s: longest time of one notebook; a measurement has more if its plan says so.
        meanwhile: called once in a thread of its own, when the first notebook starts: this process only waits then.

    Returns:
        The outcomes in the order of ``notebooks``.

    Raises:
        RackbookError: another run is writing to the same folder, or it cannot be written; or a measurement does not
            fit its cluster.
    """
    asked = [Execution(n, values.get(n.name, {}), {}, 1, Limits(timeout_s=timeout_s)) for n in notebooks]
    limits = {step.execution.notebook.name: step.execution.limits for step in sweep_plan.steps(asked, {})}
    alone = sorted({own.exclusive for own in limits.values()} - {""})
    at_once = 1 if alone else jobs or whole_cores()
    if alone and len(notebooks) > 1:
        print("note: notebooks that measure run one after the other", file=sys.stderr)
    with _locked(folders.out), leases.held(alone), kernels.scratch_folder() as scratch:
        ordered = longest_first(notebooks, folders)
        for notebook in notebooks:
            (folders.notebooks / f"{notebook.name}.ipynb").unlink(missing_ok=True)
            shutil.rmtree(folders.charts / notebook.name, ignore_errors=True)
        folders.report.unlink(missing_ok=True)
        run = uuid.uuid4().hex[:12]
        tasks = [
            Task(
                notebook=n.name,
                path=n.path.resolve(),
                values=values.get(n.name, {}),
                parameters={p.name: p.default for p in n.parameters} | values.get(n.name, {}),
                executed=(folders.notebooks / f"{n.name}.ipynb").resolve(),
                charts=(folders.charts / n.name).resolve(),
                scratch=Path(scratch) / n.name[:2],
                timeout_s=limits[n.name].timeout_s,
                run=run,
                environment={"RACKBOOK_RUNS": str(runs_home())},
            )
            for n in ordered
        ]
        progress, beside = Progress(len(tasks)), threading.Thread(target=meanwhile, name="meanwhile", daemon=True)

        def started(task: Task) -> None:
            progress.started(task.notebook)
            if beside.ident is None:
                beside.start()

        try:
            found = pool.run(tasks, at_once, Path(scratch), on_start=started, on_end=progress.ended)
        finally:
            progress.close()
            pictures.prune()
    by_name = {outcome.notebook: outcome for outcome in found}
    return [by_name[n.name] for n in notebooks]


def longest_first(notebooks: Sequence[Notebook], folders: Folders) -> list[Notebook]:
    """Order notebooks so that a long one does not start last.

    Durations are those of the last successful run in the same folder. Without one a notebook counts as long, the
    larger its file (the more it draws) the longer.
    """

    def expected(notebook: Notebook) -> tuple[float, int]:
        try:
            outcome, _ = outcomes.of_executed(folders.notebooks / f"{notebook.name}.ipynb")
        except DataError:
            return (float("inf"), notebook.path.stat().st_size)
        return (outcome.duration_s if outcome.succeeded else float("inf"), 0)

    return sorted(notebooks, key=expected, reverse=True)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("w")
    except OSError as problem:
        where = f"{shown(out)}: cannot write here: {problem.strerror}"
        raise RackbookError(f"{where}; choose another folder with --out") from None
    with lock:
        if not locks.taken(lock.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB, out / ".lock"):
            raise RackbookError(
                f"{shown(out)}: another run is writing here; wait for it, or choose another folder with --out"
            )
        yield
