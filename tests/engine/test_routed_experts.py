"""Routed experts of a real vLLM, through the whole chain; and our placement against vLLM's own."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from rackbook.experiments import expert_balance as experiment
from rackbook.experts import audit
from rackbook.experts.loads import loads_of
from rackbook.experts.placement import place
from rackbook.experts.recovery import WITHOUT
from rackbook.experts.replay import Eplb, in_blocks, replay
from rackbook.measurements import expert_balance as measurement

REQUESTS, OUTPUT_TOKENS = 8, 12
LIBRARY = Path(__file__).resolve().parents[2] / "lib"

COMPARE = """
import json, sys
import numpy as np
from rackbook.engine import eplb_policy
from rackbook.experts.placement import place

rows = []
for case in json.load(sys.stdin):
    loads, sizes = np.array(case["loads"]), (case["slots"], case["ranks"])
    options = {"num_groups": case.get("groups", 1), "num_nodes": case.get("nodes", 1)}
    found = [policy(loads, *sizes, **options) for policy in (place, eplb_policy.place)]
    largest = [p.expected_rank_loads(loads).max(axis=-1).tolist() for p in found]
    replicas = bool((found[0].num_replicas == found[1].num_replicas).all())
    rows.append({"ours": largest[0], "vllm": largest[1], "replicas": replicas})
print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def run(lab, tmp_path_factory):
    """A run of the lab, recorded by the function that `source = "measure"` calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACKBOOK_RUNS", str(tmp_path_factory.mktemp("runs")))
        params = experiment.Params(source="measure", draws=10)
        return measurement.on_lab(params, lab=lab, requests=REQUESTS, output_tokens=OUTPUT_TOKENS)


def against_vllm(lab, cases):
    """Busiest rank by layer under our placement and vLLM's, both in the lab's Python."""
    done = subprocess.run(
        [lab.python, "-W", "ignore", "-c", COMPARE], input=json.dumps(cases), capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(LIBRARY)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_token_of_every_request_is_in_the_run(run):
    loads = loads_of(run)
    shape = measurement.LAB_SHAPE
    assert (loads.tokens.shape[1], loads.num_experts, loads.top_k) == (
        shape["layers"],
        shape["experts"],
        shape["top_k"],
    )
    assert loads.num_tokens.sum() == REQUESTS * (measurement.LAB_PROMPT_TOKENS + OUTPUT_TOKENS - 1)
    assert run.points()["expert_tokens"].sum() == shape["layers"] * shape["top_k"] * loads.num_tokens.sum()
    assert not run.flags
    assert run.provenance["vllm"] == "0.32.0"


def test_the_run_goes_through_balancedness_placement_and_notebook(run):
    loads = loads_of(run)
    found = {r["balance_of"]: r for r in audit.states(loads, 4, 4, seed=1).to_dicts()}
    assert 0.25 <= found[WITHOUT]["balancedness_per_layer_step"] < found[audit.BOUND]["balancedness_per_layer_step"]
    eplb = Eplb(num_ranks=4, num_redundant=4, window_steps=4, interval_steps=8)
    replayed = replay(in_blocks(loads.tokens), len(loads.tokens), eplb)
    assert replayed.means.sum() * 4 == loads.tokens.sum()
    assert len(replayed.rearrangements) >= 1
    evidence = experiment.collect(experiment.Params(source=str(run.path), draws=10))
    assert evidence.run.id == run.id
    assert set(evidence.lab["source"]) == {f"run {run.id}"}


def test_placement_is_as_even_as_vllms_on_random_and_captured_loads(lab, run):
    rng = np.random.default_rng(1)
    cases = [
        {"loads": rng.lognormal(0, skew, (layers, experts)).round(3).tolist(), "slots": slots, "ranks": ranks}
        for skew, (layers, experts), slots, ranks in (
            (0.3, (12, 256), 288, 32), (1.0, (12, 384), 416, 32), (2.0, (12, 384), 416, 32), (1.5, (6, 128), 160, 32),
            (1.0, (6, 64), 64, 8), (1.0, (6, 16), 24, 4),
        )
    ]  # fmt: skip
    cases.append({"loads": rng.integers(1, 99, (6, 64)).tolist(), "slots": 96, "ranks": 16, "groups": 8, "nodes": 4})
    cases.append({"loads": loads_of(run).tokens.sum(axis=0).tolist(), "slots": 20, "ranks": 4})
    for case, row in zip(cases, against_vllm(lab, cases), strict=True):
        assert row["replicas"], "the same experts are replicated"
        assert (np.array(row["ours"]) <= np.array(row["vllm"]) * (1 + 1e-9)).all()
        mean = np.array(case["loads"]).sum(axis=1) / case["ranks"]
        assert (np.array(row["ours"]) >= mean * (1 - 1e-9)).all()


def test_placement_against_vllms_on_the_example_of_its_authors(lab, realdata):
    example = json.loads((realdata / "eplb" / "eplb_readme_example.json").read_text())
    case = {
        "loads": example["weight"], "slots": example["num_replicas"], "ranks": example["num_gpus"],
        "groups": example["num_groups"], "nodes": example["num_nodes"],
    }  # fmt: skip
    (row,) = against_vllm(lab, [case])
    assert row["replicas"]
    assert (np.array(row["ours"]) <= row["vllm"]).all()


def test_without_vllm_the_policy_says_what_to_do():
    from rackbook.engine import eplb_policy
    from rackbook.errors import RackbookError

    with pytest.raises(RackbookError, match="cannot be imported .*; run this with the lab's Python"):
        eplb_policy.place([[1, 2]], 2, 2)
    assert place([[1, 2]], 2, 2).num_slots == 2
