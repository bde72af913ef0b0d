"""Losses of simulated lag replays, as tables: by ranks, by what is varied, and by the cost of depth that fits one.

A loss is that of the mean excess of the repeats; its bounds are the lowest and the highest repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.errors import DataError
from rackbook.replay.calibration import LagReplay, fit_depth

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_LOSS = dict.fromkeys(("loss_percent", "loss_low_percent", "loss_high_percent", "excess_percent"), pl.Float64)
_PROVENANCE = dict.fromkeys(("origin", "source", "missing_reason"), pl.String)
_BY_RANKS = {"setting": pl.String, "dp_size": pl.Int64, **_LOSS, "whole_run_loss_percent": pl.Float64, **_PROVENANCE}
_BY_SETTING = {"varied": pl.String, "setting": pl.String, "dp_size": pl.Int64, **_LOSS, **_PROVENANCE}
_FITS = {
    "length_law": pl.String,
    "mean_depth_tokens": pl.Float64,
    "ps_per_attended_token": pl.Float64,
    "us_per_token": pl.Float64,
    "times_default": pl.Float64,
    "dp_size": pl.Int64,
    **_LOSS,
    "excess_to_two_ranks": pl.Float64,
    **_PROVENANCE,
}


def by_ranks(settings: dict[str, LagReplay], ranks: Sequence[int], source: str) -> pl.DataFrame:
    """Simulated loss by rank count.

    Args:
        settings: a lag replay per setting.
        ranks: to simulate.
        source: of the requests.

    Returns:
        setting, dp_size, loss_percent (mean excess of the repeats) with the lowest and highest repeat, excess_percent,
        whole_run_loss_percent (stagger included), origin "simulated", source, missing_reason. A loss is null where the
        ranks have no common window.
    """
    return pl.DataFrame(
        [
            {
                "setting": setting,
                "dp_size": num_ranks,
                **_loss_columns(lag_replay, num_ranks),
                "whole_run_loss_percent": 100 * lag_replay.whole_run_loss(num_ranks),
                "origin": "simulated",
                "source": source,
            }
            for setting, lag_replay in settings.items()
            for num_ranks in ranks
        ],
        schema=_BY_RANKS,
    )


def by_setting(
    settings: Iterable[tuple[str, str, LagReplay | None]], ranks: Sequence[int], source: str
) -> pl.DataFrame:
    """Simulated loss by what is varied.

    Args:
        settings: what is varied, how, and the lag replay; none where the published rate leaves no time per token.
        ranks: to simulate.
        source: of the requests.

    Returns:
        varied, setting, dp_size, loss_percent with the lowest and highest repeat, excess_percent, origin "simulated",
        source, missing_reason. A loss is null where there is no lag replay, or no common window in it.
    """
    rows = []
    for varied, setting, lag_replay in settings:
        for dp_size in ranks:
            row = {"varied": varied, "setting": setting, "dp_size": dp_size, "origin": "simulated"}
            if lag_replay is not None:
                row |= _loss_columns(lag_replay, dp_size)
            else:
                row["missing_reason"] = "fixed cost and depth alone take longer than the published rate allows"
            rows.append(row | {"source": source})
    return pl.DataFrame(rows, schema=_BY_SETTING)


def of_fits(
    unfitted: dict[str, LagReplay],
    known: tuple[int, float],
    dp_size: int,
    tok_per_s: float,
    source: str,
    *,
    bound_ps: float,
) -> pl.DataFrame:
    """For each law of prompt lengths, the cost of depth that gives a known loss, and the loss on other ranks.

    One number is fitted to one number; the other loss is then a prediction. The cost per token is calibrated anew for
    every cost of depth.

    Args:
        unfitted: a lag replay per law; times_default compares with its cost of depth.
        known: ranks (two), and the excess on them.
        dp_size: ranks to predict.
        tok_per_s: throughput of one rank alone.
        source: of the requests.
        bound_ps: a cost of depth above this is not possible.

    Returns:
        length_law, mean_depth_tokens, ps_per_attended_token, us_per_token, times_default, dp_size, loss_percent with
        the lowest and highest repeat, excess_percent, excess_to_two_ranks, origin "simulated", source, missing_reason.
        Everything but the depth is null where no possible cost of depth has the known loss.
    """
    on_ranks, wanted = known
    rows = []
    for name, lag_replay in unfitted.items():
        row = {"length_law": name, "mean_depth_tokens": lag_replay.mean_depth_tokens, "dp_size": dp_size}
        try:
            fitted = fit_depth(lag_replay, on_ranks, wanted, tok_per_s)
        except DataError as problem:
            row["missing_reason"] = str(problem)
        else:
            row |= _fit_columns(fitted, lag_replay, known, dp_size, bound_ps)
        rows.append(row | {"origin": "simulated", "source": source})
    return pl.DataFrame(rows, schema=_FITS)


def _fit_columns(
    fitted: LagReplay | None, unfitted: LagReplay, known: tuple[int, float], dp_size: int, bound_ps: float
) -> dict[str, float | str | None]:
    on_ranks, wanted = known
    if fitted is None:
        return {"missing_reason": f"no cost of depth has the published loss on {on_ranks} ranks"}
    depth, default = fitted.cost.ps_per_attended_token, unfitted.cost.ps_per_attended_token
    if depth > bound_ps:
        return {
            "missing_reason": f"the published loss on {on_ranks} ranks would take {depth:,.1f} ps, more than the "
            f"{bound_ps:,.1f} ps that the published prefill allows"
        }
    losses = _loss_columns(fitted, dp_size)
    return {
        "ps_per_attended_token": depth,
        "us_per_token": fitted.cost.us_per_token,
        "times_default": depth / default if default else None,
        **losses,
        "excess_to_two_ranks": losses["excess_percent"] / (100 * wanted) if "excess_percent" in losses else None,
    }


def _loss_columns(lag_replay: LagReplay, num_ranks: int) -> dict[str, float | str]:
    """The loss of a lag replay; without a common window there is none, and the reason is given."""
    try:
        excess = lag_replay.excess(num_ranks)
    except DataError as problem:
        return {"missing_reason": str(problem)}
    lost = 100 * excess / (1 + excess)
    return {
        "loss_percent": float(100 * excess.mean() / (1 + excess.mean())),
        "loss_low_percent": float(lost.min()),
        "loss_high_percent": float(lost.max()),
        "excess_percent": float(100 * excess.mean()),
    }
