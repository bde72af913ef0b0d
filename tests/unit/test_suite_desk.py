"""Whose turn it is: who waits for whom, and for what a plan reserves the machine."""

from __future__ import annotations

import io
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from small_notebooks import notebook

from rackbook import plans
from rackbook.errors import RackbookError
from rackbook.suite import local, store, sweep_plan
from rackbook.suite.executions import MACHINE, Execution, Limits
from rackbook.suite.leases import VISIBLE, Leases
from rackbook.suite.notebooks import discover, read, select
from rackbook.suite.progress import Progress

LIVE = """\
seed: int = 1  # [-] seed of the draws
source: str = "published"  # [-] where the numbers come from
cluster: str = "here"  # [-] where to measure
"""


@pytest.fixture
def one(tmp_path):
    return read(notebook(tmp_path, "01_one", parameters=LIVE))


def execution(one, seed: int, **values) -> Execution:
    limits = values.pop("limits", Limits())
    return Execution(one, {"seed": seed, **values}, {"seed": seed}, 1, limits)


class Desk:
    """A desk without workers; what it hands out ends when the test says so."""

    def __init__(
        self, folder: Path, executions: list[Execution], gpus: list[str] | None = ("0", "1"), locks: Path | None = None
    ) -> None:
        results = store.Store(folder / "out")
        results.prepare()
        leases = None if gpus is None else Leases(list(gpus), locks or folder / "locks")
        self.said = io.StringIO()
        progress = Progress(len(executions), self.said)
        self.desk = local._Desk(executions, results, leases, folder / "scratch", {"kind": "local"}, progress)
        self.tasks = {}

    def start(self) -> list[int]:
        """Hand out what can start; the seeds."""
        started = []
        while (task := self.desk.next()) is not None:
            started.append(task.values["seed"])
            self.tasks[task.values["seed"]] = task
        return started

    def end(self, seed: int) -> None:
        job = self.desk._jobs.pop(self.tasks[seed].id)
        self.desk._give_back(job.devices)
        os.close(job.lock)

    def sees(self, seed: int) -> str | None:
        return self.tasks[seed].environment.get(VISIBLE)


def test_gpus_are_handed_out_once_and_come_back(one, tmp_path):
    wants = [Limits(gpus=2), Limits(gpus=1), Limits()]
    desk = Desk(tmp_path, [execution(one, i, limits=limits) for i, limits in enumerate(wants, 1)])
    assert desk.start() == [1, 3]
    assert (desk.sees(1), desk.sees(3)) == ("0,1", "")
    desk.end(1)
    assert desk.start() == [2]
    assert desk.sees(2) == "0"
    assert not desk.desk.open


def test_a_measurement_runs_alone(one, tmp_path):
    limits = [Limits(), Limits(exclusive=MACHINE), Limits()]
    desk = Desk(tmp_path, [execution(one, i, limits=own) for i, own in enumerate(limits, 1)])
    assert desk.start() == [1, 3]
    desk.end(1)
    assert desk.start() == []
    desk.end(3)
    assert desk.start() == [2]


def test_another_run_waits_while_something_is_measured_and_says_so_once(one, tmp_path):
    live = execution(one, 1, limits=Limits(gpus=1, exclusive=MACHINE))
    desk = Desk(tmp_path, [live, execution(one, 2, limits=live.limits)])
    other = Desk(tmp_path / "other", [execution(one, 3)], locks=tmp_path / "locks")
    assert desk.start() == [1]
    assert desk.sees(1) == "0"
    assert (other.start(), other.start()) == ([], [])
    assert other.said.getvalue().count("waits: another run has this machine") == 1
    desk.end(1)
    assert other.start() == [3]
    assert desk.start() == []
    other.end(3)
    assert desk.start() == [2]


def test_runs_are_recorded_where_the_command_line_looks(one, tmp_path, monkeypatch):
    monkeypatch.delenv("RACKBOOK_RUNS", raising=False)
    monkeypatch.chdir(tmp_path)
    desk = Desk(tmp_path, [execution(one, 1)])
    assert desk.start() == [1]
    assert desk.tasks[1].environment["RACKBOOK_RUNS"] == str(tmp_path / "build" / "runs")


def test_one_measurement_at_a_time_on_a_cluster_elsewhere_which_needs_no_gpu_here(one, tmp_path):
    limits = [Limits(gpus=32, exclusive=f"cluster {name}") for name in ("rack", "rack", "other")]
    desk = Desk(tmp_path, [execution(one, i, limits=own) for i, own in enumerate(limits, 1)])
    assert desk.start() == [1, 3]
    assert desk.sees(1) is None
    desk.end(1)
    assert desk.start() == [2]


def test_in_an_allocation_the_gpus_are_left_as_they_are(one, tmp_path):
    desk = Desk(tmp_path, [execution(one, 1, limits=Limits(gpus=16))], gpus=None)
    assert desk.start() == [1]
    assert desk.sees(1) is None


def test_what_another_process_executes_is_waited_for(one, tmp_path):
    mine, other = execution(one, 1), execution(one, 2)
    desk = Desk(tmp_path, [mine, other])
    held = desk.desk._results.lock(mine.request)
    assert desk.start() == [2]
    assert desk.desk.open
    os.close(held)
    assert desk.start() == [1]


def test_more_gpus_than_there_are_is_an_error_before_anything_runs(one, tmp_path):
    wants = [execution(one, 1, limits=Limits(gpus=3))]
    with pytest.raises(RackbookError, match=r"01_one seed=1: wants 3 GPUs, available here: 2; name them with --gpus"):
        local.run(wants, store.Store(tmp_path), jobs=1, gpus=["0", "1"])


@pytest.fixture
def planned(monkeypatch):
    """Let a plan be found for the live notebook; there is no allocation of Slurm's around this process."""
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr(plans, "TOPICS", ("one",))
    monkeypatch.setattr("rackbook.experiments.load", lambda _: SimpleNamespace(Params=dict))

    def make(*, kind: str = "local", gpus: int = 8, minutes: float = 10.0, hosts: int = 1, servers: bool = False):
        found = SimpleNamespace(
            num_gpus=gpus, gpu_minutes=gpus * minutes, minutes=minutes,
            cluster=SimpleNamespace(launcher=SimpleNamespace(kind=kind), num_gpus_per_host=4 if gpus else 0),
            processes=[SimpleNamespace(host_index=number) for number in range(hosts)],
            stages=[SimpleNamespace(services=("server",) if servers else ())],
        )  # fmt: skip
        monkeypatch.setattr(plans, "plan", lambda *_: found)

    return make


@pytest.mark.parametrize(
    ("kind", "gpus", "exclusive", "note"),
    [
        ("local", 4, "machine", "on here, ended after 30 min"),
        ("local", 0, "machine", "on here, ended after 30 min"),
        ("torchrun", 8, "cluster here", "on here, 2 hosts, ended after 30 min"),
        ("slurm", 32, "cluster here", "on here, 8 hosts, ended after 168 h, Slurm's queue included"),
    ],
)
def test_the_plan_of_a_live_notebook_says_its_gpus_minutes_and_what_it_needs_alone(
    one, planned, kind, gpus, exclusive, note
):
    planned(kind=kind, gpus=gpus)
    live = execution(one, 1, source="measure")
    (step, still) = sweep_plan.steps([live, execution(one, 2)], {live.request: Path()})
    assert (step.done, step.gpu_minutes, step.note) == (True, gpus * 10.0, note)
    assert (step.execution.limits.gpus, step.execution.limits.exclusive) == (gpus, exclusive)
    assert (still.gpu_minutes, still.execution.limits) == (0.0, Limits())


@pytest.mark.parametrize(
    ("gpus", "hosts", "given", "shape"),
    [
        (32, 1, 0, (8, 4)),
        (4, 1, 0, (1, 4)),
        (44, 11, 0, (11, 4)),
        (8, 1, 10, (3, 4)),
        (0, 1, 0, (1, 0)),
        (4, 2, 0, (2, 4)),
    ],
)
def test_a_plan_has_the_hosts_that_it_names_and_as_many_as_its_gpus_fill(one, planned, gpus, hosts, given, shape):
    planned(gpus=gpus, hosts=hosts)
    (step,) = sweep_plan.steps([execution(one, 1, source="measure", limits=Limits(gpus=given))], {})
    assert (step.execution.limits.hosts, step.execution.limits.gpus_per_host) == shape


def test_real_plans_on_a_rack_have_its_trays():
    found = {}
    for each in select(["01", "09", "11"], discover()):
        live = Execution(each, {"source": "measure", "cluster": "gb300-nvl72"}, {}, 1, Limits())
        (step,) = sweep_plan.steps([live], {}, in_job=True)
        found[each.name[:2]] = (step.execution.limits.hosts, step.execution.limits.gpus_per_host)
    assert found == {"01": (8, 4), "09": (11, 4), "11": (1, 4)}


def test_time_in_slurms_queue_is_no_time_of_the_measurement(one, planned, monkeypatch):
    planned(kind="slurm", minutes=60.0)
    live = execution(one, 1, source="measure")

    def limit_s(**options) -> float:
        return sweep_plan.steps([live], {}, **options)[0].execution.limits.timeout_s

    assert limit_s() > 24 * 3600
    assert limit_s(in_job=True) == 7200.0
    monkeypatch.setenv("SLURM_JOB_NODELIST", "tray[1-8]")
    assert limit_s() == 7200.0


def test_servers_on_slurm_need_an_allocation_before_anything_starts(one, planned, monkeypatch):
    planned(kind="slurm", servers=True)
    live = execution(one, 1, source="measure")
    with pytest.raises(RackbookError, match="01_one seed=1: its servers on here need an allocation.*--executor slurm"):
        sweep_plan.steps([live], {})
    assert sweep_plan.steps([live], {live.request: Path()})[0].done  # what is there needs nothing
    assert sweep_plan.steps([live], {}, in_job=True)[0].execution.limits.timeout_s == 1800.0
    monkeypatch.setenv("SLURM_JOB_NODELIST", "tray1")
    assert sweep_plan.steps([live], {})[0].execution.limits.timeout_s == 1800.0


@pytest.mark.parametrize(("given_s", "limit_s"), [(1800.0, 12960.0), (20_000.0, 20_000.0)])
def test_a_measurement_has_twice_the_time_of_its_plan_unless_more_is_given(one, planned, given_s, limit_s):
    planned(minutes=108.0)
    live = execution(one, 1, source="measure", limits=Limits(timeout_s=given_s))
    (step,) = sweep_plan.steps([live], {})
    assert step.execution.limits.timeout_s == limit_s


def test_servers_that_run_already_are_measured_one_at_a_time_without_gpus_of_this_machine(one):
    live = execution(one, 1, source="measure", base_url="http://10.0.0.7:8000", limits=Limits(gpus=4))
    (step,) = sweep_plan.steps([live], {})
    assert step.execution.limits.exclusive == "cluster http://10.0.0.7:8000"
    assert step.execution.limits.gpus_here == 0
    assert (step.gpu_minutes, step.note) == (None, "live, at http://10.0.0.7:8000")
    (step,) = sweep_plan.steps([execution(one, 1, source="measure", base_url="http://127.0.0.1:8000")], {})
    assert step.execution.limits.exclusive == MACHINE


def test_a_cluster_that_cannot_do_it_is_an_error_of_the_execution(one, monkeypatch):
    def plan(*_):
        raise RackbookError("no such cluster")

    monkeypatch.setattr(plans, "TOPICS", ("one",))
    monkeypatch.setattr(plans, "plan", plan)
    monkeypatch.setattr("rackbook.experiments.load", lambda _: SimpleNamespace(Params=dict))
    with pytest.raises(RackbookError, match="01_one seed=1: no such cluster"):
        sweep_plan.steps([execution(one, 1, source="measure")], {})
