"""Tokens per expert, layer by layer and step by step, whatever they come from, and the check that nothing is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl

from rackbook.errors import DataError, ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from rackbook.runs import Run

LOADS = "loads.npy"
"""File of a recorded run: tokens of each step, layer and expert, int32; as rows it would be many times as large."""

_SHOWN = 3
"""Offending layers or experts that a message names."""


@dataclass(frozen=True, eq=False)
class Loads:
    """(Token, expert) pairs of a layer's experts in each step.

    Attributes:
        tokens: whole numbers, shape (steps, layers, experts); each layer of a step has the same sum.
        top_k: experts per token; divides every sum.
        layers: number of each layer in its model.
        origin: "measured" or "simulated".
        source: what they come from.
    """

    tokens: NDArray[np.integer]
    top_k: int
    layers: tuple[int, ...]
    origin: str
    source: str

    @property
    def num_tokens(self) -> NDArray[np.int64]:
        """Tokens of each step."""
        return self.tokens[:, 0].sum(axis=-1, dtype=np.int64) // self.top_k

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self.tokens.shape[2]

    def frame(self) -> pl.DataFrame:
        """One row per step, layer and expert.

        Returns:
            step (from 1), layer, expert (from 0), expert_tokens, origin, source.
        """
        steps, layers, experts = self.tokens.shape
        return pl.DataFrame(
            {
                "step": np.repeat(np.arange(1, steps + 1), layers * experts),
                "layer": np.tile(np.repeat(np.array(self.layers), experts), steps),
                "expert": np.tile(np.arange(experts), steps * layers),
                "expert_tokens": self.tokens.ravel().astype(np.int64),
            }
        ).with_columns(pl.lit(self.origin).alias("origin"), pl.lit(self.source).alias("source"))

    def with_tokens(self) -> Loads:
        """Without the steps in which no token was routed: they have no balancedness.

        Raises:
            DataError: no step has a token.
        """
        chosen = self.num_tokens > 0
        if not chosen.any():
            raise DataError(f"{self.source}: no step routes a token")
        return Loads(self.tokens[chosen], self.top_k, self.layers, self.origin, self.source)


def checked(
    tokens: NDArray[np.number],
    *,
    top_k: int,
    where: str,
    num_experts: int | None = None,
    layers: Sequence[int] | None = None,
    origin: str = "measured",
) -> Loads:
    """Loads of which it is certain that no (token, expert) pair is missing or counted twice.

    Args:
        tokens: tokens per expert, shape (layers, experts) for one step or a sum of steps, or (steps, layers, experts).
        top_k: different experts that each token goes to.
        where: what they come from, for messages and as the source.
        num_experts: experts that the model has; None to believe the table.
        layers: number of each layer; None for 0, 1, ….
        origin: of the loads.

    Raises:
        DataError: another shape, a transposed one, a missing, negative or fractional count, or counts that do not
            conserve token × top_k; says which and where.
        ParameterError: a top_k that no model can have.
    """
    table = np.asarray(tokens)
    table = table[None] if table.ndim == 2 else table
    if table.ndim != 3 or not table.size:
        raise DataError(
            f"{where}: loads have the shape (layers, experts) or (steps, layers, experts), got {table.shape}"
        )
    if table.dtype.kind not in "iuf":
        raise DataError(f"{where}: got {table.dtype}, allowed: whole numbers of tokens")
    if top_k < 1:
        raise ParameterError(f"top_k: got {top_k}, allowed: 1 or more")
    _refuse_transposed(table, num_experts, where)
    if num_experts is not None and table.shape[2] != num_experts:
        raise DataError(f"{where}: got {table.shape[2]} experts in a layer, expected the {num_experts} of the model")
    if top_k > table.shape[2]:
        raise DataError(f"{where}: top_k is {top_k}, but a layer has {table.shape[2]} experts")
    names = tuple(range(table.shape[1])) if layers is None else tuple(layers)
    if len(names) != table.shape[1]:
        raise DataError(f"{where}: got {len(names)} layer numbers for {table.shape[1]} layers")
    table = _whole(table, names, where)
    _conserve(table, top_k, names, where)
    return Loads(table, top_k, names, origin, where)


def from_frame(
    frame: pl.DataFrame, *, top_k: int, where: str, num_experts: int | None = None, origin: str = "measured"
) -> Loads:
    """Loads from rows of (step, layer, expert, tokens).

    Args:
        frame: layer, expert, tokens or expert_tokens, and step unless there is one only. An expert without a row in a
            layer and step is missing, not 0: a dump that leaves out zeros must say so by filling them in.
        top_k: different experts that each token goes to.
        where: what they come from.
        num_experts: experts that the model has; None for the largest number found, plus 1.
        origin: of the loads.

    Raises:
        DataError: a column, or an expert of a layer and step, is missing or there twice; or as :func:`checked`.
    """
    if "expert_tokens" not in frame.columns and "tokens" in frame.columns:
        frame = frame.rename({"tokens": "expert_tokens"})
    if "step" not in frame.columns:
        frame = frame.with_columns(pl.lit(1).alias("step"))
    _whole_coordinates(frame, where)
    steps = frame["step"].unique().sort().to_list()
    layers = frame["layer"].unique().sort().to_list()
    count = int(frame["expert"].max()) + 1 if num_experts is None else num_experts
    if frame["expert"].min() < 0 or frame["expert"].max() >= count:
        got = frame["expert"].min() if frame["expert"].min() < 0 else frame["expert"].max()
        raise DataError(f"{where}: got expert {got}, allowed: 0 to {count - 1}")
    seen = frame.group_by("step", "layer", "expert").len().sort("step", "layer", "expert")
    if (twice := seen.filter(pl.col("len") > 1)).height:
        step, layer, expert, _ = twice.row(0)
        raise DataError(f"{where}: step {step}, layer {layer}, expert {expert} is there {twice['len'][0]} times")
    whole = pl.DataFrame({"step": steps}).join(pl.DataFrame({"layer": layers}), how="cross")
    whole = whole.join(pl.DataFrame({"expert": range(count)}), how="cross")
    joined = whole.join(
        frame.select("step", "layer", "expert", "expert_tokens"), on=["step", "layer", "expert"], how="left"
    )
    joined = joined.sort("step", "layer", "expert")
    if (absent := joined.filter(pl.col("expert_tokens").is_null())).height:
        step, layer = absent.row(0)[:2]
        missing = absent.filter((pl.col("step") == step) & (pl.col("layer") == layer))["expert"].to_list()
        raise DataError(
            f"{where}: step {step}, layer {layer} lacks {len(missing)} of {count} experts: {_some(missing)}; "
            "write 0 where an expert got no token"
        )
    table = joined["expert_tokens"].to_numpy().reshape(len(steps), len(layers), count)
    return checked(table, top_k=top_k, where=where, num_experts=count, layers=layers, origin=origin)


def loads_of(run: Run) -> Loads:
    """The loads that a run recorded in :data:`LOADS`.

    Raises:
        DataError: the run has none, or they are not whole.
    """
    tokens = np.load(run.raw(LOADS), allow_pickle=False)
    return checked(tokens, top_k=run.provenance["routed"]["top_k"], where=f"run {run.id}")


def _whole_coordinates(frame: pl.DataFrame, where: str) -> None:
    for name in ("layer", "expert", "expert_tokens"):
        if name not in frame.columns:
            raise DataError(f"{where}: column {name!r} is missing; got {', '.join(frame.columns)}")
    if not frame.height:
        raise DataError(f"{where}: no rows")
    for name in ("step", "layer", "expert"):
        if not frame[name].dtype.is_integer() or frame[name].null_count():
            raise DataError(f"{where}, column {name}: got {frame[name].dtype}, allowed: whole numbers, none missing")


def _refuse_transposed(table: NDArray[np.number], num_experts: int | None, where: str) -> None:
    """A table of experts × layers shows in its size, or in that its columns are conserved and its rows are not."""
    _, layers, experts = table.shape
    by_size = num_experts is not None and layers == num_experts != experts
    with np.errstate(invalid="ignore"):
        rows, columns = table.sum(axis=2), table.sum(axis=1)
        by_sums = layers > 1 and experts > 1 and (rows != rows[:, :1]).any() and (columns == columns[:, :1]).all()
    if by_size or by_sums:
        why = f"it has {layers} rows" if by_size else "each of its columns has the same sum, its rows have not"
        raise DataError(
            f"{where}: the table looks transposed, experts × layers ({why}); expected layers × experts: transpose it"
        )


def _whole(table: NDArray[np.number], layers: tuple[int, ...], where: str) -> NDArray[np.integer]:
    if table.dtype.kind == "f":
        _refuse(np.isnan(table), table, layers, where, "is missing")
        _refuse(table != np.floor(table), table, layers, where, "is not a whole number of tokens")
    _refuse(table < 0, table, layers, where, "is negative")
    return table.astype(np.int64) if table.dtype.kind == "f" else table


def _refuse(
    bad: NDArray[np.bool_], table: NDArray[np.number], layers: tuple[int, ...], where: str, complaint: str
) -> None:
    if not bad.any():
        return
    step, layer, expert = np.argwhere(bad)[0]
    more = int(bad.sum()) - 1
    others = f" (and {more} more)" if more else ""
    raise DataError(
        f"{where}: step {step + 1}, layer {layers[layer]}, expert {expert} {complaint}: "
        f"got {table[step, layer, expert]}{others}"
    )


def _conserve(table: NDArray[np.integer], top_k: int, layers: tuple[int, ...], where: str) -> None:
    """Every layer routes every token of a step to top_k different experts."""
    sums = table.sum(axis=2, dtype=np.int64)
    usual = np.sort(sums, axis=1)[:, sums.shape[1] // 2]
    odd = sums != usual[:, None]
    if odd.any():
        step = int(np.argwhere(odd)[0][0])
        names = [layers[layer] for layer in np.flatnonzero(odd[step])]
        got = [int(value) for value in sums[step][odd[step]]]
        raise DataError(
            f"{where}: step {step + 1} does not conserve its tokens: layer {_some(names)} has {_some(got)} (token, "
            f"expert) pairs, other layers {usual[step]}; every layer routes the same tokens"
        )
    if (rest := usual % top_k).any():
        step = int(np.flatnonzero(rest)[0])
        raise DataError(
            f"{where}: step {step + 1} has {usual[step]} (token, expert) pairs in a layer, no multiple of top_k "
            f"{top_k}: pairs are missing, or top_k is another"
        )
    most = table.max(axis=2) * top_k > usual[:, None]
    if most.any():
        step, layer = np.argwhere(most)[0]
        raise DataError(
            f"{where}: step {step + 1}, layer {layers[layer]}, expert {int(table[step, layer].argmax())} has "
            f"{int(table[step, layer].max())} tokens of {usual[step] // top_k}: a token cannot go to one expert twice"
        )


def _some(values: list[int]) -> str:
    shown = ", ".join(map(str, values[:_SHOWN]))
    return f"{shown}, … ({len(values)} in all)" if len(values) > _SHOWN else shown
