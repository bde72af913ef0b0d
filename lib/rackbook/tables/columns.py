"""The vocabulary: what each column of a tidy frame means, wherever it appears.

A column name means one quantity in one unit in the whole project. Charts take their axis titles from
here, readers their checks, and notebooks their units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import polars as pl

from rackbook.errors import DataError, one_of

if TYPE_CHECKING:
    from collections.abc import Iterable

ORIGINS = ("published", "derived", "measured", "modelled", "simulated")
"""How a value came to be; DESIGN order, which is also the order of legends."""


_KINDS = {
    pl.Int64: "a whole number",
    pl.Float64: "a number",
    pl.Boolean: "true or false",
    pl.Date: "a date as YYYY-MM-DD",
    pl.String: "text",
}


@dataclass(frozen=True)
class Column:
    """One quantity.

    Attributes:
        name: as it stands in frames and files; carries the unit where there is one.
        dtype: polars type.
        label: meaning in a few words, without the unit.
        unit: unit symbol, None for names, counts of one kind say what is counted.
        minimum: smallest allowed value, inclusive.
        maximum: largest allowed value, inclusive.
        allowed: the allowed words of a text column.
    """

    name: str
    dtype: type[pl.DataType]
    label: str
    unit: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    allowed: tuple[str, ...] | None = None

    @property
    def title(self) -> str:
        """Axis or header text: label and unit; a unit that only repeats the label is left out."""
        return f"{self.label} ({self.unit})" if self.unit and self.unit.lower() != self.label.lower() else self.label

    @property
    def expectation(self) -> str:
        """What a value must be, in words."""
        if self.allowed is not None:
            return f"one of {', '.join(self.allowed)}"
        kind = _KINDS[self.dtype]
        if self.minimum is not None and self.maximum is not None:
            kind += f" from {self.minimum:g} to {self.maximum:g}"
        elif self.minimum is not None:
            kind += f" ≥ {self.minimum:g}"
        elif self.maximum is not None:
            kind += f" ≤ {self.maximum:g}"
        return f"{kind} [{self.unit}]" if self.unit else kind


def _count(name: str, label: str, unit: str | None, minimum: float = 1) -> Column:
    return Column(name, pl.Int64, label, unit, minimum)


def _amount(
    name: str, label: str, unit: str | None, minimum: float | None = 0, maximum: float | None = None
) -> Column:
    return Column(name, pl.Float64, label, unit, minimum, maximum)


def _day(name: str, label: str) -> Column:
    return Column(name, pl.Date, label)


def _flag(name: str, label: str) -> Column:
    return Column(name, pl.Boolean, label)


def _text(name: str, label: str, allowed: tuple[str, ...] | None = None) -> Column:
    return Column(name, pl.String, label, allowed=allowed)


_VOCABULARY = (
    # provenance, on every point
    _text("origin", "Origin", ORIGINS),
    _text("source", "Source"),
    _text("locator", "Where in the source"),
    _text("formula", "Formula"),
    _text("missing_reason", "Why a value is missing"),
    # where and what was run
    _text("hardware", "Hardware"),
    _text("model", "Model"),
    _text("engine", "Engine"),
    _text("reference_engine", "Compared with"),
    _text("reference_hardware", "Hardware compared with"),
    _text("setting", "Setting"),
    _text("workload", "Workload"),
    _text("tokens_counted", "Tokens counted"),
    _text("phase", "Phase of a request", ("prefill", "decode")),
    _flag("approximate", "Printed as an approximation"),
    # sizes of the system and the batch
    _count("ep_size", "Expert-parallel size", "GPUs"),
    _count("dp_size", "Data-parallel size", "ranks"),
    _count("num_ranks", "Ranks", "ranks"),
    _count("num_gpus", "GPUs", "GPUs"),
    _count("tp_size", "Tensor-parallel size", "GPUs"),
    _count("baseline_ep_size", "Expert-parallel size compared with", "GPUs"),
    _count("num_prefill_engines", "Prefill engines", "engines"),
    _count("num_decode_engines", "Decode engines", "engines"),
    _count("prefill_dp_size", "Data-parallel size of a prefill engine", "ranks"),
    _count("context_tokens", "Context length", "tokens"),
    _count("cached_tokens", "Cached prefix", "tokens", 0),
    _count("new_tokens", "New tokens", "tokens"),
    _count("min_new_tokens", "New tokens, from", "tokens"),
    _count("max_new_tokens", "New tokens, to", "tokens"),
    _count("prompt_tokens", "Prompt length", "tokens"),
    _count("prefill_chunk_tokens", "Prefill chunk", "tokens"),
    _count("replay_tokens", "Bounded replay", "tokens"),
    _count("input_tokens", "Input length", "tokens"),
    _count("output_tokens", "Output length", "tokens"),
    _count("requests_per_rank", "Requests per rank", "requests"),
    _count("concurrency", "Concurrent requests", "requests"),
    _count("batch_cap", "Cap on the batch", "requests"),
    _count("min_batch_size", "Batch size, from", "requests"),
    _count("max_batch_size", "Batch size, to", "requests"),
    _count("admissions_per_step", "Admissions per step, at most", "requests"),
    _count("nextn", "nextn of the decode setting", "tokens"),
    _amount("acceptance_length", "Accepted tokens per step", "tokens", 1),
    _count("max_capture_tokens", "Largest captured CUDA graph", "tokens"),
    # parts of a step and of a model
    _text("component", "Part of the step"),
    _text("cause", "Cause"),
    _text("fix", "Fix"),
    _text("stage", "Before or after", ("before", "after")),
    _text("schedule", "Replay", ("mirror", "lag")),
    _text("part", "Model part", ("target", "draft")),
    _text("routing", "Expert routing", ("uniform", "observed")),
    _text("placement", "Expert placement"),
    _count("top_k", "Experts per token", "experts"),
    _count("num_redundant_experts", "Redundant experts", "experts", 0),
    _count("window_steps", "Load window", "steps"),
    _count("interval_steps", "Rearrangement interval", "steps"),
    _amount("balancedness_per_layer_step", "Balancedness, mean ÷ max per layer and step", None, 0, 1),
    # times
    _amount("step_ms", "Decode step time", "ms"),
    _amount("step_share_percent", "Share of the step", "%", 0, 100),
    _amount("gpu_saving_ms", "GPU time saved per step", "ms", None),
    _amount("dp_sync_ms", "Synchronisation of the DP ranks per step", "ms"),
    _amount("admission_cpu_ms", "CPU time per admission", "ms"),
    _amount("ttft_p90_s", "Time to first token (TTFT), P90", "s"),
    _amount("lag_s_per_rank", "Delay from one rank to the next", "s"),
    _flag("prefix_caching", "Prefix caching"),
    _amount("tpot_ms", "Time per output token (TPOT)", "ms"),
    # rates
    _amount("output_tok_per_s", "Output throughput", "tokens/s"),
    _amount("total_tok_per_s", "Total throughput", "tokens/s"),
    _amount("total_tok_per_s_per_gpu", "Total throughput per GPU", "tokens/s/GPU"),
    _amount("prefill_tok_per_s", "Prefill throughput", "tokens/s"),
    _amount("prefill_tok_per_s_per_gpu", "Prefill throughput per GPU", "tokens/s/GPU"),
    _amount("acceptance_percent", "Accepted draft tokens", "%", 0, 100),
    _amount("speedup", "Speed-up", "×"),
    _amount("gain_percent", "Gain in throughput", "%", None),
    _amount("min_gain_percent", "Gain in throughput, least", "%", None),
    _amount("max_gain_percent", "Gain in throughput, most", "%", None),
    _amount("max_difference_percent", "Difference, at most", "%"),
    _amount("interactivity_p90_tok_per_s", "Interactivity per user, P90", "tokens/s"),
    # memory
    _text("parallelism", "Parallelism"),
    _amount("weights_gib_per_gpu", "Weights per GPU", "GiB"),
    _amount("kv_cache_gib_per_gpu", "KV cache per GPU", "GiB"),
    _count("kv_cache_tokens_per_rank", "KV cache capacity per rank", "tokens"),
    _count("max_seqs_per_rank", "Running sequences per rank, at most", "sequences"),
    _count("max_seqs_per_node", "Running sequences per node, at most", "sequences"),
    # releases and pull requests
    _text("package", "Package"),
    _text("version", "Version"),
    _text("min_nvcc_version", "NVCC, at least"),
    _flag("needs_rdma", "Needs an RDMA device"),
    _text("user", "Who"),
    _text("title", "Title"),
    _text("state", "State", ("merged", "open")),
    _count("pr", "Pull request", None),
    _count("releases_behind", "Releases behind the newest", "releases", 0),
    _count("weeks_behind", "Age of the release", "weeks", 0),
    _day("released_on", "Released"),
    _day("merged_on", "Merged"),
    _day("looked_up_on", "Looked up"),
    # money
    _text("price_period", "Price period", ("off-peak", "peak")),
    _amount("usd_per_gpu_hour", "Revenue", "USD per GPU-hour"),
    _text("token_kind", "Kind of token", ("cache hit", "cache miss", "output")),
    _amount("usd_per_mtok", "Price", "USD per million tokens"),
    _amount("gpu_hour_cost_usd", "Cost", "USD per GPU-hour"),
    _amount("cache_hit_share_percent", "Share of cache hits in all tokens", "%", 0, 100),
    _amount("cache_miss_share_percent", "Share of cache misses in all tokens", "%", 0, 100),
    _amount("output_share_percent", "Share of output in all tokens", "%", 0, 100),
    _amount("input_hit_rate_percent", "Hit rate of the input", "%", 0, 100),
    _text("mix", "Token mix"),
    _amount("usd_per_gpu_hour_per_point", "Revenue per percentage point", "USD per GPU-hour", None),
    _text("weekday", "Day", ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")),
    _count("hour_of_day", "Hour of the day", None, 0),
    _amount("hours_per_week", "Hours per week", "h", 0, 168),
    # serving points: what may be compared, and the readings of a rate
    _text("curve", "Curve"),
    _flag("on_frontier", "Not beaten on its curve"),
    _count("num_points", "Points", "points", 0),
    _count("num_on_frontier", "Points that are not beaten", "points", 0),
    _text("interactivity_definition", "Definition of interactivity"),
    _text("acceptance_kind", "Acceptance of drafts", ("real", "synthetic")),
    _amount("interactivity_tok_per_s", "Interactivity, 1000 ÷ TPOT", "tokens/s"),
    _amount("throughput_per_user_tok_per_s", "Total throughput ÷ concurrency", "tokens/s"),
    _amount("user_tok_per_s", "Tokens per second and user", "tokens/s"),
    _text("definition", "Definition"),
    _text("reading", "Reading"),
    _amount("tok_per_s_per_gpu", "Tokens of this reading per GPU", "tokens/s/GPU"),
    _count("num_prefill_gpus", "GPUs that prefill", "GPUs"),
    _count("num_decode_gpus", "GPUs that decode", "GPUs"),
    _count("num_decode_seats", "Requests that can decode at once", "requests"),
    _amount("clients_per_gpu", "Clients per GPU", "clients"),
    _amount("seats_per_client_percent", "Decode seats per client", "%"),
    _text("deployment", "Deployment"),
    # what one step reads
    _count("checked_tokens", "Tokens that a step checks", "tokens"),
    _amount("distinct_experts_per_layer", "Different experts per layer", "experts"),
    _text("expert_overlap", "Experts of the tokens of a step", ("all the same", "independent")),
    _amount("read_gb_per_step", "Weights read per step", "GB"),
    _amount("hbm_floor_ms", "Time to read them at full memory bandwidth", "ms"),
    _amount("hbm_use_percent", "Share of the memory bandwidth in use", "%"),
    # engine steps
    _count("step", "Step", "steps"),
    _count("num_prefill_tokens", "Prefill tokens in the step", "tokens", 0),
    _count("num_decode_requests", "Decoding requests in the step", "requests", 0),
    _amount("mean_context_tokens", "Mean context of the decoding requests", "tokens"),
    _amount("step_low_ms", "Lower bound of the step time", "ms", None),
    _amount("step_high_ms", "Upper bound of the step time", "ms", None),
    # growth between two contexts
    _count("from_context_tokens", "From context", "tokens"),
    _count("to_context_tokens", "To context", "tokens"),
    _amount("context_ratio", "Context growth", "×"),
    _amount("step_increase_ms", "Step increase", "ms", None),
    _amount("step_increase_percent", "Step increase", "%", None),
    # host work in the step, and the engine gap
    _text("quantity", "Quantity"),
    _text("assumption", "Holds if"),
    _amount("before", "Before", None, None),
    _amount("after", "After", None, None),
    _amount("after_to_before", "After ÷ before", "×"),
    _amount("low", "At least", None, None),
    _amount("high", "At most", None, None),
    _text("sync_part", "Part of the synchronisation", ("waited for", "either", "hidden")),
    _text("growth_law", "Growth with the ranks"),
    _count("num_hops", "Hops one after the other", "hops", 0),
    _amount("hop_ms", "Time per hop", "ms"),
    _amount("growth_ms", "Growth per step from the smaller to the larger engine", "ms", None),
    _text("admission_cost", "Cost of an admission", ("before", "after", "given")),
    _amount("ns_per_token", "CPU time of an admission per prompt token", "ns"),
    _amount("stall_ms", "Admission work in one step", "ms"),
    _amount("since_burst_s", "Time since the burst", "s"),
    _text("cap", "Cap on admissions per step and rank"),
    _text("arrivals", "Arrivals", ("one by one", "partly in bursts")),
    _count("num_steps", "Steps", "steps", 0),
    _count("num_waiting", "Requests still waiting at the end", "requests", 0),
    _amount("step_mean_ms", "Step time, mean", "ms"),
    _amount("step_p50_ms", "Step time, median", "ms"),
    _amount("step_p99_ms", "Step time, P99", "ms"),
    _amount("step_p99_low_ms", "Step time, P99 of the best repeat", "ms"),
    _amount("step_p99_high_ms", "Step time, P99 of the worst repeat", "ms"),
    _amount("step_max_ms", "Step time, longest", "ms"),
    _amount("delay_p50_ms", "Admission delay, median", "ms"),
    _amount("delay_p99_ms", "Admission delay, P99", "ms"),
    _amount("delay_p99_low_ms", "Admission delay, P99 of the best repeat", "ms"),
    _amount("delay_p99_high_ms", "Admission delay, P99 of the worst repeat", "ms"),
    _amount("delay_max_ms", "Admission delay, longest", "ms"),
    _text("step_part", "Part of the engine step", ("GPU", "gap")),
    _amount("part_ms", "Time per step", "ms"),
    _text("bound", "Known as", ("exactly", "at most", "at least")),
    _amount("forward_ms", "Forward pass", "ms"),
    _amount("engine_ms", "Engine step", "ms"),
    _amount("cpu_ms", "Host work per step", "ms"),
    _amount("gap_ms", "Engine gap", "ms", None),
    _amount("gap_share_percent", "Engine gap, share of the step", "%", None, 100),
    _amount("total_cpu_low_ms", "Host work per step, at least", "ms"),
    _amount("total_cpu_high_ms", "Host work per step, at most", "ms"),
    _amount("hidden_cpu_low_ms", "Hidden host work per step, at least", "ms"),
    _amount("hidden_cpu_high_ms", "Hidden host work per step, at most", "ms"),
    _amount("not_cpu_ms", "Gap that is not this rank's host work, at least", "ms"),
    _text("baseline_bound_by", "Narrower engine waits for", ("GPU", "host")),
    _text("bound_by", "Wider engine waits for", ("GPU", "host")),
    # verdicts
    _text("notebook", "Notebook"),
    _text("verdict", "Verdict", ("reproduced", "consistent", "inconsistent", "refuted", "open")),
    _text("basis", "How it was found", ("derived", "modelled", "simulated", "measured")),
    _text("claim", "Claim"),
    _text("statement", "Statement"),
    _text("unit", "Unit"),
    _count("num_claims", "Claims", "claims", 0),
    _amount("value", "Claimed", None, None),
    _amount("found", "Found here", None, None),
    _amount("difference_percent", "Found minus claimed", "%", None),
)

COLUMNS: dict[str, Column] = {c.name: c for c in _VOCABULARY}
if len(COLUMNS) != len(_VOCABULARY):
    raise DataError("a column is defined twice in the vocabulary")


def column(name: str) -> Column:
    """Look a column up.

    Raises:
        DataError: no such column; the message lists the closest.
    """
    if name not in COLUMNS:
        raise DataError(one_of(name, COLUMNS, "column"))
    return COLUMNS[name]


def title(name: str) -> str:
    """Axis title of a column: its label and unit."""
    return column(name).title


def require(frame: pl.DataFrame, names: Iterable[str], where: str) -> None:
    """Check that a frame has the columns that a chart or a function reads, with the vocabulary's types.

    Raises:
        DataError: a column is missing or has another type; names the columns that are there.
    """
    for name in names:
        if name not in frame.columns:
            got = ", ".join(frame.columns) or "(none)"
            raise DataError(f"{where}: column {name!r} is missing, got columns: {got}")
        expected, dtype = column(name).dtype, frame.schema[name]
        numeric = expected in (pl.Float64, pl.Int64) and dtype.is_numeric()
        if dtype != expected and not numeric:
            raise DataError(f"{where}: column {name!r} has type {dtype}, expected {expected.__name__}")
