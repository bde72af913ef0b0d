"""Running bench forward: the processes, what is kept, what is flagged, and that nothing is left behind."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from rackbook import plans, runs
from rackbook.engine import checks, forward_run, slurm_rank, tasks
from rackbook.engine.fit import UnfitError
from rackbook.engine.plan import Process
from rackbook.engine.tasks import TaskError
from rackbook.errors import RackbookError
from rackbook.measurements import recording

FAKE = Path(__file__).parents[1] / "fake_vllm.py"


@pytest.fixture
def cluster(tmp_path):
    def write(hosts=1, launcher='kind = "local"', environment="", gpu="b300"):
        path = tmp_path / "fake.toml"
        path.write_text(
            f'name = "fake"\nhardware = "{gpu}"\ncompute_capability = "10.3"\nhosts = {hosts}\ngpus_per_host = 4\n'
            f'recipe = "deepseek-v4.1-flash-{gpu}"\npython = ["{sys.executable}", "{FAKE}"]\n'
            f"[environment]\n{environment}\n[launcher]\n{launcher}\n"
        )
        return str(path)

    return write


def record(folder, topic, settings, cluster):
    plan = plans.plan(topic, settings, cluster)
    with runs.record(topic, settings, machine={}, root=folder) as run:
        run.write_points(forward_run.measure(plan, run))
    return runs.read(folder / run.id)


def test_a_run_keeps_results_logs_command_lines_and_kernel_times(tmp_path, cluster):
    run = record(tmp_path, "wide_ep_scaling", {"measured_ep_sizes": [2, 4]}, cluster())
    points = run.points()
    assert points.select("bench_stage", "ep_size", "forward_ms", "stable").rows() == [
        ("ep2", 2, 9.005, True),
        ("ep4", 4, 9.005, True),
    ]
    assert (points["hardware"][0], points["model"][0]) == ("B300", "deepseek-v4.1-flash")
    assert set(run.files) == {
        "points.csv", "ep2.json", "ep4.json", "ep2.host0.log", "ep4.host0.log",
        *(f"ep2.step.rank{r}.kernels.json" for r in range(2)), *(f"ep4.step.rank{r}.kernels.json" for r in range(4)),
    }  # fmt: skip
    processes = run.provenance["processes"]
    assert [p["role"] for p in processes] == ["ep2, forward, host 0", "ep4, forward, host 0"]
    assert "--routing" in processes[0]["arguments"]
    assert run.flags == ()


def test_what_is_doubtful_is_flagged_and_kept(tmp_path, cluster):
    path = cluster(environment='FAKE_VLLM = "unsteady"')
    run = record(tmp_path, "context_sweep", {"measured_ranks": 2, "measured_contexts": [4096]}, path)
    assert run.points().select("forward_ms", "stable").rows() == [(9.005, False)]
    assert run.flags == (
        "forward, c4k: unsteady: sample medians spread by 3.00 %, more than 0.5 %",
        "forward, c4k: random weights were routed as they fell, not evenly",
    )


def test_kernel_times_that_did_not_arrive_are_flagged(tmp_path, cluster):
    path = cluster(environment='FAKE_VLLM = "few kernels"')
    run = record(tmp_path, "wide_ep_scaling", {"measured_ep_sizes": [4]}, path)
    (flag,) = run.flags
    assert flag.startswith("ep4, step: kernel times of 3 of 4 ranks")


def test_a_second_host_is_reached_by_its_command(tmp_path, cluster):
    reach = '["sh", "-c", \'shift; exec sh -c "$1"\', "sh"]'
    path = cluster(2, f'kind = "torchrun"\naddresses = ["127.0.0.1", "127.0.0.2"]\nreach = {reach}')
    run = record(tmp_path, "context_sweep", {"measured_ranks": 8}, path)
    assert run.points()["num_ranks"].to_list() == [8, 8, 8]
    assert {"forward.host0.log", "forward.host1.log"} <= set(run.files)
    assert run.raw("forward.host1.log").read_text().startswith("loading\n")


def test_a_stage_that_fails_says_why_and_leaves_no_run(tmp_path, cluster):
    path = cluster(environment='FAKE_VLLM = "crash"')
    with pytest.raises(
        TaskError, match=r"(?s)forward ended with status 1; likely cause: .*memory.*CUDA out of memory"
    ) as it:
        record(tmp_path, "context_sweep", {"measured_ranks": 4}, path)
    assert "forward.host0.log" in str(it.value)
    (left,) = tmp_path.glob(".*.partial")
    with pytest.raises(RackbookError, match="never finished.*TaskError"):
        runs.read(left)


def test_a_program_that_is_not_there_is_named(tmp_path):
    with pytest.raises(TaskError, match="does not start.*no-such-program"):
        tasks.run([Process("x", ("no-such-program",))], [tmp_path / "log"], timeout_s=10)


def test_the_failure_of_one_ends_the_others(tmp_path):
    slow = Process("slow", (sys.executable, "-c", "import time; time.sleep(300)"))
    bad = Process("bad", (sys.executable, "-c", "import sys; sys.exit(3)"), host_index=1)
    start = time.monotonic()
    with pytest.raises(TaskError, match="work on host 1 ended with status 3"):
        tasks.run([slow, bad], [tmp_path / "a", tmp_path / "b"], timeout_s=60, what="work")
    assert time.monotonic() - start < 30


def pids_with(word: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and word.encode() in (entry / "environ").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_time_that_is_up_ends_everything_below(tmp_path):
    mark = f"RACKBOOK_TEST_MARK={tmp_path.name}-timeout"
    name, _, value = mark.partition("=")
    hanging = Process("x", (sys.executable, str(FAKE), "x"), {"FAKE_VLLM": "hang", name: value})
    with pytest.raises(TaskError, match="(?s)took longer than 4 s.*loading"):
        tasks.run([hanging], [tmp_path / "log"], timeout_s=4)
    assert pids_with(mark) == []


def test_a_killed_notebook_leaves_no_process(tmp_path):
    mark = f"RACKBOOK_TEST_MARK={tmp_path.name}-killed"
    name, _, value = mark.partition("=")
    script = textwrap.dedent(f"""
        from pathlib import Path
        from rackbook.engine import tasks
        from rackbook.engine.plan import Process
        hanging = Process("x", ({sys.executable!r}, {str(FAKE)!r}, "x"), {{"FAKE_VLLM": "hang", {name!r}: {value!r}}})
        tasks.run([hanging], [Path({str(tmp_path / "log")!r})], timeout_s=300)
    """)
    notebook = subprocess.Popen([sys.executable, "-c", script])
    _until(lambda: len(pids_with(mark)) >= 2)  # the process and its child
    notebook.kill()
    notebook.wait()
    _until(lambda: not pids_with(mark))


def _until(condition, limit_s=30.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_hosts_without_addresses_cannot_be_started(tmp_path, cluster):
    plan = plans.plan("context_sweep", {"measured_ranks": 8}, cluster(2, 'kind = "torchrun"'))
    with pytest.raises(RackbookError, match=r"needs 2 hosts.*fake.toml has no launcher.addresses"):
        forward_run.addresses(plan)


def test_slurm_s_servers_need_an_allocation(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    plan = plans.plan("engine_gap", None, "gb300-nvl72")
    with pytest.raises(RackbookError, match="need a Slurm allocation around this process"):
        forward_run.addresses(plan)


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Programs of a Slurm: an allocation of the given hosts, and an ``srun`` that runs here and notes its options."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)

    def program(name, body):
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)

    def allocated(*hosts, here=None):
        program("scontrol", "\n".join(f"echo {host}" for host in hosts))
        monkeypatch.setenv("SLURM_JOB_NODELIST", ",".join(hosts))
        if here:
            monkeypatch.setenv("SLURMD_NODENAME", here)

    def gpus(name):
        line = f"{name}, 580.1.2, 284208, 1900, 2032, 3996, 1400, 1400, 10.3"
        program("nvidia-smi-of-a-node", "".join(f'echo "{line}"\n' for _ in range(4)))
        skip = 'while case "$1" in -*) true;; *) false;; esac; do shift; done'
        program("srun", f'echo "$@" > {tmp_path}/options\n{skip}\nexec "$1-of-a-node"')

    allocated.gpus = gpus
    return allocated


TRAYS = tuple(f"tray{number}" for number in range(1, 10))


def test_an_allocation_with_too_few_hosts_is_refused(slurm):
    slurm(*TRAYS[:3], here="tray1")
    plan = plans.plan("engine_gap", None, "gb300-nvl72")
    with pytest.raises(UnfitError, match="found 3 hosts in the Slurm allocation; needed: 8 for engine_gap.*--nodes=8"):
        checks.check(plan, GB300)


def test_this_machine_is_the_first_host_and_no_more_are_taken_than_needed(slurm):
    slurm(*TRAYS, here="tray2")
    found = forward_run.addresses(plans.plan("engine_gap", None, "gb300-nvl72"))
    assert list(found.values()) == ["tray2", "tray1", *TRAYS[2:8]]


def test_servers_from_a_machine_outside_the_allocation_are_refused(slurm):
    slurm(*TRAYS)
    with pytest.raises(UnfitError, match=r"outside its Slurm allocation \(tray1,.*needed: one on a host of it.*sbatch"):
        forward_run.addresses(plans.plan("engine_gap", None, "gb300-nvl72"))


def test_a_machine_is_found_in_its_allocation_by_its_own_name(slurm, monkeypatch):
    slurm(*TRAYS)
    monkeypatch.setattr(forward_run.socket, "gethostname", lambda: "tray3.cluster.local")
    assert forward_run.addresses(plans.plan("engine_gap", None, "gb300-nvl72"))["HOST_0"] == "tray3"


def test_where_slurm_chooses_the_hosts_it_is_asked_for_the_gpus_of_one(slurm, cluster, tmp_path):
    path = cluster(2, 'kind = "slurm"\npartition = "gpu"', gpu="gb300")
    plan = plans.plan("context_sweep", {"measured_ranks": 8}, path)
    slurm.gpus("NVIDIA H200")
    with pytest.raises(UnfitError, match="4× NVIDIA H200 on the host that srun reached; needed: GB300"):
        checks.check(plan)
    slurm.gpus("NVIDIA GB300")
    elsewhere = checks.check(plan)["elsewhere"]
    assert (elsewhere["num_gpus"], elsewhere["gpus"][0]["name"]) == (4, "NVIDIA GB300")
    options = (tmp_path / "options").read_text().split()
    assert {"--immediate=600", "--nodes=1", "--ntasks=1", "--gpus-per-node=4", "--partition=gpu"} < set(options)


def test_a_run_on_hosts_that_slurm_chose_has_their_gpus_and_not_the_load_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path))
    monkeypatch.setattr(recording.Watch, "doubts", lambda *_: ["other programs used 9 cores"])
    elsewhere = {"gpus": GB300["gpus"], "num_gpus": 4}
    with recording.recorded("context_sweep", {}, "gb300-nvl72", None, elsewhere) as run:
        run.write_text("a.txt", "a")
    found = runs.read(run.id)
    assert found.provenance["machine"]["gpus"] == GB300["gpus"]
    assert "gpus_missing_reason" not in found.provenance["machine"]
    assert found.provenance["machine_is"].startswith("the one that started srun")
    assert found.flags == ()


def test_a_rank_under_slurm_is_told_what_torchrun_would_tell():
    slurm = {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8", "SLURM_NTASKS_PER_NODE": "4",
        "SLURM_JOB_NODELIST": "tray[03-05,9]",
    }  # fmt: skip
    assert slurm_rank.variables(slurm, "29400") == {
        "RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "tray03",
        "MASTER_PORT": "29400",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("tray1", "tray1"),
        ("a,b", "a"),
        ("tray[03-05,9],x", "tray03"),
        ("n[7,9]-ib", "n7-ib"),
        ("r1-n[10-12]", "r1-n10"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    assert slurm_rank.first_host(nodes) == first


def test_the_rank_script_becomes_the_program(tmp_path):
    environment = os.environ | {
        "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_JOB_NODELIST": "here",
    }  # fmt: skip
    code = "import os, sys; print(os.environ['RANK'], os.environ['MASTER_ADDR'], sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, slurm_rank.__file__, "29400", "-c", code, "a b"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == "1 here ['a b']\n"
    alone = subprocess.run([sys.executable, slurm_rank.__file__, "1"], capture_output=True, text=True)
    assert "must be started by srun" in alone.stderr


GB300 = {"gpus": [{"count": 4, "name": "NVIDIA GB300", "compute_capability": "10.3"}]}
B300 = {"gpus": [{"count": 8, "name": "NVIDIA B300 SXM6 AC", "compute_capability": "10.3"}]}


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"gpus": None, "gpus_missing_reason": "nvidia-smi is not installed here"}, "no GPU on this machine"),
        ({"gpus": [B300["gpus"][0] | {"count": 4}]}, "found 4× NVIDIA B300 SXM6 AC on this machine; needed: 8 GPUs"),
        ({"gpus": [{"count": 8, "name": "NVIDIA H200", "compute_capability": "9.0"}]}, "needed: B300, as data/"),
        ({"gpus": [{"count": 8, "name": "NVIDIA GB300", "compute_capability": "10.3"}]}, "GB300.*needed: B300"),
        (
            {"gpus": [{"count": 8, "name": "NVIDIA B300", "compute_capability": "10.0"}]},
            "compute capability 10.0 .*needed: 10.3 for deepseek-v4.1-flash-b300",
        ),
    ],
)  # fmt: skip
def test_a_machine_that_is_not_the_cluster_is_refused(machine, words):
    plan = plans.plan("context_sweep", None, "b300x8")
    with pytest.raises(UnfitError, match=words):
        checks.check_gpus(plan, machine)
    checks.check_gpus(plan, B300)


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.32.0", r"vllm 0.32.0, which lacks vllm bench forward \(#61339\); needed: vLLM 0.33.0 or newer, the first"),
        ("0.29.0", "vLLM 0.33.0"),
        ("unreadable", "vLLM 0.33.0"),
    ],
)
def test_a_vllm_that_is_too_old_names_the_release_that_would_do(cluster, version, words):
    plan = plans.plan("context_sweep", {"measured_ranks": 4}, cluster(environment=f'FAKE_VERSION = "{version}"'))
    with pytest.raises(UnfitError, match=words) as caught:
        checks.check(plan, B300)
    assert "set python in " in str(caught.value)


@pytest.mark.parametrize("version", ["0.33.0", "0.34.1", "0.33.0rc2.dev17+g12ab"])
def test_a_vllm_that_has_it_passes(cluster, version):
    plan = plans.plan("context_sweep", {"measured_ranks": 4}, cluster(environment=f'FAKE_VERSION = "{version}"'))
    assert checks.check(plan, B300)["version"] == version


def test_what_lies_in_an_installation_counts_more_than_its_version(tmp_path):
    plan = plans.plan("context_sweep", None, "b300x8")
    (tmp_path / "vllm").mkdir()
    found = {"name": "vllm", "version": "0.33.0", "folder": str(tmp_path / "vllm")}
    with pytest.raises(UnfitError, match="vllm 0.33.0, which lacks vllm bench forward"):
        checks.check_vllm(plan, found)


def test_no_vllm_and_no_python_are_told_apart(tmp_path, cluster):
    plan = plans.plan("context_sweep", {"measured_ranks": 4}, cluster())
    with pytest.raises(UnfitError, match="found no vLLM; needed: vLLM 0.33.0 or newer. Install it for"):
        checks.check_vllm(plan, {"name": None, "version": None, "folder": None})
    path = Path(cluster())
    path.write_text(path.read_text().replace(sys.executable, "/no/such/python"))
    gone = plans.plan("context_sweep", {"measured_ranks": 4}, str(path))
    with pytest.raises(UnfitError, match="no Python that answers to '/no/such/python.*No such file.*Set python in"):
        checks.check(gone, B300)


def test_a_model_that_is_not_there_is_refused(tmp_path, monkeypatch, cluster):
    plan = plans.plan("context_sweep", {"measured_ranks": 4}, cluster(environment='HF_HUB_OFFLINE = "1"'))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    with pytest.raises(
        UnfitError, match="DeepSeek-V4.1-Flash not in .*HF_HUB_OFFLINE is set.*Set model_id in data/rec"
    ):
        checks.check_model(plan)
    place = tmp_path / "hf" / "hub" / "models--deepseek-ai--DeepSeek-V4.1-Flash" / "snapshots" / "abc"
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    checks.check_model(plan)
