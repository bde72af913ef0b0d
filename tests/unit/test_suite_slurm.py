"""A sweep on Slurm, Slurm itself left out: what is asked for, what is resumed, and who waits for an answer."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from small_notebooks import notebook

from rackbook.errors import RackbookError
from rackbook.locations import runs_home
from rackbook.suite import job, kernels, outcomes, slurm, slurm_state, store, submissions
from rackbook.suite.executions import MACHINE, Execution, Limits
from rackbook.suite.notebooks import read


@pytest.fixture
def one(tmp_path):
    return read(notebook(tmp_path / "nb", "01_one"))


def executions(one, count: int, limits: Limits | None = None) -> list[Execution]:
    return [Execution(one, {"seed": i}, {"seed": i}, 1, limits or Limits()) for i in range(1, count + 1)]


class Results(store.Store):
    """Results that are complete as soon as their folder is there."""

    def complete(self, wanted) -> dict[str, Path]:
        folders = {e.request: self.executions / f"{e.request}-inputs" for e in wanted}
        return {request: folder for request, folder in folders.items() if folder.is_dir()}

    def add(self, request: str, identity: str) -> None:
        folder = self.executions / f"{request}-inputs"
        folder.mkdir()
        record = {"format": store.FORMAT, "executor": {"kind": "slurm", "job": identity}}
        (folder / store.RESULT).write_text(json.dumps(record))


class ShortOfTime:
    """A Slurm whose jobs each complete so many of their executions and then end, out of time by default."""

    def __init__(self, results: Results, folder: Path, completes: int, end: str) -> None:
        self.results, self.folder, self.completes, self.end = results, folder, completes, end
        self.submitted: list[list[list[str]]] = []
        self.looks: dict[str, int] = {}

    def submit(self, wanted, _results, options, _name, _say) -> tuple[list[submissions.Submission], dict[str, str]]:
        requests, size = [e.request for e in wanted], options["per_job"]
        self.submitted.append([requests[i : i + size] for i in range(0, len(requests), size)])
        name = str(len(self.submitted))
        return [submissions.Submission(self.folder, name, [list(r) for r in self.submitted[-1]], name, at=0.0)], {}

    def states(self, name: str) -> dict[int, str]:
        """Running until it was asked three times; what a job completes is there at the second."""
        chunks = self.submitted[int(name) - 1]
        self.looks[name] = self.looks.get(name, 0) + 1
        if self.looks[name] == 2:
            for place, requests in enumerate(chunks):
                for request in requests[: self.completes]:
                    self.results.add(request, name if len(chunks) == 1 else f"{name}_{place}")
        return dict.fromkeys(range(len(chunks)), "RUNNING" if self.looks[name] < 4 else self.end)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    results = Results(tmp_path / "out")
    results.prepare()

    def make(completes: int, end: str = "TIMEOUT") -> ShortOfTime:
        made = ShortOfTime(results, tmp_path, completes, end)
        monkeypatch.setattr(submissions, "submit", made.submit)
        monkeypatch.setattr(submissions, "adopted", lambda *_: [])
        monkeypatch.setattr(slurm_state, "states", made.states)
        monkeypatch.setattr(slurm_state, "obstacles", lambda _: set())
        monkeypatch.setattr(slurm.time, "sleep", lambda _: None)
        return made

    return make


def watched(short: ShortOfTime, wanted: list[Execution], per_job: int) -> list[str]:
    said: list[str] = []
    slurm.run(wanted, short.results, {"per_job": per_job}, name="held", say=said.append)
    return said


def test_a_job_whose_time_is_up_goes_on_as_long_as_each_completes_something(one, cluster):
    short = cluster(completes=1)
    said = watched(short, executions(one, 6), per_job=5)
    assert [[len(chunk) for chunk in chunks] for chunks in short.submitted] == [[5, 1], [4], [3], [2], [1]]
    assert len(list(short.results.executions.iterdir())) == 6
    assert list(short.results.attempts.iterdir()) == []  # whose turn it was not yet has not failed
    assert "01_one seed=5: submitted again after: Slurm: the job ran past its time limit" in "\n".join(said)
    assert not any("FAILED" in line for line in said)


def test_a_job_that_completes_nothing_in_its_time_is_not_tried_again(one, cluster):
    short = cluster(completes=0)
    said = watched(short, executions(one, 2), per_job=2)
    assert len(short.submitted) == 1
    assert sum("FAILED: Slurm: the job ran past its time limit" in line for line in said) == 2


def failing(results, execution, cause: str, identity: str) -> None:
    """What a job leaves that tried an execution in vain."""
    folder = results.attempts / execution.request / "20261130-000000-0001"
    folder.mkdir(parents=True)
    outcome = {"cause": cause, "reason": "changed while the notebook ran: data/a.csv"}
    record = {"format": store.FORMAT, "executor": {"kind": "slurm", "job": identity}, "outcome": outcome}
    (folder / store.RESULT).write_text(json.dumps(record))


def test_what_a_job_tried_in_vain_as_often_as_it_may_is_told_in_its_own_words(one, cluster):
    short, (execution,) = cluster(completes=0, end="COMPLETED"), executions(one, 1)
    failing(short.results, execution, outcomes.CHANGED, "1")
    said = watched(short, [execution], per_job=1)
    assert said[-1] == "01_one seed=1: FAILED: changed while the notebook ran: data/a.csv"
    assert len(short.submitted) == 1
    assert len(list(short.results.attempts.glob("*/*"))) == 1  # nothing is made up beside it


def test_a_job_that_ended_before_it_could_try_again_is_submitted_again(one, cluster):
    short, (execution,) = cluster(completes=0, end="NODE_FAIL"), executions(one, 1)
    failing(short.results, execution, outcomes.START, "1")
    said = watched(short, [execution], per_job=1)
    assert len(short.submitted) == 3
    assert "FAILED: Slurm: the node failed (NODE_FAIL)" in said[-1]


def test_a_result_that_is_out_of_date_when_its_job_has_ended_is_no_job_that_was_killed(one, cluster, monkeypatch):
    short, (execution,) = cluster(completes=1, end="COMPLETED"), executions(one, 1)
    failing(short.results, execution, outcomes.CHANGED, "1")  # the attempt before
    monkeypatch.setattr(Results, "complete", lambda *_: {})
    monkeypatch.setattr(Results, "outdated", lambda *_: "data/a.csv")
    said = watched(short, [execution], per_job=1)
    assert said[-1] == "01_one seed=1: FAILED: its result is out of date, data/a.csv has changed; start it again"
    assert len(list(short.results.attempts.glob("*/*"))) == 1


class Counter:
    """Slurm's counter: takes arrays, but for some shapes."""

    def __init__(self, monkeypatch, refuses=lambda _: False) -> None:
        self.taken: list[tuple[list[str], dict]] = []

        def submit(chunks, _results, wanted, _local_dir, name, _say):
            if refuses(wanted):
                raise submissions.RefusedError("Slurm did not take the jobs: Requested node configuration")
            self.taken.append(([e.label for chunk in chunks for e in chunk], wanted))
            return submissions.Submission(Path(), name, [[e.request for e in chunk] for chunk in chunks], "1", 0.0)

        monkeypatch.setattr(slurm_state, "largest_array", lambda: 1000)
        monkeypatch.setattr(submissions, "_submit_array", submit)


@pytest.mark.parametrize(
    ("limits", "options", "shape"),
    [
        (Limits(gpus=32, hosts=8, gpus_per_host=4), {}, (8, 4)),
        (Limits(gpus=4, hosts=1, gpus_per_host=4), {"nodes": 8}, (1, 4)),
        (Limits(gpus=44, hosts=11, gpus_per_host=4), {"nodes": 1, "gpus_per_node": 1}, (11, 4)),
        (Limits(hosts=1, gpus_per_host=0), {"nodes": 2}, (1, None)),
        (Limits(), {"nodes": 2, "gpus_per_node": 2}, (1, None)),
        (Limits(gpus=4), {}, (1, 4)),
        (Limits(gpus=4), {"nodes": 2}, (2, 2)),
        (Limits(gpus=3), {"nodes": 2}, (2, 2)),
        (Limits(gpus=4), {"nodes": 2, "gpus_per_node": 4}, (2, 4)),
    ],
)
def test_a_job_has_the_hosts_of_its_plan_and_without_one_what_the_options_say(one, limits, options, shape):
    found = submissions._parameters(executions(one, 1, limits), {"max_jobs": 1} | options)
    assert (found["nodes"], found["gpus_per_node"]) == shape


def test_each_shape_is_an_array_of_its_own(one, monkeypatch, tmp_path):
    counter = Counter(monkeypatch)
    shapes = [Limits(gpus=8, hosts=2, gpus_per_host=4), Limits(gpus=8, hosts=1, gpus_per_host=8), Limits(gpus=8)]
    wanted = [e for limits in shapes for e in executions(one, 1, limits)]
    submissions.submit(wanted, store.Store(tmp_path), {}, "held", print)
    assert [(w["nodes"], w["gpus_per_node"]) for _, w in counter.taken] == [(2, 4), (1, 8), (1, 8)]


def test_what_does_not_fit_the_options_is_said_before_anything_is_submitted(one, monkeypatch, tmp_path):
    counter = Counter(monkeypatch)
    wanted = [*executions(one, 1), *executions(one, 1, Limits(gpus=4))]
    with pytest.raises(RackbookError, match="wants 4 GPUs, the job has 1 nodes × 2 GPUs; raise --nodes"):
        submissions.submit(wanted, store.Store(tmp_path), {"gpus_per_node": 2}, "held", print)
    assert counter.taken == []


def test_an_array_that_slurm_refuses_leaves_the_others_alone_and_shows_in_the_end(one, cluster, monkeypatch):
    Counter(monkeypatch, refuses=lambda wanted: wanted["nodes"] == 8)
    counting = submissions.submit
    short = cluster(completes=1, end="COMPLETED")
    mine, rack = executions(one, 2)
    rack = replace(rack, limits=Limits(gpus=32, hosts=8, gpus_per_host=4))

    def submit(wanted, results, options, name, say):
        found, refused = counting(wanted, results, options, name, say)
        left = [e for e in wanted if e.request not in refused]
        return short.submit(left, results, options, name, say)[0] if found else found, refused

    monkeypatch.setattr(submissions, "submit", submit)
    said = []
    stopped = slurm.run([rack, mine], short.results, {"per_job": 1}, name="held", say=said.append)
    assert stopped == "Slurm did not take the jobs: Requested node configuration"
    assert said[0] == f"01_one seed=2: {stopped}"
    assert [p.name for p in short.results.executions.iterdir()] == [f"{mine.request}-inputs"]


def test_nothing_that_slurm_takes_is_an_error(one, monkeypatch, tmp_path):
    Counter(monkeypatch, refuses=lambda _: True)
    with pytest.raises(RackbookError, match="Requested node configuration"):
        submissions.submit(executions(one, 2), store.Store(tmp_path), {}, "held", lambda _: None)


def test_an_array_has_at_most_the_size_that_slurm_allows(one, monkeypatch, tmp_path):
    taken = []
    monkeypatch.setattr(slurm_state, "largest_array", lambda: 2)
    monkeypatch.setattr(
        submissions, "_submit_array",
        lambda chunks, _results, wanted, *_: taken.append((chunks, wanted["array_parallelism"])),
    )  # fmt: skip
    wanted = [*executions(one, 9), *executions(one, 1, Limits(exclusive=MACHINE))]
    submissions.submit(wanted, store.Store(tmp_path), {"per_job": 2, "max_jobs": 7}, "held", print)
    sizes = [[len(chunk) for chunk in chunks] for chunks, _ in taken]
    assert sizes == [[2], [2, 2], [2, 1], [1]]  # five jobs in three arrays, and the measurement apart
    assert [at_once for _, at_once in taken] == [3, 3, 3, 7]
    assert [e for chunks, _ in taken for chunk in chunks for e in chunk] == wanted


@pytest.mark.parametrize(
    ("limits", "options", "memory", "exclusive"),
    [
        (Limits(), {}, None, None),
        (Limits(memory_gib=2.5), {}, "3584M", None),
        (Limits(memory_gib=2.5), {"mem_gib": 8.0}, "8192M", None),
        (Limits(exclusive=MACHINE), {}, "0", True),
        (Limits(exclusive=MACHINE, memory_gib=4.0), {}, "5120M", True),
    ],
)
def test_a_job_asks_for_the_memory_and_the_whole_nodes_of_its_executions(one, limits, options, memory, exclusive):
    found = submissions._parameters(executions(one, 1, limits), {"max_jobs": 1} | options)
    assert (found["mem"], found["exclusive"]) == (memory, exclusive)


def test_a_job_has_the_time_of_all_its_executions(one):
    found = submissions._parameters(executions(one, 1, Limits(timeout_s=3600)), {"max_jobs": 1, "per_job": 3})
    assert found["time"] == 180 + submissions.SPARE_MIN


def answering(monkeypatch, *answers) -> list[float]:
    """Let Slurm's commands fail or answer in turn; the pauses that are made."""
    left, pauses = list(answers), []

    def run(command, **_):
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, 0, stdout=answer, stderr="")

    monkeypatch.setattr(slurm_state.subprocess, "run", run)
    monkeypatch.setattr(slurm_state.time, "sleep", pauses.append)
    return pauses


DOWN = subprocess.CalledProcessError(1, "squeue", stderr="slurm_load_jobs error: Unable to contact slurm controller")


def test_a_controller_that_does_not_answer_is_asked_again(monkeypatch, capsys):
    pauses = answering(monkeypatch, DOWN, subprocess.TimeoutExpired("squeue", 60), DOWN, "0|RUNNING\n1|PENDING\n")
    assert slurm_state.states("held") == {0: "RUNNING", 1: "PENDING"}
    assert pauses == [2.0, 4.0, 8.0]
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "squeue: slurm_load_jobs error: Unable to contact slurm controller; asked again in 2 s"
    assert said[1] == "squeue: no answer within 60 s; asked again in 4 s"


def test_a_controller_that_stays_away_is_an_error_with_its_own_words(monkeypatch):
    monkeypatch.setattr(slurm_state, "_OUTAGE_S", 0.0)
    answering(monkeypatch, DOWN)
    with pytest.raises(RackbookError, match="squeue: slurm_load_jobs error: Unable to contact"):
        slurm_state.states("held")


def test_slurm_that_is_not_installed_is_not_waited_for(monkeypatch):
    pauses = answering(monkeypatch, FileNotFoundError())
    with pytest.raises(RackbookError, match="squeue: not found; is Slurm installed"):
        slurm_state.states("held")
    assert pauses == []


@pytest.mark.parametrize(
    ("configuration", "largest"),
    [
        ("Configuration data\nMaxArraySize            = 4001\nMaxJobCount = 9\n", 4001),
        ("MaxArraySize = 0\n", 1),
        ("MaxJobCount = 9\n", 1001),
    ],
)
def test_the_largest_array_is_read_from_the_configuration(monkeypatch, configuration, largest):
    answering(monkeypatch, configuration)
    assert slurm_state.largest_array() == largest


@pytest.fixture
def task(tmp_path, monkeypatch):
    """Run a job with nothing to do; tells where its temporary files go."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("RACKBOOK_RUNS", "elsewhere")
    monkeypatch.setattr(job.signal, "signal", lambda *_: None)

    def run(local_dir: str | None, runs: Path = tmp_path / "runs") -> str:
        content = {"out": str(tmp_path / "out"), "runs": str(runs), "local_dir": local_dir, "executions": []}
        (tmp_path / "task.json").write_text(json.dumps(content))
        assert job.main([str(tmp_path / "task.json")]) == 0
        return tempfile.gettempdir()

    return run


def test_a_job_puts_runs_where_the_one_who_submitted_it_has_them(task, tmp_path):
    task(None, tmp_path / "runs")
    assert runs_home() == tmp_path / "runs"


def test_variables_in_the_local_folder_are_those_of_the_job(task, monkeypatch):
    with tempfile.TemporaryDirectory(prefix="rb", dir="/tmp") as folder:
        (Path(folder) / "17").mkdir()
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        assert task(f"{folder}/$SLURM_JOB_ID") == f"{folder}/17"


def test_a_local_folder_that_is_missing_ends_the_job_with_its_name(task, monkeypatch):
    monkeypatch.delenv("NO_SUCH", raising=False)
    with pytest.raises(SystemExit, match=r"local_dir: got '/tmp/\$NO_SUCH', allowed: a folder on the node"):
        task("/tmp/$NO_SUCH")


def test_a_local_folder_too_long_for_sockets_is_not_replaced_in_silence(task, tmp_path, capsys):
    long = tmp_path / ("long" * 12)
    long.mkdir()
    task(str(long))
    assert kernels.scratch_base() == Path("/tmp")
    assert f"local_dir {long} has more than 40 characters: /tmp is used" in capsys.readouterr().err
