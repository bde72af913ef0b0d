"""Claims and verdicts: what a source states, what was found here, and how the two compare.

``data/claims.toml`` holds the statements; each experiment registers one function per claim that looks at
its evidence and says what it found. A verdict is computed from the two and never stored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, model_validator

from rackbook import published, records
from rackbook.errors import DataError, one_of
from rackbook.locations import DATA, shown

VERDICTS = ("reproduced", "consistent", "inconsistent", "refuted", "open")
MIME = "application/vnd.rackbook.verdicts+json"
"""Output type under which a notebook stores its verdicts; the suite reads it back."""


class Settlement(BaseModel):
    """What would settle a claim that is open here.

    Attributes:
        needs: the hardware or data that is missing.
        command: what to run there; None where no run can settle it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    needs: str
    command: str | None = None


class Claim(BaseModel):
    """One statement.

    Attributes:
        id: ``<topic>.<name>``; the topic is the experiment and the notebook that judges it.
        statement: the claim in a sentence.
        value: what is claimed; a number in ``unit``, or true/false.
        unit: of the value and the tolerance.
        tolerance: largest difference, absolute and in ``unit``, at which the claim holds.
        kind: "printed" in the source, or "derived" by arithmetic on printed figures.
        source: id of a registered source; several joined by "+".
        locator: words by which the statement is found in the (first) source; for a derived claim the formula.
        settlement: key of the settlement that applies while the claim is open.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    id: str = Field(pattern=r"^[a-z0-9_]+\.[a-z0-9_]+$")
    statement: str
    value: StrictBool | StrictFloat
    unit: str = ""
    tolerance: float = Field(default=0.0, ge=0)
    kind: Literal["printed", "derived"] = "printed"
    source: str
    locator: str
    settlement: str | None = None

    @model_validator(mode="after")
    def _yes_or_no_is_exact(self) -> Self:
        if isinstance(self.value, bool) and (self.unit or self.tolerance):
            raise ValueError(f"{self.id}: a true/false claim has neither unit nor tolerance")
        return self

    @property
    def topic(self) -> str:
        """The experiment that judges the claim."""
        return self.id.split(".")[0]


@dataclass(frozen=True)
class Finding:
    """What an experiment found about one claim.

    Attributes:
        found: the value found, in the claim's unit; None where the evidence cannot say.
        basis: how it was found: "derived" or "modelled" from published numbers, "simulated", or "measured".
        note: what was compared, or why nothing was found.
    """

    found: float | bool | None
    basis: Literal["derived", "modelled", "simulated", "measured"] | None = None
    note: str = ""

    def __post_init__(self) -> None:
        if (self.found is None) != (self.basis is None):
            raise ValueError("a finding has a value and a basis, or neither")
        if self.found is not None and not (isinstance(self.found, bool | int | float) and math.isfinite(self.found)):
            raise ValueError(f"a finding is a finite number, true or false; got {self.found!r}. Nothing found is None")


REMEASURED = 0.05
"""Part of a claimed number by which a new measurement of it may differ and still reproduce it, where its tolerance is
narrower.

The tolerance of most claims is the rounding of the printed figure, which another machine of the same kind does not
keep. How far two of them differ is printed nowhere: this is rackbook's own yardstick, an assumption.
"""

OPEN = Finding(None)
"""Nothing here bears on the claim; its settlement says what would."""


@dataclass(frozen=True)
class Verdict:
    """A claim beside what was found, and the word for how they compare."""

    claim: Claim
    finding: Finding

    def __post_init__(self) -> None:
        found = self.finding.found
        if found is not None and isinstance(found, bool) != isinstance(self.claim.value, bool):
            expected = "true or false" if isinstance(self.claim.value, bool) else f"a number [{self.claim.unit or '-'}]"
            raise DataError(f"claim {self.claim.id}: its check found {found!r}, expected {expected}")
        if found is None and self.claim.settlement is None and not self.finding.note:
            raise DataError(
                f"claim {self.claim.id} is open without a reason: name a settlement in the register, or let its check "
                "say in the note why nothing was found"
            )

    @property
    def verdict(self) -> str:
        """One of :data:`VERDICTS`, computed.

        Within tolerance, a measurement or simulation reproduces a claim, and arithmetic on other published
        numbers is consistent with it. Outside, a measurement under the claim's own conditions refutes it,
        and anything else is inconsistent with it.
        """
        if self.finding.found is None:
            return "open"
        holds = abs(self.difference) <= self.tolerance * (1 + 1e-9) + 1e-12
        if self.finding.basis in ("measured", "simulated") and holds:
            return "reproduced"
        if holds:
            return "consistent"
        return "refuted" if self.finding.basis == "measured" else "inconsistent"

    @property
    def tolerance(self) -> float:
        """Largest difference at which the claim holds: the claim's own, at least :data:`REMEASURED` if measured."""
        if self.finding.basis == "measured" and not isinstance(self.claim.value, bool):
            return max(self.claim.tolerance, REMEASURED * abs(self.claim.value))
        return self.claim.tolerance

    @property
    def difference(self) -> float:
        """Found minus claimed, in the claim's unit; NaN while the claim is open."""
        if self.finding.found is None:
            return math.nan
        found, claimed = float(self.finding.found), float(self.claim.value)
        # 9.53 - 8.93 is not 0.6 in binary: such a remainder is no difference
        return 0.0 if math.isclose(found, claimed, rel_tol=1e-12) else found - claimed

    @property
    def settlement(self) -> Settlement | None:
        """What would settle the claim; None once it is settled."""
        if self.verdict != "open" or self.claim.settlement is None:
            return None
        return register().settlements[self.claim.settlement]


class Verdicts:
    """The verdicts of one experiment or of the whole board: a frame, and a table in a notebook."""

    def __init__(self, verdicts: Iterable[Verdict]) -> None:
        self.verdicts = tuple(verdicts)

    def __iter__(self) -> Iterator[Verdict]:
        return iter(self.verdicts)

    def __len__(self) -> int:
        return len(self.verdicts)

    def records(self) -> list[dict[str, Any]]:
        """One dictionary of plain values per claim, in register order; what ``rackbook claims --json`` prints."""
        rows = []
        for v in self.verdicts:
            difference = None if math.isnan(v.difference) else v.difference
            settlement = v.settlement
            rows.append(
                v.claim.model_dump(exclude={"settlement"})
                | {
                    "tolerance": v.tolerance,
                    "found": v.finding.found,
                    "difference": difference,
                    "verdict": v.verdict,
                    "basis": v.finding.basis,
                    "note": v.finding.note,
                    "topic": v.claim.topic,
                    "needs": settlement.needs if settlement else None,
                    "command": settlement.command if settlement else None,
                }
            )
        return rows

    def frame(self) -> pl.DataFrame:
        """Claim by claim: claim, statement, published, here, difference, tolerance, unit, basis, verdict; all text."""
        return pl.DataFrame(
            [
                {
                    "claim": r["id"],
                    "statement": r["statement"],
                    "published": shown_value(r["value"]),
                    "here": shown_value(r["found"]),
                    "difference": shown_value(r["difference"], signed=True) if not isinstance(r["value"], bool) else "",
                    "tolerance": f"± {shown_value(r['tolerance'])}" if r["tolerance"] else "exact",
                    "unit": r["unit"],
                    "basis": r["basis"] or "–",
                    "verdict": r["verdict"],
                }
                for r in self.records()
            ]
        )

    def counts(self) -> dict[str, int]:
        """Number of claims by verdict, every verdict present."""
        words = [v.verdict for v in self.verdicts]
        return {word: words.count(word) for word in VERDICTS}

    def _repr_mimebundle_(self, **_: object) -> dict[str, object]:
        with pl.Config(tbl_rows=-1):
            frame = self.frame()
            html, text = frame._repr_html_(), repr(frame)
        rounded = [
            {key: float(f"{value:.9g}") if isinstance(value, float) else value for key, value in row.items()}
            for row in self.records()
        ]
        return {"text/html": html, "text/plain": text, MIME: rounded}


def shown_value(value: float | bool | None, *, signed: bool = False) -> str:
    """A value as a person reads it: four significant digits, yes/no, or a dash."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value and abs(value) >= 1e4:
        return f"{value:{'+' if signed else ''},.0f}"
    return f"{value:{'+' if signed else ''}.4g}"


class Checks:
    """The check functions of one experiment, one per claim.

    Args:
        topic: the experiment, as in the ids of its claims.
    """

    def __init__(self, topic: str) -> None:
        self.topic = topic
        self._functions: dict[str, Callable[[Any], Finding]] = {}

    def __call__(self, *names: str) -> Callable[[Callable[[Any], Finding]], Callable[[Any], Finding]]:
        """Register the decorated function for the claims ``<topic>.<name>``."""

        def register_function(function: Callable[[Any], Finding]) -> Callable[[Any], Finding]:
            for name in names:
                if name in self._functions:
                    raise DataError(f"claim {self.topic}.{name} has two checks")
                self._functions[name] = function
            return function

        return register_function

    def judge(self, evidence: Any) -> Verdicts:
        """Run every check of the experiment on its evidence.

        Args:
            evidence: what the experiment's ``collect`` returned.

        Raises:
            DataError: a claim without a check, or a check without a claim.
        """
        claims = {c.id.split(".")[1]: c for c in register().claims if c.topic == self.topic}
        if missing := claims.keys() - self._functions.keys():
            raise DataError(f"claims without a check: {', '.join(f'{self.topic}.{m}' for m in sorted(missing))}")
        if extra := self._functions.keys() - claims.keys():
            raise DataError(f"checks without a claim: {', '.join(f'{self.topic}.{e}' for e in sorted(extra))}")
        return Verdicts(Verdict(claim, self._functions[name](evidence)) for name, claim in claims.items())


class Register(BaseModel):
    """``data/claims.toml``: the claims, and what would settle the open ones."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    claims: tuple[Claim, ...] = Field(alias="claim")
    settlements: dict[str, Settlement] = Field(alias="settlement", default_factory=dict)


def read_register(path: Path) -> Register:
    """Read and check a file of claims.

    Raises:
        DataError: the file is missing or malformed, an id stands twice, a source or a settlement is not registered.
    """
    found = records.read(path, Register)
    seen: set[str] = set()
    for claim in found.claims:
        if claim.id in seen:
            raise DataError(f"{shown(path)}: claim {claim.id} stands twice")
        seen.add(claim.id)
        where = f"{shown(path)}: claim {claim.id}"
        for key in claim.source.split("+"):
            if key not in published.sources():
                raise DataError(f"{where}: {one_of(key, published.sources(), 'source')}")
        if claim.settlement is not None and claim.settlement not in found.settlements:
            raise DataError(f"{where}: {one_of(claim.settlement, found.settlements, 'settlement')}")
    return found


@cache
def register() -> Register:
    """All claims of ``data/claims.toml``, checked.

    Raises:
        DataError: as :func:`read_register`.
    """
    return read_register(DATA / "claims.toml")
