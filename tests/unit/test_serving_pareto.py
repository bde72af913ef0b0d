"""Experiment 09: frontiers, comparability, GPUs of a deployment, two rates per user, charts."""

import json

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook import published
from rackbook.charts import serving_pareto as charts
from rackbook.charts import single_user
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import serving_pareto as experiment
from rackbook.models import rack
from rackbook.models.interactivity import (
    decode_tok_per_s_per_gpu,
    implied_step_ms,
    throughput_per_user_tok_per_s,
    tpot_ms,
)
from rackbook.models.pareto import comparable, on_frontier
from rackbook.tables import COLUMNS, schema


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params())


def frontier(rows):
    frame = pl.DataFrame(rows, schema=["x", "y"], orient="row", strict=False)
    return on_frontier(frame, "x", "y").to_list()


def test_a_tie_on_one_axis_does_not_save_a_worse_point():
    assert frontier([(1.0, 5.0), (1.0, 4.0), (2.0, 4.0)]) == [True, False, True]


def test_equal_points_are_both_kept():
    assert frontier([(1.0, 5.0), (1.0, 5.0), (0.5, 5.0)]) == [True, True, False]


def test_null_and_nan_are_on_no_frontier_and_beat_nobody():
    assert frontier([(None, 9.0), (9.0, None), (float("nan"), 9.0), (1.0, 1.0)]) == [False, False, False, True]


def test_groups_do_not_beat_each_other():
    points = pl.DataFrame({"x": [1, 2, 1], "y": [1, 2, 0], "curve": ["a", "b", "a"]})
    assert on_frontier(points, "x", "y", by="curve").to_list() == [True, True, False]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=12))
def test_frontier_law(rows):
    kept = frontier(rows)
    best = [row for row, on in zip(rows, kept, strict=True) if on]
    assert best, "some point is never beaten"
    for row, on in zip(rows, kept, strict=True):
        beaten = any(x >= row[0] and y >= row[1] and (x, y) != row for x, y in best)
        assert beaten is not on
    # on the frontier more of one is less of the other
    front = sorted(set(best))
    assert [y for _, y in front] == sorted({y for _, y in front}, reverse=True)


def test_unknown_axis_is_named():
    with pytest.raises(DataError, match="unknown column: got 'xx', allowed: x, y"):
        on_frontier(pl.DataFrame({"x": [1], "y": [1]}), "xx", "y")


def test_not_stated_is_not_equal():
    points = pl.DataFrame(
        {
            "engine": ["a", "a", "a", "a", "a", "b"],
            "workload": ["w", "w", None, None, None, "w"],
            "source": ["S", "T", "S", "S", "T", "S"],
            "setting": ["1", "2", "3", "3", "3", "1"],
        }
    )
    curves = comparable(points, ["engine", "workload"], ["source", "setting"]).to_list()
    assert curves == ["curve 1", "curve 1", "curve 2", "curve 2", "curve 3", "curve 4"]
    assert comparable(points, [], ["source", "setting"]).n_unique() == 1


def test_unknown_condition_is_named():
    with pytest.raises(ParameterError, match="unknown condition: got 'engin'.*Did you mean 'engine'"):
        comparable(pl.DataFrame({"engine": ["a"]}), ["engin"], [])


def test_published_points_make_four_curves(evidence):
    by_curve = {r["curve"]: r for r in evidence.curves.to_dicts()}
    assert [r["num_points"] for r in by_curve.values()] == [1, 2, 2, 3]
    assert [r["num_on_frontier"] for r in by_curve.values()] == [1, 1, 1, 3]
    beaten = evidence.points.filter(~pl.col("on_frontier"))
    assert beaten["stage"].to_list() == ["before", "before"]
    assert all(r["engine"] is not None for r in by_curve.values()), "no curve holds two engines"


def test_pooling_leaves_the_rack_alone_and_says_so():
    params = experiment.Params(may_differ=["all"])
    pooled = experiment.collect(params)
    assert pooled.points.filter("on_frontier")["total_tok_per_s_per_gpu"].to_list() == [954_000]
    assert pooled.curves["num_points"].to_list() == [8]
    assert experiment.curves_subtitle(pooled.points, params)[1] == "POOLED ON PURPOSE over every condition"
    some = experiment.Params(may_differ=["tokens_counted", "engine"])
    assert experiment.curves_subtitle(pooled.points, some)[1] == "POOLED ON PURPOSE over engine, tokens counted"
    assert "POOLED" not in str(experiment.curves_subtitle(pooled.points, experiment.Params()))


def test_relaxing_some_conditions_keeps_the_others():
    params = experiment.Params(may_differ=["tokens_counted", "interactivity_definition", "acceptance_kind"])
    assert params.relaxed == ("tokens_counted", "interactivity_definition", "acceptance_kind")
    assert experiment.collect(params).curves.height == 4, "the acceptance length is still not stated by S1"


def own_file(folder, rows):
    table = schema("serving_pareto")
    frame = table.frame(rows)
    path = folder / "own.csv"
    frame.write_csv(path)
    return str(path)


def own_row(throughput, interactivity, concurrency):
    return {
        "engine": "vLLM", "hardware": "H200", "model": "m", "workload": "w", "setting": f"c{concurrency}",
        "concurrency": concurrency, "acceptance_length": 3.0, "tokens_counted": "total", "approximate": False,
        "total_tok_per_s_per_gpu": throughput, "interactivity_p90_tok_per_s": interactivity, "origin": "measured",
        "source": "run-1", "missing_reason": "no TTFT",
    }  # fmt: skip


def test_own_points_share_a_curve_of_their_own(tmp_path):
    rows = [own_row(1000.0, 50.0, 8), own_row(2000.0, 40.0, 16), own_row(1500.0, 40.0, 32)]
    evidence = experiment.collect(experiment.Params(own_points_path=own_file(tmp_path, rows)))
    own = evidence.points.filter(pl.col("source") == "run-1")
    assert own["curve"].n_unique() == 1
    assert own["on_frontier"].to_list() == [True, True, False]
    assert evidence.curves.height == 5
    spec = check_chart(
        charts.throughput_by_interactivity(evidence.points, subtitle="x"), name="throughput_by_interactivity"
    )
    assert "measured" in json.dumps(spec)


def test_what_real_drafts_achieve_is_no_condition_and_a_length_that_is_set_is(tmp_path):
    rows = [
        own_row(1000.0, 50.0, 8) | {"acceptance_length": 3.1},
        own_row(2000.0, 40.0, 16) | {"acceptance_length": 2.9},
        own_row(2500.0, 30.0, 32) | {"acceptance_length": None, "missing_reason": "no TTFT, no acceptance"},
    ]
    path = own_file(tmp_path, rows)

    def own(**more):
        points = experiment.collect(experiment.Params(own_points_path=path, **more)).points
        return points.filter(pl.col("source") == "run-1")

    assert own()["curve"].n_unique() == 1
    assert own()["acceptance_length"].to_list() == [3.1, 2.9, None], "what was measured is shown as it is"
    assert own(own_acceptance="synthetic")["curve"].n_unique() == 3
    assert own(own_acceptance="synthetic", may_differ=["acceptance_length"])["curve"].n_unique() == 1


def test_own_file_as_a_spreadsheet_writes_it(tmp_path):
    rows = [own_row(1000.0, 50.0, 8), own_row(2000.0, 40.0, 16)]
    plain = experiment.collect(experiment.Params(own_points_path=own_file(tmp_path, rows))).points
    path = tmp_path / "own.csv"
    frame = pl.read_csv(path)
    kept = [name for name in reversed(frame.columns) if frame[name].null_count() < frame.height]
    assert len(kept) < len(frame.columns)
    header, *lines = frame.select(kept).write_csv().splitlines()
    path.write_text("\n".join(["\ufeff" + header, lines[0], "", lines[1], "", ""]))
    assert experiment.collect(experiment.Params(own_points_path=str(path))).points.equals(plain)
    path.write_text("\n".join([header, lines[0], "", lines[1].replace("2000", "x")]))
    with pytest.raises(DataError, match=r"own\.csv, row 4, column total_tok_per_s_per_gpu: got 'x\.0'"):
        experiment.collect(experiment.Params(own_points_path=str(path)))


def test_own_file_that_is_none(tmp_path):
    with pytest.raises(DataError, match="no such file; own_points_path names a CSV with columns engine,"):
        experiment.collect(experiment.Params(own_points_path=str(tmp_path / "absent.csv")))
    (tmp_path / "own.csv").write_text("engin,hardware\n")
    with pytest.raises(DataError, match="row 1: unknown column: got 'engin'.*Did you mean 'engine'"):
        experiment.collect(experiment.Params(own_points_path=str(tmp_path / "own.csv")))


def test_gpus_of_the_deployments(evidence):
    rows = {(r["concurrency"]): r for r in evidence.deployments.to_dicts()}
    assert {c: r["num_gpus"] for c, r in rows.items()} == {3018: 44, 7388: 56, 10888: 64, 9888: 40}
    assert rows[9888]["deployment"] == "12 × DEP2 → DEP16"
    assert rows[3018]["num_decode_seats"] == 18 * 32
    assert rows[3018]["clients_per_gpu"] == pytest.approx(3018 / 44)
    assert rows[9888]["seats_per_client_percent"] == pytest.approx(100 * 253 * 16 / 9888)
    long = experiment.gpus_by_phase(evidence.deployments)
    assert long.group_by("deployment").agg(pl.col("num_gpus").sum()).sort("num_gpus")["num_gpus"].to_list() == [
        40, 44, 56, 64,
    ]  # fmt: skip


def test_two_rates_by_hand(evidence):
    rates = {(r["setting"], r["stage"]): r for r in evidence.rates.to_dicts()}
    after = rates["NIXL push (#61121)", "after"]
    assert after["num_gpus"] == 8 * 2 + 32
    assert after["throughput_per_user_tok_per_s"] == pytest.approx(440_000 * 48 / 3072)
    assert after["interactivity_p90_tok_per_s"] == 159
    sglang = rates["TP2, prefill chunk 4096, cap 64", None]
    assert sglang["throughput_per_user_tok_per_s"] == pytest.approx(90_885 * 2 / 64)
    assert not evidence.rates["setting"].str.contains("NVL72").any(), "its concurrency is not printed"
    long = experiment.rates_by_definition(evidence.rates)
    assert long.height == 2 * evidence.rates.height
    printed = long.filter(pl.col("origin") == "published")
    assert printed["user_tok_per_s"].to_list() == evidence.rates["interactivity_p90_tok_per_s"].to_list()
    assert printed["formula"].null_count() == printed.height


def test_interactivity_is_not_throughput_over_concurrency():
    # one request that waits for half the time: fast while it runs, half of that as a quotient
    assert tpot_ms(100) == 10
    assert throughput_per_user_tok_per_s(50, 1) == 50


def test_step_arithmetic_by_hand():
    assert implied_step_ms(200, 3) == pytest.approx(15)
    assert decode_tok_per_s_per_gpu(64, 3.51, 16) == pytest.approx(14_040)
    assert decode_tok_per_s_per_gpu(1, 3, implied_step_ms(200, 3)) == pytest.approx(200)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: tpot_ms(0), "interactivity: got 0, allowed: a number > 0"),
        (lambda: tpot_ms(float("nan")), "interactivity: got nan"),
        (lambda: throughput_per_user_tok_per_s(1, 0), "concurrency: got 0"),
        (lambda: implied_step_ms(100, 0.5), "acceptance_length: got 0.5, allowed: a number ≥ 1"),
        (lambda: decode_tok_per_s_per_gpu(64, 3, 0), "step_ms: got 0"),
    ],
)
def test_impossible_rates_are_refused(call, words):
    with pytest.raises(ParameterError, match=words):
        call()


def test_readings_fall_from_the_printed_rate(evidence):
    rates = dict(evidence.readings.select("reading", "tok_per_s_per_gpu").iter_rows())
    assert next(iter(rates.values())) == 954_000
    assert rates["output: every draft accepted"] == pytest.approx(24_000)
    assert rates["output: 3.51 tokens per step"] == pytest.approx(14_040)
    assert rates["output: the most that the revenue leaves"] == pytest.approx(13_334, abs=1)
    faster = experiment.collect(experiment.Params(acceptance_length=6.0)).readings
    assert faster["tok_per_s_per_gpu"].to_list().count(24_000) == 2


def test_rack_is_put_together_from_the_tables():
    step = rack.decode_step()
    assert (step.requests_per_gpu, step.step_ms) == (64, pytest.approx(16.0))
    assert rack.serving_point()["total_tok_per_s_per_gpu"] == 954_000
    assert rack.acceptance_length() == 3.51


@pytest.mark.parametrize("bad", [{"may_differ": ["engines"]}, {"acceptance_length": 6.5}, {"own_acceptance": "no"}])
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValidationError):
        experiment.Params(**bad)


def test_frames_use_the_vocabulary(evidence):
    for name in ("points", "curves", "deployments", "rates", "readings", "line", "steps"):
        frame = getattr(evidence, name)
        assert set(frame.columns) <= set(COLUMNS), name
        assert {"origin", "source"} <= set(frame.columns), name


def test_verdicts(evidence):
    verdicts = {v.claim.id.split(".")[1]: v for v in experiment.CHECKS.judge(evidence)}
    assert verdicts["rack_tok_per_s_per_gpu"].verdict == "open"
    assert verdicts["sglang_chunk_8192_cap_64_ttft_s"].verdict == "open"
    assert verdicts["implied_single_node"].finding.found == pytest.approx(954_000 / 7.9)
    assert verdicts["implied_step_ms"].finding.found == pytest.approx(3510 / 196)
    assert verdicts["decode_ranks"].verdict == verdicts["prefill_ranks"].verdict == "consistent"
    assert not [v.claim.id for v in verdicts.values() if v.verdict in ("inconsistent", "refuted")]


def test_verdicts_do_not_depend_on_the_parameters(evidence):
    other = experiment.collect(experiment.Params(may_differ=["all"], acceptance_length=2.0))
    assert experiment.CHECKS.judge(other).records() == experiment.CHECKS.judge(evidence).records()


def test_charts(evidence):
    check_chart(
        charts.throughput_by_interactivity(evidence.points, subtitle="GB300"), name="throughput_by_interactivity"
    )
    gpus = experiment.gpus_by_phase(evidence.deployments)
    check_chart(charts.gpus_by_deployment(evidence.deployments, gpus), name="gpus_by_deployment")
    check_chart(
        charts.two_rates_per_user(experiment.rates_by_definition(evidence.rates), subtitle="GB300"),
        name="two_rates_per_user",
    )
    spec = check_chart(charts.readings_of_tokens(evidence.readings, subtitle="GB300"), name="readings_of_tokens")
    assert "9.3 times" in spec["title"]["text"]
    step = single_user.step_time_by_acceptance(
        evidence.line, evidence.steps, experiment.step_references(), headline="steps", subtitle="GB300"
    )
    check_chart(step, name="step_time_by_acceptance")


def test_every_point_is_drawn_and_only_unbeaten_ones_make_a_line(evidence):
    spec = charts.throughput_by_interactivity(evidence.points, subtitle="").to_dict()
    data = spec["datasets"]
    sizes = {layer["mark"]["type"]: len(data[layer["data"]["name"]]) for layer in spec["layer"] if "mark" in layer}
    assert sizes["point"] == 8
    line = next(layer for layer in spec["layer"] if layer.get("mark", {}).get("interpolate") == "step-before")
    assert all(row["on_frontier"] for row in data[line["data"]["name"]])


def test_a_point_without_a_value_is_not_drawn(evidence):
    blank = evidence.points.with_columns(
        pl.when(pl.col("setting").str.contains("NVL72"))
        .then(None)
        .otherwise("interactivity_p90_tok_per_s")
        .alias("interactivity_p90_tok_per_s")
    )
    text = json.dumps(charts.throughput_by_interactivity(blank, subtitle="").to_dict()["datasets"])
    assert "NVL72" not in text


def test_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="column 'curve' is missing"):
        charts.throughput_by_interactivity(evidence.points.drop("curve"), subtitle="")


def test_conventions_cover_every_source_of_the_points():
    points, conventions = published.read("serving_pareto"), published.read("serving_pareto_conventions")
    assert set(points["source"]) <= set(conventions["source"])
    assert conventions["source"].is_unique().all()
