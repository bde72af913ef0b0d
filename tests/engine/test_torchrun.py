"""A plan of bench forward under the real torchrun: two hosts, both of them this one; vLLM is the fake one."""

from pathlib import Path

import vllm_033

from rackbook import plans, runs
from rackbook.engine import forward_run
from rackbook.engine.readiness import free_port

TESTS = Path(__file__).parents[1]
REACH = '["sh", "-c", \'shift; exec sh -c "$1"\', "sh"]'
"""Runs on this machine what is meant for the address that follows."""


def test_torchrun_takes_the_arguments_and_numbers_the_ranks(tmp_path):
    python = vllm_033.interpreter()
    package = tmp_path / "site" / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):  # or the lab's own vLLM would be found first
        (folder / "__init__.py").touch()
    (package / "main.py").write_text("import fake_vllm\nfake_vllm.main()\n")
    found = ":".join(map(str, (tmp_path / "site", TESTS, TESTS.parent / "lib")))
    path = tmp_path / "two.toml"
    path.write_text(
        'name = "two"\nhardware = "gb300"\ncompute_capability = "10.3"\nhosts = 2\ngpus_per_host = 2\n'
        f'recipe = "deepseek-v4.1-flash-gb300"\npython = ["{python}"]\n[environment]\nPYTHONPATH = "{found}"\n'
        f'[launcher]\nkind = "torchrun"\naddresses = ["127.0.0.1", "127.0.0.1"]\nport = {free_port()}\n'
        f"reach = {REACH}\n"
    )
    plan = plans.plan("context_sweep", {"measured_ranks": 4, "measured_contexts": [4096]}, str(path))
    with runs.record("context_sweep", {}, machine={}, root=tmp_path / "runs") as run:
        points = forward_run.measure(plan, run)
        run.write_points(points)
    assert points["num_ranks"].item() == 4
    kept = runs.read(tmp_path / "runs" / run.id)
    told = [line for host in (0, 1) for line in kept.raw(f"forward.host{host}.log").read_text().splitlines()]
    ranks = sorted(line for line in told if line.startswith("RANK="))
    assert ranks == [f"RANK={rank} WORLD_SIZE=4 MASTER_ADDR=127.0.0.1" for rank in range(4)]
