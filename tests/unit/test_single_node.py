"""Experiment 12: printed tables and their gaps, Little's law, CUDA graphs, the KV figures, charts."""

import dataclasses
import math

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook import catalog
from rackbook.charts import single_node as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import single_node as experiment
from rackbook.models import memory, node_memory, node_throughput
from rackbook.models.closed_loop import ClosedLoop
from rackbook.models.graph_cover import MixedSteps
from rackbook.tables import COLUMNS

STEPS = {
    "requests_per_rank": 256, "prompt_tokens": 1024, "output_tokens": 1024, "tokens_per_step": 1.95,
    "draft_tokens": 5, "max_step_tokens": 8192, "num_ranks": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def frames_of(evidence):
    return {name: value for name, value in vars(evidence).items() if isinstance(value, pl.DataFrame)}


def by(frame, key):
    return {row[key]: row for row in frame.to_dicts()}


# the printed tables


def test_what_is_elided_stays_missing_with_its_reason(evidence):
    rows = [row for row in evidence.rates.to_dicts() if row["workload"] == "8K → 1K"]
    assert len(rows) == 2
    for row in rows:
        assert row["output_tok_per_s"] is None
        assert row["total_tok_per_s"] is None
        assert "elided" in row["missing_reason"]


def test_totals_and_per_gpu_by_hand(evidence):
    rows = {(r["engine"], r["workload"]): r for r in evidence.rates.to_dicts()}
    assert rows["vLLM", "128 → 1K"]["total_tok_per_s"] == pytest.approx(64990 * 1.125)
    assert rows["vLLM", "1K → 1K"]["total_tok_per_s"] == 109970
    assert rows["DeepInfer", "1K → 1K"]["output_tok_per_s_per_gpu"] == pytest.approx(27906 / 8)


def test_ratios_beside_the_printed_ones(evidence):
    rows = by(evidence.ratios, "quantity")
    assert rows["vLLM ÷ DeepInfer, decode 1K → 1K"]["found"] == pytest.approx(1.970365, abs=1e-6)
    assert rows["vLLM ÷ DeepInfer, prefill"]["found"] == pytest.approx(658 / 66)
    assert rows["vLLM ÷ DeepInfer, decode 8K → 1K"]["found"] is None
    assert rows["vLLM ÷ DeepInfer, decode 8K → 1K"]["value"] == 4.3
    assert rows["total, vLLM 1K → 1K"]["value"] is None


def test_total_and_output_by_hand():
    run = {"output_tok_per_s": 30.0, "total_tok_per_s": 40.0, "input_tokens": 1, "output_tokens": 3}
    assert node_throughput.total_tok_per_s(run) == pytest.approx(40.0)
    assert node_throughput.output_tok_per_s(run) == pytest.approx(30.0)


# Little's law


def test_a_closed_loop_by_hand():
    # 10 in flight, each 1 s of waiting and 4 steps of 1 s: 2 requests per s, 10 tokens per s
    loop = ClosedLoop(concurrency=10, output_tokens=5, output_tok_per_s=10.0, tpot_ms=1000.0)
    assert loop.requests_per_s == 2
    assert loop.request_s == 5
    assert loop.decode_s == 4
    assert loop.other_s == 1
    assert loop.num_decoding == 8
    assert loop.ms_per_token == 1000


@given(st.integers(1, 4096), st.integers(2, 4096), st.floats(1.0, 1e5), st.floats(0.1, 100))
def test_seats_are_decoding_or_not(concurrency, output_tokens, rate, tpot_ms):
    loop = ClosedLoop(concurrency, output_tokens, rate, tpot_ms)
    waiting = loop.requests_per_s * loop.other_s
    assert loop.num_decoding + waiting == pytest.approx(concurrency, rel=1e-9, abs=1e-6)


def test_a_loop_without_rate_is_refused():
    with pytest.raises(ParameterError, match="rates and times above 0"):
        ClosedLoop(1, 1, 0.0, 1.0)


def test_the_published_requests(evidence):
    rows = by(evidence.loop, "workload")
    assert set(rows) == {"128 → 1K", "1K → 1K"}, "runs without a TPOT cannot be split"
    assert rows["128 → 1K"]["ms_per_token"] == pytest.approx(1000 * 2048 / 64990)
    assert rows["128 → 1K"]["other_s"] == pytest.approx(2048 * 1024 / 64990 - 1023 * 0.0248)
    assert rows["1K → 1K"]["prefill_s"] == pytest.approx(2048 * 1024 / 658000)
    for row in rows.values():
        assert row["other_s"] > row["prefill_s"], "prefill alone does not explain the rest"


# CUDA graphs


def test_step_sizes_by_hand():
    steps = MixedSteps(**STEPS)
    assert steps.decode_only_tokens == 1536
    assert [steps.step_tokens(n) for n in (0, 1, 6, 7)] == [1536, 255 * 6 + 1024, 250 * 6 + 6144, 8192]
    assert steps.starts_per_rank_and_step == pytest.approx(256 * 1.95 / 1024)
    assert [steps.most_prompts_within(c) for c in (1535, 1536, 2553, 2554, 8191, 8192)] == [-1, 0, 0, 1, 6, 256]


def test_shares_of_covered_steps_by_hand():
    steps = MixedSteps(**STEPS)
    starts = 256 * 1.95 / 1024
    assert steps.covered_if_independent(1535) == 0
    assert steps.covered_if_independent(1536) == pytest.approx(math.exp(-8 * starts))
    assert steps.covered_if_independent(2554) == pytest.approx((math.exp(-starts) * (1 + starts)) ** 8)
    # 32 steps of prefill, 1,024 / 1.95 of decoding
    assert steps.covered_if_together(1536) == pytest.approx(525.128 / 557.128, abs=1e-5)
    assert steps.covered_if_together(8192) == 1
    assert steps.covered_if_together(1000) == 0


@given(
    st.integers(1, 300), st.integers(1, 4096), st.integers(16, 4096), st.floats(1, 6), st.integers(1, 64),
    st.integers(1, 9000), st.integers(1, 9000),
)  # fmt: skip
def test_a_higher_ceiling_covers_no_less(requests, prompt, output, length, ranks, first, second):
    steps = MixedSteps(requests, prompt, output, length, 5, 8192, ranks)
    low, high = sorted((first, second))
    for covered in (steps.covered_if_independent, steps.covered_if_together):
        assert 0 <= covered(low) <= covered(high) <= 1 + 1e-9


def test_a_wave_counts_with_the_tokens_that_its_steps_have():
    one_step = MixedSteps(
        requests_per_rank=4, prompt_tokens=100, output_tokens=10, tokens_per_step=1.0, draft_tokens=0,
        max_step_tokens=8192, num_ranks=1,
    )  # fmt: skip
    assert one_step.covered_if_together(400) == 1
    assert one_step.covered_if_together(399) == pytest.approx(10 / 11)
    # 400 tokens in steps of 160, 160 and 80
    three = dataclasses.replace(one_step, max_step_tokens=160)
    assert [three.covered_if_together(n) for n in (160, 80, 79)] == pytest.approx([1, 11 / 13, 10 / 13])


def test_a_step_too_small_to_decode_is_refused():
    with pytest.raises(ParameterError, match="max_step_tokens: got 1000, allowed: at least 1536"):
        MixedSteps(**STEPS | {"max_step_tokens": 1000})
    with pytest.raises(ParameterError, match="from 1 to 6 tokens per step"):
        MixedSteps(**STEPS | {"tokens_per_step": 7.0})


def test_ceilings_of_the_default_and_of_the_source(evidence):
    rows = by(evidence.cover, "max_capture_tokens")
    assert rows[1024]["covered_high_percent"] == 0
    assert rows[1024]["num_new_prompts"] is None
    assert "1,536 tokens of decoding alone" in rows[1024]["missing_reason"]
    assert rows[1536]["covered_low_percent"] < 3 < 90 < rows[1536]["covered_high_percent"]
    assert rows[8192]["covered_low_percent"] == 100
    sizes = by(evidence.step_sizes, "num_new_prompts")
    assert (sizes[0]["graph_cover"], sizes[1]["graph_cover"]) == ("1,536", "8,192")


# acceptance, memory


def test_tokens_per_step_of_the_printed_shares(evidence):
    rows = by(evidence.acceptance, "workload")
    assert rows["1K → 1K"]["tokens_per_step"] == pytest.approx(1.95)
    assert rows["8K → 1K"]["tokens_per_step"] == pytest.approx(1.6)
    assert rows["1K → 1K"]["output_tok_per_s"] == pytest.approx(54985 * 3.51 / 1.95)
    assert rows["8K → 1K"]["output_tok_per_s"] is None


def test_weights_of_both_deployments(evidence):
    rows = {(r["hardware"], r["reading"]): r["found"] for r in evidence.weights.to_dicts()}
    assert rows["B300", "all scales with the experts"] == pytest.approx(281.4 / 8 + 10.8)
    assert rows["H200", "all scales with the experts"] == pytest.approx(281.4 / 4 + 10.8)
    assert rows["H200", "Engram's scales outside"] == pytest.approx(259.5 * 17 / 16 / 4 + 10.8)


def test_the_memory_that_is_not_named(evidence):
    row = evidence.budget.filter((pl.col("quantity") == "not named") & (pl.col("unit") == "GiB")).row(0, named=True)
    assert row["value"] == pytest.approx(288e9 / 2**30 - 206)


def test_sizes_of_the_checkpoint_by_hand():
    model = catalog.model("deepseek-v4.1-flash")
    parameters = model.engram.num_parameters.known
    assert memory.scales_gib(model.checkpoint, model.engram) == pytest.approx((557.2e9 + parameters) / 32 / 2**30)
    assert memory.engram_parameters(model.engram) == 2 * 384_000_000 * 256


def test_size_and_number_of_cached_tokens_by_hand():
    row = {"kv_cache_gib_per_gpu": 2.0, "kv_cache_tokens_per_rank": 2**20}
    assert node_memory.kv_bytes_per_token(row) == 2048
    assert node_memory.kv_cache_mtok(row, 1024.0) == pytest.approx(2.097152)


def test_kv_figures_do_not_meet(evidence):
    kv = evidence.kv.sort("kv_bytes_per_token")
    assert kv["kv_bytes_per_token"].to_list() == pytest.approx([890, 38.5 * 2**30 / 20e6, 160 * 2**30 / 52e6])
    assert all(high < low for high, low in zip(kv["high"], kv["low"][1:], strict=False)), "no rounding joins them"
    assert kv["low"][2] == pytest.approx(159.5 * 2**30 / 53e6)
    assert kv["high"][2] == pytest.approx(160.5 * 2**30 / 51e6)
    assert kv["kv_cache_mtok"][0] == pytest.approx(193.03, abs=0.01)
    assert kv["context_tokens"][2] == 52_000_000 // 256


def test_the_fixed_part_of_a_request_by_hand():
    candidates = experiment.collect(experiment.Params(max_model_len=1000)).candidates
    found = candidates.filter((pl.col("quantity") == "fixed part of a request") & (pl.col("hardware") == "B300"))
    assert found["found"].item() == pytest.approx((160 * 2**30 / 52e6 - 890) * 1000 / 1e6)


def test_no_candidate_gives_one_figure_for_both_deployments(evidence):
    for (assumption,), rows in evidence.candidates.group_by("assumption", maintain_order=True):
        assert rows["hardware"].to_list() == ["B300", "H200"], assumption
        assert rows["found"][0] / rows["found"][1] > 1.2, assumption


# parameters, frames, verdicts, charts


@pytest.mark.parametrize(
    ("changed", "frames"),
    [
        ({"capture_tokens": [2048]}, {"step_sizes", "cover"}),
        ({"requests_per_rank": 200}, {"step_sizes", "cover"}),
        ({"num_ranks": 4}, {"cover"}),
        ({"prompt_tokens": 128}, {"step_sizes", "cover"}),
        ({"output_tokens": 256}, {"cover"}),
        ({"max_step_tokens": 4096}, {"step_sizes", "cover"}),
        ({"draft_tokens": 4}, {"step_sizes", "cover", "acceptance"}),
        ({"acceptance_percent": 50.0}, {"cover"}),
        ({"acceptance_length": 2.0}, {"acceptance"}),
        ({"max_model_len": 131_072}, {"candidates"}),
    ],
)
def test_every_parameter_changes_what_it_says(evidence, changed, frames):
    other = experiment.collect(experiment.Params(**changed))
    for name, frame in frames_of(other).items():
        # a formula that names the parameter is no effect
        same = frame.drop("formula", strict=False).equals(getattr(evidence, name).drop("formula", strict=False))
        assert same == (name not in frames), name


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"capture_tokens": [8192, 1536]}, "in ascending order"),
        ({"capture_tokens": []}, "at least 1 item"),
        ({"acceptance_length": 7.0}, "got 7, allowed: at most 6"),
        ({"max_step_tokens": 1500}, "got 1500, allowed: at least 1536"),
        ({"acceptance_percent": 101.0}, "less than or equal to 100"),
        ({"capture": 1}, "Extra inputs"),
    ],
)
def test_bad_parameters_are_refused(bad, words):
    with pytest.raises(ValidationError, match=words):
        experiment.Params(**bad)


def test_frames_use_the_vocabulary(evidence):
    for name, frame in frames_of(evidence).items():
        assert set(frame.columns) <= set(COLUMNS), name
        assert {"origin", "source"} <= set(frame.columns), name


def test_verdicts_do_not_depend_on_the_parameters(evidence):
    verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    assert {name for name, v in verdicts.items() if v.verdict == "inconsistent"} == {
        "ratio_at_least_2", "prefill_ratio", "kv_bytes_per_token", "kv_tokens_per_rank", "h200_kv_tokens",
    }  # fmt: skip
    assert verdicts["ratio_8k_1k"].verdict == "open"
    assert verdicts["kv_bytes_per_token"].finding.note == "160 GiB ÷ 52 million tokens, both printed by S2"
    assert verdicts["h200_kv_tokens"].finding.note == "38.5 GiB ÷ S1's 890 B per token"
    assert verdicts["shared_experts"].finding.note == "printed by vllm-recipe as well"
    assert verdicts["deepinfer_prefill_gpus"].finding.note == "EP4DP4, printed by S1"
    assert verdicts["shared_experts"].verdict == verdicts["deepinfer_prefill_gpus"].verdict == "consistent"
    assert all(v.settlement for v in verdicts.values() if v.verdict == "open"), "an open claim says what settles it"
    assert verdicts["weights_gib_per_gpu"].finding.found == pytest.approx(45.975)
    # (259.5 + 21.9) ÷ 4 of the 81.2 GiB per H200 are experts and scales
    assert verdicts["dense_gib"].finding.found == pytest.approx(81.2 - 70.35 - 3.9)
    assert verdicts["embedding_gib"].finding.found == pytest.approx(81.2 - 70.35 - 6.9)
    assert verdicts["dense_gib"].finding.note.endswith("per B300 leave 6.93")
    assert verdicts["memory_is_not_the_limit"].finding.found is True
    other = experiment.collect(experiment.Params(requests_per_rank=10, capture_tokens=[64], max_model_len=1))
    assert experiment.CHECKS.judge(other).records() == experiment.CHECKS.judge(evidence).records()


def test_table_charts(evidence):
    spec = check_chart(charts.output_by_engine(evidence.runs, subtitle="8 × B300"), name="output_by_engine")
    assert "1.97 times" in spec["title"]["text"]
    assert "not printed" in str(spec)
    spec = check_chart(
        charts.request_time_by_part(evidence.request_parts, evidence.loop, subtitle="8 × B300"),
        name="request_time_by_part",
    )
    assert "up to 6.9 of the 32.3 s" in spec["title"]["text"]


def test_graph_chart_says_what_falls_out(evidence):
    def title(evidence):
        chart = charts.step_tokens_by_new_prompts(evidence.step_sizes, evidence.cover, subtitle="DEP8")
        return check_chart(chart, name="step_tokens_by_new_prompts")["title"]["text"]

    assert title(evidence) == "Graphs to 1,536 tokens hold decoding alone; one prompt makes it 2,554"
    large = experiment.collect(experiment.Params(capture_tokens=[8192]))
    assert title(large) == "Decoding alone takes 1,536 tokens of a step, with one prompt 2,554"


def test_kv_chart(evidence):
    spec = check_chart(charts.kv_bytes_by_figure(evidence.kv, subtitle="three figures"), name="kv_bytes_by_figure")
    assert "3.7 times" in spec["title"]["text"]


def test_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="ceilings: column 'covered_low_percent' is missing"):
        charts.step_tokens_by_new_prompts(evidence.step_sizes, evidence.cover.drop("covered_low_percent"), subtitle="")
