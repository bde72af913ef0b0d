"""Experiment 02: shares, what follows from them, the user's profiles, charts."""

import json

import polars as pl
import pytest
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import step_breakdown as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import step_breakdown as experiment
from rackbook.models.amdahl import greatest_speedup, whole_speedup

SUMMARY = {"trace": "", "replays": 3, "span_us": 90.0, "busy_us": 100.0, "pre_forward_us": 0.0, "activities": 4}
BEFORE = {"mega_moe_impl": 60.0, "topk_select_x": 5.0, "splitkv_mla": 15.0, "nvjet": 10.0, "new_kernel": 10.0}


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def profile(folder, times, case="c", rank=0):
    folder.mkdir(exist_ok=True)
    rows = [{"name": name, "us": us, "calls": 1} for name, us in times.items()]
    (folder / f"{case}.rank{rank}.kernels.json").write_text(json.dumps(SUMMARY | {"kernels": rows}))
    return folder


@pytest.fixture
def two_runs(tmp_path):
    before = profile(tmp_path / "before", BEFORE)
    after = profile(tmp_path / "after", BEFORE | {"mega_moe_impl": 30.0, "nvjet": 12.0})
    return experiment.collect(experiment.Params(profile_path=str(before), profile_after_path=str(after)))


def shares(evidence, run):
    rows = evidence.shares.filter(pl.col("run") == run)
    return dict(rows.select("component", "step_share_percent").iter_rows())


def test_the_published_parts_and_the_rest_they_leave(evidence):
    assert shares(evidence, "S1, published") == {"moe": 62, "attention_indexer": 13, "rest": 25}
    assert evidence.shares["origin"].to_list() == ["published", "published", "derived"]
    assert evidence.shares["formula"].to_list() == [None, None, "100 − 62 − 13"]


def test_amdahl_by_hand():
    assert whole_speedup(0.5, [1, 2, 4]).tolist() == pytest.approx([1, 4 / 3, 1.6])
    assert greatest_speedup(0.75) == 4
    assert whole_speedup(0.75, 1e12) == pytest.approx(greatest_speedup(0.75))
    with pytest.raises(ParameterError, match=r"got a share of 1.5 .*allowed: 0 to 1 and > 0"):
        whole_speedup(1.5, 2)


def test_what_a_faster_part_buys(evidence):
    moe = evidence.limits.filter(pl.col("component") == "moe").row(0, named=True)
    assert moe["step_speedup"] == pytest.approx(1 / (0.38 + 0.31))
    assert moe["step_speedup_limit"] == pytest.approx(1 / 0.38)
    faster = experiment.collect(experiment.Params(part_speedup=16))
    assert faster.limits["step_speedup"][0] == pytest.approx(1 / (0.38 + 0.62 / 16))
    assert faster.speedups["part_speedup"].max() == 16, "the curve reaches the point that is marked"
    assert faster.limits["step_speedup_limit"].equals(evidence.limits["step_speedup_limit"])


def test_the_printed_times_make_other_shares(evidence):
    assert evidence.share_points["step_share_percent"].to_list() == pytest.approx([100 * 13.4 / 23.4, 37.5])
    # a + b/EP through 13.4 and 6.0 ms meets 62/38 · 10 ms
    b = (13.4 - 6.0) / (1 / 4 - 1 / 32)
    a = 13.4 - b / 4
    assert evidence.implied_ep_size == pytest.approx(b / (620 / 38 - a))
    assert evidence.implied_ep_size < 4
    wide = evidence.share_checks.filter(pl.col("ep_size") == 32).row(0, named=True)
    assert wide["step_ms"] == pytest.approx(6.0 / 0.62)
    assert wide["step_ms"] + wide["other_ms"] == pytest.approx(16.0), "the parts add up to MoE and everything else"


def test_without_a_profile_there_is_nothing_of_the_user(evidence):
    for frame in (evidence.profiles, evidence.components, evidence.unassigned, evidence.comparison):
        assert frame.is_empty()


def test_one_profile(tmp_path):
    path = profile(tmp_path / "p", BEFORE)
    found = experiment.collect(experiment.Params(profile_path=str(path), profile_hardware="H", profile_model="M"))
    assert shares(found, "your profile") == {"moe": 60, "attention_indexer": 20, "rest": 10, "unassigned": 10}
    assert found.unassigned.select("kernel", "kernel_us", "step_share_percent").rows() == [("new_kernel", 10, 10)]
    assert found.profiles.select("hardware", "model", "stage").rows() == [("H", "M", None)]
    assert found.comparison.is_empty()
    assert set(found.components["origin"]) == {"measured"}


def test_two_profiles_component_by_component(two_runs):
    rows = {row["component"]: row for row in two_runs.comparison.to_dicts()}
    assert (rows["moe"]["before_us"], rows["moe"]["after_us"], rows["moe"]["difference_us"]) == (60, 30, -30)
    assert rows["moe"]["before_share_percent"] == 60
    assert rows["moe"]["after_share_percent"] == pytest.approx(100 * 30 / 72)
    assert rows["gemm"]["difference_us"] == 2
    assert two_runs.comparison["component"][-1] == "unassigned"
    assert two_runs.comparison["difference_us"].sum() == pytest.approx(-28)
    assert two_runs.comparison["source"][0] == "c.rank0.kernels.json, c.rank0.kernels.json"


def test_every_profile_parameter_changes_what_is_found(tmp_path):
    folder = profile(tmp_path / "p", {"mega_moe_impl": 10.0, "x": 10.0, "y": 5.0})
    profile(folder, {"mega_moe_impl": 40.0, "x": 10.0, "y": 5.0}, rank=1)

    def moe_us(**values):
        found = experiment.collect(experiment.Params(profile_path=str(folder), **values))
        return found.components.filter(pl.col("component") == "moe")["kernel_us"].item()

    assert [moe_us(rank_statistic=s) for s in ("min", "median", "max")] == [10, 25, 40]
    patterns = tmp_path / "patterns.toml"
    patterns.write_text("[[component]]\nname = 'moe'\nmeaning = ''\npart = 'moe'\npattern = '^[xy]'\n")
    assert moe_us(patterns_path=str(patterns)) == 15
    few = experiment.collect(experiment.Params(profile_path=str(folder), num_unassigned=1))
    assert few.unassigned["kernel"].to_list() == ["x"]
    report = tmp_path / "n.csv"
    report.write_text("Total Time (ns),Instances,Name\n6000,2,mega_moe_impl\n")
    nsight = experiment.collect(experiment.Params(profile_path=str(report), nsight_forwards=[3]))
    assert nsight.components["kernel_us"].sum() == 2


@pytest.fixture
def reports(tmp_path):
    """Two Nsight reports: 8 passes with 60 µs of MoE each and 40 of GEMM, and 2 passes with 30 and 40."""
    for name, moe, gemm in (("before", 480_000, 320_000), ("after", 60_000, 80_000)):
        text = f"Total Time (ns),Instances,Name\n{moe},8,mega_moe_impl\n{gemm},8,nvjet\n"
        (tmp_path / f"{name}.csv").write_text(text)
    return {"profile_path": str(tmp_path / "before.csv"), "profile_after_path": str(tmp_path / "after.csv")}


def test_each_recording_has_forward_passes_of_its_own(reports):
    found = experiment.collect(experiment.Params(**reports, nsight_forwards=[8, 2]))
    rows = {row["component"]: row for row in found.comparison.to_dicts()}
    assert (rows["moe"]["before_us"], rows["moe"]["after_us"], rows["moe"]["difference_us"]) == (60, 30, -30)
    assert rows["gemm"]["difference_us"] == 0
    assert experiment.why_no_difference(found) == ""
    assert found.profiles["num_forwards"].to_list() == [8, 2]


def test_without_forward_passes_there_is_no_difference_in_time(reports):
    found = experiment.collect(experiment.Params(**reports))
    moe = found.comparison.row(by_predicate=pl.col("component") == "moe", named=True)
    assert moe["difference_us"] is None
    assert moe["missing_reason"] == "no difference: the forward passes of before and after are not given"
    assert (moe["before_share_percent"], moe["after_share_percent"]) == pytest.approx((60, 100 * 60 / 140))
    assert experiment.why_no_difference(found).endswith("; set nsight_forwards")
    reasons = found.components.filter(pl.col("kernel_us").is_null())["missing_reason"]
    assert reasons.null_count() == 0
    spec = check_chart(charts.component_times(found.components, subtitle="s"), name="component_times")
    assert spec["spec"]["layer"][0]["encoding"]["x"]["title"] == "Share of the recording's kernel time (%)"
    assert spec["title"]["text"].startswith("Share of the kernel time by component")


def test_a_summary_of_bench_forward_beside_a_report_without_passes(tmp_path, reports):
    before = profile(tmp_path / "b", BEFORE)
    found = experiment.collect(experiment.Params(**reports | {"profile_path": str(before)}))
    reason = found.comparison["missing_reason"].unique().to_list()
    assert reason == ["no difference: the forward passes of after are not given"]
    known = found.components.filter(pl.col("run") == "before")
    assert (known["kernel_us"].sum(), known["missing_reason"].null_count()) == (100, known.height)


def test_no_number_is_written_as_a_power_of_ten(tmp_path):
    before = profile(tmp_path / "before", {"mega_moe_impl": 60.0, "nvjet": 0.25})
    after = profile(tmp_path / "after", {"mega_moe_impl": 4_767_123.0, "nvjet": 0.5})
    found = experiment.collect(experiment.Params(profile_path=str(before), profile_after_path=str(after)))
    spec = check_chart(charts.component_differences(found.comparison, subtitle="s"), name="component_differences")
    assert spec["title"]["text"] == "After − before: +4,767,000 µs of kernel time, +4,767,000 µs in moe"
    formats = {layer["encoding"].get("text", {}).get("format") for layer in spec["layer"]} - {None}
    assert formats == {"+,.4~r"}
    assert spec["layer"][0]["encoding"]["x"]["axis"]["format"] == ",.4~r"


def test_a_run_after_needs_a_run_before():
    with pytest.raises(ParameterError, match="profile_after_path: got 'x' without profile_path"):
        experiment.collect(experiment.Params(profile_after_path="x"))


@pytest.mark.parametrize(
    "bad",
    [
        {"part_speedup": 0.5},
        {"rank_statistic": "mean"},
        {"profile_path": "p", "nsight_forwards": [0]},
        {"nsight_forwards": [1]},
        {"profile_path": "p", "nsight_forwards": [1, 2]},
        {"profile_path": "p", "profile_after_path": "q", "nsight_forwards": [1]},
        {"num_unassigned": 0},
        {"profile": ""},
    ],
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        experiment.Params(**bad)


def test_verdicts(evidence, two_runs):
    for found in (evidence, two_runs):
        verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(found)}
        assert verdicts["moe_share_percent"].verdict == "open"
        assert "57.3 % at DEP4, 37.5 % at DEP32" in verdicts["moe_share_percent"].finding.note
        assert verdicts["attention_indexer_share_percent"].verdict == "open"
        assert verdicts["rest_share_percent"].verdict == "consistent"


def test_charts_of_the_published_shares(evidence):
    spec = check_chart(charts.step_shares(evidence.shares, subtitle="64 requests"), name="step_shares")
    assert spec["title"]["text"] == "MoE takes 62 % of the step (S1, published)"
    spec = check_chart(
        charts.step_speedup_by_part(evidence.speedups, evidence.limits, subtitle="s"), name="step_speedup_by_part"
    )
    assert "2× as fast makes the step 1.45× as fast, never more than 2.63×" in spec["title"]["text"]
    spec = check_chart(
        charts.moe_share_by_ep_size(
            evidence.share_curve,
            evidence.share_points,
            evidence.points,
            implied_ep_size=evidence.implied_ep_size,
            subtitle="s",
        ),
        name="moe_share_by_ep_size",
    )
    assert "62 % at 3.0 GPUs, fewer than any printed size" in spec["title"]["text"]


def test_charts_of_profiles(two_runs):
    spec = check_chart(charts.component_times(two_runs.components, subtitle="s"), name="component_times")
    assert spec["title"]["text"] == "Kernel time by component; unassigned: 10.0 %, 13.9 % of it"
    assert len(spec["datasets"]) == 1, "layers with data of their own are not split by run"
    spec = check_chart(charts.component_differences(two_runs.comparison, subtitle="s"), name="component_differences")
    assert spec["title"]["text"] == "After − before: −28 µs of kernel time, −30 µs in moe"
    check_chart(charts.step_shares(two_runs.shares, subtitle="s"), name="step_shares")


def test_a_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="step_shares: column 'step_share_percent' is missing, got columns: run"):
        charts.step_shares(evidence.shares.drop("step_share_percent"), subtitle="")
