"""What of the published prefill fixes can be switched on a release: ``data/prefill_switches.toml``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from rackbook import records
from rackbook.locations import DATA

NAMES = ("replay", "engram", "indexer")
"""Short names of the switches, in the source's order of the fixes."""


class Switch(BaseModel):
    """What of one fix can be switched on a release.

    Attributes:
        name: short name, one of :data:`NAMES`.
        fix: as in table ``prefill_ablation``.
        on: arguments that switch it on.
        off: arguments that switch it off.
        default: the state without either; None where it is neither.
        alone: whether nothing else is switched.
        switches: what the two compare.
        against_fix: how that differs from the fix.
        needs: what the switch needs.
        compute_capabilities: GPUs that have it, "10.3" or "10.x"; empty for all.
        locator: where it is defined.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Literal["replay", "engram", "indexer"]
    fix: str
    on: str
    off: str
    default: Literal["on", "off"] | None = None
    alone: bool
    switches: str
    against_fix: str
    needs: str
    compute_capabilities: Annotated[tuple[str, ...], Field(strict=False)] = ()
    locator: str


class Switches(BaseModel):
    """The switches of one release.

    Attributes:
        package: distribution name.
        version: its version.
        source: id of a registered source.
        switch: one entry per fix.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    package: str
    version: str
    source: str
    switch: list[Switch]

    def named(self, name: str) -> Switch:
        """Look a switch up by its short name."""
        return next(switch for switch in self.switch if switch.name == name)


def read(path: Path = DATA / "prefill_switches.toml") -> Switches:
    """Read the switches.

    Raises:
        DataError: no such file, or a malformed one.
    """
    return records.read(path, Switches)
