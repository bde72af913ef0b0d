"""Runs of host-side measurements: what follows from them, verdicts by their evidence, charts, and a run made now."""

import math
import sys

import polars as pl
import pytest

from chart_checks import check_chart
from rackbook import runs
from rackbook.charts import host_measurements as charts
from rackbook.charts import step_accounts
from rackbook.cli import main
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import cpu_overhead as experiment
from rackbook.experiments import cpu_overhead_load as load
from rackbook.hostwork import foreign_load, growth_verdicts, measured, recording
from rackbook.hostwork.ranks.member import ALGORITHMS
from rackbook.models.host_accounts import account_of_pair
from rackbook.models.step_account import Pair

MACHINE = {"cpu": "a processor", "usable_cores": 2.0, "load_1min": 0.0, "packages": {"numpy": "2.4"}}


def all_reduce(name, num_ranks, *, cores=2, ms=None, waits=None, cpu_us=None, segments=None):
    row = {
        "all_reduce": name, "num_ranks": num_ranks, "num_hosts": 1, "num_cores": cores, "pinned": num_ranks <= cores,
        "oversubscribed": num_ranks > cores, "num_values": 7 * num_ranks, "sync_p50_ms": ms or 1.0 * num_ranks,
        "sync_low_ms": None, "sync_high_ms": None, "sync_p99_ms": 2.0 * (ms or num_ranks),
        "cpu_us_per_rank": cpu_us or 10.0 * num_ranks, "waits_per_rank": waits or 1.0 + math.log2(num_ranks),
        "num_repeats": 9, "num_samples": 200, "tight": True, "missing_reason": "interval: not here",
    }  # fmt: skip
    return row if segments is None else row | {"segments_per_rank": segments}


def copies():
    return [
        {
            "copy": copy, "allocation": allocation, "cache_state": cache, "prompt_tokens": tokens,
            "copy_p50_ms": 0.02 + 4e-5 * tokens, "copy_low_ms": tokens * 3.9e-5, "copy_high_ms": tokens * 4.1e-5,
            "num_repeats": 9, "tight": True, "missing_reason": None,
        }
        for copy, allocation, cache in (measured.BEFORE_COPY, measured.AFTER_COPY)
        for tokens in (4096, 65_536, 1_048_576)
    ]  # fmt: skip


@pytest.fixture
def stored(tmp_path):
    """A function that stores a run with the given tables and doubts."""

    def store(doubts=(), absent=None, **tables):
        with runs.record("cpu_overhead", {"n": len(list(tmp_path.iterdir()))}, machine=MACHINE, root=tmp_path) as run:
            run.describe(absent=absent or {}, ranks={"torch": "2.13", "vllm": None})
            for name, rows in tables.items():
                run.write_points(pl.DataFrame(rows, infer_schema_length=None), name)
            for doubt in doubts:
                run.flag(doubt)
        return runs.read(tmp_path / run.id)

    return store


GLOO = "Gloo all-reduce"
POWERS = (2, 4, 8, 16, 32)
SHARING = (4, 8, 16, 32, 64)
"""Powers of two above the two cores."""


# ── growth ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_with_a_core_for_each_rank_the_times_decide(stored):
    # the segments, here the other law, would say otherwise
    run = stored(
        all_reduces=[all_reduce(GLOO, n, cores=64, ms=0.1 + 0.2 * n, segments=3 * math.log2(n)) for n in POWERS]
    )
    found = growth_verdicts.linear_growth(run, GLOO)
    assert (found.found, found.basis) == (True, "measured")
    assert "a core per rank, 2, 4, 8, 16, 32 ranks: time α + β · n (" in found.note
    run = stored(
        all_reduces=[all_reduce(GLOO, n, cores=64, ms=0.1 + 0.2 * math.log2(n), segments=3.0 * n) for n in POWERS]
    )
    assert growth_verdicts.linear_growth(run, GLOO).found is False


def test_with_more_ranks_than_cores_nothing_decides_and_the_segments_are_told(stored):
    for time in (lambda n: 0.1 + 0.2 * n, lambda n: 7.0):
        run = stored(all_reduces=[all_reduce(GLOO, n, ms=time(n), segments=10.5 * n - 10.5) for n in SHARING])
        found = growth_verdicts.linear_growth(run, GLOO)
        assert found.found is None
        assert "it takes a core per rank at 4 powers of two, where the time itself decides" in found.note
        assert "more ranks than cores, 4, 8, 16, 32, 64 ranks: TCP segments of a rank α + β · n (" in found.note
        assert found.note.endswith("which is not the time")
    run = stored(all_reduces=[all_reduce(GLOO, n) for n in SHARING])
    assert "segments were not counted at 4 of them either" in growth_verdicts.linear_growth(run, GLOO).note


def test_times_that_neither_law_describes_decide_nothing(stored):
    run = stored(all_reduces=[all_reduce(GLOO, n, cores=64, ms=0.01 * n**2) for n in POWERS])
    found = growth_verdicts.linear_growth(run, GLOO)
    assert found.found is None
    assert "a core per rank, 2, 4, 8, 16, 32 ranks: time neither (" in found.note


def test_a_time_that_falls_with_the_ranks_does_not_grow(stored):
    run = stored(all_reduces=[all_reduce(GLOO, n, cores=64, ms=100.0 - 2 * n) for n in POWERS])
    assert growth_verdicts.linear_growth(run, GLOO).found is False


@pytest.mark.parametrize(
    ("rows", "doubts", "absent", "words"),
    [
        ([all_reduce(GLOO, n, cores=64) for n in (2, 4, 8, 16)], ["loaded"], {}, "measured it, but: loaded"),
        ([all_reduce("ring over sockets", 4)], [], {GLOO: "no torch"}, "has no Gloo all-reduce: no torch"),
        ([all_reduce("ring over sockets", 4)], [], {}, "has no Gloo all-reduce: it was not asked for"),
        ([all_reduce(GLOO, n, cores=64) for n in (2, 3, 4, 6, 8, 12)], [], {}, "a core per rank at 4 powers of two"),
        (
            [all_reduce(GLOO, n, cores=64, ms=ms) for n, ms in ((4, 10.0), (8, 17.0), (16, 26.0), (32, 40.0))],
            [], {}, "time cannot tell (",
        ),
    ],
)  # fmt: skip
def test_a_run_that_cannot_tell_leaves_the_claim_open_with_the_reason(stored, rows, doubts, absent, words):
    found = growth_verdicts.linear_growth(stored(doubts, absent, all_reduces=rows), GLOO)
    assert found.found is None
    assert words in found.note


def test_regimes_are_never_fitted_together(stored):
    rows = [all_reduce(GLOO, n, cores=8, ms=1.0 * n if n <= 8 else 100.0 * n) for n in (2, 4, 8, 16, 32, 64, 128)]
    fits = measured.growth_fits(measured.all_reduces(stored(all_reduces=rows)))
    times = fits.filter(pl.col("quantity").str.starts_with("Time"))
    assert times.select("regime", "growth_law", "num_points").rows() == [
        (measured.OWN_CORE, None, 3),
        (measured.SHARED_CORE, "α + β · n", 4),
        (measured.SHARED_CORE, "α + β · log2 n", 4),
    ]
    assert "a fit needs 4 numbers of ranks" in times["missing_reason"][0]
    assert times["fit_slope"][1] == pytest.approx(100)


def test_the_table_of_laws_names_the_better_one_and_what_is_absent(stored):
    rows = [all_reduce(GLOO, n, segments=7.0 * n + 2) for n in (2, 4, 8, 16, 32, 64)]
    run = stored(absent={"vLLM's all-reduce": "vLLM is not installed here"}, all_reduces=rows)
    laws = measured.named_laws(run, measured.growth_fits(measured.all_reduces(run)))
    sent = laws.filter(pl.col("quantity").str.starts_with("TCP")).row(0, named=True)
    assert sent["better_law"] == "α + β · n"
    assert (sent["fit_constant"], sent["fit_slope"]) == pytest.approx((2, 7))
    assert laws.row(-1, named=True)["missing_reason"] == "vLLM is not installed here"
    assert laws.height == 3 + 1 + 1
    assert laws.row(3, named=True)["regime"] == "a core per rank"
    assert "a fit needs 4 numbers of ranks" in laws.row(3, named=True)["missing_reason"]
    drawn = measured.fitted_growth(measured.all_reduces(run), "segments_per_rank")
    assert drawn.select("num_ranks", "segments_per_rank").rows() == [
        (n, pytest.approx(7 * n + 2)) for n in (4, 8, 16, 32, 64)
    ]
    assert drawn["formula"].unique().to_list() == ["α = 2, β = 7"]
    cpu = measured.fitted_growth(measured.all_reduces(run), "cpu_us_per_rank")
    assert cpu["formula"].unique().to_list() == ["α = 0 µs, β = 10 µs"]


def test_the_table_of_laws_says_where_both_are_off_and_draws_neither(stored):
    run = stored(all_reduces=[all_reduce(GLOO, n, segments=0.1 * n**2) for n in SHARING])
    laws = measured.named_laws(run, measured.growth_fits(measured.all_reduces(run)))
    sent = laws.filter(pl.col("quantity").str.starts_with("TCP")).row(0, named=True)
    assert sent["better_law"] == "neither"
    assert sent["fit_error_percent"] > 10
    assert measured.fitted_growth(measured.all_reduces(run), "segments_per_rank").is_empty()


# ── copies ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_cost_per_token_is_the_slope(stored):
    costs = measured.copy_costs(measured.copies(stored(copies=copies())))
    assert measured.cost_of(costs, measured.BEFORE_COPY) == pytest.approx(40)
    assert costs["fixed_us"].to_list() == pytest.approx([20, 20])
    assert costs["ns_per_token_low"].to_list() == pytest.approx([40, 40])
    with pytest.raises(DataError, match="the run has 0 costs for the copy list → list, new, warm, expected one"):
        measured.cost_of(costs, ("list → list", "new", "warm"))


def test_copies_say_what_they_cost_and_settle_nothing_of_an_admission(stored):
    found = growth_verdicts.admission_growth(stored(copies=copies()), 44.3)
    assert (found.found, found.basis) == (None, None)
    assert "list → int32 40 ns, int32 → int32 40 ns, beside 44 ns printed for a whole admission" in found.note
    assert "but: loaded" in growth_verdicts.admission_growth(stored(["loaded"], copies=copies()), 44.3).note


def test_the_facts_of_a_run_say_what_speaks_against_it(stored):
    facts = dict(
        measured.facts(stored(["other programs used 1.2 cores"], copies=copies())).select("quantity", "fact").rows()
    )
    assert facts["doubts"] == "other programs used 1.2 cores"
    assert facts["processor"] == "a processor"
    assert facts["packages"] == "numpy 2.4, torch 2.13"
    assert facts["memory (GiB)"] == "not recorded"


# ── accounts ────────────────────────────────────────────────────────────────────────────────────────────────────


def parts(frame):
    return {row["account_part"]: (row["from_ms"], row["to_ms"]) for row in frame.to_dicts()}


def test_the_published_steps_are_taken_apart_by_hand():
    accounts = experiment.collect(experiment.Params()).accounts
    growth = accounts.filter(pl.col("account").str.starts_with("un-optimised"))
    assert parts(growth) == {
        "step at DEP16": (0, 13.84),
        "GPU": (13.84, pytest.approx(12.74)),
        "not GPU": (pytest.approx(12.74), 17.57),
        "step at DEP32": (0, 17.57),
    }
    assert growth["origin"].to_list() == ["published", "derived", "derived", "published"]
    assert accounts["account"].n_unique() == 2


def test_a_pair_with_host_work_shows_what_hides():
    frame = account_of_pair(Pair(6.0, 9.5, 5.0), "given")
    assert parts(frame) == {
        "forward pass": (0, 6.0),
        "host, hidden behind the GPU": (4.5, 6.0),
        "host, not hidden": (6.0, 9.5),
        "engine step": (0, 9.5),
    }
    less = parts(account_of_pair(Pair(6.0, 9.5, 1.0), "given"))
    assert less["host, not hidden"] == (6.0, 7.0)
    assert less["neither"] == (7.0, 9.5)
    assert "host, hidden behind the GPU" not in less
    assert parts(account_of_pair(Pair(6.0, 9.5), "given"))["gap"] == (6.0, 9.5)


LINE = (
    "(EngineCore pid=1) INFO 11-29 19:00:00 [loggers.py:1] Iteration({i}): {c} context requests, {t} context tokens, "
    "{g} generation requests, {g} generation tokens, iteration elapsed time: {ms:.2f} ms\n"
)


def test_a_log_gives_the_median_of_the_steps_that_only_decode(tmp_path):
    rows = [(0, 0, 4, 9.0), (1, 512, 4, 80.0), (0, 0, 4, 11.0), (0, 0, 4, 10.0), (1, 64, 0, 70.0)]
    path = tmp_path / "engine.log"
    lines = "".join(LINE.format(i=i, c=c, t=t, g=g, ms=ms) for i, (c, t, g, ms) in enumerate(rows))
    path.write_bytes(b"a caf\xe9, not in UTF-8\n" + lines.encode())
    evidence = experiment.collect(experiment.Params(own_step=["6", str(path)]))
    own = evidence.accounts.filter(pl.col("account") == "your engine")
    assert parts(own)["engine step"] == (0, 10.0)
    assert own["source"][0] == "median of 3 decode steps in engine.log"


@pytest.mark.parametrize(
    ("content", "own", "words"),
    [
        (None, ["6", "nowhere.log"], "own_step: nowhere.log: No such file or directory; allowed: a number > 0, or"),
        (LINE.format(i=0, c=1, t=9, g=0, ms=5), ["6", "engine.log"], "has 1 steps, none that only decodes"),
        (None, ["6", "9", "12"], "cpu_ms: got 12, allowed: 0 to engine_ms = 9"),
    ],
)
def test_an_own_step_that_cannot_be_read_is_refused(tmp_path, monkeypatch, content, own, words):
    monkeypatch.chdir(tmp_path)
    if content:
        (tmp_path / "engine.log").write_text(content)
    with pytest.raises(ParameterError, match=words):
        experiment.collect(experiment.Params(own_step=own))


# ── simulations that take their cost or their arrivals from elsewhere ───────────────────────────────────────────


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(load, "WINDOW_S", 3.0)
    monkeypatch.setattr(load, "REPEATS", 2)


def test_the_measured_costs_drive_the_simulation(stored, short):
    run = stored(copies=copies(), all_reduces=[all_reduce(GLOO, 2)])
    evidence = experiment.collect(experiment.Params(source=str(run.path), caps=[1]))
    costs = dict(evidence.slo_sweep.select("admission_cost", "ns_per_token").unique().rows())
    assert costs["measured list"] == pytest.approx(40)
    assert costs["before"] == pytest.approx(38.8e6 / 875_520)
    assert evidence.slo_sweep.height == 2 * evidence.sweep.height
    assert evidence.best_caps.height == 2 * 4


@pytest.mark.parametrize(
    ("file", "kind"),
    [("azure_code_head2000.csv", "Azure trace"), ("mooncake_conversation_head2000.jsonl", "Mooncake trace")],
)
def test_arrivals_of_a_trace_keep_their_order_and_take_the_rate_of_the_load(realdata, short, file, kind):
    path = realdata / "traces" / file
    params = experiment.Params(trace_path=str(path), caps=[1], requests_per_s=50.0)
    sweep = experiment.collect(params).sweep
    assert sweep["arrivals"].unique(maintain_order=True).to_list() == [
        "one by one",
        "partly in bursts",
        "as in the trace",
    ]
    source = sweep.filter(pl.col("arrivals") == "as in the trace")["source"][0]
    assert source.startswith(f"{kind} {file} at 50 requests/s, the first ")
    best = load.best_caps(sweep, params)
    assert best.filter(pl.col("arrivals") == "as in the trace")["source"].unique().to_list() == [source]
    assert best.filter(pl.col("arrivals") == "one by one")["source"].unique().to_list() == [load.sample(params)]
    assert load.label(params).endswith(f"; {load.sample(params)}; trace: arrivals and prompts of {file}")


def test_a_trace_that_is_not_there_is_refused(short):
    with pytest.raises(ParameterError, match="trace_path: nowhere.csv: no such file"):
        _ = experiment.collect(experiment.Params(trace_path="nowhere.csv")).sweep


def test_a_source_that_is_no_run_of_this_topic_is_refused(tmp_path):
    with runs.record("dp_imbalance", {}, machine=MACHINE, root=tmp_path) as run:
        run.write_json("x.json", {})
    with pytest.raises(ParameterError, match="is one of dp_imbalance, this notebook shows cpu_overhead"):
        experiment.collect(experiment.Params(source=str(tmp_path / run.id)))


def test_without_any_run_the_published_part_stands_and_the_rest_says_what_to_do(monkeypatch):
    monkeypatch.setattr(experiment.live, "recorded", lambda topic: None)
    evidence = experiment.collect(experiment.Params())
    verdicts = {v.claim.id: v for v in experiment.CHECKS.judge(evidence)}
    assert "growth needs several, measured" in verdicts["cpu_overhead.gloo_grows_linearly"].finding.note
    with pytest.raises(DataError, match="no run of cpu_overhead comes with this installation: measure one"):
        _ = evidence.all_reduces


# ── a run made now ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run over all measurements, as short as can be, without torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RACKBOOK_RUNS", str(tmp_path_factory.mktemp("runs")))
        patch.setattr(recording, "PROMPT_TOKENS", (4096, 16_384, 65_536))
        patch.setattr(recording, "ROW_COUNTS", (16, 64))
        params = experiment.Params(source="measure", ranks_with=sys.executable, rank_counts=[2, 3], measure_s=2.0)
        yield experiment.collect(params)


def test_measuring_now_makes_a_run_with_every_table(made):
    assert sorted(made.run.files) == ["all_reduces.csv", "copies.csv", "rows.csv", "tables.csv"]
    assert made.run.params == {"ranks_with": made.run.params["ranks_with"], "rank_counts": [2, 3], "measure_s": 2.0,
                               "seed": 20261025}  # fmt: skip
    assert made.all_reduces["source"].unique().to_list() == [made.run.id]
    assert set(made.all_reduces["num_ranks"]) == {2, 3}
    assert made.copies.height == 3 * 12
    assert made.tables.height == 6
    assert made.rows["row_bytes"].unique().to_list() == [890]
    assert {*made.run.provenance["absent"], *made.all_reduces["all_reduce"]} == set(ALGORITHMS)


def test_other_work_on_the_machine_is_a_doubt(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "PROMPT_TOKENS", (4096, 16_384, 65_536))
    monkeypatch.setattr(recording, "ROW_COUNTS", (16,))
    monkeypatch.setattr(foreign_load, "BUSY_CORES", -1.0)
    run = recording.record({}, rank_counts=[2], interpreter=None, block_tokens=64, budget_s=0.5, seed=1, root=tmp_path)
    parts = [flag.partition(": other programs used ")[0] for flag in run.flags if ": other programs used " in flag]
    assert parts == ["all-reduces, 2 ranks", "copies", "tables", "rows"], "each part is watched by itself"


def test_the_command_refuses_what_the_notebook_refuses(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["hostwork", "record", "--ranks", "2,1"])
    assert ended.value.code == 2
    assert "got [2, 1], allowed: different whole numbers from 2 to 256" in capsys.readouterr().err


# ── charts ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def shown():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "WINDOW_S", 3.0)
        patch.setattr(load, "REPEATS", 2)
        evidence = experiment.collect(experiment.Params(caps=[1, 8], own_step=["6", "9.5", "5"]))
        _ = evidence.best_caps
        yield evidence


def test_the_chart_of_times_marks_what_shared_cores(shown):
    spec = check_chart(
        charts.all_reduce_times(shown.all_reduces, shown.sync_growth, subtitle="x"), name="all_reduce_times"
    )
    at = shown.all_reduces.filter(pl.col("num_ranks") == shown.all_reduces["num_ranks"].max())
    took = dict(at.select("all_reduce", "sync_p50_ms").rows())
    ratio = took["Gloo all-reduce"] / took["doubling over Gloo"]
    assert f"{ratio:.1f} times as long" in spec["title"]["text"]
    assert ("that share cores" in spec["title"]["text"]) == at["oversubscribed"][0]
    assert "hollow: more ranks than cores" in spec["title"]["subtitle"]


def test_the_chart_of_segments_names_the_laws_that_were_found(shown):
    spec = check_chart(
        charts.segments_by_ranks(shown.all_reduces, shown.fitted_segments, subtitle="x"), name="segments_by_ranks"
    )
    laws = dict(shown.fitted_segments.select("all_reduce", "growth_law").unique().rows())
    for name in ("Gloo all-reduce", "doubling over Gloo"):
        assert (
            (f"{name} {laws[name]}" in spec["title"]["text"]) if name in laws else (name not in spec["title"]["text"])
        )
    none = check_chart(
        charts.segments_by_ranks(shown.all_reduces, shown.fitted_segments.head(0), subtitle="x"),
        name="segments_by_ranks",
    )
    assert "this run names no law of growth" in none["title"]["text"]


def test_the_chart_of_copies_computes_its_title(shown):
    spec = check_chart(charts.prompt_copy_times(shown.copies, shown.points, subtitle="x"), name="prompt_copy_times")
    at = shown.copies.filter(pl.col("prompt_tokens") == 1_048_576, pl.col("cache_state") == "cold")
    took = dict(at.select("copy_method", "copy_p50_ms").rows())
    ratio = took["list → int32, new memory"] / took["int32 → int32, reused memory"]
    assert f"costs {ratio:.0f} times a copy" in spec["title"]["text"]
    ticks = spec["hconcat"][0]["layer"][0]["encoding"]["x"]["axis"]["values"]
    assert 875_520 in shown.copies["prompt_tokens"]
    assert ticks == [4096, 16_384, 65_536, 262_144, 1_048_576], "855K would run into 1024K"


def test_the_other_charts(shown):
    spec = check_chart(charts.tables_and_rows(shown.tables, shown.rows, subtitle="x"), name="tables_and_rows")
    assert "times a packed region" in spec["title"]["text"]
    spec = check_chart(charts.cap_for_slo(shown.slo_sweep, shown.best_caps, subtitle="x"), name="cap_for_slo")
    assert "the soonest cap that keeps up, with no step above 50 ms; without a number: no cap" in spec["title"]["text"]
    spec = check_chart(step_accounts.step_accounts(shown.accounts, subtitle="x"), name="step_accounts")
    assert "4.83 ms came from outside the GPU" in spec["title"]["text"]
    assert len(spec["vconcat"]) == 3


@pytest.mark.parametrize(
    ("draw", "column"),
    [
        (lambda e: charts.all_reduce_times(e.all_reduces.drop("regime"), e.sync_growth, subtitle=""), "regime"),
        (lambda e: charts.segments_by_ranks(e.all_reduces, e.fitted_segments.drop("formula"), subtitle=""), "formula"),
        (lambda e: charts.prompt_copy_times(e.copies, e.points.drop("stage"), subtitle=""), "stage"),
        (lambda e: charts.tables_and_rows(e.tables.drop("num_blocks"), e.rows, subtitle=""), "num_blocks"),
        (lambda e: charts.cap_for_slo(e.slo_sweep, e.best_caps.drop("best_cap"), subtitle=""), "best_cap"),
        (lambda e: step_accounts.step_accounts(e.accounts.drop("to_ms"), subtitle=""), "to_ms"),
    ],
)
def test_charts_refuse_a_frame_without_their_columns(shown, draw, column):
    with pytest.raises(DataError, match=f"column '{column}' is missing, got columns"):
        draw(shown)
