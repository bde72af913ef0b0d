"""A list of pull requests with probes: what to look for in a release, and what a find or a miss says."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rackbook import records

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from rackbook.releases.contents import Contents

Kind = Literal["brings", "removes", "needs", "replaces"]
SAYS: dict[Kind, tuple[bool | None, bool | None]] = {
    "brings": (True, False),
    "removes": (False, True),
    "needs": (None, False),
    "replaces": (False, None),
}
"""What finding, and what missing, the probed thing says: in (True), not in (False), or nothing (None).

A change *brings* a thing that nothing else would bring, or *removes* one. It *needs* a thing that another change could
have brought as well, and it *replaces* a thing that another change could have replaced as well.
"""


class Probe(BaseModel):
    """One thing to look for.

    Attributes:
        kind: what the change does to it, as in :data:`SAYS`.
        path: of the file, from the root of the wheel; ``*`` stands for a part of a name, ``**`` for any folders.
        pattern: regular expression to find in one of those files; without it, a file with that path is the thing.
        reason: why a find or a miss says so, and what it could be confused with.
        confidence: "firm" if the thing has the change's own name or place, "likely" if it follows from what it does.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    path: str = Field(min_length=1)
    pattern: str | None = Field(default=None, min_length=1)
    reason: str = Field(min_length=1)
    confidence: Literal["firm", "likely"]

    @field_validator("path")
    @classmethod
    def _is_inside(cls, path: str) -> str:
        if path.startswith("/") or "\\" in path or ".." in path.split("/"):
            raise ValueError("a path goes from the root of the wheel downwards, with / between folders")
        return path

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str | None) -> str | None:
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as problem:
                raise ValueError(f"not a regular expression: {problem}") from None
        return pattern

    def look(self, contents: Contents) -> Sighting:
        """Look into a wheel or a folder."""
        files = contents.matching(self.path)
        at = files[0] if files and self.pattern is None else None
        if self.pattern is not None:
            expression = re.compile(self.pattern, re.MULTILINE)
            for name in files:
                text = contents.text(name)
                if match := expression.search(text):
                    at = f"{name}:{text.count(chr(10), 0, match.start()) + 1}"
                    break
        says = SAYS[self.kind][0 if at else 1]
        # a file that is not there at all may have been renamed: what it no longer holds proves nothing
        if self.kind in ("removes", "replaces") and self.pattern is not None and not files:
            says = None
        return Sighting(found=at is not None, at=at, says=says)


class Sighting(BaseModel):
    """What one probe saw in one release.

    Attributes:
        found: whether the thing is there.
        at: file, and line if a pattern was looked for; None if nothing was found.
        says: whether the change is in, or None if this probe cannot tell.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    found: bool
    at: str | None = None
    says: bool | None = None


class PullRequest(BaseModel):
    """One change.

    Attributes:
        number: of the pull request.
        title: in a few words.
        state: "merged" or "open" on the day of the look-up; None if nobody looked.
        merged_on: when it was merged; None while it is open.
        looked_up_on: the day on which ``state`` held.
        undetermined: why a release can leave the question open, for a person to read.
        probes: what to look for; none if nothing in a wheel can tell.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    number: int = Field(ge=1)
    title: str = Field(min_length=1)
    state: Literal["merged", "open"] | None = None
    merged_on: datetime.date | None = None
    looked_up_on: datetime.date | None = None
    undetermined: str = ""
    probes: tuple[Probe, ...] = Field(default=(), alias="probe")

    @model_validator(mode="after")
    def _can_be_explained(self) -> PullRequest:
        if (self.state == "merged") != (self.merged_on is not None):
            raise ValueError("merged_on belongs to the state merged, and to no other")
        decides = {says for probe in self.probes for says in SAYS[probe.kind]}
        if True not in decides and not self.undetermined:
            raise ValueError("no probe can say that the change is in: undetermined must say why")
        return self

    def judge(self, contents: Contents) -> Judgement:
        """Put the probes together: one voice decides, two that contradict each other do not."""
        sightings = tuple(probe.look(contents) for probe in self.probes)
        voices = {sighting.says for sighting in sightings} - {None}
        if len(voices) == 1:
            return Judgement(voices.pop(), "", sightings)
        note = "the probes contradict each other" if voices else self.undetermined or "no probe can tell"
        return Judgement(None, note, sightings)


@dataclass(frozen=True)
class Judgement:
    """Whether one change is in one release.

    Attributes:
        contained: in, not in, or None if that cannot be told.
        note: why not; empty if it can.
        sightings: what each probe saw, in the order of the list.
    """

    contained: bool | None
    note: str
    sightings: tuple[Sighting, ...]


class Commit(BaseModel):
    """Where a release names the commit that it was built from.

    Attributes:
        path: of the file.
        pattern: regular expression; its one group is the commit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    pattern: str

    @field_validator("pattern")
    @classmethod
    def _has_one_group(cls, pattern: str) -> str:
        try:
            groups = re.compile(pattern).groups
        except re.error as problem:
            raise ValueError(f"not a regular expression: {problem}") from None
        if groups != 1:
            raise ValueError(f"the commit is the one group of the pattern, this has {groups}")
        return pattern

    def read(self, contents: Contents) -> str | None:
        """The commit; None if the release does not name it."""
        for name in contents.matching(self.path):
            if match := re.search(self.pattern, contents.text(name), re.MULTILINE):
                return match[1]
        return None


class ChangeList(BaseModel):
    """A file of pull requests, e.g. ``data/releases/prs.toml``.

    Attributes:
        package: name on the package index.
        platform: which wheel of a release to look into: a pattern of its platform tag; pure wheels always fit.
        commit: where the commit stands.
        companions: other packages of the same project, whose releases are listed and not looked into.
        changes: the pull requests.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    platform: str = "manylinux*_x86_64"
    commit: Commit | None = None
    companions: tuple[str, ...] = ()
    changes: tuple[PullRequest, ...] = Field(alias="pr", min_length=1)

    @model_validator(mode="after")
    def _each_once(self) -> ChangeList:
        numbers = [change.number for change in self.changes]
        if twice := sorted({number for number in numbers if numbers.count(number) > 1}):
            raise ValueError(f"pull request {twice[0]} stands twice")
        return self

    def paths(self, contents: Contents) -> list[str]:
        """The files that all probes together have to read, each once."""
        globs = [probe.path for change in self.changes for probe in change.probes if probe.pattern is not None]
        if self.commit is not None:
            globs.append(self.commit.path)
        return list(dict.fromkeys(name for glob in globs for name in contents.matching(glob)))


def read(path: Path) -> ChangeList:
    """Read and check a list of pull requests.

    Raises:
        DataError: no such file, not TOML, or a field that is missing, misspelt or not allowed; names all of them.
    """
    return records.read(path, ChangeList)


def judge(changes: Iterable[PullRequest], contents: Contents) -> dict[int, Judgement]:
    """Judge every change, by number."""
    return {change.number: change.judge(contents) for change in changes}
