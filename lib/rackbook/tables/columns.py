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


def _count(name: str, label: str, unit: str | None, minimum: float | None = 1) -> Column:
    return Column(name, pl.Int64, label, unit, minimum)


def _amount(name: str, label: str, unit: str | None, minimum: float | None = 0, maximum: float | None = None) -> Column:
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
    _count("num_busy", "Ranks with work", "ranks"),
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
    _text("schedule", "Replay", ("mirror", "lag", "mirror again", "warm-up", "probe")),
    _text("part", "Model part", ("target", "draft")),
    _text("routing", "Expert routing", ("uniform", "observed")),
    _text("placement", "Expert placement"),
    _count("top_k", "Experts per token", "experts"),
    _count("num_redundant_experts", "Redundant experts", "experts", 0),
    _count("window_steps", "Load window", "steps"),
    _count("interval_steps", "Rearrangement interval", "steps"),
    _amount("balancedness_per_layer_step", "Balancedness, mean ÷ max per layer and step", None, 0, 1),
    _count("num_experts", "Routed experts", "experts"),
    _count("layer", "Layer", None, 0),
    _count("expert", "Expert", None, 0),
    _count("expert_tokens", "Tokens of an expert", "tokens", 0),
    _count("expert_place", "Expert of a layer, busiest first", None),
    _amount("expert_load_to_mean", "Tokens of an expert ÷ mean of its layer", None),
    # balancing replayed
    _count("redundant_per_rank", "Redundant experts on each rank", "experts", 0),
    _amount("memory_steps", "Steps in which a preference falls to 1/e", "steps"),
    _amount("printed_after", "After, as printed", None, 0, 1),
    _amount("hindsight_balancedness", "Balancedness of one placement in hindsight", None, 0, 1),
    _amount("balancedness_bound", "Balancedness that no placement exceeds", None, 0, 1),
    _amount("recovered_of_bound_percent", "Part of the gap to the bound that is closed", "%", None, 100),
    _amount("planned_balancedness", "Balancedness of the window's load as placed", None, 0, 1),
    _count("num_experts_moved", "Experts received, all ranks and replayed layers", "experts", 0),
    _amount("moved_percent", "Experts received, of the slots", "%", 0, 100),
    _amount("moved_gb_per_rank", "Experts received by the rank that receives most, replayed layers", "GB"),
    _amount("move_ms", "Time to receive them", "ms"),
    _count("num_duplicates", "Copies beside another on their rank", "copies", 0),
    _amount("rearrangements_per_1000_steps", "Rearrangements per 1,000 steps", None),
    _amount("bias", "Less the source's quantity", None, None),
    _text("cost_reading", "What follows the busiest rank"),
    _amount("extra_ms", "MoE time beyond that of even routing", "ms", None),
    _amount("extra_percent", "MoE time beyond that of even routing, of the whole step", "%", None),
    _count("tokens_per_request", "Tokens per request and step", "tokens"),
    _count("num_draws", "Draws of a batch", "draws"),
    _amount("balancedness_low", "Balancedness, lower bound", None, None),
    _amount("balancedness_high", "Balancedness, upper bound", None, None),
    _amount("balancedness", "Balancedness, by the named definition", None, 0, 1),
    _text("balance_of", "Routing and placement"),
    _amount("busiest_to_mean", "Busiest rank ÷ mean, on average at least", None, 1),
    _count("load_place", "Rank by its load in the draw, 1 is the busiest", None),
    _amount("load_to_mean", "Load of a rank ÷ mean load", None),
    _amount("load_to_mean_low", "Load of a rank ÷ mean load, lower bound", None),
    _amount("load_to_mean_high", "Load of a rank ÷ mean load, upper bound", None),
    _amount("share_of_draws_percent", "Draws in the bin", "%", 0, 100),
    _text("uniform_from", "Balancedness of uniform routing, from"),
    _amount("uniform_balancedness", "Balancedness of uniform routing", None, 0, 1),
    _amount("recovered_percent", "Gap to uniform routing recovered", "%", None),
    _amount("recovered_low_percent", "Gap recovered, at least", "%", None),
    _amount("recovered_high_percent", "Gap recovered, at most", "%", None),
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
    _text("admission_cost", "Cost of an admission", ("before", "after", "given", "measured list", "measured int32")),
    _amount("ns_per_token", "CPU time of an admission per prompt token", "ns"),
    _amount("stall_ms", "Admission work in one step", "ms"),
    _text("cap", "Cap on admissions per step and rank"),
    _text("arrivals", "Arrivals", ("one by one", "partly in bursts", "as in the trace")),
    _count("num_steps", "Steps", "steps", 0),
    _count("num_waiting", "Requests still waiting at the end", "requests", 0),
    _amount("admission_load_percent", "Time to admit all requests, of that in which they arrive", "%"),
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
    # wide EP: the step by parallel size
    _amount("moe_ms", "Target MoE time per step", "ms"),
    _text("moe_origin", "Origin of the MoE time", ORIGINS),
    _amount("rest_ms", "Everything else per step", "ms"),
    _amount("steps_per_s", "Steps per second", "steps/s"),
    _amount("output_tok_per_s_per_gpu", "Output throughput per GPU", "tokens/s/GPU"),
    _amount("throughput_per_gpu_ratio", "Throughput per GPU, relative to the smallest size", "×"),
    _text("doubling", "Expert-parallel size, from → to"),
    _amount("gain_per_doubling_percent", "Gain in throughput per doubling", "%", None),
    _flag("below_threshold", "Below the threshold"),
    _amount("beside_read_ms", "MoE time beside reading the experts", "ms", None),
    _text("moe_part", "Part of the MoE time", ("reading the experts", "everything else")),
    _amount("experts_touched_percent", "Experts that a step reads", "%", 0, 100),
    _amount("popularity_percent", "Popularity at which 99 of 100 steps read an expert, of the mean", "%"),
    _text("weight_part", "Weights"),
    _amount("gib_per_gpu", "Memory per GPU", "GiB"),
    # one node: requests, steps and memory
    _amount("ms_per_token", "Time in flight per output token", "ms"),
    _amount("request_s", "Time per request, from throughput and concurrency", "s"),
    _amount("decode_s", "Decoding time per request, from TPOT", "s"),
    _amount("other_s", "Rest of a request: waiting and prefill", "s", None),
    _amount("prefill_s", "Prefill of one prompt of every request, at the printed rate", "s"),
    _amount("num_decoding", "Requests that decode at once, mean", "requests"),
    _text("request_part", "Part of a request", ("decoding", "waiting and prefill")),
    _count("num_new_prompts", "Prompts that start in the step", None, 0),
    _text("graph_cover", "CUDA graphs up to (tokens)"),
    _amount("covered_low_percent", "Steps inside the CUDA graphs, at least", "%", 0, 100),
    _amount("covered_high_percent", "Steps inside the CUDA graphs, at most", "%", 0, 100),
    _amount("kv_bytes_per_token", "KV cache per token", "B"),
    _amount("kv_cache_mtok", "KV cache capacity", "million tokens"),
    _amount("tokens_per_step", "Tokens per step and request", "tokens"),
    # the parts of a step, and kernel profiles
    _text("run", "Run"),
    _text("part_of_step", "Part of the published breakdown"),
    _amount("part_speedup", "Speed-up of the part", "×", 1),
    _amount("step_speedup", "Speed-up of the step", "×"),
    _amount("step_speedup_limit", "Speed-up of the step, at most", "×"),
    _amount("target_rest_ms", "Rest of the target's step if MoE takes the printed share", "ms"),
    _amount("other_ms", "What then is left of everything else", "ms", None),
    _text("profile_format", "Format of the profile", ("bench forward", "Nsight")),
    _count("rank", "Rank", None, 0),
    _text("kernel", "Kernel"),
    _amount("kernel_us", "GPU time per forward pass", "µs"),
    _amount("calls_per_forward", "Calls per forward pass", "calls"),
    _amount("recording_share_percent", "Share of the recording's kernel time", "%", 0, 100),
    _count("num_forwards", "Forward passes in the recording", "forward passes"),
    _count("num_kernels", "Kernels", "kernels", 0),
    _amount("span_us", "First to last GPU activity", "µs"),
    _amount("busy_us", "Busy time, as the file gives it", "µs"),
    _amount("kernel_sum_us", "Sum of all kernels", "µs"),
    _amount("pre_forward_us", "GPU time before the forward pass", "µs"),
    _amount("before_us", "GPU time per forward pass, before", "µs"),
    _amount("after_us", "GPU time per forward pass, after", "µs"),
    _amount("difference_us", "Difference per forward pass, after − before", "µs", None),
    _amount("before_share_percent", "Share, before", "%", 0, 100),
    _amount("after_share_percent", "Share, after", "%", 0, 100),
    # the gains of several fixes
    _text("gains_of", "Gains"),
    _text("composition", "How the gains combine", ("multiplied", "added")),
    _amount("multiplied_gain_percent", "Gain so far, multiplied", "%", None),
    _amount("added_gain_percent", "Gain so far, added", "%", None),
    _amount("min_total_gain_percent", "Gain of all together, least", "%", None),
    _amount("max_total_gain_percent", "Gain of all together, most", "%", None),
    _amount("min_residual_points", "All together minus the combined gains, least", "percentage points", None),
    _amount("max_residual_points", "All together minus the combined gains, most", "percentage points", None),
    _flag("inside_total", "Combined gain inside that of all together"),
    _amount("other_gain_percent", "Gain of the two other fixes", "%", None),
    _amount("min_other_gain_percent", "Gain of the two other fixes, least", "%", None),
    _amount("max_other_gain_percent", "Gain of the two other fixes, most", "%", None),
    _amount("us_per_token", "Prefill time per new token and GPU", "µs"),
    _text("time_of", "Time"),
    _text("switch_on", "Arguments, on"),
    _text("switch_off", "Arguments, off"),
    _flag("alone", "Switches this fix and nothing else"),
    _text("switches", "What the switch compares"),
    _text("against_fix", "Against the fix"),
    _text("needs", "Needs"),
    # DP imbalance: replays, laws of step times, routing
    _text("activity", "What a rank does", ("computing", "waiting", "no request")),
    _amount("from_s", "Time since the first request", "s"),
    _amount("to_s", "Until", "s"),
    _amount("mean_depth_tokens", "Context that a computed token attends to, mean", "tokens"),
    _amount("loss_percent", "Throughput lost to DP imbalance", "%", None, 100),
    _amount("loss_low_percent", "Loss, lowest", "%", None, 100),
    _amount("loss_high_percent", "Loss, highest", "%", None, 100),
    _amount("whole_run_loss_percent", "Loss over the whole run, stagger included", "%", None, 100),
    _amount("stagger_loss_percent", "Loss to the stagger alone", "%", 0, 100),
    _amount("excess_percent", "Lagged step, longer than a rank's own", "%"),
    _text("varied", "What is varied"),
    _text("length_law", "Law of the prompt lengths"),
    _amount("ps_per_attended_token", "Cost of depth, per token and context token", "ps"),
    _amount("times_default", "Relative to the default", "×"),
    _text("law", "Law of the step times"),
    _amount("excess_to_two_ranks", "Cost of waiting, relative to 2 ranks", "×"),
    _amount("run_s", "Length of the mirrored run", "s"),
    _amount("ratio_percent", "DEP4 per GPU, of DEP2", "%"),
    _amount("ratio_low_percent", "DEP4 per GPU, of DEP2, at least", "%"),
    _amount("ratio_high_percent", "DEP4 per GPU, of DEP2, at most", "%"),
    _amount("gap_part_percent", "Share of the gap (of its logarithm)", "%", None),
    _text("policy", "Routing", ("round-robin", "least-requests", "least-tokens")),
    _amount("load_percent", "Offered load, of the ranks' capacity alone", "%"),
    _amount("ttft_p50_s", "Time to first token (TTFT), median", "s"),
    _amount("ttft_p99_s", "Time to first token (TTFT), P99", "s"),
    _amount("ttft_p99_low_s", "Time to first token (TTFT), P99 of the best repeat", "s"),
    _amount("ttft_p99_high_s", "Time to first token (TTFT), P99 of the worst repeat", "s"),
    _amount("wait_percent", "Rank time without own tokens while another rank works", "%", 0, 100),
    # a replay on a running server: its requests, and what it lost
    _text("session", "Session"),
    _text("error", "What went wrong"),
    _amount("arrival_s", "Arrival in the trace", "s"),
    _amount("at_s", "Time since the replay began", "s"),
    _amount("computed_tokens", "Prompt tokens computed so far", "tokens"),
    _amount("step_s", "Time of a step", "s"),
    _amount("modelled_s", "Time of the fitted step-time function", "s"),
    _amount("same_time_percent", "Iterations in which all ranks took the same time, within 5 %", "%", 0, 100),
    _amount("same_tokens_percent", "Iterations in which all ranks computed as many tokens", "%", 0, 100),
    _amount("predicted_run_s", "Length of the simulated mirror replay", "s"),
    _text("comparison", "Compared", ("lag with mirror", "mirror with mirror")),
    _text("doubt", "Why it is not used"),
    _count("replay", "Replay, in order", None, 0),
    _count("pair", "Pair of replays", None, 0),
    _count("request", "Request of the trace", None, 0),
    _count("http_status", "HTTP status", None, 100),
    _count("num_requests", "Requests", "requests", 0),
    _count("num_pairs", "Pairs of replays", "pairs", 0),
    _count("pairs_needed", "Pairs that would show a loss of 1 %", "pairs"),
    _count("sent_tokens", "Prompt tokens sent", "tokens", 0),
    _count("counted_tokens", "Prompt tokens that the server counted", "tokens", 0),
    _amount("scheduled_s", "Scheduled", "s"),
    _amount("sent_s", "Sent", "s"),
    _amount("first_token_s", "First token", "s"),
    _amount("done_s", "Whole answer", "s"),
    _amount("lateness_p99_ms", "Sent later than scheduled, P99", "ms", None),
    _amount("window_s", "Length of the common window", "s"),
    _amount("busy_percent", "Common window of the mirror replay in which a rank has requests", "%", 0, 100),
    _amount("window_tok_per_s", "Prompt tokens per second in the common window", "tokens/s"),
    _amount("whole_run_tok_per_s", "Prompt tokens per second over the whole replay", "tokens/s"),
    _amount("loss_from_percent", "Loss, lower bound of the interval", "%", None, 100),
    _amount("loss_to_percent", "Loss, upper bound of the interval", "%", None),
    _amount("pair_spread_points", "Standard deviation of the loss of a pair", "percentage points"),
    # what a running server logs and counts
    _text("logged_at", "Logged at"),
    _count("iteration", "Iteration of the engine", None, 0),
    _count("num_prefill_requests", "Prefilling requests in the step", "requests", 0),
    _count("num_decode_tokens", "Decoding tokens in the step", "tokens", 0),
    _flag("dummy_step", "Step of a rank without work"),
    _amount("kv_use_percent", "KV cache in use", "%", 0, 100),
    _amount("prompt_tok_per_s", "Prompt tokens computed per second", "tokens/s"),
    _count("num_running", "Running requests", "requests", 0),
    _count("num_queued", "Waiting requests", "requests", 0),
    _amount("prefix_hit_percent", "Prompt tokens found in the prefix cache", "%", 0, 100),
    _count("eplb_step", "Step of the load balancer", None, 0),
    _amount("mean_rank_tokens", "Tokens of a rank, mean, summed over layers", "tokens"),
    _amount("max_rank_tokens", "Tokens of the busiest rank, summed over layers", "tokens"),
    _amount("balancedness_of_sums", "Balancedness, sum of means ÷ sum of maxima over layers", None, 0, 1),
    _count("steps_to_rearrangement", "Steps until the next rearrangement", "steps", None),
    _count("num_accepted_tokens", "Accepted draft tokens", "tokens", 0),
    _count("num_drafted_tokens", "Drafted tokens", "tokens", 0),
    _count("draft_position", "Position in the draft", None),
    _amount("position_accepted_percent", "Drafts accepted up to the position", "%", 0, 100),
    _count("looked_up_tokens", "Prompt tokens looked up in the prefix cache", "tokens", 0),
    _count("hit_tokens", "Prompt tokens found in the prefix cache", "tokens", 0),
    # runs of a benchmark client
    _count("repeat", "Repeat", None),
    _count("repeats", "Repeats", "runs"),
    _count("seed", "Seed", None, 0),
    _count("num_prompts", "Requests sent", "requests"),
    _count("num_completed", "Completed requests", "requests", 0),
    _count("num_failed", "Failed requests", "requests", 0),
    _amount("duration_s", "Length of the run", "s"),
    _amount("output_low_tok_per_s", "Output throughput, at least", "tokens/s", None),
    _amount("output_high_tok_per_s", "Output throughput, at most", "tokens/s"),
    _amount("total_low_tok_per_s", "Total throughput, at least", "tokens/s", None),
    _amount("total_high_tok_per_s", "Total throughput, at most", "tokens/s"),
    _amount("ttft_p50_low_s", "Time to first token (TTFT), median, at least", "s", None),
    _amount("ttft_p50_high_s", "Time to first token (TTFT), median, at most", "s"),
    _amount("tpot_low_ms", "Time per output token (TPOT), at least", "ms", None),
    _amount("tpot_high_ms", "Time per output token (TPOT), at most", "ms"),
    _amount("tpot_p90_ms", "Time per output token (TPOT), P90", "ms"),
    _amount("itl_ms", "Time between two chunks (ITL)", "ms"),
    _amount("e2el_s", "Time per request (E2EL)", "s"),
    _amount("client_cpu_percent", "Share of a core that the client used", "%"),
    # host work, measured: all-reduces, copies of a prompt, block tables, rows of the KV cache
    _text("all_reduce", "All-reduce"),
    _count("num_hosts", "Machines", "machines"),
    _count("num_cores", "Cores of a machine", "cores"),
    _flag("pinned", "Each rank on a core of its own"),
    _flag("oversubscribed", "More ranks than cores"),
    _count("num_values", "Numbers added up", None),
    _amount("sync_p50_ms", "Time of an all-reduce, median", "ms"),
    _amount("sync_low_ms", "Median, at least", "ms"),
    _amount("sync_high_ms", "Median, at most", "ms"),
    _amount("sync_p99_ms", "Time of an all-reduce, P99", "ms"),
    _amount("cpu_us_per_rank", "CPU time of an all-reduce per rank", "µs"),
    _amount("waits_per_rank", "Waits in an all-reduce per rank", "waits"),
    _amount("segments_per_rank", "TCP segments of an all-reduce per rank", None),
    _count("num_repeats", "Repeats of the measurement", "repeats"),
    _count("num_samples", "All-reduces timed", None),
    _flag("tight", "Interval as narrow as asked for"),
    _text("fact", "Fact"),
    _text("subject", "What it is a fact of"),
    _text("regime", "Ranks and cores", ("a core per rank", "more ranks than cores")),
    _amount("fit_constant", "α, at no growth", None, None),
    _amount("fit_slope", "β, per unit of growth", None, None),
    _amount("fit_error_percent", "Relative error of the fit, root mean square", "%"),
    _amount("evidence_ratio", "Weight against the other law", "×"),
    _text("better_law", "Law that fits better"),
    _text("copy", "Copy"),
    _text("allocation", "Memory that is written", ("new", "reused")),
    _text("cache_state", "Caches", ("warm", "cold")),
    _text("copy_method", "Copy and memory"),
    _amount("copy_p50_ms", "CPU time of a copy, median", "ms"),
    _amount("copy_low_ms", "CPU time of a copy, at least", "ms"),
    _amount("copy_high_ms", "CPU time of a copy, at most", "ms"),
    _amount("fixed_us", "CPU time beside the tokens", "µs", None),
    _amount("ns_per_token_low", "CPU time per prompt token, at least", "ns", None),
    _amount("ns_per_token_high", "CPU time per prompt token, at most", "ns"),
    _text("table_fill", "Entries written"),
    _count("block_tokens", "Tokens of a block", "tokens"),
    _count("num_blocks", "Blocks of the prompt", "blocks"),
    _count("num_null_blocks", "Null blocks of the prompt", "blocks", 0),
    _amount("fill_p50_us", "CPU time to fill a block table, median", "µs"),
    _amount("fill_low_us", "CPU time to fill a block table, at least", "µs"),
    _amount("fill_high_us", "CPU time to fill a block table, at most", "µs"),
    _text("row_send", "How the rows are sent"),
    _count("num_rows", "Rows of a transfer", "rows"),
    _count("row_bytes", "Size of a row", "B"),
    _amount("transfer_p50_ms", "Time of a transfer, median", "ms"),
    _amount("transfer_low_ms", "Time of a transfer, at least", "ms"),
    _amount("transfer_high_ms", "Time of a transfer, at most", "ms"),
    _amount("sender_cpu_ms", "CPU time of the sending thread", "ms"),
    _amount("gb_per_s", "Rate", "GB/s"),
    _amount("slo_step_ms", "Longest step allowed", "ms"),
    _text("best_cap", "Best cap"),
    _text("placement_of_burst", "Ranks of the burst"),
    _amount("rank_wait_s", "Time that the other ranks wait, summed", "s"),
    _text("account", "Account"),
    _text("account_part", "Part of the account"),
    _amount("from_ms", "From", "ms", None),
    _amount("to_ms", "To", "ms", None),
    _amount("change_ms", "Change", "ms", None),
    # a forward pass as vllm bench forward times it
    _text("bench_stage", "Stage of the plan"),
    _text("timing_scope", "What was timed", ("target_only", "target_and_drafter")),
    _text("bench_routing", "Routing in the benchmark"),
    _count("query_tokens", "Tokens computed per request", "tokens"),
    _count("num_replays", "Timed replays", "replays"),
    _amount("forward_min_ms", "Forward pass, shortest", "ms"),
    _amount("forward_p90_ms", "Forward pass, P90", "ms"),
    _amount("sample_spread_percent", "Spread of the samples' medians", "%"),
    _amount("graph_vs_eager_rms", "CUDA graph against eager pass, relative RMS", None),
    _flag("graph_deterministic", "Two replays agree in every bit"),
    _flag("finite", "Output is finite"),
    _flag("drafts_agree", "Drafts valid and as in the eager pass"),
    _flag("stable", "Steady and sound"),
    _amount("user_low_tok_per_s", "Tokens per second and user, at least", "tokens/s", None),
    _amount("user_high_tok_per_s", "Tokens per second and user, at most", "tokens/s"),
    _amount("user_slow_tail_tok_per_s", "Tokens per second and user, slowest tenth", "tokens/s"),
    _text("left_out", "Left out, and why"),
    _amount("least_output_tok_per_s_per_gpu", "Output throughput per GPU, no draft accepted", "tokens/s/GPU"),
    _amount("most_output_tok_per_s_per_gpu", "Output throughput per GPU, every draft accepted", "tokens/s/GPU"),
    _amount("switched_on_ms", "Forward pass with the switch on", "ms"),
    _amount("switched_off_ms", "Forward pass with the switch off", "ms"),
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
    # parity of two engines
    _count("batch_size", "Batch size", "requests"),
    _count("draft_tokens", "Tokens drafted per step", "tokens", 0),
    _count("step_tokens", "Tokens in one step", "tokens"),
    _amount("reference_output_tok_per_s", "Output throughput of the engine compared with", "tokens/s"),
    _amount("throughput_ratio", "Throughput ratio of two engines", "×"),
    _amount("throughput_ratio_low", "Throughput ratio, least", "×"),
    _amount("throughput_ratio_high", "Throughput ratio, most", "×"),
    _amount("throughput_difference_percent", "Difference from the engine compared with", "%", None),
    _flag("inside_envelope", "Inside the envelope"),
    _text("engine_setting", "Here"),
    _text("reference_setting", "Compared with it"),
    _text("agreement", "Agreement", ("same", "differs", "not stated")),
    _text("bench_case", "Case of bench forward"),
    # changes and the releases that hold them
    _text("change", "Change"),
    _text("evidence", "Evidence", ("by dates", "by content")),
    _text("contained", "In the release", ("in", "not in", "not known")),
    _text("confidence", "Confidence", ("firm", "likely")),
    _flag("disagrees", "Dates and content disagree"),
    _text("commit", "Commit"),
    _text("first_release", "First release that has it"),
    _text("whereabouts", "Where it is", ("released", "main only", "not found", "cannot tell")),
    _count("num_prs", "Pull requests", "pull requests", 0),
    _count("days_to_release", "From merge to release", "days", 0),
    _count("max_days", "From merge to release, most", "days", 0),
    _amount("age_weeks", "Time since the release", "weeks"),
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
