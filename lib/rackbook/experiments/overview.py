"""What was claimed, and what holds?

Runs every experiment on its defaults and puts all verdicts on one board.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from rackbook import claims
from rackbook.experiments import load, notebook_names


class Params(BaseModel):
    """Parameters of notebook 00."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    verdicts: list[Literal["reproduced", "consistent", "inconsistent", "refuted", "open"]] = Field(
        default=[], description="verdicts to list; empty for all"
    )


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        board: every claim's verdict.
        selected: those with one of the verdicts asked for.
        counts: notebook, verdict, num_claims.
        ratios: claim, statement, notebook, verdict, value, found, unit, difference_percent: settled numeric claims
            whose value is not 0.
    """

    board: claims.Verdicts
    selected: claims.Verdicts
    counts: pl.DataFrame
    ratios: pl.DataFrame


def board() -> claims.Verdicts:
    """Judge every claim, each experiment on its default parameters.

    Raises:
        DataError: a claim's topic has no experiment, or an experiment lacks a check.
    """
    topics = dict.fromkeys(claim.topic for claim in claims.register().claims)
    found = []
    for topic in topics:
        experiment = load(topic)
        found.extend(experiment.CHECKS.judge(experiment.collect(experiment.Params())))
    return claims.Verdicts(found)


def collect(params: Params) -> Evidence:
    """Judge every claim and count."""
    everything = board()
    wanted = params.verdicts or claims.VERDICTS
    return Evidence(
        board=everything,
        selected=claims.Verdicts(v for v in everything if v.verdict in wanted),
        counts=counts(everything),
        ratios=ratios(everything),
    )


def counts(verdicts: claims.Verdicts) -> pl.DataFrame:
    """Number of claims by notebook and verdict: notebook, verdict, num_claims; absent pairs are left out."""
    names = notebook_names()
    return (
        pl.DataFrame(
            {"notebook": [names[v.claim.topic] for v in verdicts], "verdict": [v.verdict for v in verdicts]},
            schema={"notebook": pl.String, "verdict": pl.String},
        )
        .group_by("notebook", "verdict")
        .agg(pl.len().cast(pl.Int64).alias("num_claims"))
        .sort("notebook", pl.col("verdict").replace_strict({word: i for i, word in enumerate(claims.VERDICTS)}))
    )


def ratios(verdicts: claims.Verdicts) -> pl.DataFrame:
    """How far each settled number is from its claim.

    Returns:
        One row per settled claim with a number other than 0: claim, statement, notebook, verdict, basis, value,
        found, unit, difference_percent.
    """
    names = notebook_names()
    return pl.DataFrame(
        [
            {
                "claim": v.claim.id,
                "statement": v.claim.statement,
                "notebook": names[v.claim.topic],
                "verdict": v.verdict,
                "basis": v.finding.basis,
                "value": float(v.claim.value),
                "found": float(v.finding.found),
                "unit": v.claim.unit,
                "difference_percent": 100 * v.difference / abs(v.claim.value),
            }
            for v in verdicts
            if v.finding.found is not None and not isinstance(v.claim.value, bool) and v.claim.value
        ]
    )


def linked_table(verdicts: claims.Verdicts) -> str:
    """The board as a Markdown table whose claims link into their notebooks."""
    names = notebook_names()
    lines = ["| verdict | claim | published | here | unit | notebook |", "|---|---|--:|--:|---|---|"]
    for v in verdicts:
        name = names[v.claim.topic]
        cells = (
            v.verdict,
            v.claim.statement.replace("|", "\\|"),
            claims.shown_value(v.claim.value),
            claims.shown_value(v.finding.found),
            v.claim.unit,
            f"[{name}]({name}.ipynb)",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def open_claims(verdicts: claims.Verdicts) -> str:
    """The open claims by what would settle them, as Markdown: the need, the command, the claims."""
    groups: dict[str, list[claims.Verdict]] = {}
    for v in verdicts:
        if v.verdict == "open":
            groups.setdefault(v.claim.settlement or "", []).append(v)
    parts = []
    for key, members in groups.items():
        settlement = members[0].settlement
        need = settlement.needs if settlement else "; ".join(dict.fromkeys(v.finding.note for v in members))
        command = f"\n\n```sh\n{settlement.command.strip()}\n```" if settlement and settlement.command else ""
        listing = "\n".join(f"- {v.claim.statement}" for v in members)
        parts.append(f"**{key or 'no run settles these'}** — {need}{command}\n\n{listing}")
    return "\n\n".join(parts)
