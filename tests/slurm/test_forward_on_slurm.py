"""A plan of bench forward on a real Slurm: one task per GPU on two nodes, each told its rank; vLLM is the fake one."""

import sys
from pathlib import Path

import pytest

from rackbook import plans, runs
from rackbook.engine import forward_run
from rackbook.engine.tasks import TaskError

TESTS = Path(__file__).parents[1]


@pytest.fixture
def described(cluster, tmp_path, monkeypatch):
    """The running Slurm as a cluster's file; its Python finds a package called vllm."""
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "main.py").write_text(
        f"import sys\nsys.path.insert(0, {str(TESTS)!r})\nimport fake_vllm\nfake_vllm.main()\n"
    )
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "slurm.toml"

    def write(behaviour=""):
        path.write_text(
            'name = "two nodes"\nhardware = "gb300"\ncompute_capability = "10.3"\nhosts = 2\ngpus_per_host = 2\n'
            f'recipe = "deepseek-v4.1-flash-gb300"\npython = ["{sys.executable}"]\n'
            f'[environment]\nPYTHONPATH = "{tmp_path / "site"}"\nFAKE_VLLM = "{behaviour}"\n'
            '[launcher]\nkind = "slurm"\npartition = "work"\nminutes = 5\noptions = ["--immediate=60"]\n'
        )
        return str(path)

    return write


def test_every_rank_is_started_and_told_its_number(described, tmp_path):
    plan = plans.plan("wide_ep_scaling", {"measured_ep_sizes": [2, 4]}, described())
    with runs.record("wide_ep_scaling", {}, machine={}, root=tmp_path / "runs") as run:
        points = forward_run.measure(plan, run)
        run.write_points(points)
    assert points["num_ranks"].to_list() == [2, 4]
    log = runs.read(tmp_path / "runs" / run.id).raw("ep4.host0.log").read_text()
    told = sorted(line for line in log.splitlines() if line.startswith("RANK="))
    assert [line.split()[:2] for line in told] == [[f"RANK={rank}", "WORLD_SIZE=4"] for rank in range(4)]
    assert {line.split()[2] for line in told} == {"MASTER_ADDR=node1"}


def test_one_rank_that_fails_ends_the_step(described, tmp_path):
    plan = plans.plan("context_sweep", {"measured_ranks": 4}, described("crash"))
    with (
        pytest.raises(TaskError, match=r"(?s)forward ended with status \d+; likely cause: .*CUDA out of memory"),
        runs.record("context_sweep", {}, machine={}, root=tmp_path / "runs") as run,
    ):
        forward_run.measure(plan, run)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == [f".{run.id}.partial"]
