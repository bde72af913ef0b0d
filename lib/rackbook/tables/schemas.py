"""The schemas of the point tables, one per experiment table.

A published table holds what a source prints and no code could recompute from other printed values; ratios
and differences of printed values stand as claims. A length printed in K is read as units of 1,024 tokens (S1
calls the same context 128K and 131K), a rate or a capacity printed in K or M as units of 1,000.
"""

from rackbook.errors import DataError, one_of
from rackbook.tables.schema import Schema

_PUBLISHED = (
    Schema(
        name="context_sweep",
        grain="the step time of one decode batch at one context length",
        coordinates=("hardware", "model", "ep_size", "requests_per_rank", "context_tokens"),
        values=("step_ms",),
    ),
    Schema(
        name="wide_ep_scaling",
        grain="the time that one part of the decode step takes at one expert-parallel size",
        coordinates=(
            "hardware", "model", "ep_size", "requests_per_rank", "context_tokens", "component",
            "approximate",
        ),
        values=("step_ms",),
        optional=("hardware", "approximate"),
    ),
    Schema(
        name="expert_balance",
        grain="the balancedness of one part of the model under one routing and one placement",
        coordinates=(
            "hardware", "model", "part", "top_k", "routing", "placement", "ep_size", "requests_per_rank",
        ),
        values=("balancedness_per_layer_step",),
        optional=("hardware", "ep_size", "requests_per_rank"),
    ),
    Schema(
        name="expert_balance_eplb",
        grain="how one source sets EPLB at one expert-parallel size",
        coordinates=("hardware", "model", "engine", "ep_size"),
        values=("window_steps", "interval_steps", "num_redundant_experts"),
        optional=("hardware", "ep_size", "num_redundant_experts"),
    ),
    Schema(
        name="single_node",
        grain="the decode throughput of one engine on one node at one input and output length",
        coordinates=(
            "engine", "hardware", "num_gpus", "model", "input_tokens", "output_tokens", "concurrency",
        ),
        values=("output_tok_per_s", "total_tok_per_s", "tpot_ms"),
        optional=("concurrency", "output_tok_per_s", "total_tok_per_s", "tpot_ms"),
    ),
    Schema(
        name="single_node_prefill",
        grain="the prefill throughput of one engine on one node at one prompt length",
        coordinates=(
            "engine", "hardware", "num_gpus", "model", "setting", "input_tokens", "output_tokens",
            "approximate",
        ),
        values=("prefill_tok_per_s", "prefill_tok_per_s_per_gpu"),
        optional=(
            "hardware", "num_gpus", "input_tokens", "output_tokens", "approximate",
            "prefill_tok_per_s_per_gpu",
        ),
    ),
    Schema(
        name="single_node_ratio",
        grain="how many times faster one engine is than the other in one phase, as printed",
        coordinates=(
            "engine", "reference_engine", "hardware", "num_gpus", "model", "phase", "input_tokens",
            "output_tokens",
        ),
        values=("speedup",),
        optional=("input_tokens", "output_tokens"),
    ),
    Schema(
        name="single_node_graphs",
        grain="the throughput of one node with CUDA graphs captured up to one size",
        coordinates=(
            "engine", "hardware", "num_gpus", "model", "input_tokens", "output_tokens", "concurrency",
            "max_capture_tokens",
        ),
        values=("output_tok_per_s",),
        optional=("concurrency",),
    ),
    Schema(
        name="single_node_acceptance",
        grain="the share of draft tokens accepted with random-token prompts of one length",
        coordinates=("engine", "hardware", "num_gpus", "model", "input_tokens"),
        values=("acceptance_percent",),
    ),
    Schema(
        name="single_node_memory",
        grain="what the weights and the KV cache take on each GPU of one deployment, and what fits",
        coordinates=("engine", "hardware", "num_gpus", "model", "parallelism", "setting", "approximate"),
        values=(
            "weights_gib_per_gpu", "kv_cache_gib_per_gpu", "kv_cache_tokens_per_rank",
            "max_seqs_per_rank", "max_seqs_per_node",
        ),
        optional=("setting", "approximate", "max_seqs_per_rank", "max_seqs_per_node"),
    ),
    Schema(
        name="single_node_setup",
        grain="what one engine needs to be installed and run on one node",
        coordinates=("engine", "hardware", "num_gpus"),
        values=("min_nvcc_version", "needs_rdma"),
    ),
    Schema(
        name="single_node_deployment",
        grain="the GPUs that the maker of an engine gives one phase in its own benchmark",
        coordinates=("engine", "hardware", "phase"),
        values=("num_gpus",),
        optional=("hardware",),
    ),
    Schema(
        name="step_breakdown",
        grain="the share of the target's decode step that one part takes",
        coordinates=("hardware", "model", "ep_size", "requests_per_rank", "context_tokens", "component"),
        values=("step_share_percent",),
        optional=("hardware", "ep_size"),
    ),
    Schema(
        name="prefill_ablation",
        grain="the gain of one prefill fix at one number of new tokens on top of a cached prefix",
        coordinates=("hardware", "model", "fix", "pr", "cached_tokens", "new_tokens"),
        values=("gain_percent",),
        optional=("hardware", "new_tokens"),
    ),
    Schema(
        name="prefill_ablation_total",
        grain="the range of the gain of all prefill fixes together over a range of new tokens",
        coordinates=("hardware", "model", "fix", "cached_tokens", "min_new_tokens", "max_new_tokens"),
        values=("min_gain_percent", "max_gain_percent"),
        optional=("hardware",),
    ),
    Schema(
        name="prefill_ablation_throughput",
        grain="the prefill throughput before or after all fixes",
        coordinates=("hardware", "model", "stage", "cached_tokens", "new_tokens"),
        values=("prefill_tok_per_s_per_gpu",),
        optional=("hardware",),
    ),
    Schema(
        name="dp_imbalance",
        grain="the throughput of all ranks under one replay schedule",
        coordinates=("hardware", "model", "dp_size", "schedule", "lag_s_per_rank", "prefix_caching"),
        values=("total_tok_per_s",),
        optional=("hardware",),
    ),
    Schema(
        name="dp_imbalance_prefill_only",
        grain="the throughput per GPU of a prefill-only run at one data-parallel size",
        coordinates=("hardware", "model", "workload", "concurrency", "dp_size"),
        values=("prefill_tok_per_s_per_gpu",),
        optional=("hardware",),
    ),
    Schema(
        name="cpu_overhead",
        grain="what was measured of one host-side cause, before or after its fix; other metrics are null",
        coordinates=(
            "cause", "fix", "pr", "stage", "hardware", "model", "num_prefill_engines",
            "num_decode_engines", "ep_size", "concurrency", "prompt_tokens", "approximate",
        ),
        values=(
            "total_tok_per_s_per_gpu", "interactivity_p90_tok_per_s", "step_ms", "dp_sync_ms",
            "admission_cpu_ms", "admissions_per_step",
        ),
        optional=(
            "hardware", "num_prefill_engines", "num_decode_engines", "ep_size", "concurrency",
            "prompt_tokens", "approximate", "total_tok_per_s_per_gpu", "interactivity_p90_tok_per_s",
            "step_ms", "dp_sync_ms", "admission_cpu_ms", "admissions_per_step",
        ),
    ),
    Schema(
        name="engine_gap",
        grain="the decode step of the engine, host work included, at one expert-parallel size",
        coordinates=("hardware", "model", "ep_size", "stage"),
        values=("step_ms",),
        optional=("hardware",),
    ),
    Schema(
        name="engine_gap_gpu",
        grain="how much less one expert-parallel size runs on the GPU per step than another",
        coordinates=("hardware", "model", "ep_size", "baseline_ep_size", "stage"),
        values=("gpu_saving_ms",),
        optional=("hardware",),
    ),
    Schema(
        name="serving_pareto",
        grain="one serving run: its throughput per GPU and how fast its users read",
        coordinates=(
            "engine", "hardware", "model", "workload", "setting", "stage", "num_prefill_engines",
            "num_decode_engines", "ep_size", "tp_size", "concurrency", "prefill_chunk_tokens",
            "batch_cap", "acceptance_length", "tokens_counted", "approximate",
        ),
        values=("total_tok_per_s_per_gpu", "interactivity_p90_tok_per_s", "ttft_p90_s"),
        optional=(
            "workload", "stage", "num_prefill_engines", "num_decode_engines", "ep_size", "tp_size",
            "concurrency", "prefill_chunk_tokens", "batch_cap", "acceptance_length", "tokens_counted",
            "approximate", "ttft_p90_s",
        ),
    ),
    Schema(
        name="serving_pareto_speedup",
        grain="how many times more throughput per GPU a rack gives than a named baseline, as printed",
        coordinates=("engine", "hardware", "model", "workload", "setting"),
        values=("speedup",),
    ),
    Schema(
        name="serving_pareto_conventions",
        grain="how one source counts: what its interactivity is, and whether drafts were accepted or said to be",
        coordinates=("engine", "hardware", "workload"),
        values=("interactivity_definition", "acceptance_kind"),
        optional=("interactivity_definition", "acceptance_kind"),
    ),
    Schema(
        name="serving_pareto_topology",
        grain="one P/D deployment: the engines and their limits at one number of clients",
        coordinates=(
            "engine", "hardware", "model", "workload", "concurrency", "prefill_dp_size", "ep_size",
        ),
        values=("num_prefill_engines", "max_seqs_per_rank", "admissions_per_step"),
        optional=("concurrency", "num_prefill_engines", "max_seqs_per_rank", "admissions_per_step"),
    ),
    Schema(
        name="decode_parity",
        grain="the largest difference of two engines' decode throughput over a range of batch sizes",
        coordinates=(
            "engine", "hardware", "reference_engine", "reference_hardware", "model", "context_tokens",
            "nextn", "min_batch_size", "max_batch_size",
        ),
        values=("max_difference_percent",),
        optional=("reference_hardware",),
    ),
    Schema(
        name="decode_parity_prefill",
        grain="how one engine was set in the prefill figure that is no comparison of engines",
        coordinates=("engine", "hardware", "model", "parallelism"),
        values=("num_redundant_experts", "replay_tokens"),
        optional=("hardware",),
    ),
    Schema(
        name="single_user",
        grain="the decode speed of one user alone on a node",
        coordinates=("engine", "hardware", "num_gpus", "model", "concurrency"),
        values=("interactivity_p90_tok_per_s",),
    ),
    Schema(
        name="release_map",
        grain="the day one version of a package came out, by one source",
        coordinates=("package", "version"),
        values=("released_on",),
    ),
    Schema(
        name="release_map_prs",
        grain="the state of one pull request on the day it was looked up",
        coordinates=("pr", "title", "looked_up_on", "state"),
        values=("merged_on",),
        optional=("merged_on",),
    ),
    Schema(
        name="release_map_stack",
        grain="the version that one user ran on one day, and its distance from the newest",
        coordinates=("user", "package", "version", "looked_up_on"),
        values=("releases_behind", "weeks_behind"),
    ),
    Schema(
        name="cost",
        grain="what a GPU earns in an hour at one price list",
        coordinates=("engine", "hardware", "model", "workload", "price_period"),
        values=("usd_per_gpu_hour",),
    ),
)

_EVIDENCE = (
    Schema(
        name="uniform_balance",
        grain="the mean balancedness of one part of the model under uniform routing, at one setting",
        coordinates=(
            "part", "num_ranks", "requests_per_rank", "tokens_per_request", "num_experts", "top_k",
        ),
        values=("balancedness_per_layer_step", "balancedness_low", "balancedness_high", "num_draws"),
        optional=("balancedness_low", "balancedness_high", "num_draws"),
        origins=("modelled", "simulated"),
    ),
    Schema(
        name="context_growth",
        grain="the growth of the step between two context lengths of one sweep",
        coordinates=("hardware", "model", "from_context_tokens", "to_context_tokens"),
        values=("context_ratio", "step_increase_ms", "step_increase_percent"),
    ),
    Schema(
        name="engine_pairs",
        grain="a forward pass by itself and the engine's step of the same batch, at one setting",
        coordinates=("setting", "hardware", "model"),
        values=("forward_ms", "engine_ms", "cpu_ms"),
        optional=("hardware", "model", "cpu_ms"),
        origins=("measured",),
    ),
    Schema(
        name="engine_steps",
        grain="one step of a running engine",
        coordinates=(
            "hardware", "model", "step", "num_prefill_tokens", "num_decode_requests",
            "mean_context_tokens",
        ),
        values=("step_ms",),
        optional=("mean_context_tokens",),
    ),
    Schema(
        name="kernel_profiles",
        grain="one kernel profile of one rank",
        coordinates=("hardware", "model", "stage", "rank", "profile_format"),
        values=("num_forwards", "num_kernels", "kernel_sum_us", "busy_us", "span_us", "pre_forward_us"),
        optional=("stage", "rank", "busy_us", "span_us", "pre_forward_us"),
        origins=("measured",),
    ),
    Schema(
        name="kernel_times",
        grain="the time of one kernel per forward pass on one rank",
        coordinates=("hardware", "model", "stage", "rank", "kernel"),
        values=("kernel_us", "calls_per_forward"),
        optional=("stage", "rank"),
        origins=("measured",),
    ),
)

PUBLISHED = tuple(s.name for s in _PUBLISHED)
"""The tables that have a file in ``data/published``."""

SCHEMAS: dict[str, Schema] = {s.name: s for s in (*_PUBLISHED, *_EVIDENCE)}
if len(SCHEMAS) != len(_PUBLISHED) + len(_EVIDENCE):
    raise DataError("two tables have one name")


def schema(name: str) -> Schema:
    """Look a schema up by table name.

    Raises:
        DataError: no such table.
    """
    if name not in SCHEMAS:
        raise DataError(one_of(name, SCHEMAS, "table"))
    return SCHEMAS[name]
