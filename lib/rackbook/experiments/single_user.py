"""How fast is one user on four GPUs, and how near is that to what the memory allows?

One published rate, the step times that it can mean, and the least time in which the four GPUs could read the
weights of one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rackbook import catalog, published
from rackbook.claims import Checks, Finding
from rackbook.experiments import live, parameter_rules
from rackbook.models import rack
from rackbook.models.interactivity import implied_step_ms, tpot_ms
from rackbook.models.memory import GIB, mxfp4_bytes, routed_entries
from rackbook.models.speculation import ExpertWeights, expected_distinct_experts, read_ms
from rackbook.runs import Run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

CHECKS = Checks("single_user")
doubts = live.doubts

MODEL = "deepseek-v4.1-flash"
SAME, INDEPENDENT = "all the same", "independent"


class Params(BaseModel):
    """Parameters of notebook 11."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    user_tok_per_s: float = Field(default=826.0, gt=0, description="rate of one user")
    acceptance_length: float = Field(
        default=3.51, ge=1, description="tokens that a step yields, the target's own included"
    )
    draft_tokens: int = Field(default=5, ge=0, description="tokens drafted per step; a step checks one more")
    hardware: parameter_rules.Gpu = Field(default="b300", description="GPU, by its file name in data/hardware")
    num_gpus: int = Field(default=4, ge=1, description="GPUs that share every weight (TP)")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="b300x8", description=live.CLUSTER)
    measured_input_tokens: int = Field(default=1024, ge=1, description="length of a prompt to measure with")
    measured_output_tokens: int = Field(default=1024, ge=1, description="length of an answer to measure with")
    measured_prompts: int = Field(default=64, ge=1, description="requests per run, one at a time")
    measured_repeats: int = Field(default=3, ge=1, description="runs on each server")

    _no_more_than_checked = model_validator(mode="after")(parameter_rules.no_more_than_checked)


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``single_user``, published.
        line: implied step time by acceptance_length, from 1 to 1 + draft_tokens, origin "derived".
        steps: the same at whole acceptance lengths and at the chosen one.
        use: those steps with the time to read their weights at independent routing and its share of the step:
            acceptance_length, step_ms, hbm_floor_ms, hbm_use_percent, origin "modelled".
        reads: bytes that a step reads, by component, checked_tokens and expert_overlap: read_gb_per_step,
            distinct_experts_per_layer, hbm_floor_ms, origin "modelled".
        floors: the floor of a whole step, by checked_tokens and expert_overlap: read_gb_per_step, hbm_floor_ms.
        run: the run that ``source`` names; None for "published".
        measured: table ``single_user_measured``: a row per server of that run; empty without one.
    """

    points: pl.DataFrame
    line: pl.DataFrame
    steps: pl.DataFrame
    use: pl.DataFrame
    reads: pl.DataFrame
    floors: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the published rate, the step times that it implies, the memory floor, and a run, measured if asked for.

    Raises:
        DataError: unknown hardware, hardware whose bandwidth is not known, or a stored run that is damaged.
        ParameterError: a ``source`` that is not allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = live.run_of(CHECKS.topic, params.source, lambda: measure(params))
    checked = 1 + params.draft_tokens
    reads = pl.concat(
        [reads_of_step(params, n, overlap) for n in range(1, checked + 1) for overlap in (INDEPENDENT, SAME)]
    )
    floors = floors_of(reads)
    floor = floors.filter((pl.col("checked_tokens") == checked) & (pl.col("expert_overlap") == INDEPENDENT))
    steps = implied_steps(params.user_tok_per_s, sorted({*map(float, range(1, checked + 1)), params.acceptance_length}))
    return Evidence(
        points=published.read("single_user"),
        line=implied_steps(params.user_tok_per_s, np.linspace(1, checked, 51)),
        steps=steps,
        use=bandwidth_use(steps, floor["hbm_floor_ms"].item()),
        reads=reads,
        floors=floors,
        run=run,
        measured=live.points_of(run, "single_user_measured"),
    )


def measure(params: Params) -> Run:
    """Measure one user's rate on ``cluster`` and keep it as a run.

    Raises:
        RackbookError: the cluster cannot do it, or it failed on the way.
    """
    from rackbook.measurements import single_user  # what talks to vLLM is imported when it is needed

    return single_user.measure(params)


def measured_subtitle(evidence: Evidence) -> str:
    """Hardware, model and sample of the measured rates, for their chart."""
    row = evidence.measured.row(0, named=True)
    return (
        f"{row['model']} on {row['num_gpus']} {row['hardware']}, one request at a time, random prompts, "
        f"{row['repeats']} runs; {live.description(evidence.run)}"
    )


def implied_steps(user_tok_per_s: float, acceptance_lengths: Iterable[float]) -> pl.DataFrame:
    """Step times that give one user a rate, by tokens per step.

    Returns:
        acceptance_length, step_ms, origin "derived", source, formula.
    """
    return pl.DataFrame(
        [
            {
                "acceptance_length": float(length),
                "step_ms": implied_step_ms(user_tok_per_s, length),
                "origin": "derived",
                "source": "S1" if user_tok_per_s == _published_rate() else "parameters",
                "formula": f"{length:.4g} tokens ÷ {user_tok_per_s:g} tokens/s",
            }
            for length in acceptance_lengths
        ]
    )


def bandwidth_use(steps: pl.DataFrame, floor_ms: float) -> pl.DataFrame:
    """Share of each implied step in which the memory, at full bandwidth, would deliver the weights.

    Args:
        steps: acceptance_length, step_ms, source.
        floor_ms: time to read the weights of one step.

    Returns:
        acceptance_length, step_ms, hbm_floor_ms, hbm_use_percent, origin "modelled", source.
    """
    return steps.select(
        "acceptance_length",
        "step_ms",
        pl.lit(floor_ms).alias("hbm_floor_ms"),
        (100 * floor_ms / pl.col("step_ms")).alias("hbm_use_percent"),
        pl.lit("modelled").alias("origin"),
        pl.format("{}+vllm-recipe+vendor-hardware", "source").alias("source"),
    )


def target_experts() -> ExpertWeights:
    """The target's routed experts: one set per layer, MXFP4 with one scale byte per 32 entries."""
    model = catalog.model(MODEL)
    num_layers, num_experts = model.num_layers.known, model.experts.num_routed.known
    size = mxfp4_bytes(routed_entries(model.checkpoint), bits=model.checkpoint.expert_bits.known)
    return ExpertWeights(num_layers, num_experts, model.experts.top_k.known, size / (num_layers * num_experts))


def draft_experts() -> ExpertWeights:
    """The DSpark draft model's routed experts: one set per stage."""
    model = catalog.model(MODEL)
    num_stages, num_experts = model.draft.num_stages.known, model.draft.num_routed.known
    entries, bits = model.checkpoint.draft_expert_entries.known, model.checkpoint.expert_bits.known
    size = mxfp4_bytes(entries, bits=bits) / (num_stages * num_experts)
    return ExpertWeights(num_stages, num_experts, model.draft.top_k.known, size)


def reads_of_step(params: Params, checked_tokens: int, expert_overlap: str) -> pl.DataFrame:
    """Weights that one step must read from memory, part by part.

    Counted once each: the different experts that the checked tokens pick, those that the drafts pick in the draft
    model, all of attention, dense layers and routers, and the LM head (half of "embedding and LM head"). Left out, so
    that the sum stays a floor: the KV cache, activations, scales of FP8 weights, and Engram rows, which can lie in host
    memory. Spread evenly over the GPUs, at the nominal bandwidth.

    Args:
        params: gives hardware and GPUs.
        checked_tokens: tokens of one user in the step: the next one and the drafts.
        expert_overlap: "all the same" or "independent": how the tokens of a step choose experts.

    Returns:
        component, checked_tokens, expert_overlap, distinct_experts_per_layer (null where there are none),
        read_gb_per_step, hbm_floor_ms, hardware, num_gpus, origin "modelled", source, formula.
    """
    checkpoint = catalog.model(MODEL).checkpoint
    hardware = catalog.hardware(params.hardware)
    drafts = checked_tokens - 1
    parts = [("target experts", *_experts_read(target_experts(), checked_tokens, expert_overlap))]
    if drafts:
        parts.append(("draft experts", *_experts_read(draft_experts(), drafts, expert_overlap)))
    parts += [
        ("attention, dense, routers", None, checkpoint.dense_gib.known * GIB, f"{checkpoint.dense_gib.known:g} GiB"),
        ("LM head", None, checkpoint.embedding_gib.known * GIB / 2, f"{checkpoint.embedding_gib.known:g} GiB ÷ 2"),
    ]
    return pl.DataFrame(
        [
            {
                "component": component,
                "checked_tokens": checked_tokens,
                "expert_overlap": expert_overlap,
                "distinct_experts_per_layer": distinct,
                "read_gb_per_step": num_bytes / 1e9,
                "hbm_floor_ms": read_ms(num_bytes, params.num_gpus, hardware.hbm_tb_per_s.known),
                "hardware": hardware.name,
                "num_gpus": params.num_gpus,
                "origin": "modelled",
                "source": "vllm-recipe+vendor-hardware",
                "formula": formula,
            }
            for component, distinct, num_bytes, formula in parts
        ],
        schema_overrides={"distinct_experts_per_layer": pl.Float64},
    )


def floors_of(reads: pl.DataFrame) -> pl.DataFrame:
    """Sum the parts of each step: checked_tokens, expert_overlap, read_gb_per_step, hbm_floor_ms, origin, source."""
    kept = ("checked_tokens", "expert_overlap", "hardware", "num_gpus", "origin", "source")
    return reads.group_by(kept, maintain_order=True).agg(pl.col("read_gb_per_step", "hbm_floor_ms").sum())


def references(evidence: Evidence) -> pl.DataFrame:
    """The floors of the largest step as marks beside the implied steps: reading, step_ms, origin, source."""
    largest = evidence.floors.filter(pl.col("checked_tokens") == pl.col("checked_tokens").max())
    return largest.select(
        pl.format("memory floor, experts {}", "expert_overlap").alias("reading"),
        pl.col("hbm_floor_ms").alias("step_ms"),
        "origin",
        "source",
    )


def _experts_read(weights: ExpertWeights, num_tokens: int, overlap: str) -> tuple[float, float, str]:
    if overlap == SAME:
        distinct = float(weights.top_k)
    else:
        distinct = expected_distinct_experts(weights.num_experts, weights.top_k, num_tokens)
    formula = f"{weights.num_layers} × {distinct:.4g} experts × {weights.bytes_per_expert / 1e6:.4g} MB"
    return distinct, weights.bytes_read(distinct), formula


def _published_rate() -> float:
    return published.read("single_user")["interactivity_p90_tok_per_s"].item()


@CHECKS("p90_tok_per_s")
def _rate(evidence: Evidence) -> Finding:
    if not evidence.measured.is_empty():
        rates = evidence.measured.drop_nulls("user_tok_per_s").select("bench_stage", "user_tok_per_s").rows()
        words = ", ".join(f"{rate:.0f} tokens/s {stage}" for stage, rate in rates) or "nothing"
        return Finding(
            None, note=f"run {evidence.run.id} measured {words} with random prompts; the source's prompts are not known"
        )
    return Finding(None, note="one run of the source; no other published figure determines it")


@CHECKS("ms_per_token")
def _ms_per_token(_: Evidence) -> Finding:
    return Finding(tpot_ms(_published_rate()), "derived", "1000 ÷ the published rate")


def _step_check(tokens_per_step: Callable[[], float]) -> Callable[[Evidence], Finding]:
    def check(_: Evidence) -> Finding:
        length = tokens_per_step()
        return Finding(
            implied_step_ms(_published_rate(), length), "derived", f"{length:g} tokens per step ÷ the published rate"
        )

    return check


CHECKS("step_at_3_51_ms")(_step_check(rack.acceptance_length))
CHECKS("step_at_6_ms")(_step_check(lambda: 1 + catalog.model(MODEL).draft.block_tokens.known))
