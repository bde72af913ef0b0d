"""What does DP imbalance cost?

The published mirror and lag replays, what they explain of the gap between DEP2 and DEP4, and what the two losses say
about the law of step times. A lockstep simulation of both replays on a stated trace, beside the published losses, with
its sensitivity to everything that is not published. Three ways of routing requests to ranks.

The replays on a real server are :mod:`rackbook.measurements.dp_imbalance`'s business, and what a run of them says
is :mod:`rackbook.experiments.dp_imbalance_recorded`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rackbook import published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.experiments import live
from rackbook.experiments.dp_imbalance_recorded import Recorded
from rackbook.measurements import dp_imbalance as measurements
from rackbook.models import depth_cost, dp_laws, dp_loss
from rackbook.models.dp_loss import LARGE, SMALL
from rackbook.replay import lag_losses, lockstep, routed_loads, timelines, trace_files, traces
from rackbook.replay.calibration import LagReplay
from rackbook.replay.lockstep import StepCost, replay
from rackbook.replay.queues import Queue, lag, mirror, queue
from rackbook.runs import Run

CHECKS = Checks("dp_imbalance")

REPEATS = 5
"""Independent traces; a trace of the user's counts once."""
FIXED_MS = 10.0
"""Cost of every step, also a dummy step; assumed, and hardly of weight."""
POLICY_RANKS = 4
NO_RUN = 'no recorded replays in data/runs: `rackbook record 05` records them, source = "measure" measures now'
"""What the notebook shows where there is no run."""
NO_WINDOW = "no step in which all ranks have requests: shorten the lag or give the ranks more requests"
"""What the notebook shows in place of such steps."""
ALL_AT_ONCE = "the requests of the trace all arrive at once, so no load can be set"
"""What the notebook shows in place of a load."""

POLICY_REQUESTS = 6_000
LOADS_PERCENT = (50.0, 70.0, 80.0, 90.0)
TIMELINE_RANKS = 4
CLOSE_UP_STEPS = 8
MAX_TIMELINE_STEPS = 150

MEAN_GAP_S = traces.Sessions().gap_median_s * math.exp(traces.Sessions().gap_sigma ** 2 / 2)

# What is varied one at a time; nothing of it is published.
DEPTH_FACTORS = (0.0, 0.5, 2.0, 4.0)
OTHER_LENGTHS = (("fixed", 1.0), ("exponential", 1.0), ("lognormal", 1.0), ("lognormal", 1.5))
OTHER_LAGS_S = (1.0, 20.0)
OTHER_CAPS = (8_192, 32_768)
OTHER_FIXED_MS = (50.0,)
DEFAULTS = "all defaults"


class Params(BaseModel):
    """Parameters of notebook 05."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: list[int] = Field(default=[2, 4, 8], description="engines to simulate, and to measure on a GPU cluster")
    lag_s: float = Field(default=5.0, ge=0, le=600, description="delay from one rank to the next")
    trace_path: str = Field(default="", description="a Mooncake .jsonl or Azure .csv trace; empty for agent sessions")
    num_requests: int = Field(default=600, ge=10, le=100_000, description="requests that every rank gets")
    rate_scale: float | None = Field(default=None, gt=0, description="arrivals faster; none lets all wait at the start")
    length_scale: float = Field(default=1.0, gt=0, description="tokens of every request are multiplied by this")
    max_num_batched_tokens: int = Field(default=16_384, ge=1, description="tokens per step and rank, at most")
    us_per_token: float | None = Field(default=None, gt=0, description="cost per token; none calibrates it")
    ps_per_attended_token: float | None = Field(default=None, ge=0, description="cost of depth; none derives it")
    seed: int = Field(default=20261023, ge=0, description="seed of the traces")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="cpu-lab", description=live.CLUSTER)
    base_url: str = Field(default="", description="servers of yours to measure instead; see the notebook's last part")
    pairs: int = Field(default=4, ge=1, le=1000, description="pairs of a mirror and a lag replay to measure")
    users: int = Field(default=4, ge=0, le=100_000, description="per rank, in the measured replays; 0: open loop")

    @field_validator("ranks")
    @classmethod
    def _ranks_can_wait(cls, ranks: list[int]) -> list[int]:
        if not ranks or min(ranks) < 2 or max(ranks) > 1024 or len(set(ranks)) < len(ranks):
            raise ValueError(f"got {ranks}, allowed: different whole numbers from 2 to 1024")
        return sorted(ranks)


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows; what is simulated, which settles no claim, is computed when it is first looked at.

    Attributes:
        params: the notebook's.
        points: table ``dp_imbalance``, published rows.
        prefill_only: table ``dp_imbalance_prefill_only``, published rows.
        losses: dp_size, loss_percent, excess_percent, "derived" from the points, with the bounds of their rounding.
        per_gpu: setting, dp_size, prefill_tok_per_s_per_gpu: the replays "derived", the AgentX run "published".
        gap: quantity, ratio_percent with its bounds, gap_part_percent: the gap between DEP2 and DEP4, "derived".
        laws: law, num_ranks, excess_to_two_ranks: laws "modelled", the published pair "derived".
        stagger: length of a run in which the stagger alone would lose what the source prints, "modelled".
        run: the measured replays: those of ``source``, else the newest that came with the project; None if none did.
    """

    params: Params
    points: pl.DataFrame
    prefill_only: pl.DataFrame
    losses: pl.DataFrame
    per_gpu: pl.DataFrame
    gap: pl.DataFrame
    laws: pl.DataFrame
    stagger: pl.DataFrame
    run: Run | None

    @cached_property
    def measured(self) -> Recorded | None:
        """What the measured replays say; None without a run, see :data:`NO_RUN`."""
        return None if self.run is None else Recorded(self.run)

    @property
    def tok_per_s(self) -> float:
        """Throughput of one rank alone: the mirror replay's, per GPU."""
        return dp_loss.mirror_tok_per_s_per_gpu(self.points)

    @cached_property
    def fitted_laws(self) -> pl.DataFrame:
        """law, quantity, value, low, high: parameters at which a law has the published ratio, "modelled"."""
        return dp_laws.fitted_laws(self.losses)

    @cached_property
    def drawn(self) -> list[traces.Trace]:
        """The traces of the mirror and lag replays."""
        return replay_traces(self.params, self.prefill_only)

    @cached_property
    def trace(self) -> pl.DataFrame:
        """quantity, mean, p50, p90, p99, max of the simulated requests."""
        return trace_summary(self.drawn, self.params)

    @cached_property
    def assumed(self) -> LagReplay:
        """The lag replay with the default costs.

        Raises:
            ParameterError: costs that cannot be calibrated.
        """
        return default_replay(self.params, self.drawn, self.tok_per_s)

    @cached_property
    def costs(self) -> pl.DataFrame:
        """quantity, value, unit, formula: the step-time coefficients and where each comes from."""
        return costs(self.params, self.assumed, self.tok_per_s)

    @cached_property
    def timeline_runs(self) -> dict[str, lockstep.Run]:
        """A mirror and a lag replay of the default costs on :data:`TIMELINE_RANKS` ranks."""
        plans = {
            "mirror": mirror(self.assumed.queues[0], TIMELINE_RANKS),
            "lag": lag(self.assumed.queues[0], TIMELINE_RANKS, self.params.lag_s),
        }
        return {
            schedule: replay(plan, self.assumed.cost, self.params.max_num_batched_tokens)
            for schedule, plan in plans.items()
        }

    @cached_property
    def beginning(self) -> pl.DataFrame:
        """Activity of each rank while a mirror and a lag replay begin, "simulated"."""
        return beginning(self.timeline_runs, self.params)

    @cached_property
    def close_up(self) -> pl.DataFrame:
        """The same for a few steps in the common window; empty if the ranks never work together."""
        return timelines.close_up(self.timeline_runs, num_steps=CLOSE_UP_STEPS, source=_seed(self.params))

    @property
    def lag_waiting_percent(self) -> float:
        """Share of the ranks' time in the close-up of the lag replay that is waiting for the slowest."""
        return timelines.waiting_percent(self.close_up)

    @cached_property
    def fits(self) -> pl.DataFrame:
        """The depth cost that gives the published loss on 2 ranks, by law of prompt lengths, and the loss on 4 then."""
        return fits(self.params, self.losses, self.assumed, self.tok_per_s)

    @cached_property
    def predictions(self) -> pl.DataFrame:
        """Loss by dp_size with the default costs and with the depth cost fitted to DEP2, "simulated"."""
        return predictions(self.params, self.assumed, self.fits)

    @cached_property
    def sensitivity(self) -> pl.DataFrame:
        """Loss on 2 and on 4 ranks when one assumption is varied, "simulated"."""
        return sensitivity(self.params, self.assumed, self.tok_per_s)

    @property
    def noise_percent(self) -> dict[str, float]:
        """Noise of a throughput, by law, at which the 95 % range of the published pair holds the law's own ratio."""
        return {law: noise_percent(self, law) for law in ("exponential", "normal")}

    @cached_property
    def policies(self) -> pl.DataFrame:
        """Time to first token and waiting by policy and load, "simulated"; empty where no load can be set."""
        return policies(self.params, self.prefill_only, self.assumed.cost)


def collect(params: Params) -> Evidence:
    """Gather the published points and the arithmetic on them, and measure if the parameters say so.

    The simulations run when they are first looked at. Before anything is measured, it is seen whether they can.

    Raises:
        DataError: the trace file or the stored run is not what it should be.
        ParameterError: a source that is none, parameters that do not fit the servers, or costs that cannot be
            calibrated.
    """
    points = published.read("dp_imbalance")
    prefill_only = published.read("dp_imbalance_prefill_only")
    losses = dp_loss.losses(points)
    evidence = Evidence(
        params=params,
        points=points,
        prefill_only=prefill_only,
        losses=losses,
        per_gpu=dp_loss.per_gpu(points, prefill_only),
        gap=dp_loss.gap(points, prefill_only),
        laws=dp_laws.laws(losses),
        stagger=dp_loss.stagger(losses, points),
        run=None,
    )
    if params.trace_path or params.source == live.MEASURE:
        _ = evidence.assumed
    run = live.run_of("dp_imbalance", params.source, lambda: measurements.measure(params))
    return replace(evidence, run=run or live.recorded("dp_imbalance"))


def replay_traces(params: Params, prefill_only: pl.DataFrame) -> list[traces.Trace]:
    """The traces of the mirror and lag replays: the user's, or one drawn per repeat.

    As many sessions are active at a time as the published AgentX run has requests.
    """
    return _traces(params, prefill_only, params.num_requests, rate=params.rate_scale or 1.0, stream=0)


def _traces(
    params: Params, prefill_only: pl.DataFrame, num_requests: int, *, rate: float, stream: int
) -> list[traces.Trace]:
    if params.trace_path:
        drawn = [trace_files.read(params.trace_path).head(num_requests)]
    else:
        requests_per_s = prefill_only["concurrency"][0] / MEAN_GAP_S
        drawn = [
            traces.agentic(
                np.random.default_rng([params.seed, stream, repeat]), num_requests, requests_per_s=requests_per_s
            )
            for repeat in range(REPEATS)
        ]
    return [trace.scaled(rate=rate, length=params.length_scale) for trace in drawn]


def trace_summary(drawn: list[traces.Trace], params: Params) -> pl.DataFrame:
    """The requests of all repeats in numbers.

    Returns:
        quantity, unit, mean, p50, p90, p99, max, origin, source.
    """
    rows = pl.concat([trace.requests for trace in drawn])
    values = {
        "input": rows["input_tokens"],
        "known prefix": rows["cached_tokens"],
        "computed in the replays": pl.Series(np.concatenate([q.new_tokens for q in _queues(drawn, params)])),
        "output (not simulated)": rows["output_tokens"],
    }
    summary = [
        {
            "quantity": quantity,
            "unit": "tokens",
            "mean": series.mean(),
            **{f"p{p}": series.quantile(p / 100, interpolation="linear") for p in (50, 90, 99)},
            "max": series.max(),
        }
        for quantity, series in values.items()
        if series.null_count() == 0
    ]
    return pl.DataFrame(summary, infer_schema_length=None).with_columns(
        pl.lit(drawn[0].origin).alias("origin"), pl.lit(_source(drawn, params)).alias("source")
    )


def default_replay(params: Params, drawn: list[traces.Trace], tok_per_s: float) -> LagReplay:
    """The lag replay of the parameters; costs that they leave open are derived or calibrated.

    Args:
        params: the notebook's.
        drawn: a trace per repeat.
        tok_per_s: throughput of one rank alone.

    Raises:
        ParameterError: fixed and depth cost alone exceed the time at that throughput.
    """
    depth = params.ps_per_attended_token
    if depth is None:
        depth, _ = depth_cost.derived_depth_cost_ps(published.read("context_sweep"))
    cost = StepCost(FIXED_MS, 1.0, depth)
    wanted = LagReplay(_queues(drawn, params), params.lag_s, params.max_num_batched_tokens, cost)
    return _with_token_cost(params, wanted, tok_per_s)


def _with_token_cost(params: Params, wanted: LagReplay, tok_per_s: float) -> LagReplay:
    if params.us_per_token is not None:
        return wanted.with_cost(us_per_token=params.us_per_token)
    return wanted.calibrated(tok_per_s)


def _queues(drawn: list[traces.Trace], params: Params) -> tuple[Queue, ...]:
    queues = (queue(trace, prefix_caching=False) for trace in drawn)
    return tuple(q.at_once() if params.rate_scale is None else q for q in queues)


def costs(params: Params, assumed: LagReplay, tok_per_s: float) -> pl.DataFrame:
    """The step-time coefficients of the default run, and where each comes from.

    Returns:
        quantity, value, unit, formula.
    """
    _, from_sweep = depth_cost.derived_depth_cost_ps(published.read("context_sweep"))
    bound, bound_formula = depth_cost.depth_cost_bound_ps(published.read("prefill_ablation_throughput"))
    cost, cap = assumed.cost, assumed.max_num_batched_tokens
    calibrated = f"calibrated: the mirrored trace runs at the published {tok_per_s:,.0f} tokens/s per GPU of DEP2"
    derived = f"{from_sweep}; that prefill pays the same is assumed"
    at_no_depth, at_128k = (cost.ns(cap, cap * depth).item() * 1e-6 for depth in (0, 131_072))
    rows = [
        ("tokens per step and rank, at most", cap, "tokens", "assumed"),
        ("context that a token attends to, mean", assumed.mean_depth_tokens, "tokens", "of the requests above"),
        ("fixed cost of a step", cost.fixed_ms, "ms", "assumed"),
        ("cost per token", cost.us_per_token, "µs", calibrated if params.us_per_token is None else "given"),
        (
            "cost of depth, per token and context token", cost.ps_per_attended_token, "ps",
            derived if params.ps_per_attended_token is None else "given",
        ),
        ("largest cost of depth that fits the published prefill", bound, "ps", bound_formula),
        ("full step at no depth", at_no_depth, "ms", "fixed + per token · tokens"),
        ("full step at 128K of depth", at_128k, "ms", "the same + depth · tokens · 131,072"),
    ]  # fmt: skip
    return pl.DataFrame(
        [(quantity, float(value), unit, formula) for quantity, value, unit, formula in rows],
        schema=["quantity", "value", "unit", "formula"],
        orient="row",
    )


def beginning(runs: dict[str, lockstep.Run], params: Params) -> pl.DataFrame:
    """What each rank does until the last one has begun, and a little longer; at most :data:`MAX_TIMELINE_STEPS` steps.

    Args:
        runs: a run per schedule.
        params: gives the lag.

    Returns:
        schedule, rank, step, activity, from_s, to_s, num_prefill_tokens, mean_depth_tokens, origin "simulated", source.
    """
    until_s = (TIMELINE_RANKS - 1) * params.lag_s + 5
    return timelines.until(runs, until_s, max_steps=MAX_TIMELINE_STEPS, source=_seed(params))


def predictions(params: Params, assumed: LagReplay, fitted: pl.DataFrame) -> pl.DataFrame:
    """Simulated loss by rank count: with the default costs, and with the depth cost that the DEP2 loss asks for.

    Returns:
        setting, dp_size, loss_percent (mean excess of the repeats) with the lowest and highest repeat, excess_percent,
        whole_run_loss_percent (stagger included), origin "simulated", source, missing_reason. A loss is null where the
        ranks have no common window.
    """
    settings = {"default costs": assumed}
    depth, per_token = fitted.select("ps_per_attended_token", "us_per_token").row(0)
    if depth is not None:
        fitted_replay = assumed.with_cost(ps_per_attended_token=depth, us_per_token=per_token)
        settings["depth cost fitted to DEP2"] = fitted_replay
    return lag_losses.by_ranks(settings, params.ranks, _seed(params))


def other_lengths(params: Params, drawn: tuple[Queue, ...]) -> dict[str, tuple[Queue, ...]]:
    """Queues with other laws of prompt lengths and the same mean, no prefixes and nothing to wait for, by the law."""
    mean = float(np.mean([q.new_tokens.mean() for q in drawn]))
    return {
        law + (f", sigma {sigma:g}" if law == "lognormal" else ""): tuple(
            queue(
                traces.independent(
                    np.random.default_rng([params.seed, 1, number, repeat]), len(drawn[0]), law, mean, sigma=sigma
                ),
                prefix_caching=False,
            )
            for repeat in range(len(drawn))
        )
        for number, (law, sigma) in enumerate(OTHER_LENGTHS)
    }


def sensitivity(params: Params, assumed: LagReplay, tok_per_s: float) -> pl.DataFrame:
    """The simulated losses when one assumption is varied and the others stay; the cost per token is calibrated anew.

    Returns:
        varied, setting, dp_size (2 and 4), loss_percent with the lowest and highest repeat, excess_percent, origin
        "simulated", source, missing_reason. A loss is null where the published rate leaves no time per token, or the
        ranks have no common window.
    """
    settings = (
        (varied, setting, _with_token_cost(params, wanted, tok_per_s) if _possible(params, wanted, tok_per_s) else None)
        for varied, setting, wanted in _variations(params, assumed)
    )
    return lag_losses.by_setting(settings, (SMALL, LARGE), _seed(params))


def _possible(params: Params, wanted: LagReplay, tok_per_s: float) -> bool:
    return params.us_per_token is not None or wanted.us_per_token_at(tok_per_s) > 0


def _variations(params: Params, assumed: LagReplay) -> Iterator[tuple[str, str, LagReplay]]:
    """What is varied, how, and the lag replay with the cost per token of the default one."""
    depth = assumed.cost.ps_per_attended_token
    yield DEFAULTS, DEFAULTS, assumed
    for factor in DEPTH_FACTORS:
        yield "cost of depth", f"{factor:g} ×", assumed.with_cost(ps_per_attended_token=factor * depth)
    for name, queues in other_lengths(params, assumed.queues).items():
        yield "prompt lengths", name, replace(assumed, queues=queues)
    for lag_s in OTHER_LAGS_S:
        yield "lag", f"{lag_s:g} s", replace(assumed, lag_s=lag_s)
    for cap in OTHER_CAPS:
        yield "tokens per step", f"{cap:,}", replace(assumed, max_num_batched_tokens=cap)
    for fixed_ms in OTHER_FIXED_MS:
        yield "fixed cost", f"{fixed_ms:g} ms", assumed.with_cost(fixed_ms=fixed_ms)


def fits(params: Params, found: pl.DataFrame, assumed: LagReplay, tok_per_s: float) -> pl.DataFrame:
    """For each law of prompt lengths, the cost of depth that gives the published loss on 2 ranks, and the loss on 4.

    One number is fitted to one number; the loss on 4 ranks is then a prediction. The cost per token is calibrated anew
    for every cost of depth, also where the parameters give one.

    Returns:
        length_law, mean_depth_tokens, ps_per_attended_token, us_per_token, times_default, dp_size 4, loss_percent with
        the lowest and highest repeat, excess_percent, excess_to_two_ranks, origin "simulated", source, missing_reason.
        Everything but the depth is null where no cost of depth has the published loss, or one that the published
        prefill does not allow.
    """
    bound, _ = depth_cost.depth_cost_bound_ps(published.read("prefill_ablation_throughput"))
    wanted = found.filter(pl.col("dp_size") == SMALL)["excess_percent"].item() / 100
    lengths = {"the trace": assumed.queues, **other_lengths(params, assumed.queues)}
    unfitted = {name: replace(assumed, queues=queues) for name, queues in lengths.items()}
    return lag_losses.of_fits(unfitted, (SMALL, wanted), LARGE, tok_per_s, _seed(params), bound_ps=bound)


def policies(params: Params, prefill_only: pl.DataFrame, cost: StepCost) -> pl.DataFrame:
    """Time to the end of the prefill when a router deals one stream of requests to the ranks.

    Every policy sees the same requests. The load is the time that the ranks would need in full steps, each alone, over
    the time in which the requests arrive; arrivals are compressed to give it. A prefix that the trace knows is not
    computed, whichever rank the request goes to.

    Returns:
        policy, load_percent, num_ranks, num_requests, prefix_caching, ttft_p50_s and ttft_p99_s over all repeats, the
        P99 of the best and the worst repeat, wait_percent, origin "simulated", source. Empty where all requests arrive
        at once.
    """
    drawn = _traces(params, prefill_only, POLICY_REQUESTS, rate=1.0, stream=2)
    if not all(trace.requests["arrival_s"][-1] > 0 for trace in drawn):
        return pl.DataFrame()
    cap = params.max_num_batched_tokens
    found = routed_loads.policies(drawn, LOADS_PERCENT, POLICY_RANKS, cost, cap)
    return found.with_columns(pl.lit(_seed(params)).alias("source"))


def noise_percent(evidence: Evidence, law: str) -> float:
    """Noise of each of the four throughputs at which the published pair no longer excludes a law of step times.

    With independent normal noise of this relative size, the 95 % range of the published ratio of the excesses just
    reaches the law's own ratio r: by Fieller, |excess₄ − r · excess₂| is 1.96 of its standard deviations.

    Returns:
        The relative standard deviation, in %.
    """
    excess = {n: evidence.losses.filter(pl.col("dp_size") == n)["excess_percent"].item() / 100 for n in (SMALL, LARGE)}
    ratio = _ratio_of(evidence, law)
    per_noise = math.sqrt(2) * math.hypot(1 + excess[LARGE], ratio * (1 + excess[SMALL]))
    return 100 * abs(excess[LARGE] - ratio * excess[SMALL]) / (1.96 * per_noise)


def _ratio_of(evidence: Evidence, law: str) -> float:
    here = (pl.col("law") == law) & (pl.col("num_ranks") == LARGE)
    return float(evidence.laws.filter(here)["excess_to_two_ranks"].item())


def _seed(params: Params) -> str:
    return params.trace_path or f"seed {params.seed}, {REPEATS} traces"


def _source(drawn: list[traces.Trace], params: Params) -> str:
    return drawn[0].name if params.trace_path else f"{drawn[0].name}, {_seed(params)}"


@CHECKS("dep2_mirror", "dep2_lag", "dep4_mirror", "dep4_lag", "agentx_dep2", "agentx_dep4")
def _measured(_: Evidence) -> Finding:
    return OPEN


def _loss_check(dp_size: int, column: str) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        row = evidence.losses.filter(pl.col("dp_size") == dp_size).row(0, named=True)
        return Finding(row[column], "derived", row["formula"])

    return check


CHECKS("dep2_loss_percent", "dep2_loss_derived_percent")(_loss_check(SMALL, "loss_percent"))
CHECKS("dep4_loss_percent", "dep4_loss_derived_percent")(_loss_check(LARGE, "loss_percent"))
CHECKS("excess_2_ranks_percent")(_loss_check(SMALL, "excess_percent"))
CHECKS("excess_4_ranks_percent")(_loss_check(LARGE, "excess_percent"))


def _per_gpu_check(setting: str, dp_size: int) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        this = (pl.col("setting") == setting) & (pl.col("dp_size") == dp_size)
        row = evidence.per_gpu.filter(this).row(0, named=True)
        return Finding(row["prefill_tok_per_s_per_gpu"], "derived", row["formula"])

    return check


for _dp_size in (SMALL, LARGE):
    for _schedule in ("mirror", "lag"):
        CHECKS(f"dep{_dp_size}_{_schedule}_per_gpu")(_per_gpu_check(f"{_schedule} replay", _dp_size))


@CHECKS("agentx_ratio_percent", "agentx_ratio_derived_percent")
def _agentx_ratio(evidence: Evidence) -> Finding:
    return Finding(evidence.gap["ratio_percent"][0], "derived", evidence.gap["formula"][0])


@CHECKS("prefill_default_ranks")
def _prefill_default(_: Evidence) -> Finding:
    engines = published.read("serving_pareto_topology").filter(pl.col("source") == "vllm-recipe")
    ranks = engines["prefill_dp_size"].unique().to_list()
    if len(ranks) != 1:
        return Finding(None, note=f"the recipe's prefill engines have different sizes: {sorted(ranks)}")
    return Finding(ranks[0], "derived", f"all {engines.height} prefill deployments of the vLLM recipe")


@CHECKS("excess_ratio")
def _excess_ratio(evidence: Evidence) -> Finding:
    low, value, high = dp_laws.published_ratio(evidence.losses)
    return Finding(value, "derived", f"{low:.2f} to {high:.2f} within the rounding of the throughputs")


def _law_check(law: str) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        row = evidence.laws.filter((pl.col("law") == law) & (pl.col("num_ranks") == LARGE)).row(0, named=True)
        return Finding(row["excess_to_two_ranks"], "modelled", row["formula"])

    return check


for _name, _law in (("normal", "normal"), ("exponential", "exponential"), ("spikes", "rare spikes")):
    CHECKS(f"excess_ratio_{_name}")(_law_check(_law))


@CHECKS("law_is_spiky")
def _law_is_spiky(evidence: Evidence) -> Finding:
    low, _, high = dp_laws.published_ratio(evidence.losses)
    at = {law: _ratio_of(evidence, law) for law in ("exponential", "rare spikes")}
    compared = (
        f"{low:.2f} to {high:.2f} within rounding, exponential {at['exponential']:.2f}, rare {at['rare spikes']:.2f}"
    )
    if not at["exponential"] < low <= high < at["rare spikes"]:
        return Finding(found=False, basis="derived", note=compared)
    noise = evidence.noise_percent
    runs = " and ".join(f"{run_s:.0f} s" for run_s in evidence.stagger["run_s"])
    return Finding(
        None,
        note=f"{compared}; but each throughput is one run: with {noise['exponential']:.2f} % of noise in each the 95 % "
        f"range of the ratio reaches the exponential law, with {noise['normal']:.2f} % the normal one; and the stagger "
        f"alone would give both losses in runs of {runs}",
    )
