"""What the sources state about the model, its hardware and its deployments; and whether a second source says the same.

These facts are inputs of several experiments; notebook 00 shows them in one place.
"""

from __future__ import annotations

import polars as pl

from rackbook import catalog, published
from rackbook.claims import Finding
from rackbook.tables import column

MODEL = "deepseek-v4.1-flash"


def facts() -> pl.DataFrame:
    """Every fact of the model and of the hardware in the catalog.

    Returns:
        One row per fact: subject (the model or the GPU), quantity, fact (as text; null where no source gives it),
        unit, origin "published", source (all that print it, joined by "+"), missing_reason.
    """
    records = [catalog.model(MODEL), *(catalog.hardware(name) for name in catalog.names("hardware"))]
    rows = [
        {
            "subject": record.name,
            "quantity": path.replace("_", " ").replace(".", ": "),
            "fact": None if fact.value is None else _as_text(fact.value),
            "unit": fact.unit,
            "origin": "published",
            "source": "+".join([fact.source, *(other.source for other in fact.also)]) if fact.source else None,
            "missing_reason": fact.missing_reason or None,
        }
        for record in records
        for path, fact in catalog.facts(record)
    ]
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in rows[0]})


def deployments() -> pl.DataFrame:
    """The sources' GB300 deployments on AgentX, with the EPLB setting that the recipe gives for the size of the engine.

    Returns:
        Rows of table ``serving_pareto_topology`` with window_steps, interval_steps and num_redundant_experts of table
        ``expert_balance_eplb``; without locator and formula.
    """
    eplb = published.read("expert_balance_eplb").select(
        "source", "ep_size", "window_steps", "interval_steps", "num_redundant_experts"
    )
    points = published.read("serving_pareto_topology").join(
        eplb, on=["source", "ep_size"], how="left", maintain_order="left"
    )
    last = ("origin", "source", "missing_reason")
    return points.select(pl.exclude("engine", "hardware", "model", "locator", "formula", *last), *last)


def printed_elsewhere(fact: catalog.Fact, source: str) -> Finding:
    """What another source than the claim's prints for the same number: a second print, independent of the first.

    Args:
        fact: of the catalog.
        source: of the claim.
    """
    other = fact.elsewhere(source)
    if other is None:
        return Finding(None, note="no other source at hand prints it")
    return Finding(other.value, "derived", f"printed by {other.source} as well")


def _as_text(value: float | tuple) -> str:
    if isinstance(value, tuple):
        return ", ".join(_as_text(item) for item in value)
    return f"{value:,}"
