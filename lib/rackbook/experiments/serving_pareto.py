"""How much throughput per GPU goes with which speed per user, and which published points may be compared?

The published serving points with their conditions, a frontier for each set of points that share them, the P/D
deployments behind them, the two quantities that are both called tokens/s per user, and what "tokens" can mean in
954K tokens/s per GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rackbook import published
from rackbook.claims import Checks, Finding
from rackbook.errors import one_of
from rackbook.experiments import live
from rackbook.experiments.own_csv import read_table
from rackbook.models import rack
from rackbook.models.interactivity import implied_step_ms, throughput_per_user_tok_per_s, tpot_ms
from rackbook.models.pareto import comparable, on_frontier
from rackbook.runs import Run
from rackbook.tables import schema

if TYPE_CHECKING:
    from collections.abc import Iterable

CHECKS = Checks("serving_pareto")
doubts = live.doubts
CONDITIONS = (
    "engine",
    "hardware",
    "model",
    "workload",
    "tokens_counted",
    "interactivity_definition",
    "acceptance_kind",
    "acceptance_length",
)
"""What must be stated and equal before two points share a curve. Load, topology and limits are what a curve varies.

The acceptance length is a condition where it is set; what real drafts achieve is a result, which differs from load to
load.
"""

EVERYTHING = "all"
"""Word in ``may_differ`` that pools every point into one curve."""

EXPERIMENT = ("source", "setting")
"""What identifies one experiment of one source."""

LONGEST = 6.0
"""Tokens that a step yields if all five drafts are accepted."""

DEFINITIONS = ("P90 of tokens/s per user, as printed", "total throughput ÷ concurrency")


OWN_DEFINITION = "1000 / TPOT; P90 is the slow tail"
"""What interactivity means in our own runs."""


class Params(BaseModel):
    """Parameters of notebook 09."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    may_differ: list[str] = Field(
        default=[], description="conditions that points of one curve need not share; all pools every point"
    )
    acceptance_length: float = Field(
        default=3.51, ge=1, le=LONGEST, description="tokens that a step yields per request"
    )
    own_points_path: str = Field(default="", description="CSV with the columns of table serving_pareto; empty for none")
    own_definition: str = Field(default=OWN_DEFINITION, description="what interactivity means in that file")
    own_acceptance: Literal["real", "synthetic"] = Field(default="real", description="how its drafts were accepted")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="gb300-nvl72", description=live.CLUSTER)
    workload_path: str = Field(default="", description="trace of requests to measure with, one JSON object a line")
    measured_prefill_engines: int | None = Field(default=None, ge=1, description="prefill engines to measure with")
    measured_decode_ranks: int | None = Field(default=None, ge=1, description="ranks of the decode engine")
    measured_max_seqs: int | None = Field(default=None, ge=1, description="requests that run on a decode rank")
    measured_concurrency: list[int] | None = Field(default=None, description="clients at a time")
    measured_repeats: int = Field(default=3, ge=1, description="runs per number of clients, prompts new in each")

    @field_validator("may_differ")
    @classmethod
    def _known_conditions(cls, value: list[str]) -> list[str]:
        for name in value:
            if name not in (*CONDITIONS, EVERYTHING):
                raise ValueError(one_of(name, (*CONDITIONS, EVERYTHING), "condition"))
        return value

    @property
    def relaxed(self) -> tuple[str, ...]:
        """The conditions that points of one curve need not share."""
        return CONDITIONS if EVERYTHING in self.may_differ else tuple(c for c in CONDITIONS if c in self.may_differ)


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``serving_pareto``, published rows, the user's and those of the run, with
            interactivity_definition, acceptance_kind, curve and on_frontier.
        curves: one row per curve: its conditions, num_points and num_on_frontier.
        deployments: the P/D deployments of table ``serving_pareto_topology`` with their GPUs, clients per GPU and
            decode seats, origin "derived".
        rates: both tokens/s per user of every point that has a concurrency: interactivity_p90_tok_per_s and
            throughput_per_user_tok_per_s, with the GPUs counted.
        readings: what "tokens" could count, with the rate that other figures allow: reading, tok_per_s_per_gpu.
        line: step time that the rack's P90 implies, by acceptance_length from 1 to 6, origin "derived".
        steps: the same at 1, at 6 and at the chosen acceptance length.
        run: the run that ``source`` names; None without one.
        measured: table ``serving_measured``: its points as the clients saw them; empty without one.
    """

    points: pl.DataFrame
    curves: pl.DataFrame
    deployments: pl.DataFrame
    rates: pl.DataFrame
    readings: pl.DataFrame
    line: pl.DataFrame
    steps: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the points, their curves, what follows from them, and a run; measures one if ``source`` says so.

    Raises:
        DataError: the user's file is not a table ``serving_pareto``.
        ParameterError: ``source`` is no word, run or folder that is allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = live.run_of(CHECKS.topic, params.source, lambda: measure(params))
    published_points = published.read("serving_pareto")
    points = with_curves(pl.concat([_with_conventions(published_points), _own(params), _measured(run)]), params.relaxed)
    return Evidence(
        points=points,
        curves=curves(points),
        deployments=deployments(published.read("serving_pareto_topology")),
        rates=rates_per_user(published_points),
        readings=readings(params.acceptance_length),
        line=steps_by_acceptance(np.linspace(1, LONGEST, 51)),
        steps=steps_by_acceptance(sorted({1.0, params.acceptance_length, LONGEST})),
        run=run,
        measured=live.points_of(run, "serving_measured", "loads"),
    )


def measure(params: Params) -> Run:
    """Measure P/D serving on ``cluster`` and keep it as a run.

    Raises:
        RackbookError: the cluster cannot do it, or it failed on the way.
    """
    from rackbook.measurements import serving_pareto  # what talks to vLLM is imported when it is needed

    return serving_pareto.measure(params)


def _measured(run: Run | None) -> pl.DataFrame:
    rows = live.points_of(run, "serving_pareto")
    return rows.with_columns(
        pl.lit(OWN_DEFINITION).alias("interactivity_definition"), pl.lit("real").alias("acceptance_kind")
    )


def with_curves(points: pl.DataFrame, relaxed: tuple[str, ...] = ()) -> pl.DataFrame:
    """Add to each point the curve that it belongs to and whether another point of that curve beats it.

    Args:
        points: table ``serving_pareto`` with interactivity_definition and acceptance_kind.
        relaxed: conditions that points of one curve need not share; with all of them there is one curve.
    """
    required = [c for c in CONDITIONS if c not in relaxed]
    achieved = pl.when(pl.col("acceptance_kind") == "real").then(0.0).otherwise("acceptance_length")
    conditions = points.with_columns(achieved.alias("acceptance_length"))
    marked = points.with_columns(comparable(conditions, required, EXPERIMENT))
    return marked.with_columns(
        on_frontier(marked, "interactivity_p90_tok_per_s", "total_tok_per_s_per_gpu", by="curve")
    )


def curves_subtitle(points: pl.DataFrame, params: Params) -> list[str]:
    """Say what the points are and, where curves pool points on purpose, over what; one string per line."""
    sample = f"{', '.join(points['hardware'].unique(maintain_order=True))}, {points.height} points"
    if not params.relaxed:
        rule = "points share a curve where all conditions are stated and equal"
    elif params.relaxed == CONDITIONS:
        rule = "POOLED ON PURPOSE over every condition"
    else:
        rule = f"POOLED ON PURPOSE over {', '.join(c.replace('_', ' ') for c in params.relaxed)}"
    return [f"{sample}; faint: beaten on its curve", rule]


def curves(points: pl.DataFrame) -> pl.DataFrame:
    """One row per curve: what its points have in common, how many they are, and how many are not beaten.

    Returns:
        curve, setting and the conditions (null where the points differ or do not say), num_points, num_on_frontier,
        origin and source (joined by "+" where there are several).
    """
    shared = [pl.when(pl.col(c).n_unique() == 1).then(pl.col(c).first()).alias(c) for c in ("setting", *CONDITIONS)]
    return points.group_by("curve", maintain_order=True).agg(
        *shared,
        pl.len().cast(pl.Int64).alias("num_points"),
        pl.col("on_frontier").sum().cast(pl.Int64).alias("num_on_frontier"),
        *(pl.col(c).unique(maintain_order=True).str.join("+") for c in ("origin", "source")),
    )


def deployments(topology: pl.DataFrame) -> pl.DataFrame:
    """Count the GPUs of each P/D deployment, and how many of its clients can decode at once.

    One decode engine: prefill engines × ranks per engine, plus the decode engine's expert-parallel size.

    Args:
        topology: table ``serving_pareto_topology``; rows without a number of engines are left out.

    Returns:
        deployment, concurrency, num_prefill_gpus, num_decode_gpus, num_gpus, clients_per_gpu, num_decode_seats,
        seats_per_client_percent, hardware, model, origin, source, formula.
    """
    rows = []
    stated = topology.drop_nulls("num_prefill_engines").sort("ep_size", "concurrency", descending=[True, False])
    for row in stated.to_dicts():
        prefill, decode = row["num_prefill_engines"] * row["prefill_dp_size"], row["ep_size"]
        seats = row["max_seqs_per_rank"] * row["ep_size"]
        rows.append(
            {
                "deployment": f"{row['num_prefill_engines']} × DEP{row['prefill_dp_size']} → DEP{row['ep_size']}",
                "concurrency": row["concurrency"],
                "num_prefill_gpus": prefill,
                "num_decode_gpus": decode,
                "num_gpus": prefill + decode,
                "clients_per_gpu": row["concurrency"] / (prefill + decode),
                "num_decode_seats": seats,
                "seats_per_client_percent": 100 * seats / row["concurrency"],
                "hardware": row["hardware"],
                "model": row["model"],
                "origin": "derived",
                "source": row["source"],
                "formula": f"{row['num_prefill_engines']} × {row['prefill_dp_size']} + {decode} GPUs; "
                f"{row['max_seqs_per_rank']} × {decode} seats",
            }
        )
    return pl.DataFrame(rows)


def gpus_by_phase(deployments: pl.DataFrame) -> pl.DataFrame:
    """The GPUs of each deployment in long form: deployment, phase, num_gpus, origin, source, formula."""
    kept = ("deployment", "concurrency", "hardware", "model", "origin", "source", "formula")
    return pl.concat(
        deployments.select(*kept, pl.lit(phase).alias("phase"), pl.col(f"num_{phase}_gpus").alias("num_gpus"))
        for phase in ("prefill", "decode")
    )


def rates_per_user(points: pl.DataFrame) -> pl.DataFrame:
    """Both quantities that are called tokens/s per user, side by side, for the points that allow both.

    The GPUs of a P/D point are counted with the engine sizes of S1's figure, prefill DEP2 and decode DEP32; a point
    without P/D is one replica of ``tp_size`` GPUs.

    Args:
        points: table ``serving_pareto``; rows without a concurrency are left out.

    Returns:
        engine, hardware, model, setting, stage, concurrency, num_gpus, interactivity_p90_tok_per_s (as printed),
        throughput_per_user_tok_per_s, origin "derived", source, formula (of the quotient).
    """
    figure = published.read("serving_pareto_topology").filter(pl.col("source") == "S1").row(0, named=True)
    kept = ("engine", "hardware", "model", "setting", "stage", "concurrency", "interactivity_p90_tok_per_s", "source")
    rows = []
    for row in points.drop_nulls("concurrency").to_dicts():
        if row["num_prefill_engines"] is None:
            gpus, counted = row["tp_size"], f"{row['tp_size']}"
        else:
            prefill, decode = row["num_prefill_engines"], row["num_decode_engines"]
            gpus = prefill * figure["prefill_dp_size"] + decode * figure["ep_size"]
            counted = f"({prefill} × {figure['prefill_dp_size']} + {decode} × {figure['ep_size']})"
        tok_per_s = row["total_tok_per_s_per_gpu"] * gpus
        rows.append(
            {name: row[name] for name in kept}
            | {
                "num_gpus": gpus,
                "throughput_per_user_tok_per_s": throughput_per_user_tok_per_s(tok_per_s, row["concurrency"]),
                "origin": "derived",
                "formula": f"{row['total_tok_per_s_per_gpu']:,.0f} × {counted} ÷ {row['concurrency']:,}",
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def rates_by_definition(rates: pl.DataFrame) -> pl.DataFrame:
    """The same in long form, for a chart: definition, user_tok_per_s, and the origin of each."""
    columns = ("interactivity_p90_tok_per_s", "throughput_per_user_tok_per_s")
    values = zip(DEFINITIONS, columns, ("published", "derived"), strict=True)
    return pl.concat(
        rates.drop(*columns, "origin").with_columns(
            pl.lit(definition).alias("definition"),
            rates[column].alias("user_tok_per_s"),
            pl.lit(origin).alias("origin"),
            pl.lit(None, pl.String).alias("formula") if origin == "published" else pl.col("formula"),
        )
        for definition, column, origin in values
    )


def readings(acceptance_length: float) -> pl.DataFrame:
    """What "tokens" could count in the rack's tokens/s per GPU, and the rate that other figures allow for it.

    Args:
        acceptance_length: tokens that a decode step yields per request.

    Returns:
        reading, tok_per_s_per_gpu, origin, source, formula; the published rate first, then falling.
    """
    point, step = rack.serving_point(), rack.decode_step()
    prefill = published.read("prefill_ablation_throughput").filter(pl.col("stage") == "after").row(0, named=True)
    total, share = point["total_tok_per_s_per_gpu"], rack.most_output().output

    def decoded(reading: str, length: float, source: str) -> dict[str, object]:
        return {
            "reading": reading,
            "tok_per_s_per_gpu": step.output_tok_per_s_per_gpu(length),
            "origin": "derived",
            "source": source,
            "formula": f"{step.requests_per_gpu} × {length:g} tokens ÷ {step.step_ms:g} ms, per decode GPU",
        }

    rows = [
        {
            "reading": "as printed",
            "tok_per_s_per_gpu": total,
            "origin": "published",
            "source": point["source"],
            "formula": None,
        },
        {
            "reading": "new input tokens: the fastest prefill printed",
            "tok_per_s_per_gpu": prefill["prefill_tok_per_s_per_gpu"],
            "origin": "published",
            "source": prefill["source"],
            "formula": None,
        },
        decoded("output: every draft accepted", LONGEST, "S1"),
        decoded(f"output: {acceptance_length:g} tokens per step", acceptance_length, "S1+inferencex-3344"),
        {
            "reading": "output: the most that the revenue leaves",
            "tok_per_s_per_gpu": share * total,
            "origin": "derived",
            "source": "S1+deepseek-prices",
            "formula": f"{100 * share:.2f} % of {total:,.0f}",
        },
    ]
    return pl.DataFrame(rows).sort("tok_per_s_per_gpu", descending=True, maintain_order=True)


def steps_by_acceptance(acceptance_lengths: Iterable[float]) -> pl.DataFrame:
    """Step times that the rack's P90 implies.

    Args:
        acceptance_lengths: tokens that a step yields per request.

    Returns:
        acceptance_length, step_ms, hardware, model, origin "derived", source, formula.
    """
    point = rack.serving_point()
    rate = float(point["interactivity_p90_tok_per_s"])
    return pl.DataFrame(
        [
            {
                "acceptance_length": float(length),
                "step_ms": implied_step_ms(rate, length),
                "hardware": point["hardware"],
                "model": point["model"],
                "origin": "derived",
                "source": point["source"],
                "formula": f"{length:.4g} tokens ÷ {rate:g} tokens/s",
            }
            for length in acceptance_lengths
        ]
    )


def step_references() -> pl.DataFrame:
    """The rack's decode step, put together from its printed parts: reading, step_ms, origin, source, formula."""
    step = rack.decode_step()
    return pl.DataFrame(
        [
            {
                "reading": f"decode step at DEP{rack.DECODE_EP_SIZE}, {step.requests_per_gpu} requests per GPU",
                "step_ms": step.step_ms,
                "origin": "derived",
                "source": "S1",
                "formula": "MoE and everything else, table wide_ep_scaling",
            }
        ]
    )


def _with_conventions(points: pl.DataFrame) -> pl.DataFrame:
    conventions = published.read("serving_pareto_conventions")
    return points.join(
        conventions.select("source", "interactivity_definition", "acceptance_kind"),
        on="source",
        how="left",
        maintain_order="left",
    )


def _own(params: Params) -> pl.DataFrame:
    table, path = schema("serving_pareto"), params.own_points_path
    own = read_table(path, table, parameter="own_points_path") if path else table.frame([])
    return own.with_columns(
        pl.lit(params.own_definition).alias("interactivity_definition"),
        pl.lit(params.own_acceptance).alias("acceptance_kind"),
    )


@CHECKS(
    "rack_tok_per_s_per_gpu",
    "rack_p90_user",
    "sglang_chunk_4096_cap_64",
    "sglang_chunk_4096_cap_64_p90_user",
    "sglang_chunk_8192_cap_64",
    "sglang_chunk_8192_cap_64_p90_user",
    "sglang_chunk_8192_cap_64_ttft_s",
    "sglang_chunk_4096_cap_128",
    "sglang_chunk_4096_cap_128_p90_user",
    "sglang_chunk_4096_cap_128_ttft_s",
)
def _measured_elsewhere(_: Evidence) -> Finding:
    return Finding(None, note="one run of the source; no other published figure determines it")


@CHECKS("sglang_concurrency", "sglang_acceptance_length")
def _settings_elsewhere(_: Evidence) -> Finding:
    return Finding(None, note="a setting of another engine's runs; no other figure determines it")


@CHECKS("recipe_3018_clients", "recipe_7388_clients", "recipe_10888_clients", "recipe_9888_clients")
def _recipe_settings(_: Evidence) -> Finding:
    return Finding(None, note="settings of one recipe; no other figure determines them")


@CHECKS("rack_over_single_node")
def _over_single_node(_: Evidence) -> Finding:
    return Finding(None, note="the single-node result is not printed")


@CHECKS("decode_ranks")
def _decode_ranks(evidence: Evidence) -> Finding:
    sizes = evidence.deployments["num_decode_gpus"]
    usual = sizes.mode().sort()[-1]
    count = (sizes == usual).sum()
    return Finding(usual, "derived", f"{count} of the recipe's {sizes.len()} deployments on GB300 decode on {usual}")


@CHECKS("prefill_ranks")
def _prefill_ranks(_: Evidence) -> Finding:
    recipe = published.read("serving_pareto_topology").filter(pl.col("source") == "vllm-recipe")
    sizes = recipe["prefill_dp_size"]
    return Finding(sizes.mode().sort()[-1], "derived", f"prefill engines of the recipe's {sizes.len()} deployments")


@CHECKS("implied_single_node")
def _implied_single_node(_: Evidence) -> Finding:
    rate = rack.serving_point()["total_tok_per_s_per_gpu"]
    speedup = published.read("serving_pareto_speedup")["speedup"].item()
    return Finding(rate / speedup, "derived", f"{rate:,.0f} ÷ {speedup:g}")


@CHECKS("ms_per_token")
def _ms_per_token(_: Evidence) -> Finding:
    rate = rack.serving_point()["interactivity_p90_tok_per_s"]
    return Finding(tpot_ms(rate), "derived", f"1000 ÷ {rate:g}")


@CHECKS("implied_step_ms")
def _implied_step_ms(_: Evidence) -> Finding:
    rate, length = rack.serving_point()["interactivity_p90_tok_per_s"], rack.acceptance_length()
    return Finding(implied_step_ms(rate, length), "derived", f"{length:g} tokens ÷ {rate:g} tokens/s")


@CHECKS("step_dep32_ms")
def _step_dep32_ms(_: Evidence) -> Finding:
    return Finding(rack.decode_step().step_ms, "derived", "sum of the two parts of table wide_ep_scaling at 32")


@CHECKS("output_from_step")
def _output_from_step(_: Evidence) -> Finding:
    step, length = rack.decode_step(), rack.acceptance_length()
    rate = step.output_tok_per_s_per_gpu(length)
    return Finding(rate, "derived", f"{step.requests_per_gpu} requests × {length:g} tokens ÷ {step.step_ms:g} ms")
