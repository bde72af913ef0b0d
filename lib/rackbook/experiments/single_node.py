"""How does vLLM compare with DeepInfer on one node of 8 B300, and which of the printed figures fit together?

The printed tables with their gaps, what can be computed from them, the steps that fall out of the CUDA graphs, and
three printed figures of the KV cache that fit no common definition.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rackbook import catalog, published
from rackbook.claims import Checks, Finding
from rackbook.experiments import live, parameter_rules, single_node_measured, single_node_steps
from rackbook.experiments.stated_facts import printed_elsewhere
from rackbook.models import memory, node_memory, node_throughput
from rackbook.models.closed_loop import ClosedLoop
from rackbook.models.node_throughput import K
from rackbook.runs import Run

CHECKS = Checks("single_node")
doubts = live.doubts

MODEL = "deepseek-v4.1-flash"
DECODING, OTHER = "decoding", "waiting and prefill"


class Params(BaseModel):
    """Parameters of notebook 12."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capture_tokens: list[int] = Field(default=[1024, 1536, 8192], min_length=1, description="largest captured steps")
    requests_per_rank: int = Field(default=256, ge=1, description="requests that run on each rank")
    num_ranks: int = Field(default=8, ge=1, description="ranks that pad to the largest step")
    prompt_tokens: int = Field(default=1024, ge=1, description="length of a prompt")
    output_tokens: int = Field(default=1024, ge=1, description="length of an answer")
    max_step_tokens: int = Field(default=8192, ge=1, description="most tokens of a step (max-num-batched-tokens)")
    draft_tokens: int = Field(default=5, ge=0, description="tokens drafted per request and step")
    acceptance_percent: float = Field(default=19.0, ge=0, le=100, description="share of the drafts that are accepted")
    acceptance_length: float = Field(default=3.51, ge=1, description="tokens per step on other prompts, what if")
    max_model_len: int = Field(default=16_384, ge=1, description="longest request that the KV cache is counted for")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="b300x8", description=live.CLUSTER)
    measured_input_tokens: list[int] = Field(
        default=[128, 1024, 8192], min_length=1, description="lengths of a prompt to measure with"
    )
    measured_ranks: int | None = Field(default=None, ge=1, description="ranks to measure with; the source's if none")
    measured_repeats: int = Field(default=3, ge=1, description="runs per load; intervals are over them")

    _ascending = field_validator("capture_tokens")(parameter_rules.ascending)

    @model_validator(mode="after")
    def _fits(self) -> Params:
        parameter_rules.no_more_than_checked(self)
        per_request = 1 + self.draft_tokens
        if self.requests_per_rank * per_request > self.max_step_tokens:
            raise ValueError(
                f"max_step_tokens: got {self.max_step_tokens}, allowed: at least "
                f"{self.requests_per_rank * per_request}, what {self.requests_per_rank} decoding requests take"
            )
        return self


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``single_node``, published, with its gaps.
        runs: the same by workload, for the chart.
        rates: one row per printed run: output and total throughput, node and GPU, origin "derived".
        ratios: printed figures beside what other printed figures give: quantity, value, found, difference_percent,
            unit, reading.
        loop: what concurrency and throughput say about a request, per vLLM run: request_s, decode_s, other_s,
            prefill_s, num_decoding.
        request_parts: request_s by workload and request_part, for the chart.
        acceptance: tokens_per_step by workload, and output_tok_per_s at the chosen acceptance length.
        step_sizes: step_tokens by num_new_prompts, with the smallest ceiling that covers them, origin "modelled".
        cover: per ceiling, the share of steps that it covers: covered_low_percent, covered_high_percent.
        weights: weights per GPU of both printed deployments beside the checkpoint's parts.
        budget: what of a GPU's memory the source names: quantity, value, unit.
        kv: three figures of the KV cache: kv_bytes_per_token with low and high, and what each would mean.
        candidates: explanations of their differences, each with the figure it would need: quantity, hardware, found,
            unit, assumption.
        run: the run that ``source`` names; else the recorded run of the CPU lab; None where there is neither.
        measured: table ``serving_measured``: the points of that run; empty without one.
    """

    points: pl.DataFrame
    runs: pl.DataFrame
    rates: pl.DataFrame
    ratios: pl.DataFrame
    loop: pl.DataFrame
    request_parts: pl.DataFrame
    acceptance: pl.DataFrame
    step_sizes: pl.DataFrame
    cover: pl.DataFrame
    weights: pl.DataFrame
    budget: pl.DataFrame
    kv: pl.DataFrame
    candidates: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame


LAB = {"cluster": "cpu-lab"}
"""Parameters with which the CPU lab measures; the plan has a grid of its own for two cores."""


def collect(params: Params) -> Evidence:
    """Gather the printed tables, everything that follows from them, and a run; measures one if ``source`` says so.

    Raises:
        ParameterError: ``source`` is no word, run or folder that is allowed.
        RackbookError: the measurement cannot start, or failed.
    """
    run = live.run_of(CHECKS.topic, params.source, lambda: measure(params)) or live.recorded(CHECKS.topic)
    model = catalog.model(MODEL)
    footprint = model.attention.kv_bytes_per_token.known
    loop = request_times()
    return Evidence(
        points=published.read("single_node"),
        runs=runs_by_workload(),
        rates=rates(),
        ratios=node_throughput.ratios(),
        loop=loop,
        request_parts=request_parts(loop),
        acceptance=acceptance(params),
        step_sizes=single_node_steps.step_sizes(params),
        cover=single_node_steps.graph_cover(params),
        weights=node_memory.weights_by_deployment(model.checkpoint),
        budget=node_memory.memory_budget(),
        kv=node_memory.kv_figures(footprint),
        candidates=node_memory.kv_candidates(footprint, params.max_model_len),
        run=run,
        measured=live.points_of(run, "serving_measured"),
    )


def measure(params: Params) -> Run:
    """Measure the grid on ``cluster`` and keep it as a run.

    Raises:
        RackbookError: the cluster cannot do it, or it failed on the way.
    """
    from rackbook.measurements import single_node  # what talks to vLLM is imported when it is needed

    return single_node.measure(params)


def measured_subtitle(evidence: Evidence) -> str:
    """Hardware, model and sample of the measured grid, for its chart."""
    row = evidence.measured.row(0, named=True)
    return (
        f"{row['hardware']} ({live.description(evidence.run)}), {row['model']}, random prompts; "
        f"{row['repeats']} runs per load, 95 % intervals"
    )


def workload(input_tokens: int, output_tokens: int) -> str:
    """A pair of lengths as the source writes it: "1K → 1K"."""

    def short(tokens: int) -> str:
        return f"{tokens // K}K" if tokens % K == 0 else str(tokens)

    return f"{short(input_tokens)} → {short(output_tokens)}"


def runs_by_workload() -> pl.DataFrame:
    """Printed runs: engine, workload, output_tok_per_s, tpot_ms, origin "published", source, missing_reason."""
    names = ("engine", "output_tok_per_s", "tpot_ms", "origin", "source", "missing_reason")
    return pl.DataFrame(
        [
            {"workload": workload(run["input_tokens"], run["output_tokens"]), **{name: run[name] for name in names}}
            for run in published.read("single_node").to_dicts()
        ],
        infer_schema_length=None,
    )


def rates() -> pl.DataFrame:
    """Output and total throughput of every run, of the node and per GPU; what the source leaves out stays null.

    Returns:
        engine, workload, input_tokens, output_tokens, num_gpus, output_tok_per_s, output_tok_per_s_per_gpu,
        total_tok_per_s, total_tok_per_s_per_gpu, origin "derived", source, formula, missing_reason.
    """
    rows = []
    for run in published.read("single_node").to_dicts():
        output, gpus = run["output_tok_per_s"], run["num_gpus"]
        total = None if output is None else node_throughput.total_tok_per_s(run)
        rows.append(
            {
                "engine": run["engine"],
                "workload": workload(run["input_tokens"], run["output_tokens"]),
                "input_tokens": run["input_tokens"],
                "output_tokens": run["output_tokens"],
                "num_gpus": gpus,
                "output_tok_per_s": output,
                "output_tok_per_s_per_gpu": None if output is None else output / gpus,
                "total_tok_per_s": total,
                "total_tok_per_s_per_gpu": None if total is None else total / gpus,
                "origin": "derived",
                "source": run["source"],
                "formula": "total = output × (input + output length) ÷ output length",
                "missing_reason": run["missing_reason"] if output is None else None,
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


def request_times() -> pl.DataFrame:
    """What a constant number of requests in flight and the printed throughput say about the time of a request.

    Returns:
        workload, concurrency, output_tok_per_s, tpot_ms (printed), ms_per_token (concurrency ÷ throughput), request_s,
        decode_s, other_s, prefill_s (one prompt of every request in flight, at the printed prefill rate of 8K
        prompts), num_decoding, origin "derived", source, formula. Runs without a printed TPOT are left out.
    """
    rate = node_throughput.prefill("vLLM")["prefill_tok_per_s"]
    rows = []
    for run in published.read("single_node").filter(pl.col("tpot_ms").is_not_null()).to_dicts():
        loop = ClosedLoop(run["concurrency"], run["output_tokens"], run["output_tok_per_s"], run["tpot_ms"])
        rows.append(
            {
                "workload": workload(run["input_tokens"], run["output_tokens"]),
                "concurrency": run["concurrency"],
                "output_tok_per_s": run["output_tok_per_s"],
                "tpot_ms": run["tpot_ms"],
                "ms_per_token": loop.ms_per_token,
                "request_s": loop.request_s,
                "decode_s": loop.decode_s,
                "other_s": loop.other_s,
                "prefill_s": run["concurrency"] * run["input_tokens"] / rate,
                "num_decoding": loop.num_decoding,
                "origin": "derived",
                "source": "S2",
                "formula": "request = concurrency × output length ÷ output tok/s",
            }
        )
    return pl.DataFrame(rows)


def request_parts(loop: pl.DataFrame) -> pl.DataFrame:
    """The time of a request in two parts: workload, request_part, request_s, origin, source, formula."""
    parts = {DECODING: "decode_s", OTHER: "other_s"}
    return pl.concat(
        loop.select(
            "workload",
            pl.lit(part).alias("request_part"),
            pl.col(column).alias("request_s"),
            "origin",
            "source",
            "formula",
        )
        for part, column in parts.items()
    )


def acceptance(params: Params) -> pl.DataFrame:
    """What the printed acceptance means in tokens per step, and what other prompts could give.

    A step yields the target's own token and the accepted drafts; the share is read as accepted ÷ drafted. The second
    throughput assumes that a step takes as long whatever it accepts.

    Returns:
        workload, acceptance_percent (printed), tokens_per_step, acceptance_length (the parameter), speedup,
        output_tok_per_s (of that length; null where none is printed), origin "modelled", source, missing_reason.
    """
    rows = []
    for row in published.read("single_node_acceptance").sort("input_tokens").to_dicts():
        length = 1 + row["acceptance_percent"] / 100 * params.draft_tokens
        run = node_throughput.run("vLLM", row["input_tokens"])
        output = run["output_tok_per_s"]
        rows.append(
            {
                "workload": workload(run["input_tokens"], run["output_tokens"]),
                "acceptance_percent": row["acceptance_percent"],
                "tokens_per_step": length,
                "acceptance_length": params.acceptance_length,
                "speedup": params.acceptance_length / length,
                "output_tok_per_s": None if output is None else output * params.acceptance_length / length,
                "origin": "modelled",
                "source": "S2",
                "missing_reason": run["missing_reason"] if output is None else None,
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None)


_ALONE = Finding(None, note="one printed figure of one run; the other figures do not determine it")
_STATED = Finding(None, note="a statement about DeepInfer; no figure here bears on it")


def _check(*names: str) -> Callable[[Callable[[Evidence], Finding]], Callable[[Evidence], Finding]]:
    """Register a check for claims; one that a run can settle asks the run first."""

    def register(function: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding]:
        for name in names:
            CHECKS(name)(_measured_first(name, function) if name in single_node_measured.SETTLED else function)
        return function

    return register


def _measured_first(name: str, otherwise: Callable[[Evidence], Finding]) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        return single_node_measured.finding(name, evidence.run, evidence.measured) or otherwise(evidence)

    return check


@_check(
    "output_1k_1k",
    "deepinfer_output_1k_1k",
    "prefill_tok_per_s",
    "deepinfer_prefill_tok_per_s",
    "acceptance_1k_percent",
    "acceptance_8k_percent",
    "graphs_1536",
    "kv_cache_gib_per_gpu",
    "h200_kv_cache_gib_per_gpu",
)
def _alone(_: Evidence) -> Finding:
    return _ALONE


@_check("deepinfer_decode_gpus", "deepinfer_nvcc", "deepinfer_needs_rdma")
def _stated(_: Evidence) -> Finding:
    return _STATED


@_check("deepinfer_prefill_gpus")
def _prefill_gpus(_: Evidence) -> Finding:
    engines = published.read("decode_parity_prefill").filter(pl.col("engine") == "DeepInfer")
    parallelism, source = engines.select("parallelism", "source").row(0)
    return Finding(int(parallelism.rpartition("DP")[2]), "derived", f"{parallelism}, printed by {source}")


@_check("hidden_size", "max_context_tokens", "hbm_gb", "h200_hbm_gb")
def _stated_once(_: Evidence) -> Finding:
    return Finding(None, note="printed by one source; no other figure determines it")


@_check("ratio_8k_1k")
def _ratio_8k(_: Evidence) -> Finding:
    return Finding(None, note="both throughputs stand in rows that the source elides")


@_check("random_prompts_are_worst")
def _worst(_: Evidence) -> Finding:
    return Finding(None, note="no run with other prompts is printed")


@_check("tpot_128_1k_ms", "tpot_1k_1k_ms")
def _tpot(_: Evidence) -> Finding:
    times = ", ".join(f"{row['ms_per_token']:.1f} ms at {row['workload']}" for row in request_times().to_dicts())
    return Finding(None, note=f"concurrency ÷ throughput bounds it from above only: {times}")


@_check("shared_experts")
def _shared(_: Evidence) -> Finding:
    return printed_elsewhere(catalog.model(MODEL).experts.num_shared, "S2")


@_check("routed_experts")
def _routed(_: Evidence) -> Finding:
    per_gpu, gpus = (
        catalog.model(MODEL).experts.num_per_gpu_at_ep8.known,
        node_memory.deployment(node_memory.NODE)["num_gpus"],
    )
    return Finding(per_gpu * gpus, "derived", f"{per_gpu} experts on each of {gpus} GPUs")


@_check("experts_per_gpu")
def _per_gpu(_: Evidence) -> Finding:
    routed, gpus = catalog.model(MODEL).experts.num_routed.known, node_memory.deployment(node_memory.NODE)["num_gpus"]
    return Finding(routed / gpus, "derived", f"{routed} experts over {gpus} GPUs")


@_check("experts_per_token")
def _per_token(_: Evidence) -> Finding:
    top_k = catalog.model(MODEL).experts.top_k
    return Finding(top_k.known, "derived", f"printed by {top_k.source} as well")


@_check("output_128_1k")
def _output_short(_: Evidence) -> Finding:
    run = node_throughput.run("vLLM", 128)
    return Finding(node_throughput.output_tok_per_s(run), "derived", "the printed total × 1,024 ÷ 1,152")


@_check("output_128_1k_rounded")
def _output_short_rounded(_: Evidence) -> Finding:
    return Finding(node_throughput.run("vLLM", 128)["output_tok_per_s"], "derived", "the table's figure")


@_check("total_128_1k")
def _total_short(_: Evidence) -> Finding:
    return Finding(
        node_throughput.total_tok_per_s(node_throughput.run("vLLM", 128)),
        "derived",
        "the printed output × 1,152 ÷ 1,024",
    )


@_check("total_over_output_128_1k")
def _total_over_output(_: Evidence) -> Finding:
    run = node_throughput.run("vLLM", 128)
    return Finding(run["total_tok_per_s"] / run["output_tok_per_s"], "derived", "quotient of the printed throughputs")


@_check("total_1k_1k_derived")
def _total_long(_: Evidence) -> Finding:
    return Finding(
        node_throughput.total_tok_per_s(node_throughput.run("vLLM", K)), "derived", "the printed output × 2,048 ÷ 1,024"
    )


@_check("ratio_1k_1k", "ratio_1k_1k_derived")
def _ratio(_: Evidence) -> Finding:
    return Finding(node_throughput.decode_quotient(), "derived", "quotient of the printed throughputs")


@_check("ratio_at_least_2")
def _at_least_2(_: Evidence) -> Finding:
    return Finding(
        node_throughput.decode_quotient() >= 2,
        "derived",
        f"{node_throughput.decode_quotient():.3f}, which the source rounds to 2.0",
    )


@_check("prefill_per_gpu")
def _prefill_per_gpu(_: Evidence) -> Finding:
    return Finding(node_throughput.prefill_tok_per_s_per_gpu(), "derived", "the node's throughput ÷ 8")


@_check("prefill_ratio")
def _prefill_ratio(_: Evidence) -> Finding:
    return Finding(
        node_throughput.prefill_quotient(),
        "derived",
        "quotient with DeepInfer's own benchmark; the printed ratio has its own measurement, which the summary omits",
    )


@_check("prefill_ratio_derived")
def _prefill_ratio_derived(_: Evidence) -> Finding:
    return Finding(node_throughput.prefill_quotient(), "derived", "quotient of the printed throughputs")


@_check("graphs_8192")
def _graphs_8192(_: Evidence) -> Finding:
    return Finding(node_throughput.run("vLLM", K)["output_tok_per_s"], "derived", "the table's figure for 1K → 1K")


@_check("graphs_gain_percent")
def _graphs_gain(_: Evidence) -> Finding:
    return Finding(node_throughput.graphs_gain_percent(), "derived", "quotient of the two printed throughputs")


def _weights(num_gpus: int, *, engram_scales: bool = True) -> float:
    parts = memory.weights_gib_per_gpu(catalog.model(MODEL).checkpoint, num_gpus, engram_scales=engram_scales)
    return sum(parts.values())


@_check("weights_gib_per_gpu", "weights_derived_gib_per_gpu")
def _weights_b300(_: Evidence) -> Finding:
    return Finding(_weights(8), "derived", "parts of the checkpoint: experts and scales ÷ 8, the rest on each GPU")


@_check("weights_without_engram_scales_gib_per_gpu")
def _weights_without(_: Evidence) -> Finding:
    return Finding(_weights(8, engram_scales=False), "derived", "the same with the scales of the experts only")


@_check("h200_weights_gib_per_gpu")
def _weights_h200(_: Evidence) -> Finding:
    without = _weights(4, engram_scales=False)
    return Finding(
        _weights(4),
        "derived",
        f"experts and scales ÷ 4, the rest on each GPU; {without:.1f} GiB without Engram's scales",
    )


def _remainder_check(part: str) -> Callable[[Evidence], Finding]:
    """A part that lies on each GPU as a whole: what the printed weights of a GPU leave for it."""

    def remainder(source: str) -> float:
        row = node_memory.deployment(source)
        parts = memory.weights_gib_per_gpu(catalog.model(MODEL).checkpoint, row["num_gpus"])
        return row["weights_gib_per_gpu"] - sum(gib for name, gib in parts.items() if name != part)

    def check(_: Evidence) -> Finding:
        note = (
            f"the printed weights per H200 less the other parts; S2's per B300 leave {remainder(node_memory.NODE):.2f}"
        )
        return Finding(remainder(node_memory.RECIPE), "derived", note)

    return check


_check("dense_gib")(_remainder_check("attention, dense, routers"))
_check("embedding_gib")(_remainder_check("embedding, LM head"))


def _bytes_per_token(source: str) -> Finding:
    row = node_memory.deployment(source)
    cache, tokens = row["kv_cache_gib_per_gpu"], row["kv_cache_tokens_per_rank"] / 1e6
    note = f"{cache:g} GiB ÷ {tokens:g} million tokens, both printed by {source}"
    return Finding(node_memory.kv_bytes_per_token(row), "derived", note)


def _tokens_at_footprint(source: str) -> Finding:
    row, footprint = node_memory.deployment(source), catalog.model(MODEL).attention.kv_bytes_per_token
    note = f"{row['kv_cache_gib_per_gpu']:g} GiB ÷ {footprint.source}'s {footprint.known:g} B per token"
    return Finding(node_memory.kv_cache_mtok(row, footprint.known), "derived", note)


@_check("kv_bytes_per_token", "kv_bytes_at_52m_tokens")
def _kv_bytes(_: Evidence) -> Finding:
    return _bytes_per_token(node_memory.NODE)


@_check("kv_tokens_per_rank", "kv_tokens_at_890_bytes")
def _kv_tokens(_: Evidence) -> Finding:
    return _tokens_at_footprint(node_memory.NODE)


@_check("h200_kv_tokens")
def _h200_tokens(_: Evidence) -> Finding:
    return _tokens_at_footprint(node_memory.RECIPE)


@_check("h200_kv_bytes_per_token")
def _h200_bytes(_: Evidence) -> Finding:
    return _bytes_per_token(node_memory.RECIPE)


@_check("seqs_per_node")
def _seqs(_: Evidence) -> Finding:
    row = node_memory.deployment(node_memory.NODE)
    seqs, ranks = row["max_seqs_per_rank"], row["num_gpus"]
    return Finding(seqs * ranks, "derived", f"{seqs} on each of {ranks} ranks")


@_check("memory_is_not_the_limit")
def _not_the_limit(_: Evidence) -> Finding:
    row = node_memory.deployment(node_memory.NODE)
    seqs, length = row["max_seqs_per_rank"], 8 * K + K
    needed = seqs * length
    share = 100 * needed / row["kv_cache_tokens_per_rank"]
    return Finding(
        needed <= row["kv_cache_tokens_per_rank"],
        "derived",
        f"{seqs} × {length:,} tokens are {share:.1f} % of the printed capacity, the smallest of the three figures",
    )


def _checkpoint_check(value: Callable[[catalog.Model], float], note: str) -> Callable[[Evidence], Finding]:
    def check(_: Evidence) -> Finding:
        return Finding(value(catalog.model(MODEL)), "derived", note)

    return check


CHECKS("checkpoint_gib")(_checkpoint_check(lambda m: memory.checkpoint_gib(m.checkpoint), "sum of the five parts"))
CHECKS("engram_parameters_billion")(
    _checkpoint_check(lambda m: memory.engram_parameters(m.engram) / 1e9, "2 layers × 384 million rows × 256")
)
CHECKS("engram_gib")(_checkpoint_check(lambda m: m.engram.num_parameters.known / memory.GIB, "parameters at 8 bit"))
CHECKS("scales_gib")(
    _checkpoint_check(lambda m: memory.scales_gib(m.checkpoint, m.engram), "one byte per 32 expert and Engram weights")
)
