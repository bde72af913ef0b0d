"""The release map: which release has which change, with the evidence; ``data/releases/release_map.json``."""

from __future__ import annotations

import datetime
import hashlib
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version
from pydantic import BaseModel, ConfigDict, Field

from rackbook import records
from rackbook.errors import DataError, one_of
from rackbook.locations import shown
from rackbook.releases import MAP
from rackbook.releases.probes import ChangeList, Judgement, Kind, Sighting, judge

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rackbook.releases.targets import Shelf, Target


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Release(_Entry):
    """One release that was looked into.

    Attributes:
        uploaded_on: day on which its wheel was put on the index; None if the index does not say.
        commit: that it was built from; None if it does not say.
        wheel: file name.
        sha256: of the wheel; None if the index does not say.
        yanked: whether its makers took it back, on the day of the look.
        probed_on: day of the look.
        probes_sha256: of the probes that looked; another value means that the list has changed since.
    """

    uploaded_on: datetime.date | None
    commit: str | None
    wheel: str
    sha256: str | None
    yanked: bool
    probed_on: datetime.date
    probes_sha256: str


class ProbeRecord(_Entry):
    """One probe and what it saw, release by release."""

    kind: Kind
    path: str
    pattern: str | None
    confidence: Literal["firm", "likely"]
    evidence: dict[str, Sighting]


class ChangeRecord(_Entry):
    """One pull request: in a release (true), not in (false), or not to be told (null, with a note)."""

    pr: int
    title: str
    releases: dict[str, bool | None]
    notes: dict[str, str] = Field(default_factory=dict)
    probes: tuple[ProbeRecord, ...]

    def confidence(self, version: str) -> str | None:
        """Of the firmest probe that decided; None where none did."""
        contained = self.releases[version]
        sure = [p.confidence for p in self.probes if contained is not None and p.evidence[version].says == contained]
        return min(sure, default=None)  # "firm" sorts before "likely"


class ReleaseMap(_Entry):
    """Which release of a package has which change.

    Attributes:
        package: name on the index.
        releases: by version, oldest first.
        prs: the changes.
        companions: upload dates of the releases of other packages, from the oldest release of this map on.
    """

    package: str
    releases: dict[str, Release]
    prs: tuple[ChangeRecord, ...]
    companions: dict[str, dict[str, datetime.date | None]] = Field(default_factory=dict)

    def change(self, pr: int) -> ChangeRecord:
        """Look a change up by the number of its pull request.

        Raises:
            DataError: it is not in the map.
        """
        found = {record.pr: record for record in self.prs}
        if pr not in found:
            raise DataError(one_of(str(pr), map(str, found), f"pull request in the map of {self.package}"))
        return found[pr]

    def first_release(self, pr: int) -> str | None:
        """The oldest release that has a change; None if none is known to."""
        return next((v for v, contained in self.change(pr).releases.items() if contained), None)

    def text(self) -> str:
        """The file: the same map gives the same bytes."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def read(path: Path = MAP) -> ReleaseMap:
    """Read a map.

    Raises:
        DataError: no such file, not JSON, or not a map.
    """
    return records.checked(_load(path), ReleaseMap, shown(path))


def write(release_map: ReleaseMap, path: Path) -> bool:
    """Write a map, all at once or not at all.

    Returns:
        Whether the file changed.

    Raises:
        DataError: the folder cannot be written to.
    """
    text = release_map.text()
    if path.is_file() and path.read_text("utf-8") == text:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).chmod(0o644)
        Path(file.name).replace(path)
    except OSError as problem:
        raise DataError(
            f"{shown(path)}: cannot be written ({problem.strerror}); name another file with --map"
        ) from None
    return True


def look(changes: ChangeList, target: Target) -> tuple[dict[int, Judgement], str | None]:
    """Look into one release: a judgement by number, and the commit if it names one."""
    target.contents.fetch(changes.paths(target.contents))
    commit = changes.commit.read(target.contents) if changes.commit else None
    return judge(changes.changes, target.contents), commit


def update(
    changes: ChangeList,
    shelf: Shelf,
    old: ReleaseMap | None,
    *,
    versions: Sequence[str] = (),
    today: datetime.date,
    say: Callable[[str], None] = lambda _: None,
) -> ReleaseMap:
    """Bring a map up to date with the index.

    A release whose wheel and probes are the same as in the old map is not read again.

    Args:
        changes: the list of pull requests.
        shelf: opens the releases.
        old: the map so far; None for the first one.
        versions: releases to look into beside those of the old map; if none are named, every later one that is neither
            a pre-release nor yanked.
        today: the date of what is read now.
        say: told what was read.

    Raises:
        DataError: a release that is not there or has no wheel for the platform, or a damaged one.
        NotReadError: the index cannot be reached.
    """
    known = list(old.releases) if old else []
    if not versions and not known:
        raise DataError(f"there is no map of {changes.package} yet: name the releases to begin with")
    newer = [v for v in shelf.page.stable if known and Version(v) > Version(known[-1])]
    wanted = sorted({Version(v): v for v in (*known, *(versions or newer))}.values(), key=Version)
    digest = probes_sha256(changes)
    releases: dict[str, Release] = {}
    judgements: dict[str, dict[int, Judgement]] = {}
    for name in wanted:
        file = shelf.page.wheel(name, changes.platform)
        version = str(file.version)
        before = old.releases.get(version) if old else None
        if old and before and before.sha256 == file.sha256 is not None and before.probes_sha256 == digest:
            releases[version] = before.model_copy(update={"yanked": file.yanked})
            judgements[version] = {record.pr: _kept(record, version) for record in old.prs}
            continue
        target = shelf.release(version)
        judgements[version], commit = look(changes, target)
        releases[version] = Release(
            uploaded_on=file.uploaded_on, commit=commit, wheel=file.filename, sha256=file.sha256, yanked=file.yanked,
            probed_on=today, probes_sha256=digest,
        )  # fmt: skip
        say(f"{version}: {target.reading}")
    return ReleaseMap(
        package=changes.package,
        releases=releases,
        prs=assemble(changes, judgements),
        companions={name: _uploads(shelf, name, min(wanted, key=Version)) for name in changes.companions},
    )


def assemble(changes: ChangeList, judgements: dict[str, dict[int, Judgement]]) -> tuple[ChangeRecord, ...]:
    """Put the judgements of several releases together, change by change.

    What an older release has and a newer one lacks was renamed or taken out: there, the question is open.

    Args:
        changes: the list of pull requests.
        judgements: by version, oldest first, then by number.
    """
    found = []
    for change in changes.changes:
        contained: dict[str, bool | None] = {}
        notes: dict[str, str] = {}
        for version, judged in judgements.items():
            judgement = judged[change.number]
            contained[version], note = judgement.contained, judgement.note
            earlier = [v for v, is_in in contained.items() if is_in]
            if judgement.contained is False and earlier:
                contained[version], note = (
                    None,
                    f"{earlier[-1]} has it: renamed or taken out since; the probes need care",
                )
            if note:
                notes[version] = note
        found.append(
            ChangeRecord(
                pr=change.number,
                title=change.title,
                releases=contained,
                notes=notes,
                probes=tuple(
                    ProbeRecord(
                        kind=probe.kind, path=probe.path, pattern=probe.pattern, confidence=probe.confidence,
                        evidence={v: judged[change.number].sightings[place] for v, judged in judgements.items()},
                    )
                    for place, probe in enumerate(change.probes)
                ),
            )
        )  # fmt: skip
    return tuple(found)


def probes_sha256(changes: ChangeList) -> str:
    """A digest of all that decides what is looked for, without the words for people."""
    parts = [
        [change.number, change.undetermined, [[p.kind, p.path, p.pattern] for p in change.probes]]
        for change in changes.changes
    ]
    commit = changes.commit.model_dump() if changes.commit else None
    return hashlib.sha256(json.dumps([changes.platform, commit, parts]).encode()).hexdigest()


def _kept(record: ChangeRecord, version: str) -> Judgement:
    sightings = tuple(probe.evidence[version] for probe in record.probes)
    voices = {sighting.says for sighting in sightings} - {None}
    if len(voices) == 1:
        return Judgement(voices.pop(), "", sightings)
    return Judgement(None, record.notes[version], sightings)


def _uploads(shelf: Shelf, package: str, oldest: str) -> dict[str, datetime.date | None]:
    page = shelf.page_of(package)
    return {
        version: min((f.uploaded_on for f in page.files if f.version == version and f.uploaded_on), default=None)
        for version in page.stable
        if Version(version) >= Version(oldest)
    }


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise DataError(f"{shown(path)}: no such map; `rackbook releases update VERSION …` begins one") from None
    except ValueError as problem:
        raise DataError(f"{shown(path)}: not valid JSON: {problem}") from None
