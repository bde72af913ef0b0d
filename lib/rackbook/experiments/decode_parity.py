"""Is vLLM within 6 % of DeepInfer in decode?

A published claim about a curve whose points are not printed. This module lays out the envelope that the claim draws,
the settings that the two engines share and those that are not stated, the readings of "nextn", and the same two
engines at another source; a user's own measured curve can be judged against the envelope.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from rackbook import catalog, published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.errors import DataError
from rackbook.experiments import decode_parity_measured, forward_runs, live, vocabulary
from rackbook.experiments.own_csv import OwnCsv
from rackbook.runs import Run

CHECKS = Checks("decode_parity")
doubts = live.doubts

_NOT_STATED = "not stated"
_NOT_RECORDED = "not recorded"
_CURVE = ("batch_size", "output_tok_per_s", "reference_output_tok_per_s")
_RATES = (*_CURVE, "origin", "source")
_SLACK = 1 + 1e-9
"""0.94 − 1 is not −0.06 in binary."""
_CONDITIONS = ("setting", "engine_setting", "reference_setting", "agreement", "origin", "source")


class Params(BaseModel):
    """Parameters of notebook 10."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    draft_tokens: int = Field(default=3, ge=1, description="drafts per request and step that nextn = 3 stands for")
    envelope_percent: float = Field(default=6.0, gt=0, lt=100, description="largest difference from the reference")
    points_path: str = Field(default="", description="CSV of a measured curve of two engines; empty for none")
    points_hardware: str = Field(default=_NOT_RECORDED, description="what the engine ran on")
    points_reference: str = Field(default=_NOT_RECORDED, description="the engine that it was compared with")
    points_context_tokens: int | None = Field(default=None, ge=1, description="context length of the curve")
    points_draft_tokens: int | None = Field(default=None, ge=0, description="drafts per request and step of the curve")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="gb200-nvl72", description=live.CLUSTER)
    measured_batch_sizes: list[int] = Field(
        default=[8, 16, 32, 64, 128, 256], min_length=1, description="requests per rank to measure with"
    )
    measured_ranks: int = Field(default=4, ge=1, description="ranks to measure with; the source prints none")


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        claim: table ``decode_parity``, the published row.
        envelope: min_batch_size, max_batch_size, throughput_ratio_low, throughput_ratio_high: what
            ``envelope_percent`` allows over the claimed batch sizes, by which engine is the 100 %, origin "derived".
        readings: what "nextn" can mean: reading, draft_tokens, checked_tokens, tokens in the largest step, origin
            "derived".
        cases: one case of the decode run per batch size for the chosen drafts.
        settings: decode and prefill settings side by side: phase, setting, engine_setting, reference_setting,
            agreement.
        elsewhere: the same two engines by another source: published ratios, and what sets them apart.
        curve: the user's curve with throughput_ratio, difference and inside_envelope, origin "measured"; empty without
            ``points_path``.
        conditions: the user's conditions beside the claim's; empty without ``points_path``.
        run: the run that ``source`` names; None for "published".
        measured: vLLM's half of the curve in that run: batch_size, step_ms, the rates that it allows, and its quality;
            empty without one.
    """

    claim: pl.DataFrame
    envelope: pl.DataFrame
    readings: pl.DataFrame
    cases: pl.DataFrame
    settings: pl.DataFrame
    elsewhere: pl.DataFrame
    curve: pl.DataFrame
    conditions: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the claim, its envelope and settings, judge the user's curve, and take a run, measured now if asked for.

    Raises:
        DataError: the user's file, or a stored run, is not what it should be.
        ParameterError: a ``source`` that is not allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = forward_runs.run_of(CHECKS.topic, params)
    claim = published.read("decode_parity")
    rates = read_curve(params.points_path) if params.points_path else vocabulary.frame(_RATES)
    curve = judged(rates, claim, params.envelope_percent)
    return Evidence(
        claim=claim,
        envelope=envelope(claim, params.envelope_percent),
        readings=readings(claim),
        cases=cases(claim, params.draft_tokens),
        settings=settings(claim, published.read("decode_parity_prefill"), published.read("single_node_deployment")),
        elsewhere=elsewhere(),
        curve=curve,
        conditions=conditions(claim, curve, params) if params.points_path else vocabulary.frame(_CONDITIONS),
        run=run,
        measured=decode_parity_measured.steps(run),
    )


def measured_subtitle(evidence: Evidence) -> str:
    """Hardware, model and sample of the measured steps, for their chart."""
    row = evidence.measured.row(0, named=True)
    return (
        f"{row['model']} on {row['hardware']}, {row['num_ranks']} ranks, {row['context_tokens']:,} tokens, "
        f"{row['draft_tokens']} drafts; {live.description(evidence.run)}"
    )


def envelope(claim: pl.DataFrame, percent: float) -> pl.DataFrame:
    """The ratios that "within so many percent" allows.

    The sentence does not say which engine is the 100 %: |v − d| ≤ p·d gives ratios v/d of 1 ± p, |v − d| ≤ p·v gives
    1/(1 + p) to 1/(1 − p).

    Args:
        claim: table ``decode_parity``, one row.
        percent: p, in percent.

    Returns:
        reading, min_batch_size, max_batch_size, throughput_ratio_low, throughput_ratio_high, origin, source, formula.
    """
    row, part = claim.row(0, named=True), percent / 100
    rows = [
        (f"share of {row['reference_engine']}'s throughput", 1 - part, 1 + part, f"1 ± {part:g}"),
        (f"share of {row['engine']}'s throughput", 1 / (1 + part), 1 / (1 - part), f"1 ÷ (1 ± {part:g})"),
    ]
    return pl.DataFrame(
        [
            {
                "reading": reading,
                "min_batch_size": row["min_batch_size"],
                "max_batch_size": row["max_batch_size"],
                "throughput_ratio_low": low,
                "throughput_ratio_high": high,
                "origin": "derived",
                "source": row["source"],
                "formula": formula,
            }
            for reading, low, high, formula in rows
        ]
    )


def readings(claim: pl.DataFrame) -> pl.DataFrame:
    """What the claim's "nextn" can mean for a run of vLLM.

    The model has no multi-token-prediction layers of its own: drafts come from DSpark. Either nextn counts the drafts,
    or the query tokens of a step, which are the drafts and one more.

    Returns:
        reading, nextn, draft_tokens, checked_tokens, step_tokens (of the largest batch), origin, source, formula.
    """
    row = claim.row(0, named=True)
    return pl.DataFrame(
        [
            {
                "reading": reading,
                "nextn": row["nextn"],
                "draft_tokens": drafts,
                "checked_tokens": drafts + 1,
                "step_tokens": row["max_batch_size"] * (drafts + 1),
                "origin": "derived",
                "source": row["source"],
                "formula": f"{row['max_batch_size']} requests × (1 + {drafts}) tokens",
            }
            for reading, drafts in (("drafts", row["nextn"]), ("query tokens", row["nextn"] - 1))
        ]
    )


def cases(claim: pl.DataFrame, draft_tokens: int) -> pl.DataFrame:
    """The cases of ``vllm bench forward`` that give vLLM's half of the curve, one per doubling of the batch.

    A case ``N*Q@K:D`` is N requests of Q query tokens, K tokens of context including them, and D drafts.

    Returns:
        batch_size, context_tokens, draft_tokens, step_tokens, bench_case, origin, source, formula.
    """
    row = claim.row(0, named=True)
    sizes = [row["min_batch_size"]]
    while sizes[-1] * 2 <= row["max_batch_size"]:
        sizes.append(sizes[-1] * 2)
    query, context = draft_tokens + 1, row["context_tokens"]
    return pl.DataFrame(
        [
            {
                "batch_size": size,
                "context_tokens": context,
                "draft_tokens": draft_tokens,
                "step_tokens": size * query,
                "bench_case": f"b{size}={size}*{query}@{context}:{draft_tokens}",
                "origin": "derived",
                "source": row["source"],
                "formula": f"{size} × (1 + {draft_tokens}) tokens per step",
            }
            for size in sizes
        ]
    )


def settings(claim: pl.DataFrame, prefill: pl.DataFrame, deployment: pl.DataFrame) -> pl.DataFrame:
    """The settings of the two engines side by side, phase by phase.

    Args:
        claim: table ``decode_parity``, one row; its settings hold for both engines unless it names one.
        prefill: table ``decode_parity_prefill``, one row per engine.
        deployment: table ``single_node_deployment``: on how many GPUs DeepInfer's maker benchmarks each phase.

    Returns:
        phase, setting, engine_setting (vLLM's), reference_setting (DeepInfer's), agreement, origin, source. A setting
        that a source does not print reads "not stated".
    """
    decode = claim.row(0, named=True)
    ours, theirs = (prefill.row(by_predicate=pl.col("engine") == engine, named=True) for engine in _engines(claim))
    gpus = dict(deployment.select("phase", "num_gpus").iter_rows())
    own, other = decode["source"], deployment["source"][0]
    rows = [
        ("decode", "context [tokens]", decode["context_tokens"], decode["context_tokens"], own),
        ("decode", "nextn", decode["nextn"], decode["nextn"], own),
        ("decode", "hardware", decode["hardware"], decode["reference_hardware"], own),
        ("decode", "GPUs of the engine", None, f"{gpus['decode']}, in its maker's benchmark", f"{own}+{other}"),
        ("decode", "batch size per rank, or of the engine", None, None, own),
        ("decode", "drafts accepted per step", None, None, own),
        ("prefill", "parallelism", ours["parallelism"], theirs["parallelism"], own),
        ("prefill", "redundant experts", ours["num_redundant_experts"], theirs["num_redundant_experts"], own),
        ("prefill", "bounded replay [tokens]", ours["replay_tokens"], theirs["replay_tokens"], own),
        ("prefill", "hardware", ours["hardware"], theirs["hardware"], own),
    ]
    return pl.DataFrame(
        [
            {
                "phase": phase,
                "setting": name,
                "engine_setting": _NOT_STATED if ours is None else str(ours),
                "reference_setting": _NOT_STATED if theirs is None else str(theirs),
                "agreement": _agreement(ours, theirs),
                "origin": "published",
                "source": source,
            }
            for phase, name, ours, theirs, source in rows
        ]
    )


def elsewhere() -> pl.DataFrame:
    """The published decode ratios of the same two engines on one node, under other conditions.

    Returns:
        engine, reference_engine, hardware, num_gpus, input_tokens, output_tokens, throughput_ratio, origin
        "published", source, locator.
    """
    rows = published.read("single_node_ratio").filter(pl.col("phase") == "decode")
    return rows.select(
        "engine", "reference_engine", "hardware", "num_gpus", "input_tokens", "output_tokens",
        pl.col("speedup").alias("throughput_ratio"),
        "origin", "source", "locator",
    )  # fmt: skip


def read_curve(path: str | Path) -> pl.DataFrame:
    """Read a measured curve of two engines.

    The file is a CSV with the columns batch_size, output_tok_per_s and reference_output_tok_per_s, in any order, one
    row per batch size; the two rates are counted alike (both of the whole engine, or both per GPU).

    Args:
        path: the file.

    Returns:
        The three columns, origin "measured", source (the file's name); by batch size.

    Raises:
        DataError: no such file, other columns, a cell that is not what it should be, or a batch size that stands twice.
    """
    file = OwnCsv(path, parameter="points_path", columns=_CURVE)
    rows: dict[float, dict[str, object]] = {}
    for number, cells in file.rows():
        row = {key: file.positive(number, key, cell) for key, cell in cells.items()}
        if row["batch_size"] in rows:
            raise DataError(f"{file.row(number)}, column batch_size: got {row['batch_size']:g} a second time")
        rows[row["batch_size"]] = row | {"origin": "measured", "source": Path(path).name}
    return (
        pl.DataFrame(sorted(rows.values(), key=lambda row: row["batch_size"]))
        .with_columns(pl.col("batch_size").cast(pl.Int64))
        .select(_RATES)
    )


def judged(rates: pl.DataFrame, claim: pl.DataFrame, percent: float) -> pl.DataFrame:
    """Each point of a measured curve against the envelope.

    Args:
        rates: from :func:`read_curve`; may be empty.
        claim: table ``decode_parity``, one row; gives the range of batch sizes.
        percent: largest allowed difference, of the reference's rate.

    Returns:
        ``rates`` with throughput_ratio, throughput_difference_percent and inside_envelope, which is null for a batch
        size that the claim does not cover.
    """
    ratio = pl.col("output_tok_per_s") / pl.col("reference_output_tok_per_s")
    return rates.with_columns(
        ratio.alias("throughput_ratio"), (100 * (ratio - 1)).alias("throughput_difference_percent")
    ).with_columns(pl.when(_claimed(claim)).then(_inside(percent)).alias("inside_envelope"))


def worst_point(curve: pl.DataFrame, claim: pl.DataFrame) -> pl.DataFrame:
    """The batch size at which a measured curve is farthest from the reference, among the claimed ones.

    Args:
        curve: from :func:`judged`; may be empty.
        claim: table ``decode_parity``, one row; gives the range of batch sizes.

    Returns:
        The row of the largest absolute difference, the first of several; no row if no batch size is in the range.
    """
    chosen = curve.filter(_claimed(claim))
    return chosen.sort(pl.col("throughput_difference_percent").abs(), descending=True, maintain_order=True).head(1)


def conditions(claim: pl.DataFrame, curve: pl.DataFrame, params: Params) -> pl.DataFrame:
    """The conditions of the user's curve beside the claim's; drafts agree in either reading of nextn.

    The claim is about a range of batch sizes: a curve is one of it if it has every doubling, as in :func:`cases`.

    Returns:
        setting, engine_setting (of the curve), reference_setting (of the claim), agreement, origin "measured", source.
    """
    row = claim.row(0, named=True)
    sizes, wanted_sizes = curve["batch_size"].to_list(), cases(claim, params.draft_tokens)["batch_size"].to_list()
    stated = {
        "hardware": (params.points_hardware, row["hardware"]),
        "compared with": (params.points_reference, row["reference_engine"]),
        "context [tokens]": (params.points_context_tokens, row["context_tokens"]),
    }
    drafts = readings(claim)["draft_tokens"].to_list()
    rows = [
        {
            "setting": name,
            "engine_setting": _NOT_RECORDED if got in (None, _NOT_RECORDED) else str(got),
            "reference_setting": str(wanted),
            "agreement": _agreement(None if got == _NOT_RECORDED else got, wanted),
        }
        for name, (got, wanted) in stated.items()
    ]
    got = params.points_draft_tokens
    rows.append(
        {
            "setting": "drafts per step",
            "engine_setting": _NOT_RECORDED if got is None else str(got),
            "reference_setting": " or ".join(map(str, drafts)),
            "agreement": _agreement(got, got if got in drafts else drafts),
        }
    )
    rows.append(
        {
            "setting": "batch sizes [requests]",
            "engine_setting": ", ".join(map(str, sizes)),
            "reference_setting": ", ".join(map(str, wanted_sizes)),
            "agreement": "same" if set(wanted_sizes) <= set(sizes) else "differs",
        }
    )
    return pl.DataFrame(rows).with_columns(
        pl.lit("measured").alias("origin"), pl.lit(curve["source"][0]).alias("source")
    )


def _engines(claim: pl.DataFrame) -> tuple[str, str]:
    return claim["engine"][0], claim["reference_engine"][0]


def _agreement(ours: object, theirs: object) -> str:
    if ours is None or theirs is None:
        return _NOT_STATED
    return "same" if ours == theirs else "differs"


def _inside(percent: float) -> pl.Expr:
    return pl.col("throughput_difference_percent").abs() <= percent * _SLACK


def _claimed(claim: pl.DataFrame) -> pl.Expr:
    return pl.col("batch_size").is_between(claim["min_batch_size"][0], claim["max_batch_size"][0])


@CHECKS("within_6_percent")
def _within(evidence: Evidence) -> Finding:
    """Settled only by a measured curve under the claim's own conditions, judged at the published percentage.

    The source does not say which engine is the 100 %, so the two readings of the envelope must agree.
    """
    if evidence.curve.is_empty():
        half = f"; run {evidence.run.id} has vLLM's half" if evidence.run is not None else ""
        note = "no point of either curve is printed; give points_path to judge a measured curve"
        return Finding(None, note=note + half)
    unlike = evidence.conditions.filter(pl.col("agreement") != "same")["setting"].to_list()
    if unlike:
        return Finding(None, note=f"the measured curve is not under the claim's conditions: {', '.join(unlike)}")
    limit = evidence.claim["max_difference_percent"][0]
    batches = evidence.curve.filter(_claimed(evidence.claim))
    worst = worst_point(evidence.curve, evidence.claim).row(0, named=True)
    holds = {
        row["reading"]: batches["throughput_ratio"]
        .is_between(row["throughput_ratio_low"] / _SLACK, row["throughput_ratio_high"] * _SLACK)
        .all()
        for row in envelope(evidence.claim, limit).to_dicts()
    }
    note = (
        f"largest difference {worst['throughput_difference_percent']:+.2f} % at batch {worst['batch_size']}, "
        f"{batches.height} batch sizes"
    )
    if len(set(holds.values())) > 1:
        words = ", ".join(f"{'inside' if inside else 'outside'} as a {reading}" for reading, inside in holds.items())
        return Finding(None, note=f"{note}: {words}; the source does not say which is meant")
    return Finding(all(holds.values()), "measured", note)


@CHECKS("prefill_is_no_comparison")
def _no_comparison(evidence: Evidence) -> Finding:
    prefill = evidence.settings.filter(pl.col("phase") == "prefill")
    apart = prefill.filter(pl.col("agreement") != "same")["setting"].to_list()
    stated = prefill.filter(pl.col("setting") == "hardware")["reference_setting"][0] != _NOT_STATED
    differs = (prefill["agreement"] == "differs").any()
    return Finding(bool(differs and not stated), "derived", f"not the same, or not stated: {', '.join(apart)}")


@CHECKS("deepinfer_prefill_gpus")
def _prefill_gpus(_: Evidence) -> Finding:
    row = published.read("single_node_deployment").row(by_predicate=pl.col("phase") == "prefill", named=True)
    return Finding(
        row["num_gpus"], "derived", f"{row['source']}: its maker benchmarks prefill on {row['num_gpus']} GPUs"
    )


@CHECKS("vllm_replay_tokens")
def _replay(_: Evidence) -> Finding:
    window = catalog.model("deepseek-v4.1-flash").attention.sliding_window_tokens
    return Finding(window.known, "derived", f"sliding window of every layer, {window.source}: a replay refills it")


@CHECKS("deepinfer_replay_tokens", "deepinfer_redundant_experts", "deepinfer_is_offline")
def _of_deepinfer(_: Evidence) -> Finding:
    return OPEN
