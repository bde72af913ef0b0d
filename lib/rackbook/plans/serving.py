"""Servers and their clients: what the plans of the serving experiments have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rackbook import published
from rackbook.clusters import Cluster
from rackbook.engine import bench, fit, lab_settings, launch
from rackbook.engine.bench import Load
from rackbook.engine.plan import RUN_FOLDER, Needs, Process
from rackbook.recipes import Recipe


@dataclass(frozen=True)
class Duration:
    """An estimate.

    Attributes:
        minutes: how long.
        basis: what it assumes.
    """

    minutes: float
    basis: str


def check(
    cluster: Cluster, recipe: Recipe, role: str, num_ranks: int, ranks_parameter: str, redundant_experts: int = 0
) -> None:
    """Refuse what the cluster, the recipe or the model cannot do.

    Raises:
        UnfitError: with what was found and needed.
        DataError: the recipe has no such role.
    """
    if not cluster.is_lab:
        fit.need_gpus(cluster, "a server of this recipe" if recipe.hardware else "this plan")
    fit.need_hardware(cluster, recipe, role)
    if role != "single_user":
        fit.need_experts_divisible(recipe, num_ranks, ranks_parameter, redundant_experts)
    fit.need_memory(cluster, recipe, role, num_ranks, ranks_parameter)


def fitting(
    cluster: Cluster, recipe: Recipe, sizes: Iterable[int], parameter: str, word: str = "DEP"
) -> tuple[list[int], tuple[str, ...]]:
    """The sizes that a cluster has GPUs for, and memory for the weights.

    Args:
        cluster: where.
        recipe: what is to run, in the role aggregated.
        sizes: data-parallel ranks of each engine.
        parameter: that sets them.
        word: what stands before a size in a note.

    Returns:
        The sizes, and notes that name what was left out.

    Raises:
        UnfitError: there are GPUs for a size, and memory for none.
    """
    wanted, notes = list(sizes), []
    few = [size for size in wanted if size <= cluster.num_gpus]
    if beyond := [f"{word}{size}" for size in wanted if size > cluster.num_gpus]:
        notes.append(f"left out, because {cluster.key} has {cluster.num_gpus} GPUs: {', '.join(beyond)}")
    room = {size: fit.memory(cluster, recipe, "aggregated", size) for size in few}
    small = [size for size in few if room[size] is not None and not room[size].holds_weights]
    if small and small == few:
        fit.need_memory(cluster, recipe, "aggregated", max(small), parameter)
    if small:
        each = ", ".join(f"{word}{size} ({room[size].weights_gib:.1f} GiB)" for size in small)
        notes.append(f"left out, because weights do not fit into {room[small[0]].words}: {each}")
    return [size for size in few if size not in small], tuple(notes)


def whole(cluster: Cluster, recipe: Recipe, sizes: Iterable[int], parameter: str) -> tuple[list[int], tuple[str, ...]]:
    """The sizes of :func:`fitting`; all GPUs of the cluster where it has too few for any of them.

    Returns:
        The sizes, and notes that name what was left out.

    Raises:
        UnfitError: there are GPUs for a size, and memory for none.
    """
    wanted = list(sizes)
    found, notes = fitting(cluster, recipe, wanted, parameter)
    if found or not wanted:
        return found, notes
    return [cluster.num_gpus], (*notes, f"DEP{cluster.num_gpus} instead, all GPUs of {cluster.key}: not the claim's")


def model_of(cluster: Cluster, recipe: Recipe) -> str:
    """What a server loads; for the lab the word that stands for the model that it makes itself."""
    return launch.LAB_MODEL if cluster.is_lab else recipe.model_id


def clients(
    cluster: Cluster,
    recipe: Recipe,
    base_url: str,
    loads: Sequence[Load],
    *,
    repeats: int,
    name: str,
    first_seed: int = 0,
    extra: Sequence[str] = (),
) -> tuple[tuple[Process, ...], ...]:
    """The runs of ``vllm bench serve``, one after the other, as :func:`rackbook.engine.bench_runs.follow` takes them.

    Args:
        cluster: where.
        recipe: gives the model.
        base_url: of the server.
        loads: what to send.
        repeats: runs per load, each with a seed of its own.
        name: of the stage; starts the names of the result files.
        first_seed: seed of the first run.
        extra: further arguments.
    """
    if cluster.is_lab:
        start, extra = (
            (*launch.python(cluster), launch.LAB_BENCH, "bench", "serve"),
            (*extra, *lab_settings.CLIENT_MODEL),
        )
    else:
        start = (*launch.python(cluster), "-m", launch.VLLM, "bench", "serve")
    steps, seed = [], first_seed
    for repeat in range(1, repeats + 1):
        for load in loads:
            result = f"{RUN_FOLDER}/{name}-{load.named()}-{repeat}.json"
            words = bench.arguments(start, base_url, load, seed, result, model=model_of(cluster, recipe), extra=extra)
            steps.append((Process("client", words, client_environment(cluster, recipe)),))
            seed += 1
    return tuple(steps)


def client_environment(cluster: Cluster, recipe: Recipe) -> dict[str, str]:
    """The variables of a client: those of every vLLM process, and a fixed order of hashes."""
    return cluster.environment | recipe.environment | {"PYTHONHASHSEED": "0"}


def duration(
    recipe: Recipe, loads: Sequence[Load], repeats: int, num_gpus: int, *, dummy: bool, prefill: bool = True
) -> Duration:
    """How long a server and its clients take: start-up and tokens at published rates per GPU.

    Args:
        recipe: gives the start-up.
        loads: what is sent.
        repeats: runs per load.
        num_gpus: that share the work; 0 for the lab, which is not estimated by GPUs.
        dummy: whether the weights are random.
        prefill: whether prompts are computed; a connector that fills the KV cache itself computes none.
    """
    startup = recipe.startup.dummy_minutes if dummy else recipe.startup.real_minutes
    if not num_gpus:
        each = 0.5
        return Duration(
            startup + each * repeats * len(loads),
            f"{startup:g} min to start ({recipe.startup.basis}); {each:g} min per run (assumed)",
        )
    output, prompt = _published_rates()
    seconds = sum(
        load.num_prompts * (load.output_tokens / output + (load.input_tokens / prompt if prefill else 0)) / num_gpus
        for load in loads
    )
    what = f"S2's rates per GPU, {output:,.0f} output and {prompt:,.0f} prompt tokens/s" if prefill else (
        f"S2's rate per GPU, {output:,.0f} output tokens/s"
    )  # fmt: skip
    basis = f"{startup:g} min to start ({recipe.startup.basis}); the clients' tokens at {what}, whatever the GPU"
    return Duration(startup + repeats * seconds / 60, basis)


def lab_duration(recipe: Recipe, minutes: float) -> Duration:
    """How long the lab takes for what rackbook itself sends; no GPU time."""
    startup = recipe.startup.dummy_minutes
    return Duration(
        startup + minutes, f"{startup:g} min to start ({recipe.startup.basis}); {minutes:g} min of requests (assumed)"
    )


def needs(recipe: Recipe, role: str, context_tokens: int, *, checkpoint: bool, changes: dict[int, str]) -> Needs:
    """What a plan of servers needs."""
    found = recipe.role(role).compute_capabilities or recipe.compute_capabilities
    return Needs(recipe.vllm, changes, found, context_tokens, checkpoint)


def _published_rates() -> tuple[float, float]:
    """Output and prompt tokens per second and GPU on one node of eight B300."""
    rows = published.read("single_node").filter(
        engine="vLLM", input_tokens=1024, output_tokens=1024
    )  # fmt: skip
    node = rows.row(0, named=True)
    prefill = published.read("single_node_prefill").filter(engine="vLLM").row(0, named=True)
    return node["output_tok_per_s"] / node["num_gpus"], prefill["prefill_tok_per_s"] / prefill["num_gpus"]
