"""Losses of simulated lag replays, as tables: by ranks, by what is varied, and by the cost of depth that fits one.

A loss is that of the mean excess of the repeats; its bounds are the lowest and the highest repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from rackbook.replay.calibration import LagReplay, fit_depth

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

_LOSS = dict.fromkeys(("loss_percent", "loss_low_percent", "loss_high_percent", "excess_percent"), pl.Float64)
_PROVENANCE = dict.fromkeys(("origin", "source", "missing_reason"), pl.String)
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
        whole_run_loss_percent (stagger included), origin "simulated", source.
    """
    return pl.DataFrame(
        [
            {
                "setting": setting,
                "dp_size": num_ranks,
                **_loss_columns(lag_replay.excess(num_ranks)),
                "whole_run_loss_percent": 100 * lag_replay.whole_run_loss(num_ranks),
                "origin": "simulated",
                "source": source,
            }
            for setting, lag_replay in settings.items()
            for num_ranks in ranks
        ]
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
        source, missing_reason. A loss is null where there is no lag replay.
    """
    rows = []
    for varied, setting, lag_replay in settings:
        for dp_size in ranks:
            row = {"varied": varied, "setting": setting, "dp_size": dp_size, "origin": "simulated"}
            if lag_replay is not None:
                row |= _loss_columns(lag_replay.excess(dp_size))
            else:
                row["missing_reason"] = "fixed cost and depth alone take longer than the published rate allows"
            rows.append(row | {"source": source})
    return pl.DataFrame(rows, schema=_BY_SETTING)


def of_fits(
    unfitted: dict[str, LagReplay], known: tuple[int, float], dp_size: int, tok_per_s: float, source: str
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

    Returns:
        length_law, mean_depth_tokens, ps_per_attended_token, us_per_token, times_default, dp_size, loss_percent with
        the lowest and highest repeat, excess_percent, excess_to_two_ranks, origin "simulated", source, missing_reason.
        Everything but the depth is null where no cost of depth reaches the known loss.
    """
    on_ranks, wanted = known
    rows = []
    for name, lag_replay in unfitted.items():
        row = {"length_law": name, "mean_depth_tokens": lag_replay.mean_depth_tokens, "dp_size": dp_size}
        fitted = fit_depth(lag_replay, on_ranks, wanted, tok_per_s)
        if fitted is None:
            row["missing_reason"] = f"no cost of depth has the published loss on {on_ranks} ranks"
        else:
            excess, depth = fitted.excess(dp_size), fitted.cost.ps_per_attended_token
            default = lag_replay.cost.ps_per_attended_token
            row |= {
                "ps_per_attended_token": depth,
                "us_per_token": fitted.cost.us_per_token,
                "times_default": depth / default if default else None,
                **_loss_columns(excess),
                "excess_to_two_ranks": float(excess.mean()) / wanted,
            }
        rows.append(row | {"origin": "simulated", "source": source})
    return pl.DataFrame(rows, schema=_FITS)


def _loss_columns(excess: NDArray[np.float64]) -> dict[str, float]:
    lost = 100 * excess / (1 + excess)
    return {
        "loss_percent": float(100 * excess.mean() / (1 + excess.mean())),
        "loss_low_percent": float(lost.min()),
        "loss_high_percent": float(lost.max()),
        "excess_percent": float(100 * excess.mean()),
    }
