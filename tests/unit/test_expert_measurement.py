"""What notebook 06 measures: answers with routed experts, servers' logs, and a run that has both."""

import base64
import http.server
import io
import json
import threading

import numpy as np
import polars as pl
import pytest

from rackbook import plans, runs
from rackbook.charts.expert_replay import expert_loads_by_place
from rackbook.commands.plans import plan as planned
from rackbook.engine.completions import complete_together
from rackbook.engine.fit import UnfitError
from rackbook.errors import ParameterError, RackbookError
from rackbook.experiments import expert_balance as experiment
from rackbook.experts import audit
from rackbook.experts.loads import LOADS
from rackbook.importers.routed_experts import read_answers
from rackbook.measurements import expert_balance as measurement

LINE = (
    "INFO 11-29 20:04:21 [eplb_state.py:632] EPLB step: {step} for model m: avg_tokens=12.00, max_tokens=24, "
    "balancedness={value:.4f}, steps until the next rearrangement: 90\n"
)


class Server(http.server.BaseHTTPRequestHandler):
    """Answers with the experts 0 to 2 and 1 to 3 of four for every token, layer by layer."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        tokens = len(body["prompt"]) + body["max_tokens"] - 1
        buffer = io.BytesIO()
        np.save(buffer, np.tile(np.array([[0, 1, 2], [1, 2, 3]], np.uint8), (tokens, 1, 1)))
        text = base64.b64encode(buffer.getvalue()).decode()
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        payload = json.dumps({"choices": [{"text": "", "routed_experts": text}], "usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    found = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    found.bodies = []
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def test_answers_of_a_server_become_loads(server):
    url = f"http://127.0.0.1:{server.server_port}"
    answers = [answer.content for answer in complete_together(url, "m", [[5, 6, 7], [8, 9]], 4)]
    assert {body["max_tokens"] for body in server.bodies} == {4}
    assert all(body["ignore_eos"] for body in server.bodies)
    loads = read_answers(answers, num_experts=4, where="answers")
    # two requests, three generated tokens of each went through the model
    assert loads.tokens.tolist() == [[[2, 2, 2, 0], [0, 2, 2, 2]]] * 3


def test_a_server_that_returns_experts_differs_in_that_only():
    plan = plans.plan("expert_balance", experiment.Params(), "gb300-nvl72")
    plain, routed = plan.stage("unbalanced").services, plan.stage("routed").services
    for before, after in zip(plain, routed, strict=True):
        assert after.arguments == (*before.arguments, "--enable-return-routed-experts")
        assert after.environment == {**before.environment, "VLLM_USE_V2_MODEL_RUNNER": "1"}
    balanced = " ".join(plan.stage("balanced").services[0].arguments)
    assert '"num_redundant_experts":32,"window_size":1000,"step_interval":3000' in balanced


def test_fewer_ranks_have_fewer_redundant_experts_and_requests():
    plan = plans.plan("expert_balance", experiment.Params(redundant_per_rank=2, requests_per_rank=16), "b300x8")
    assert '"num_redundant_experts":16,' in " ".join(plan.stage("balanced").services[0].arguments)
    assert plan.effective["ranks"] == 8
    assert plan.effective["measured_routed_requests"] == 8 * 16
    assert plans.plan("expert_balance", None, "gb300-nvl72").effective["measured_routed_requests"] == 512
    assert [stage.name for stage in plan.stages] == ["balanced", "unbalanced", "routed"]
    assert plan.gpu_minutes > 3 * 8 * 30  # each server takes half an hour to start
    with pytest.raises(UnfitError, match="found servers for 9,216 tokens; needed: 10,024. Lower measured_routed_input"):
        plans.plan("expert_balance", {"measured_routed_input_tokens": 10_000}, "b300x8")


def test_the_plan_takes_the_names_of_the_notebook_s_parameters():
    given = [("redundant_per_rank", "2"), ("window_steps", "77"), ("interval_steps", "500")]
    found = planned("06", given, "gb300-nvl72", None)
    balanced = " ".join(found.stage("balanced").services[0].arguments)
    assert '"num_redundant_experts":64,"window_size":77,"step_interval":500' in balanced
    assert "rackbook itself sends the 512 prompts of the stage routed, 128 random tokens each" in " ".join(found.notes)


def test_logs_of_both_servers(tmp_path):
    with pytest.raises(RackbookError, match="no log has a line about EPLB"):
        measurement.logged(tmp_path)
    (tmp_path / "balanced.server.log").write_text(LINE.format(step=10, value=0.9) + LINE.format(step=20, value=0.8))
    (tmp_path / "unbalanced.server.log").write_text("nothing\n" + LINE.format(step=10, value=0.4))
    found = measurement.logged(tmp_path)
    assert found["bench_stage"].to_list() == ["balanced", "balanced", "unbalanced"]
    assert found["balancedness_of_sums"].to_list() == [0.9, 0.8, 0.4]


@pytest.fixture
def stored(tmp_path):
    """A run with loads of a model of the published size and lines of a log."""
    params = experiment.Params(draws=10)
    rng = np.random.default_rng(1)
    tokens = np.stack([np.bincount(rng.permutation(384)[:192], minlength=384) for _ in range(8)]).reshape(4, 2, 384)
    lines = tmp_path / "unbalanced.server.log"
    lines.write_text(LINE.format(step=10, value=0.4))
    with runs.record("expert_balance", params, machine={}, root=tmp_path / "runs") as run:
        run.describe(routed={"top_k": 6})
        np.save(run.raw(LOADS), tokens.astype(np.int32))
        run.write_points(measurement.logged(tmp_path), experiment.EPLB_LINES)
    return runs.read(tmp_path / "runs" / run.id)


def test_a_stored_run_is_shown_on_the_chosen_ranks_with_its_log(stored):
    evidence = experiment.collect(experiment.Params(source=str(stored.path), draws=10))
    rows = {r["balance_of"]: r for r in evidence.lab.to_dicts()}
    assert rows[audit.AS_LOGGED]["balancedness_of_sums"] == 0.4
    assert "416 slots" in rows[audit.BOUND]["formula"]
    assert {r["source"] for r in rows.values()} == {f"run {stored.id}"}
    assert evidence.lab_places["layer"].unique().sort().to_list() == [0, 1]
    own = evidence.measured_states
    assert own.height == evidence.lab.height


def test_another_run_is_refused(tmp_path):
    with runs.record("context_sweep", {"a": 1}, machine={}, root=tmp_path) as run:
        run.write_points(pl.DataFrame({"layer": [1]}))
    with pytest.raises(ParameterError, match="is one of context_sweep, this notebook shows expert_balance"):
        experiment.collect(experiment.Params(source=str(tmp_path / run.id), draws=10))


def test_no_run_leaves_an_empty_chart_that_says_so():
    chart = expert_loads_by_place(audit.no_places(), subtitle="measured; no run")
    assert chart.to_dict()["title"]["text"] == "No routed experts were recorded"
