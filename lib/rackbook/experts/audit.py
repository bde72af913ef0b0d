"""What balancing would do for loads that were measured elsewhere: a model's own routing on an assumed set of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import DataError, ParameterError
from rackbook.experts.balancedness import balancedness_per_layer_step, ratio_of_sums
from rackbook.experts.bounds import greatest_balancedness
from rackbook.experts.placement import initial, place
from rackbook.experts.recovery import WITH, WITHOUT
from rackbook.experts.routing import experts_per_rank, sample_rank_loads
from rackbook.tables import column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rackbook.experts.loads import Loads

BOUND = "no placement exceeds"
UNIFORM = "uniform routing of the same batches"
ON_ITSELF = "as routed, placed by the same load"
AS_LOGGED = "as the server's log says"
_DRAWS_PER_STEP = 8
_STATES = (
    "balance_of", "balancedness_per_layer_step", "balancedness_of_sums", "busiest_to_mean", "num_steps", "origin",
    "source", "formula",
)  # fmt: skip
_PLACES = ("layer", "expert_place", "expert_load_to_mean", "origin", "source")


def states(loads: Loads, num_ranks: int, num_redundant: int, *, seed: int) -> pl.DataFrame:
    """Balancedness of loads without and with a placement made for them, beside uniform routing and the bound.

    With two steps or more the placement goes by the first half and is judged on the second, as a server's goes by the
    past. With one step, e.g. a sum over many, it is judged on the load that it was made by, and chance shows nowhere.

    Args:
        loads: measured or simulated; steps without a token are left out.
        num_ranks: assumed; divides the experts.
        num_redundant: redundant copies in all.
        seed: of uniform routing and of the copy that each pair goes to.

    Returns:
        balance_of, balancedness_per_layer_step, balancedness_of_sums (null for the bound), busiest_to_mean, num_steps,
        origin, source, formula.

    Raises:
        ParameterError: experts that do not divide among the ranks; names the loads.
        DataError: no step has a token.
    """
    loads = loads.with_tokens()
    try:
        experts_per_rank(loads.num_experts, num_ranks)
    except ParameterError as problem:
        raise ParameterError(f"{loads.source}: {problem}") from None
    half = len(loads.tokens) // 2
    judged = loads.tokens[half:]
    in_order = initial(judged.shape[1], loads.num_experts, 0, num_ranks)
    placement = place(loads.tokens[: half or 1].sum(axis=0), loads.num_experts + num_redundant, num_ranks)
    rng = np.random.default_rng(seed)
    placed_by = f"placed by step 1 to {half}" if half else "placed by the same load"

    def row(balance_of: str, by_rank: NDArray[np.int64], origin: str, formula: str) -> dict[str, object]:
        value = float(balancedness_per_layer_step(by_rank).mean())
        return _state(balance_of, value, ratio_of_sums(by_rank), len(judged), origin, loads.source, formula)

    bound = float(greatest_balancedness(judged, placement.num_slots, num_ranks).mean())
    slots = f"{placement.num_slots} slots, placed anew in any layer and step"
    return _frame(
        [
            row(WITHOUT, in_order.rank_loads(judged), loads.origin, "experts in order"),
            row(WITH if half else ON_ITSELF, placement.rank_loads(judged, rng), "simulated", placed_by),
            row(UNIFORM, _uniform(loads, half, num_ranks, rng), "simulated", f"{_DRAWS_PER_STEP} draws per step"),
            _state(BOUND, bound, None, len(judged), "derived", loads.source, slots),
        ]
    )


def logged(lines: pl.DataFrame, source: str) -> pl.DataFrame:
    """What a server's log says of its balance; it has no mean over layers, so that column stays empty.

    Args:
        lines: as :func:`rackbook.engine.logs.eplb_steps` returns them.
        source: the log's name.

    Returns:
        As :func:`states`, one row per model.

    Raises:
        DataError: no line about the balance of a step with tokens.
    """
    lines = lines.drop_nulls("balancedness_of_sums")
    if lines.is_empty():
        raise DataError(f"{source}: no line about EPLB's balancedness; start the server with log_balancedness")
    rows = []
    for (model,), group in lines.group_by("model", maintain_order=True):
        formula = f"mean of {group.height} lines{f', {model}' if model else ''}"
        value = float(group["balancedness_of_sums"].mean())
        rows.append(_state(AS_LOGGED, None, value, group.height, "measured", source, formula))
    return _frame(rows)


def no_states() -> pl.DataFrame:
    """:func:`states` of nothing: its columns without a row."""
    return _frame([])


def by_place(loads: Loads) -> pl.DataFrame:
    """The experts of each layer in the order of their load, over all steps.

    Returns:
        layer, expert_place (1 is the busiest expert), expert_load_to_mean, origin, source.
    """
    totals = loads.tokens.sum(axis=0, dtype=np.int64)
    ordered = -np.sort(-totals, axis=1) / totals.mean(axis=1, keepdims=True)
    layers, experts = totals.shape
    return pl.DataFrame(
        {
            "layer": np.repeat(np.array(loads.layers), experts),
            "expert_place": np.tile(np.arange(1, experts + 1), layers),
            "expert_load_to_mean": ordered.ravel(),
        }
    ).with_columns(pl.lit(loads.origin).alias("origin"), pl.lit(loads.source).alias("source"))


def no_places() -> pl.DataFrame:
    """:func:`by_place` of nothing."""
    return pl.DataFrame(schema={name: column(name).dtype for name in _PLACES})


def _state(
    balance_of: str, value: float | None, sums: float | None, num_steps: int, origin: str, source: str, formula: str
) -> dict[str, object]:
    inverse = None if value is None else 1 / value
    return dict(zip(_STATES, (balance_of, value, sums, inverse, num_steps, origin, source, formula), strict=True))


def _frame(rows: list[dict[str, object]]) -> pl.DataFrame:
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in _STATES}, orient="row")


def _uniform(loads: Loads, half: int, num_ranks: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Rank loads of the judged steps under uniform routing, a few draws each; steps of one size are drawn together."""
    sizes, counts = np.unique(loads.num_tokens[half:], return_counts=True)
    return np.concatenate(
        [
            sample_rank_loads(
                num_ranks=num_ranks,
                num_tokens=int(size),
                num_experts=loads.num_experts,
                top_k=loads.top_k,
                num_draws=int(count) * _DRAWS_PER_STEP,
                seed=rng,
            )
            for size, count in zip(sizes, counts, strict=True)
        ]
    )
