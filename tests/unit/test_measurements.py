"""The live paths of 01, 08 and 12 from parameters to a stored run, with a stand-in for vLLM; no GPU and no network."""

import json
import os
import sys
import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import polars as pl
import pytest
from pydantic import Field

import fake_vllm_server
from chart_checks import check_chart
from rackbook import plans, runs
from rackbook.charts import single_node as single_node_charts
from rackbook.charts import step_time
from rackbook.commands import measurements as commands
from rackbook.engine import decode_steps, launch
from rackbook.engine.completions import complete_together, random_prompts
from rackbook.engine.decode_steps import Batch
from rackbook.engine.fit import UnfitError
from rackbook.engine.readiness import free_port
from rackbook.engine.server import Running
from rackbook.errors import DataError, ParameterError, RackbookError
from rackbook.experiments import context_sweep as sweep_experiment
from rackbook.experiments import single_node as single_node_experiment
from rackbook.locations import DATA
from rackbook.measurements import context_sweep, engine_gap, recording, serving, single_node
from rackbook.measurements.context_sweep import Sweep
from rackbook.plans import serving_pareto as plan_of_09

FAKE = Path(__file__).parents[1] / "fake_vllm_server.py"
K = 1024


@pytest.fixture(autouse=True)
def quiet(tmp_path, monkeypatch):
    """A machine that does nothing else, and has the GPUs that the fake cluster names."""
    monkeypatch.setenv("RACKBOOK_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(runs, "COMMITTED", tmp_path / "none")
    monkeypatch.setattr(recording.Watch, "doubts", lambda *_: [])
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    folder = tmp_path / "bin"
    folder.mkdir()
    gpus = "\\n".join(["NVIDIA B300, 580.1.2, 284208, 1900, 2032, 3996, 1400, 1400, 10.3"] * 8)
    (folder / "nvidia-smi").write_text(f'#!/bin/sh\ncase "$1" in --query*) printf "{gpus}\\n";; esac\n')
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A node whose Python is the stand-in; on ports that are free, which those of the plans need not be."""
    port = free_port()
    monkeypatch.setitem(launch.server.__kwdefaults__, "port", port)
    monkeypatch.setattr(launch.url, "__defaults__", (0, port))
    for name in ("ROUTER_PORT", "PREFILL_PORT", "DECODE_PORT"):
        monkeypatch.setattr(plan_of_09, name, free_port())

    def write(environment=""):
        path = tmp_path / "node.toml"
        path.write_text(
            'name = "node"\nhardware = "b300"\ncompute_capability = "10.3"\nhosts = 1\ngpus_per_host = 8\n'
            'recipe = "deepseek-v4.1-flash-b300"\n'
            f'python = ["{sys.executable}", "{FAKE}"]\n[environment]\n{environment}\n'
        )
        return str(path)

    return write


# 01 on GPUs


def test_the_sweep_on_gpus_becomes_a_run_with_points(cluster):
    params = sweep_experiment.Params(source="measure", cluster=cluster(), measured_ranks=8)
    run = context_sweep.measure(params)
    points = run.points()
    assert points["context_tokens"].to_list() == [64 * K, 128 * K, 855 * K]
    assert points["step_ms"].to_list() == [9.005] * 3
    assert points.select("hardware", "ep_size", "requests_per_rank", "draft_tokens").unique().rows() == [
        ("B300", 8, 16, 5)
    ]
    assert points["missing_reason"][0] == "one run has no interval; its samples spread by 0.1 %"
    assert run.points("forward")["bench_case"][0] == "c64k=16*6@65536:5"
    assert run.provenance["vllm"] == "0.33.0"
    assert run.raw("plan.txt").read_text().startswith("context_sweep on node")
    shown = sweep_experiment.collect(params.model_copy(update={"source": run.id}))
    assert shown.run.id == run.id
    assert shown.measured["step_ms"].to_list() == [9.005] * 3


def test_a_vllm_without_bench_forward_is_refused_before_anything_starts(cluster, monkeypatch, tmp_path):
    monkeypatch.setenv("FAKE_VERSION", "0.30.0")
    with pytest.raises(UnfitError, match="0.30.0.*needed: "):
        context_sweep.measure(sweep_experiment.Params(cluster=cluster(), measured_ranks=8))
    assert not (tmp_path / "runs").exists()


def at_claim(step_ms, *, scope="target_only", flag=None):
    """A stored run at the claims' own setting."""
    rows = [
        {
            "hardware": "GB300", "model": "deepseek-v4.1-flash", "ep_size": 32, "requests_per_rank": 16,
            "draft_tokens": 5, "timing_scope": scope, "context_tokens": tokens * K, "step_ms": value,
            "step_low_ms": None, "step_high_ms": None, "repeats": 1, "num_steps": 100, "missing_reason": "one run",
        }
        for tokens, value in step_ms.items()
    ]  # fmt: skip
    types = {"step_low_ms": pl.Float64, "step_high_ms": pl.Float64}
    with runs.record("context_sweep", {}, machine={}) as run:
        run.write_points(pl.DataFrame(rows, schema_overrides=types))
        if flag:
            run.flag(flag)
    evidence = sweep_experiment.collect(sweep_experiment.Params(source=run.id))
    return {v.claim.id.split(".")[1]: v for v in sweep_experiment.CHECKS.judge(evidence)}


def test_a_run_at_the_claims_setting_settles_them():
    found = at_claim({64: 8.86, 128: 8.93, 855: 10.20})
    assert found["step_64k_ms"].verdict == "reproduced"
    assert found["step_855k_ms"].verdict == "refuted"
    assert found["latency_growth_ms"].finding.found == pytest.approx(10.20 - 8.93)
    assert found["latency_growth_ms"].finding.basis == "measured"
    assert found["latency_growth_derived_ms"].finding.basis == "derived"  # arithmetic on what is printed, still
    assert found["context_growth"].finding.basis == "derived"


def test_a_run_with_the_drafter_in_it_is_not_about_the_claims():
    found = at_claim({64: 12.0, 128: 12.0, 855: 12.0}, scope="target_and_drafter")
    assert found["step_64k_ms"].verdict == "open"
    assert found["latency_growth_ms"].finding.basis == "derived"


def test_a_flagged_run_settles_nothing():
    found = at_claim({64: 8.86, 128: 8.93, 855: 9.53}, flag="unsteady")
    assert found["step_64k_ms"].verdict == "open"
    assert "unsteady" in found["step_64k_ms"].finding.note
    assert found["latency_growth_ms"].finding.basis == "derived"


# 01 through a server


class Completions(fake_vllm_server.Handler):
    """Answers completions of token ids, and logs a step per token of them, all requests of a batch together."""

    batch = 2
    log: Path
    seen: list
    lock = threading.Lock()

    def do_POST(self):  # noqa: N802
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked["prompt"][0] == 999:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(b'{"error":"too long"}')
            return
        with self.lock:
            self.seen.append((len(asked["prompt"]), self.headers.get("X-data-parallel-rank")))
            if len(self.seen) % self.batch == 0:
                self.write(asked["max_tokens"] - 1, len(asked["prompt"]))
        tokens = asked["max_tokens"] - (asked["prompt"][0] == 998)
        self.answer(f'{{"usage": {{"prompt_tokens": {len(asked["prompt"])}, "completion_tokens": {tokens}}}}}')

    def write(self, steps, context):
        lines = [
            fake_vllm_server.iteration(0, self.batch, 99.0).replace("0 context requests, 0", "1 context requests, 512"),
            *(fake_vllm_server.iteration(1 + n, self.batch, context / 1000 + n) for n in range(steps)),
            fake_vllm_server.iteration(steps + 1, 1, 77.0),
        ]
        with self.log.open("a") as log:
            log.write("\n".join(lines) + "\n")


@pytest.fixture
def completions(tmp_path):
    Completions.log, Completions.seen = tmp_path / "server.log", []
    Completions.log.write_text(fake_vllm_server.iteration(0, 2, 55.0) + "\n")  # of an earlier batch
    server = ThreadingHTTPServer(("127.0.0.1", 0), Completions)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_only_steps_with_the_whole_batch_and_nothing_else_count(completions):
    found = decode_steps.measure(completions, "m", Completions.log, Batch(2, 1000, steps=3), vocabulary=100, seed=1)
    assert found["step_ms"].to_list() == [1.0, 2.0, 3.0]
    assert Completions.seen == [(1000, None)] * 2


def test_requests_are_spread_over_the_ranks_by_their_header(completions):
    complete_together(completions, "m", random_prompts(2, 5, 100, 1), 4, ranks=[0, 1])
    assert sorted(rank for _, rank in Completions.seen) == ["0", "1"]


def test_a_batch_that_never_runs_together_is_tried_again_and_then_an_error(completions, monkeypatch):
    monkeypatch.setattr(decode_steps, "_SETTLE_S", 0.05)
    with pytest.raises(RackbookError, match="3 batches gave no step that decodes 3 requests"):
        decode_steps.measure(completions, "m", Completions.log, Batch(3, 10, 3), vocabulary=100, seed=1)
    assert len(Completions.seen) == 9


def test_a_request_that_fails_or_ends_early_is_an_error(completions):
    with pytest.raises(RackbookError, match='1 of 2 requests failed: status 400: {"error":"too long"}'):
        complete_together(completions, "m", [[5, 6], [999]], 4)
    with pytest.raises(RackbookError, match="asked for 4 tokens, got 3"):
        complete_together(completions, "m", [[998], [5]], 4)


def test_prompts_differ_and_come_back_with_their_seed():
    first, second = random_prompts(2, 50, 1000, 3), random_prompts(2, 50, 1000, 4)
    assert first == random_prompts(2, 50, 1000, 3)
    assert len({tuple(prompt[:8]) for prompt in first + second}) == 4
    assert min(min(prompt) for prompt in first) >= 3


def steps_of(medians):
    """Steps by context and repeat, three each, the middle one as given."""
    rows = [
        {"repeat": repeat, "context_tokens": tokens, "rank": 0, "iteration": n, "num_decode_requests": 4, "step_ms": ms}
        for tokens, values in medians.items()
        for repeat, median in enumerate(values, start=1)
        for n, ms in enumerate((median - 0.5, median, 50 * median))
    ]
    return pl.DataFrame(rows)


def test_a_point_is_the_mean_of_the_repeats_medians():
    found = context_sweep.points(
        steps_of({1024: [4.0, 5.0, 6.0], 2048: [9.0, 9.0, 9.0]}), Sweep([1024, 2048], 4), hardware="h", model="m"
    )
    first, second = found.to_dicts()
    assert first["step_ms"] == 5.0
    assert first["step_high_ms"] - 5 == pytest.approx(4.30265 / 3**0.5, rel=1e-5)  # t(0.975, 2)·s/√3, s = 1
    assert (first["repeats"], first["num_steps"], second["step_low_ms"]) == (3, 9, 9.0)
    assert context_sweep.doubts(found) == ["context 1,024 tokens: 5.00 ± 2.48 ms over 3 repeats, limit ± 20 %"]


def test_one_repeat_is_a_doubt():
    found = context_sweep.points(steps_of({1024: [4.0]}), Sweep([1024], 4), hardware="h", model="m")
    assert found["step_low_ms"].to_list() == [None]
    assert context_sweep.doubts(found) == ["context 1,024 tokens: one repeat, its spread is not known"]


@pytest.mark.parametrize(
    ("changes", "problem", "words"),
    [
        ({"measured_draft_tokens": 5}, UnfitError, "no drafter in the CPU lab's model.*measured_draft_tokens to 0"),
        (
            {"measured_requests_per_rank": 64},
            UnfitError,
            "KV cache of 1 GiB.*8,3.* tokens on a rank.*measured_contexts",
        ),
        ({"measured_contexts": [5, 5]}, ParameterError, r"measured_contexts: got \[5, 5\], allowed: different lengths"),
    ],
)
def test_what_the_lab_cannot_do_is_refused_before_it_starts(changes, problem, words, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    params = sweep_experiment.Params(**(sweep_experiment.LAB | changes))
    with pytest.raises(problem, match=words):
        context_sweep.measure(params)
    assert not (tmp_path / "runs").exists()


# 12 and 08 on a node


class Small(single_node_experiment.Params):
    """Parameters of notebook 12, and settings that only the plan has, small enough for a test."""

    measured_captures: list[int] = Field(default=[12, 64])
    measured_input_tokens: list[int] = Field(default=[8, 16])
    measured_output_tokens: int = 16
    measured_prefill_tokens: int | None = None
    measured_ranks: int | None = 2
    measured_repeats: int = 2
    requests_per_rank: int = 2
    max_model_len: int = 1024


def test_a_grid_on_a_node_becomes_points_with_intervals_over_runs(cluster):
    run = single_node.measure(Small(cluster=cluster()))
    points = run.points()
    assert points.select("bench_stage", "max_capture_tokens", "input_tokens").rows() == [
        ("capture12", 12, 16),
        ("capture64", 64, 8),
        ("capture64", 64, 16),
    ]
    rows = run.points("runs")
    assert rows["num_completed"].to_list() == [16] * 6
    last = points.row(2, named=True)
    of_last = rows.filter((pl.col("bench_stage") == "capture64") & (pl.col("input_tokens") == 16))["output_tok_per_s"]
    assert last["output_tok_per_s"] == pytest.approx(of_last.mean())
    assert last["output_low_tok_per_s"] < of_last.min()
    assert (last["hardware"], last["num_gpus"], last["engine"], last["concurrency"]) == ("B300", 2, "vLLM", 4)
    assert last["prefix_hit_percent"] == 0
    assert last["acceptance_length"] == 3.5
    roles = [process["role"] for process in run.provenance["processes"]]
    assert roles == ["capture12, server", "client", "client", "capture64, server", *["client"] * 4]
    assert run.raw("capture64.server.log").read_text() == "serving\n"


def test_a_server_that_dies_in_mid_run_is_an_error_and_keeps_what_was_measured(cluster, monkeypatch):
    monkeypatch.setenv("FAKE_SERVER", "dies")
    with pytest.raises(RackbookError, match=r"(?s)server of the server at .* ended with status 3.*\nserving"):
        single_node.measure(Small(cluster=cluster(), measured_captures=[12]))
    assert runs.stored("single_node") == []
    (left,) = runs.unfinished()
    assert list(left.path.glob("capture12-*-1.json"))
    assert "never finished" in left.reason


def test_a_pair_of_an_engine_step_and_a_forward_pass(cluster):
    from rackbook.experiments.engine_gap import Params

    params = Params(
        source="measure", cluster=cluster(), measured_ep_sizes=[8], measured_requests_per_rank=2, measured_repeats=2
    )
    run = engine_gap.measure(params)
    (pair,) = run.points().to_dicts()
    assert pair["forward_ms"] == 9.005
    tpots = run.points("runs")["tpot_ms"]
    assert pair["engine_ms"] == pytest.approx(3.5 * tpots.mean())  # a step gives 3.5 tokens
    assert pair["setting"] == "DEP8, 16 requests, 131,066 tokens"
    assert run.points("steps").height == 10
    assert set(run.points("steps")["repeat"]) == {1, 2}


def test_the_labs_forward_pass_is_the_iteration_with_the_whole_batch():
    steps = pl.DataFrame(
        {
            "bench_stage": ["s"] * 7,
            "repeat": [1, 1, 1, 1, 1, 2, 2],
            "concurrency": [4] * 7,
            "num_prefill_tokens": [0, 0, 0, 9, 0, 0, 0],
            "num_decode_requests": [4, 4, 4, 4, 3, 4, 4],
            "dummy_step": [False] * 7,
            "step_ms": [3.0, 5.0, 4.0, 90.0, 1.0, 6.0, 10.0],
        }
    )
    seen = serving.Found(pl.DataFrame(), steps)
    assert engine_gap.lab_forward(seen) == {"s": 6.0}  # medians 4 and 8
    with pytest.raises(RackbookError, match="7 iterations, none of which"):
        engine_gap.lab_forward(serving.Found(pl.DataFrame(), steps.with_columns(concurrency=pl.lit(9))))


def test_runs_that_disagree_about_the_step_are_a_doubt():
    rows = pl.DataFrame(
        {"bench_stage": ["a", "a", "a", "b", "b", "b", "c"], "tpot_ms": [4.0, 5.0, 6.0, 5.0, 5.0, 5.1, 7.0]}
    )
    # 5 ± 4.303·1/√3; a single run has no interval
    assert engine_gap.doubts(rows) == [
        "a: 5.00 ± 2.48 ms per output token, limit ± 20 %",
        "c: one run of the client, its spread is not known",
    ]


def test_a_forward_pass_longer_than_the_step_around_it_is_a_doubt():
    pairs = pl.DataFrame({"setting": ["a", "b"], "forward_ms": [7.8, 7.2], "engine_ms": [7.24, 7.25]})
    assert engine_gap.apart(pairs) == [
        "a: the forward pass took 7.80 ms and the engine's step 7.24 ms, so they were not measured under the same "
        "conditions"
    ]


def test_a_batch_that_cannot_be_is_named():
    with pytest.raises(DataError, match="batch, steps: got 0"):
        Batch(1, 1, 0)


# charts of what was measured


def test_the_chart_of_a_measured_sweep_says_what_it_shows():
    found = context_sweep.points(
        steps_of({1024: [4.0, 5.0, 6.0], 131072: [20.0, 21.0, 22.0]}), Sweep([1024, 131072], 4), hardware="h", model="m"
    ).with_columns(origin=pl.lit("measured"), source=pl.lit("run"))
    spec = check_chart(step_time.measured_step_by_context(found, subtitle="CPU lab"), name="measured_step_by_context")
    assert spec["title"]["text"] == "From 1K to 128K tokens the measured step goes from 5.0 to 21.0 ms"
    assert "log scale" in str(spec)
    assert "step_low_ms" in str(spec["layer"][0]["encoding"])


def measured_grid(**changes):
    row = {
        "bench_stage": "grid", "concurrency": 4, "input_tokens": 64, "output_tokens": 32, "repeats": 3, "num_failed": 0,
        "output_tok_per_s": 100.0, "output_low_tok_per_s": 90.0, "output_high_tok_per_s": 110.0, "origin": "measured",
        "source": "run",
    }  # fmt: skip
    return row | changes


def test_the_chart_of_a_measured_grid_names_its_best_load():
    rows = pl.DataFrame([measured_grid(concurrency=1, output_tok_per_s=60.0), measured_grid()])
    spec = check_chart(
        single_node_charts.measured_output_by_load(rows, subtitle="CPU lab"), name="measured_output_by_load"
    )
    assert spec["title"]["text"] == "Most output tokens, 100 per second, at 64 → 32, 4 at once"


def test_a_load_that_failed_is_not_drawn_as_zero():
    nothing = {"output_tok_per_s": None, "output_low_tok_per_s": None, "output_high_tok_per_s": None, "num_failed": 9}
    rows = pl.DataFrame([measured_grid(bench_stage="capture12"), measured_grid(bench_stage="capture64", **nothing)])
    spec = check_chart(
        single_node_charts.measured_output_by_load(rows, subtitle="CPU lab"), name="measured_output_by_load"
    )
    drawn = [row["output_tok_per_s"] for row in next(iter(spec["datasets"].values()))]
    assert drawn == [100.0, None]
    assert spec["title"]["text"].endswith("at capture12: 64 → 32, 4 at once")
    alone = pl.DataFrame([measured_grid(), measured_grid(**nothing)], schema_overrides={"output_tok_per_s": pl.Float64})
    spec = single_node_charts.measured_output_by_load(alone.tail(1), subtitle="s").to_dict()
    assert spec["title"]["text"] == "No load was measured in every repeat"


# rackbook record


def test_a_flagged_run_is_not_committed_unless_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "COMMITTED", tmp_path / "committed")

    def recorded(flag=None, text="x"):
        with runs.record("single_node", {"n": text[:1]}, machine={}) as run:
            run.write_text("log", text)
            run.write_points(pl.DataFrame({"repeat": [1]}))
            if flag:
                run.flag(flag)
        return runs.read(run.id)

    first, flagged = recorded(), recorded("loaded", "y")
    assert commands.keep(first).name == first.id
    with pytest.raises(RackbookError, match="has doubts and stays there.*\n  loaded"):
        commands.keep(flagged)
    commands.keep(flagged, flagged=True)
    assert [run.id for run in runs.committed("single_node")] == [flagged.id]  # the older one made room
    with pytest.raises(DataError, match="600 kB, allowed: 500"):
        commands.keep(recorded(text="z" * 600_000))


def test_a_notebook_that_measures_nothing_is_named():
    with pytest.raises(DataError, match="13_release_map measures nothing; those that do: 01_context_sweep"):
        commands.record("13")


# 09 behind a router


def test_prefill_and_decode_engines_behind_a_router_become_points_per_gpu(cluster, tmp_path):
    from rackbook.experiments import serving_pareto as experiment
    from rackbook.measurements import serving_pareto

    recipe = (DATA / "recipes" / "deepseek-v4.1-flash-b300.toml").read_text()
    start = recipe.index("router = [")
    words = [sys.executable, str(FAKE), "serve", "PREFILL_URLS", "DECODE_URLS", "--host", "127.0.0.1", "--port"]
    router = f"router = {json.dumps([*words, str(plan_of_09.ROUTER_PORT)])}"
    (tmp_path / "own.toml").write_text(recipe[:start] + router + recipe[recipe.index("\n", start) :])
    node = Path(cluster())
    node.write_text(node.read_text().replace('"deepseek-v4.1-flash-b300"', f'"{tmp_path / "own.toml"}"'))
    lines = [
        {"timestamp": n, "input_length": 40, "output_length": 4, "hash_ids": [0, 1 + 2 * n, 2 + 2 * n]}
        for n in range(32)
    ]
    (tmp_path / "agents.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    params = experiment.Params(
        source="measure", cluster=str(node), workload_path=str(tmp_path / "agents.jsonl"), measured_prefill_engines=1,
        measured_decode_ranks=4, measured_max_seqs=2, measured_concurrency=[4, 8],
    )  # fmt: skip
    run = serving_pareto.measure(params)
    points = run.points()
    assert points["concurrency"].to_list() == [4, 8]
    rows = run.points("runs")
    gpus = 4 + 2  # decode, and a prefill engine of the recipe
    assert rows.select("concurrency", "repeat", "seed").rows() == [
        (4, 1, 0), (8, 1, 1), (4, 2, 2), (8, 2, 3), (4, 3, 4), (8, 3, 5),
    ]  # fmt: skip
    # the stand-in's total is 200 + seed, its TPOT 4 + 0.1 (seed mod 3)
    assert points["total_tok_per_s_per_gpu"].to_list() == pytest.approx([202 / gpus, 203 / gpus])
    of_runs = (1000 / 4 + 1000 / 4.1 + 1000 / 4.2) / 3
    assert points["interactivity_p90_tok_per_s"].to_list() == pytest.approx([of_runs, of_runs])
    sent = [process for process in run.provenance["processes"] if process["role"] == "client"]
    assert [process["environment"]["PYTHONHASHSEED"] for process in sent] == ["0", "1", "2", "3", "4", "5"]
    assert json.loads(run.raw("effective.json").read_text())["measured_concurrency"] == [4, 8]
    assert run.flags == ()
    assert points["workload"].unique().to_list() == ["agents"]
    assert rows["input_tokens"].to_list() == [None] * 6
    shown = experiment.collect(params.model_copy(update={"source": run.id}))
    own = shown.points.filter(origin="measured")
    assert own["setting"].unique().to_list() == ["1 prefill engines, decode DEP4"]
    assert shown.measured.height == 2
    with pytest.raises(ParameterError, match="workload_path: got nothing"):
        serving_pareto.measure(params.model_copy(update={"workload_path": ""}))
    with pytest.raises(ParameterError, match="got 32 requests in .*agents.jsonl, allowed: at least 64, four for each"):
        serving_pareto.measure(params.model_copy(update={"measured_concurrency": [16]}))


# the iterations that servers log


def iteration_of(rank, number):
    return fake_vllm_server.iteration(number, 2).replace("Engine 000", f"Engine {rank:03d}") + "\n"


class TwoProcesses:
    """A running server of two processes."""

    base_url = "http://127.0.0.1:1"

    def __init__(self, folder):
        self.processes = tuple(Running(f"server-{n}", None, folder / f"stage-{n}.full.log") for n in range(2))
        for rank, process in enumerate(self.processes):
            process.log.write_text(iteration_of(rank, 0))  # of the warm-up

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def check(self):
        pass


@pytest.mark.parametrize(
    ("written", "flags"),
    [
        ([[0, 1], [2, 3]], ()),
        ([[0, 1], []], ("served_dep4: only 2 of 4 ranks logged their iterations",)),
        ([[], []], ()),  # as from several API servers, which the plan says
    ],
)
def test_the_iterations_of_every_process_are_read_and_missing_ranks_flagged(cluster, monkeypatch, written, flags):
    plan = plans.plan("engine_gap", {"measured_ep_sizes": [4], "measured_repeats": 1}, cluster())

    def follow(*_, seen, **__):
        for process, ranks in zip(server.processes, written, strict=True):
            with process.log.open("a") as log:
                log.write("".join(iteration_of(rank, 1) for rank in ranks) + "half a line")
        seen({"repeat": 1, "concurrency": 8})
        return pl.DataFrame({"repeat": [1]})

    monkeypatch.setattr(serving.bench_runs, "follow", follow)
    monkeypatch.setattr(serving, "start", lambda *_: server)
    with runs.record("engine_gap", {}, machine={}) as run:
        server = TwoProcesses(run.folder)
        steps = serving.follow(plan, run).steps
        run.write_json("done.json", {})
    assert steps.select("rank", "iteration").rows() == [(rank, 1) for ranks in written for rank in ranks]
    assert runs.read(run.id).flags == flags


def test_ranks_that_a_log_lacks_or_lines_that_it_should_not_have_are_doubts(tmp_path):
    log = tmp_path / "dep4.log"
    log.write_text("".join(iteration_of(rank, 5) for rank in range(4)))
    assert serving.log_doubts(log, 4) == []
    assert serving.log_doubts(log, 8) == ["only 4 of 8 ranks logged their iterations"]
    log.write_text("")
    assert serving.log_doubts(log, 4) == ["only 0 of 4 ranks logged their iterations"]
    log.write_text("Iteration(1): another form, iteration elapsed time: soon\n")
    (doubt,) = serving.log_doubts(log, 4)
    assert "dep4.log, line 1: a line about iteration of an unknown form" in doubt


# what a run of 12 settles


def judged_node(flag=None, **changes):
    from rackbook.experiments import single_node as experiment

    row = {
        "engine": "vLLM", "hardware": "B300", "num_gpus": 8, "model": "deepseek-v4.1-flash", "bench_stage": "s",
        "max_capture_tokens": 8192, "concurrency": 2048, "input_tokens": 128, "output_tokens": 1024, "repeats": 3,
        "num_failed": 0, "output_tok_per_s": 64990.2, "total_tok_per_s": 73114.0, "tpot_ms": 24.83,
        "acceptance_length": 1.95, "missing_reason": "made up",
    }  # fmt: skip
    rows = [
        row,
        row | {"input_tokens": 8192, "output_tokens": 1, "output_tok_per_s": 80.0, "total_tok_per_s": 658100.0},
    ]
    with runs.record("single_node", {"draft_tokens": 5}, machine={}) as run:
        run.write_points(pl.DataFrame([each | changes for each in rows]))
        if flag:
            run.flag(flag)
    found = experiment.CHECKS.judge(experiment.collect(experiment.Params(source=run.id)))
    return {v.claim.id.split(".")[1]: v for v in found}


def test_a_grid_at_the_claims_setting_settles_them():
    found = judged_node()
    assert found["output_128_1k"].verdict == "reproduced"
    assert found["tpot_128_1k_ms"].verdict == "reproduced"
    assert found["prefill_tok_per_s"].finding.found == pytest.approx(658100 - 80)  # prompts alone
    assert found["prefill_tok_per_s"].verdict == "reproduced"
    assert found["output_1k_1k"].verdict == "open"  # not measured here
    assert found["total_over_output_128_1k"].finding.basis == "derived"


@pytest.mark.parametrize("changes", [{"hardware": "B200"}, {"concurrency": 1024}, {"num_gpus": 4}])
def test_a_grid_at_another_setting_settles_nothing(changes):
    found = judged_node(**changes)
    assert found["tpot_128_1k_ms"].verdict == "open"
    assert found["output_128_1k"].finding.basis == "derived"


def test_the_acceptance_is_the_accepted_share_of_the_drafts():
    from rackbook.experiments import single_node as experiment

    with runs.record("single_node", {"draft_tokens": 5}, machine={}) as run:
        run.write_points(
            pl.DataFrame(
                [
                    {
                        "engine": "vLLM", "hardware": "B300", "num_gpus": 8, "model": "deepseek-v4.1-flash",
                        "bench_stage": "s", "max_capture_tokens": 8192, "concurrency": 2048, "input_tokens": 1024,
                        "output_tokens": 1024, "repeats": 3, "num_failed": 0, "acceptance_length": 1.95,
                        "missing_reason": "made up",
                    }
                ]
            )
        )  # fmt: skip
    evidence = experiment.collect(experiment.Params(source=run.id))
    found = {v.claim.id: v for v in experiment.CHECKS.judge(evidence)}["single_node.acceptance_1k_percent"]
    assert found.finding.found == pytest.approx(19.0)  # (1.95 − 1) of 5 drafts
    assert found.verdict == "reproduced"


def test_loads_whose_runs_disagree_or_that_ran_once_are_doubts():
    rows = pl.DataFrame(
        [
            measured_grid(),  # ± 10 %
            measured_grid(concurrency=1, output_high_tok_per_s=130.0),
            measured_grid(concurrency=2, output_high_tok_per_s=None),
            measured_grid(concurrency=3, output_tok_per_s=None, output_high_tok_per_s=None),
        ]
    )
    assert single_node.doubts(rows) == [
        "grid, 64 → 32, 1 at once: 100.0 ± 30.0 tokens/s over 3 runs, limit ± 20 %",
        "grid, 64 → 32, 2 at once: one run, its spread is not known",
    ]
