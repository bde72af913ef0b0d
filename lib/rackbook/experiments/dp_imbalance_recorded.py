"""What a recorded mirror/lag run says: losses and their intervals, controls, timelines, and the simulator beside it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from rackbook.errors import DataError
from rackbook.experiments import live
from rackbook.measurements.dp_imbalance import TOGETHER, read_trace
from rackbook.replay import joint_steps, paired_losses, step_probe, throughput
from rackbook.replay.loads import closed_loop, open_loop
from rackbook.replay.user_lockstep import simulate
from rackbook.tables import column

if TYPE_CHECKING:
    from rackbook.replay.loads import Load
    from rackbook.replay.lockstep import StepCost
    from rackbook.replay.traces import Trace
    from rackbook.runs import Run

SIMULATED = "simulator"
_STEPS = (
    "setting", "dp_size", "schedule", "num_steps", "step_mean_ms", "step_p99_ms", "same_time_percent",
    "same_tokens_percent", "origin", "source",
)  # fmt: skip
_WORK = ("at_s", "computed_tokens", "rank", "schedule", "from_s", "to_s", "dp_size", "origin", "source")
_COUNTED = ("setting", "dp_size", "rank", "sent_tokens", "counted_tokens", "hit_tokens", "origin", "source")

INSERTED_LOSS_PERCENT = 5.0
"""The loss that is inserted into simulated replays, to see that the analysis finds it."""

CONTROL_TOLERANCE_POINTS = 1.0
"""By how much what is found may miss what was inserted before the run says so."""

NUM_PREDICTED, NUM_INSERTED = 20, 5
"""Simulated pairs of a prediction, and of each inserted loss, which spread less."""

_PROBE = (step_probe.OPENER, step_probe.PROBE)


@dataclass(frozen=True, eq=False)
class _StepFunction:
    """The step-time function of an engine, and the probes that it was fitted to.

    Attributes:
        cost: the function.
        times: of :func:`rackbook.replay.step_probe.medians`.
        modelled_s: what the function says of them.
    """

    cost: StepCost
    times: pl.DataFrame
    modelled_s: pl.Series

    @property
    def spread(self) -> float:
        """Root mean square of the relative deviations."""
        return float(np.sqrt(((self.modelled_s / self.times["step_s"] - 1) ** 2).mean()))


@dataclass(frozen=True, eq=False)
class Recorded:
    """A run of :func:`rackbook.measurements.dp_imbalance.measure`; what it shows is computed when it is looked at.

    Attributes:
        run: the run.
        confidence: of the intervals.
    """

    run: Run
    confidence: float = 0.95

    @cached_property
    def params(self) -> dict[str, Any]:
        """The parameters with which it was recorded."""
        return self.run.params

    @cached_property
    def description(self) -> str:
        """Machine, software, day and doubts in a line."""
        return live.description(self.run)

    @cached_property
    def _trace_and_facts(self) -> tuple[Trace, dict[str, Any]]:
        return read_trace(self.run)

    @property
    def trace(self) -> Trace:
        """The requests that every rank got."""
        return self._trace_and_facts[0]

    @property
    def step_tokens(self) -> int:
        """Most tokens that a rank computes in a step."""
        return self._trace_and_facts[1]["step_tokens"]

    @property
    def load(self) -> str:
        """How the requests went out, in a few words."""
        users = self.params["users"]
        think_s = self._trace_and_facts[1]["think_s"]
        return (
            f"closed loop, {users} users per rank who think for {think_s:g} s on average"
            if users
            else "open loop at the trace's times"
        )

    @cached_property
    def requests(self) -> pl.DataFrame:
        """setting, dp_size, replay, pair, schedule, and what the client noted of each request."""
        keys = ["setting", "dp_size", "replay"]
        replays = self.run.points("replays").drop("doubt")
        return self.run.points("requests").join(replays, on=keys, how="left", maintain_order="left")

    def _set_ups(self) -> list[tuple[dict[str, Any], pl.DataFrame, dict[int, str]]]:
        """Each set-up's names, requests and doubts."""
        kept = self.run.points("replays")
        found = []
        for (setting, dp_size), own in self.requests.group_by("setting", "dp_size", maintain_order=True):
            of = kept.filter((pl.col("setting") == setting) & (pl.col("dp_size") == dp_size))
            doubts = dict(of.drop_nulls("doubt").select("replay", "doubt").iter_rows())
            found.append(({"setting": setting, "dp_size": dp_size}, own, doubts))
        return found

    def _tidy(self, frame: pl.DataFrame, names: dict[str, Any], origin: str = "measured") -> pl.DataFrame:
        labels = {**names, "origin": origin, "source": self.run.id}
        return frame.with_columns(pl.lit(value).alias(name) for name, value in labels.items())

    @cached_property
    def replays(self) -> pl.DataFrame:
        """How fast each replay went; see :func:`rackbook.replay.paired_losses.replays`."""
        parts = [
            self._tidy(paired_losses.replays(own.drop_nulls("pair"), doubts), names)
            for names, own, doubts in self._set_ups()
        ]
        return pl.concat(parts)

    @cached_property
    def pairs(self) -> pl.DataFrame:
        """The loss of each pair; see :func:`rackbook.replay.paired_losses.losses`."""
        parts = [
            self._tidy(paired_losses.losses(own.drop_nulls("pair"), doubts), names)
            for names, own, doubts in self._set_ups()
        ]
        return pl.concat(parts)

    @cached_property
    def losses(self) -> pl.DataFrame:
        """Mean loss of each set-up and comparison with its interval; the simulator's prediction, and its known losses.

        Returns:
            setting, dp_size, comparison, num_pairs, loss_percent, loss_from_percent, loss_to_percent,
            pair_spread_points, pairs_needed (of measured pairs), busy_percent, missing_reason, origin "measured" or
            "simulated", source.
        """
        parts = [
            self._tidy(paired_losses.summary(own, self.confidence), {"setting": setting, "dp_size": dp_size})
            for (setting, dp_size), own in self.pairs.group_by("setting", "dp_size", maintain_order=True)
        ]
        simulated = [
            frame.drop("predicted_run_s", strict=False).with_columns(
                pl.lit(None, pl.Int64).alias("pairs_needed"),
                pl.lit("pairs needed: not measured").alias("missing_reason"),
            )
            for frame in (self.prediction, self.recovered)
        ]
        return pl.concat([*parts, *simulated])

    @cached_property
    def probes(self) -> pl.DataFrame:
        """Median time of a step with a single prompt on all ranks or on one, and what the fitted function says.

        Returns:
            dp_size, num_busy, input_tokens, step_s, modelled_s, origin, source.
        """
        parts = [
            self._tidy(fitted.times.with_columns(fitted.modelled_s), {"dp_size": dp_size})
            for dp_size, fitted in self._step_functions.items()
        ]
        if parts:
            return pl.concat(parts)
        names = ("num_busy", "input_tokens", "step_s", "modelled_s", "dp_size", "origin", "source")
        return pl.DataFrame(schema={name: column(name).dtype for name in names})

    @cached_property
    def _step_functions(self) -> dict[int, _StepFunction]:
        """By number of ranks; none where a run has no probes, not all were answered, or no function describes them."""
        found = {}
        for names, own, _ in self._set_ups():
            if names["setting"] != TOGETHER:
                continue
            probes = own.filter((pl.col("schedule") == "probe") & pl.col("session").is_in(_PROBE))
            with contextlib.suppress(DataError):
                cost = step_probe.fit(probes, ranks := names["dp_size"], self.step_tokens)
                times = step_probe.medians(probes)
                modelled = step_probe.modelled_s(times, cost, ranks, self.step_tokens)
                found[ranks] = _StepFunction(cost, times, modelled)
        return found

    @property
    def costs(self) -> pl.DataFrame:
        """dp_size, quantity, value, unit: the step-time function fitted to the single prompts, "modelled"."""
        rows = [
            (dp_size, quantity, value, unit)
            for dp_size, fitted in self._step_functions.items()
            for quantity, value, unit in (
                ("fixed cost of a step", fitted.cost.fixed_ms, "ms"),
                ("cost per token of the slowest rank", fitted.cost.us_per_token, "µs"),
                ("cost per token of the mean rank, shared by all", fitted.cost.shared_us_per_token, "µs"),
                ("cost of depth, per token and context token", fitted.cost.ps_per_attended_token, "ps"),
                ("spread of the single prompts around these", 100 * fitted.spread, "%"),
            )
        ]
        frame = pl.DataFrame(rows, schema=["dp_size", "quantity", "value", "unit"], orient="row")
        return self._tidy(frame, {}, "modelled")

    def _load(self, schedule: str, num_ranks: int, *, thinking: bool) -> Load:
        lag_s = self.params["lag_s"] if schedule == paired_losses.LAG else 0.0
        if self.params["users"]:
            think_s = self._trace_and_facts[1]["think_s"] if thinking else 0.0
            return closed_loop(
                self.trace, num_ranks, lag_s, users=self.params["users"], think_s=think_s, seed=self.params["seed"]
            )
        return open_loop(self.trace, num_ranks, lag_s)

    def _simulated(
        self, num_ranks: int, cost: StepCost, pair: int, *, coupled: bool, slower: float, thinking: bool
    ) -> pl.DataFrame:
        """A mirror and a lag replay of the run's trace, the latter slower by a factor."""
        parts = []
        for number, schedule in enumerate((paired_losses.MIRROR, paired_losses.LAG), start=2 * pair):
            factor = slower if schedule == paired_losses.LAG else 1.0
            load = self._load(schedule, num_ranks, thinking=thinking)
            frame, _ = simulate(load, cost.times(factor), self.step_tokens, coupled=coupled)
            names = (("replay", number), ("pair", pair), ("schedule", schedule))
            parts.append(frame.select(*(pl.lit(value).alias(name) for name, value in names), pl.all()))
        return pl.concat(parts)

    def _repeated(
        self,
        dp_size: int,
        fitted: _StepFunction,
        *,
        coupled: bool = True,
        num_pairs: int = NUM_PREDICTED,
        slower: float = 1.0,
        thinking: bool = True,
    ) -> pl.DataFrame:
        """Simulated pairs, each with all costs a little higher or lower, as the single prompts spread."""
        drawn = np.random.default_rng([self.params["seed"], 13]).normal(1, fitted.spread, num_pairs)
        return pl.concat(
            self._simulated(dp_size, fitted.cost.times(factor), pair, coupled=coupled, slower=slower, thinking=thinking)
            for pair, factor in enumerate(np.maximum(drawn, 0.5).tolist())
        )

    @cached_property
    def prediction(self) -> pl.DataFrame:
        """The loss of the lockstep simulator for the same trace, with the step-time function of the run.

        Which users a step takes hangs on moments, so one simulated pair says little. It is repeated with all costs a
        little higher or lower, by as much as the single prompts spread around the fitted function. The interval is that
        of the repeats, and does not know how wrong the function may be.

        Returns:
            As :attr:`losses`, and predicted_run_s (mean of the mirror replays), origin "simulated". A run without
            probes predicts nothing.
        """
        parts = []
        for dp_size, fitted in self._step_functions.items():
            requests = self._repeated(dp_size, fitted)
            pairs, replays = paired_losses.losses(requests, {}), paired_losses.replays(requests, {})
            length = replays.filter(pl.col("schedule") == paired_losses.MIRROR)["run_s"].mean()
            summary = paired_losses.summary(pairs, self.confidence)
            summary = summary.with_columns(pl.lit(length, pl.Float64).alias("predicted_run_s"))
            parts.append(self._tidy(summary, {"setting": SIMULATED, "dp_size": dp_size}, "simulated"))
        if parts:
            return pl.concat(parts)
        empty = paired_losses.summary(paired_losses.losses(self.requests.head(0), {}))
        return self._tidy(empty.with_columns(pl.lit(None, pl.Float64).alias("predicted_run_s")), {
            "setting": SIMULATED, "dp_size": 0
        }, "simulated")  # fmt: skip

    @cached_property
    def recovered(self) -> pl.DataFrame:
        """Known losses in simulated replays of this trace, on ranks that do not wait, as the same analysis finds them.

        All steps of the lag replay take longer by the loss. The users think as long as ever, as on a real server: what
        they leave idle, slower steps can fill, and so much of the loss is not seen. With users who do not think, all of
        it should be found: what is missing there, the analysis misses and not the load.

        Returns:
            As :attr:`losses`, with the inserted loss in the setting. In open loop nobody thinks.
        """
        cases = [(0.0, True), (INSERTED_LOSS_PERCENT, True)]
        if self.params["users"]:
            cases.append((INSERTED_LOSS_PERCENT, False))
        parts = []
        for dp_size, fitted in self._step_functions.items():
            for inserted, thinking in cases:
                slower = 1 / (1 - inserted / 100)
                requests = self._repeated(
                    dp_size, fitted, coupled=False, num_pairs=NUM_INSERTED, slower=slower, thinking=thinking
                )
                found = paired_losses.summary(paired_losses.losses(requests, {}), self.confidence)
                names = {"setting": _inserted(inserted, thinking=thinking), "dp_size": dp_size}
                parts.append(self._tidy(found.with_columns(pl.col("^.*percent$").round(6)), names, "simulated"))
        return pl.concat(parts) if parts else self.prediction.head(0)

    @property
    def control(self) -> str:
        """What the analysis finds of the inserted loss, and what follows if it misses more than is tolerated."""
        found = self.recovered.filter(pl.col("setting") == _inserted(INSERTED_LOSS_PERCENT)).drop_nulls("loss_percent")
        if found.is_empty():
            return "Not known: how much of a loss this load would show"
        said = []
        for dp_size, loss, busy in found.select("dp_size", "loss_percent", "busy_percent").iter_rows():
            text = f"DEP{dp_size}: of {INSERTED_LOSS_PERCENT:g} % inserted the analysis finds {loss:.1f} %"
            if abs(INSERTED_LOSS_PERCENT - loss) > CONTROL_TOLERANCE_POINTS:
                does = "hides a part of" if loss < INSERTED_LOSS_PERCENT else "overstates"
                text += (
                    f", more than {CONTROL_TOLERANCE_POINTS:g} point off: this load, with its ranks busy for "
                    f"{busy:.0f} % of the time, {does} a loss"
                )
            said.append(text)
        return "; ".join(said)

    @cached_property
    def _shown(self) -> tuple[str, pl.DataFrame]:
        of = self.requests.filter((pl.col("setting") == TOGETHER) & pl.col("pair").is_not_null())
        lagged = self.pairs.filter((pl.col("setting") == TOGETHER) & (pl.col("comparison") == "lag with mirror"))
        usable = lagged.filter(pl.col("doubt").is_null()).select("dp_size", "pair").rows()
        for dp_size, pair in [*usable, *lagged.select("dp_size", "pair").rows()]:
            own = of.filter((pl.col("dp_size") == dp_size) & (pl.col("pair") == pair))
            try:
                parts = [
                    _work(own.filter(pl.col("schedule") == schedule), schedule)
                    for schedule in (paired_losses.MIRROR, paired_losses.LAG)
                ]
            except DataError:
                continue
            doubt = "the first without a doubt" if (dp_size, pair) in usable else "all pairs have doubts"
            name = f"Pair {pair + 1} of {lagged.filter(pl.col('dp_size') == dp_size).height} on DEP{dp_size}, {doubt}"
            return name, self._tidy(pl.concat(parts), {"dp_size": dp_size})
        return f"No pair on {TOGETHER} was answered in full", pl.DataFrame(
            schema={name: column(name).dtype for name in _WORK}
        )

    @property
    def work(self) -> pl.DataFrame:
        """What each rank of an engine had computed by when, in :attr:`shown_pair`.

        Returns:
            dp_size, schedule, rank, at_s, computed_tokens, from_s and to_s (of the common window), origin "measured",
            source. Empty if no pair was answered in full.
        """
        return self._shown[1]

    @property
    def shown_pair(self) -> str:
        """Which pair :attr:`work` shows: the first without a doubt, else the first that was answered in full."""
        return self._shown[0]

    @cached_property
    def steps(self) -> pl.DataFrame:
        """What the servers' logs say of the iterations, by set-up and replay; empty without a log.

        Returns:
            setting, dp_size, schedule, num_steps (iterations that every rank logged), step_mean_ms, step_p99_ms,
            same_time_percent, same_tokens_percent (of iterations; how well mirrored the ranks stayed), origin
            "measured", source.
        """
        if "steps.csv" not in self.run.files:
            return pl.DataFrame(schema={name: column(name).dtype for name in _STEPS})
        keys = ["setting", "dp_size", "replay"]
        logged = self.run.points("steps").join(self.run.points("replays"), on=keys, how="left").drop_nulls("pair")
        parts = [
            joint_steps.joint(own, dp_size).with_columns(
                pl.lit(setting).alias("setting"), pl.lit(dp_size).alias("dp_size"), pl.lit(schedule).alias("schedule")
            )
            for (setting, dp_size, _, schedule), own in logged.group_by(*keys, "schedule", maintain_order=True)
        ]
        same = pl.col("shortest_ms") >= (1 - joint_steps.SAME) * pl.col("longest_ms")
        found = (
            pl.concat(parts)
            .group_by("setting", "dp_size", "schedule")
            .agg(
                pl.len().cast(pl.Int64).alias("num_steps"),
                pl.col("longest_ms").mean().alias("step_mean_ms"),
                pl.col("longest_ms").quantile(0.99, interpolation="linear").alias("step_p99_ms"),
                (100 * same.mean()).alias("same_time_percent"),
                (100 * pl.col("same_tokens").mean()).alias("same_tokens_percent"),
            )
            .sort("setting", "dp_size", "schedule")
        )
        return self._tidy(found, {})

    @cached_property
    def counted(self) -> pl.DataFrame:
        """Prompt tokens that the servers' counters saw on each rank, over all replays, beside those that were sent."""
        if "counted.csv" not in self.run.files:
            return pl.DataFrame(schema={name: column(name).dtype for name in _COUNTED})
        found = (
            self.run.points("counted")
            .group_by("setting", "dp_size", "rank", maintain_order=True)
            .agg(
                pl.col("sent_tokens", "counted_tokens").sum(),
                pl.when(pl.col("hit_tokens").is_not_null().any()).then(pl.col("hit_tokens").sum()).alias("hit_tokens"),
            )
        )
        return self._tidy(found, {})


def _inserted(loss_percent: float, *, thinking: bool = True) -> str:
    return f"{SIMULATED}, {loss_percent:g} % inserted" + ("" if thinking else ", nobody thinks")


def _work(requests: pl.DataFrame, schedule: str) -> pl.DataFrame:
    ranks = throughput.work(requests)
    begin, end = throughput.window(ranks)
    names = {"schedule": schedule, "from_s": begin, "to_s": end}
    return pl.concat(
        [
            pl.DataFrame({"at_s": of.time_s, "computed_tokens": of.tokens}).with_columns(
                pl.lit(rank).cast(pl.Int64).alias("rank"), *(pl.lit(value).alias(name) for name, value in names.items())
            )
            for rank, of in enumerate(ranks)
        ]
    )
