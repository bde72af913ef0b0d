"""A sweep on a real Slurm: arrays, resume, and every way in which a job ends early, told apart."""

from __future__ import annotations

import json
import time
from pathlib import Path

import polars as pl
import pytest
import small_cluster
import small_sweep
import survival
from small_notebooks import PARAMETERS, notebook

from rackbook.suite.notebooks import load_json
from rackbook.suite.store import read_result

SUITE = """\
name = "held"
{options}
[[sweep]]
notebooks = ["01"]
set = {{ rate = 0.25 }}
seeds = {seeds}
"""


SOURCE = 'source: str = "published"  # [-] measure: run now\n'


class Held:
    """A sweep whose executions do not end before they are let go."""

    def __init__(self, cluster, folder: Path, *, options: str = "", seeds: str = "[1]", cell: str = "") -> None:
        self.cluster, self.out, self.hold = cluster, folder / "out", folder / "hold"
        self.hold.touch()
        wait = f"import os, time\nwhile os.path.exists({str(self.hold)!r}):\n    time.sleep(0.1)"
        notebook(folder / "nb", "01_one", *([cell] if cell else []), wait, parameters=PARAMETERS + SOURCE)
        (folder / "suite.toml").write_text(SUITE.format(options=options, seeds=seeds))
        self.arguments = (
            "sweep", folder / "suite.toml", "--notebooks", folder / "nb", "--out", self.out, "--executor", "slurm",
        )  # fmt: skip
        self.run = None

    def start(self, *more: str) -> None:
        self.run = small_sweep.start(*self.arguments, *more, environment=self.cluster.environment)

    def end(self, timeout: float = 120) -> tuple[int, str, str]:
        out, err = self.run.communicate(timeout=timeout)
        return self.run.returncode, out, err

    def until_running(self, count: int = 1) -> list[str]:
        """Wait until kernels are at work; the jobs' ids."""
        deadline = time.monotonic() + 60
        while len(list((self.out / "executions").glob(".*.partial"))) < count:
            assert time.monotonic() < deadline, self.cluster.jobs()
            assert self.run.poll() is None, self.run.communicate()
            time.sleep(0.1)
        time.sleep(1)
        return [job for job, state in self.cluster.jobs().items() if state == "RUNNING"]

    def index(self) -> pl.DataFrame:
        return pl.read_parquet(self.out / "index.parquet")

    def records(self) -> list[dict]:
        return [read_result(p) for p in (self.out / "executions").iterdir() if not p.name.startswith(".")]


@pytest.fixture
def held(cluster, tmp_path):
    made = []

    def make(**options) -> Held:
        made.append(Held(cluster, tmp_path, **options))
        return made[-1]

    yield make
    for sweep in made:
        sweep.hold.unlink(missing_ok=True)
        if sweep.run is not None and sweep.run.poll() is None:
            sweep.run.kill()
            sweep.run.communicate()
    cluster.run("scancel", "--user", cluster.user, check=False)
    deadline = time.monotonic() + 20
    while set(cluster.jobs().values()) & {"RUNNING", "PENDING", "COMPLETING"} and time.monotonic() < deadline:
        time.sleep(0.2)


def test_a_cancelled_job_is_a_failure_that_says_so_and_is_resumed_by_the_next_run(held):
    sweep = held()
    sweep.start()
    (job,) = sweep.until_running()
    sweep.cluster.run("scancel", job)
    status, _, said = sweep.end()
    assert status == 1
    assert "Slurm: somebody cancelled the job (CANCELLED)" in said
    assert sweep.index().select("status", "cause").rows() == [("failed", "cancelled")]
    sweep.hold.unlink()
    sweep.start()
    status, printed, _ = sweep.end()
    assert (status, printed.splitlines()[0]) == (0, "1 of 1 executions complete")
    assert sweep.index().select("status", "attempts").rows() == [("done", 2)]


def test_a_preempted_job_is_queued_again_and_completes_once(held):
    sweep = held(seeds="[1, 2]")
    sweep.start()
    sweep.until_running(2)
    script = sweep.out / "urgent.sh"
    script.write_text("#!/bin/bash\nsleep 2\n")
    sweep.cluster.run("sbatch", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", str(script))
    deadline = time.monotonic() + 60
    while "Restarts=1" not in sweep.cluster.run("scontrol", "show", "job", "-o", "--all"):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    sweep.hold.unlink()
    status, printed, said = sweep.end(180)
    assert (status, printed.splitlines()[0]) == (0, "2 of 2 executions complete"), said
    assert sorted(r["executor"]["restarts"] for r in sweep.records()) == [1, 1]
    assert sweep.index()["attempts"].to_list() == [1, 1]


def test_after_a_node_failure_the_job_runs_on_another_node(held):
    sweep = held()
    sweep.start()
    sweep.until_running()
    (node,) = sweep.cluster.run("squeue", "-h", "-t", "RUNNING", "-o", "%N").split()
    sweep.cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        sweep.hold.unlink()
        status, printed, said = sweep.end(180)
        assert (status, printed.splitlines()[0]) == (0, "1 of 1 executions complete"), said
        (record,) = sweep.records()
        assert record["executor"]["kind"] == "slurm"
    finally:
        sweep.cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME", check=False)  # it may be up again


def test_a_job_that_runs_past_its_time_is_told_from_a_failed_notebook(held):
    sweep = held(options="[slurm]\ntime_min = 1")
    sweep.start()
    status, _, said = sweep.end(240)
    assert status == 1
    assert "the job ran past its time limit; raise it with --time, or lower --per-job (TIMEOUT)" in said
    assert sweep.index().select("status", "cause").rows() == [("failed", "time limit")]


def test_a_live_notebook_reaches_all_nodes_of_its_allocation_and_its_gpus(held):
    cell = (
        "import os, subprocess\n"
        "found = subprocess.run(['srun', '-N2', '-n2', 'printenv', 'SLURM_NODEID'], capture_output=True, text=True)\n"
        "print(sorted(found.stdout.split()), os.environ['SLURM_GPUS_ON_NODE'], os.environ['SLURM_JOB_NUM_NODES'])"
    )
    sweep = held(options="gpus = 4\n[slurm]\nnodes = 2\npartition = 'urgent'", cell=cell)
    sweep.hold.unlink()
    sweep.start()
    status, _, said = sweep.end()
    assert status == 0, said
    (folder,) = survival.complete(sweep.out)
    streams = [o for c in load_json(folder / "notebook.ipynb")["cells"] for o in c.get("outputs", []) if "text" in o]
    assert "".join(streams[0]["text"]).strip() == "['0', '1'] 2 2"


TWO_NODES = """\
name = "two nodes"
hardware = "gb300"
compute_capability = "10.3"
hosts = 2
gpus_per_host = 2
recipe = "deepseek-v4.1-flash-gb300"
[launcher]
kind = "slurm"
"""

MIXED = """\
[[sweep]]
notebooks = ["01"]
cluster = "two.toml"
set = { source = "measure", measured_ranks = 4 }
[[sweep]]
notebooks = ["14"]
"""


def test_a_measurement_has_the_nodes_of_its_plan_and_what_wants_no_gpu_has_one(cluster, tmp_path):
    (tmp_path / "two.toml").write_text(TWO_NODES)
    (tmp_path / "suite.toml").write_text(MIXED)
    options = ("--executor", "slurm", "--detach", "--nodes", "1")
    try:
        status, _, said = small_sweep.run(
            "sweep", tmp_path / "suite.toml", "--out", tmp_path / "out", *options, environment=cluster.environment
        )
        assert status == 3, said
        told = cluster.run("squeue", "-h", "-r", "--user", cluster.user, "-o", "%j %D %b %h").splitlines()
        shapes = sorted(line.split()[1:] for line in told if line.startswith("suite-"))
    finally:
        cluster.run("scancel", "--user", cluster.user, check=False)
    assert [(nodes, gpus.rpartition(":")[2], shared) for nodes, gpus, shared in shapes] == [
        ("1", "N/A", "OK"), ("2", "2", "NO"),
    ]  # fmt: skip


def test_an_array_that_slurm_does_not_take_leaves_the_others_alone(held):
    sweep = held(options="", seeds="[1]\n[[sweep]]\nnotebooks = ['01']\ngpus = 4\nseeds = [2]")
    sweep.hold.unlink()
    sweep.start()
    status, printed, said = sweep.end()
    assert (status, printed.splitlines()[0]) == (3, "1 of 2 executions complete, 1 not"), said
    assert "01_one: Slurm did not take the jobs: sbatch: error: " in said
    assert sorted(sweep.index()["status"]) == ["done", "waiting"]


def test_a_measurement_has_its_node_for_itself(held):
    sweep = held(seeds="[1, 2, 3]\nlist = [{ source = 'measure' }]")
    sweep.start()
    sweep.until_running(2)
    states = sweep.cluster.run("squeue", "-h", "-r", "-o", "%T %N").split("\n")
    assert sorted(" ".join(state.split()) for state in states if state) == ["PENDING", "RUNNING node1", "RUNNING node2"]
    sweep.hold.unlink()  # each node has two cores, and each job asks for one
    assert sweep.end()[0] == 0


def test_the_watcher_may_go_and_the_next_one_takes_over_its_jobs(held):
    sweep = held(seeds="[1, 2]")
    sweep.start("--detach")
    status, _, said = sweep.end()
    assert status == 3
    assert "2 executions are left to Slurm" in said
    sweep.start()
    sweep.until_running(2)
    sweep.run.kill()
    sweep.run.communicate()
    sweep.start()
    said = next((line for line in sweep.run.stderr if "earlier submission" in line), "")
    assert said == "2 executions are in the queue or running from an earlier submission\n"
    sweep.hold.unlink()
    assert sweep.end()[0] == 0
    assert len(list((sweep.out / "slurm").glob("*/submission.json"))) == 1
    assert [r["outcome"]["succeeded"] for r in sweep.records()] == [True, True]


def test_a_wrong_partition_is_an_error_with_slurms_own_words(held):
    sweep = held()
    sweep.start("--partition", "nowhere")
    status, _, said = sweep.end()
    assert status == 2
    assert "Slurm did not take the jobs" in said
    assert "invalid partition" in said.lower()


def test_24_executions_survive_five_kills_at_random_moments(cluster, tmp_path):
    arguments = (*survival.prepare(tmp_path), "--executor", "slurm", "--per-job", "2")
    out = tmp_path / "out"
    environment = cluster.environment | {"RACKBOOK_TEST_MARK": str(tmp_path)}
    mark = f"RACKBOOK_TEST_MARK={tmp_path}\0"
    survival.kill_five_times(arguments, out, environment, mark, seed=9)
    status, printed, said = small_sweep.run(*arguments, environment=environment)
    assert status == 0, said
    assert "24 of 24 executions complete" in printed
    survival.assert_exactly_all(out)
    arrays = [len(json.loads(p.read_text())["requests"]) for p in out.glob("slurm/*/submission.json")]
    assert 4 < max(arrays) <= small_cluster.LARGEST_ARRAY
    assert set(pl.read_parquet(out / "index.parquet")["executor"]) == {"slurm"}
