"""Whether a cluster can run a plan: checked when it is made, and again on the machine before anything starts."""

from __future__ import annotations

from dataclasses import dataclass

from rackbook.clusters import Cluster
from rackbook.errors import RackbookError
from rackbook.recipes import Recipe

MEMORY_SHARE, _SHARE_FLAG = 0.92, "--gpu-memory-utilization"
"""Part of a GPU's memory that vLLM 0.33.0 uses unless its option says otherwise; its file ``config/cache.py``."""


class UnfitError(RackbookError):
    """The hardware or the software does not do; says what was found, what is needed and what changes it."""

    def __init__(self, found: str, needed: str, change: str) -> None:
        """Word the refusal.

        Args:
            found: what there is.
            needed: what there must be.
            change: which parameter or file changes it.
        """
        super().__init__(f"cannot be measured here: found {found}; needed: {needed}. {change}")
        self.found, self.needed, self.change = found, needed, change


def hosts_for(cluster: Cluster, num_gpus: int, parameter: str) -> int:
    """On how many hosts so many GPUs lie.

    Args:
        cluster: where.
        num_gpus: GPUs that work together.
        parameter: of the experiment, that sets their number.

    Raises:
        UnfitError: the cluster has fewer, or they fill the last host in part only.
    """
    per_host = cluster.num_gpus_per_host
    if num_gpus > cluster.num_gpus:
        raise UnfitError(
            f"{cluster.num_gpus} GPUs on {cluster.key}",
            f"{num_gpus}",
            f"Lower {parameter}, choose another cluster, or set hosts and gpus_per_host in {cluster.file}",
        )
    if num_gpus <= per_host:
        return 1
    if num_gpus % per_host:
        raise UnfitError(
            f"hosts of {per_host} GPUs on {cluster.key}",
            f"a number of GPUs that fills them, got {num_gpus}, which leaves one host in part",
            f"Set {parameter} to a multiple of {per_host}, or gpus_per_host in {cluster.file}",
        )
    return num_gpus // per_host


def need_experts_divisible(recipe: Recipe, num_ranks: int, parameter: str, redundant: int = 0) -> None:
    """Refuse a number of ranks over which the routed experts do not spread evenly.

    Raises:
        UnfitError: they do not.
    """
    from rackbook import catalog

    if recipe.model is None:
        return
    num_experts = catalog.model(recipe.model).experts.num_routed.known + redundant
    if num_experts % num_ranks:
        raise UnfitError(
            f"{num_ranks} ranks",
            f"a number that divides the {num_experts} experts of a layer ({recipe.name})",
            f"Set {parameter} to a divisor of {num_experts}",
        )


@dataclass(frozen=True)
class Memory:
    """What is known of the memory of each GPU of an engine.

    Attributes:
        gpu: its name.
        share: part of it that vLLM uses.
        room_gib: that part.
        weights_gib: weights in it, real or random, with the Engram tables outside; redundant experts not counted.
    """

    gpu: str
    share: float
    room_gib: float
    weights_gib: float

    @property
    def holds_weights(self) -> bool:
        """Whether the weights fit, with nothing else."""
        return self.weights_gib <= self.room_gib

    @property
    def words(self) -> str:
        """The room, for a message."""
        return f"{self.room_gib:.1f} GiB on each {self.gpu}, {self.share:g} of its memory"


def memory(cluster: Cluster, recipe: Recipe, role: str, num_ranks: int) -> Memory | None:
    """The memory of an engine's GPUs; None where no source gives that of the GPU or the model's weights.

    Args:
        cluster: where.
        recipe: of the model.
        role: of the recipe.
        num_ranks: data-parallel ranks, which share the experts with each other.
    """
    from rackbook import catalog
    from rackbook.models.memory import GIB, weights_gib_per_gpu

    if recipe.model is None or cluster.hardware is None:
        return None
    gpu = catalog.hardware(cluster.hardware)
    if gpu.hbm_gb.value is None:
        return None
    given = [option.value for option in recipe.options(role) if option.flag == _SHARE_FLAG]
    share = float(given[0]) if given else MEMORY_SHARE
    num_gpus = num_ranks * recipe.role(role).gpus_per_rank
    weights = weights_gib_per_gpu(catalog.model(recipe.model).checkpoint, num_gpus)
    return Memory(gpu.name, share, share * gpu.hbm_gb.value * 1e9 / GIB, sum(weights.values()))


def need_memory(cluster: Cluster, recipe: Recipe, role: str, num_ranks: int, parameter: str) -> None:
    """Refuse an engine whose weights its GPUs cannot hold.

    Args:
        cluster: where.
        recipe: of the model.
        role: of the recipe.
        num_ranks: data-parallel ranks.
        parameter: that sets over how many GPUs the weights spread.

    Raises:
        UnfitError: they do not fit.
    """
    found = memory(cluster, recipe, role, num_ranks)
    if found is not None and not found.holds_weights:
        num_gpus = num_ranks * recipe.role(role).gpus_per_rank
        over = "one GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise UnfitError(
            f"{found.words}, on {cluster.key}",
            f"{found.weights_gib:.1f} GiB for the weights of {recipe.name} over {over}, random ones as well",
            f"Raise {parameter}, or choose another cluster",
        )


@dataclass(frozen=True)
class KvRoom:
    """How many tokens the KV cache of a rank holds, by a source's own figures for that GPU.

    Attributes:
        tokens: about.
        basis: what that is computed from, in words.
    """

    tokens: int
    basis: str


def kv_room(cluster: Cluster, recipe: Recipe, num_ranks: int) -> KvRoom | None:
    """Room for KV on each rank of an engine in the role aggregated; None where no source gives what it follows from.

    What the engine needs beside weights and KV cache is not known, so a little less than this fits.
    """
    from rackbook import catalog, published
    from rackbook.models.node_memory import kv_bytes_per_token

    found = memory(cluster, recipe, "aggregated", num_ranks)
    if found is None:
        return None
    rows = published.read("single_node_memory").drop_nulls(["kv_cache_gib_per_gpu", "kv_cache_tokens_per_rank"])
    rows = rows.filter(hardware=catalog.hardware(str(cluster.hardware)).name, model=recipe.model)
    if rows.is_empty():
        return None
    row = rows.row(0, named=True)
    size = kv_bytes_per_token(row)
    return KvRoom(
        int((found.room_gib - found.weights_gib) * 2**30 / size),
        f"{found.room_gib:.1f} GiB less {found.weights_gib:.1f} GiB of weights, at the {size:,.0f} B/token that "
        f"{row['source']} prints for the {found.gpu}",
    )


def need_kv(cluster: Cluster, recipe: Recipe, num_ranks: int, tokens_per_rank: int, change: str) -> None:
    """Refuse a batch whose KV cache a rank has no room for.

    Args:
        cluster: where.
        recipe: of the model.
        num_ranks: data-parallel ranks.
        tokens_per_rank: contexts of all requests of a rank together.
        change: what to do about it.

    Raises:
        UnfitError: there is no room.
    """
    room = kv_room(cluster, recipe, num_ranks)
    if room is not None and tokens_per_rank > room.tokens:
        raise UnfitError(
            f"room for about {room.tokens / 1e6:.1f}M tokens of KV cache on a rank ({room.basis})",
            f"{tokens_per_rank / 1e6:.1f}M tokens",
            change,
        )


def need_context(recipe: Recipe, context_tokens: int, parameter: str, room: int = 0) -> None:
    """Refuse a context that the model does not take.

    Args:
        recipe: of the model.
        context_tokens: longest context.
        parameter: that sets it.
        room: tokens beyond it that the engine needs for drafts.

    Raises:
        UnfitError: it is too long.
    """
    if context_tokens + room > recipe.context_limit:
        beyond = f" and {room} more for drafts" if room else ""
        raise UnfitError(
            f"a model whose context ends at {recipe.context_limit:,} tokens ({recipe.name})",
            f"{context_tokens:,} tokens{beyond}",
            f"Lower {parameter}, or name another recipe than {recipe.key}",
        )


def need_hardware(
    cluster: Cluster, recipe: Recipe, role: str, capabilities: tuple[str, ...] = (), why: str = ""
) -> None:
    """Refuse a recipe for other hardware than the cluster's.

    Args:
        cluster: where.
        recipe: what is to run.
        role: the role that it is to play.
        capabilities: compute capabilities that the plan itself needs; empty for the recipe's.
        why: what needs them.

    Raises:
        UnfitError: the GPUs are others, of an architecture that cannot run it, or fewer on a host than a rank takes.
        DataError: the recipe has no such role.
    """
    part = recipe.role(role)
    wanted = capabilities or part.compute_capabilities or recipe.compute_capabilities
    change = f"Name another recipe in {cluster.file}, or choose another cluster"
    if recipe.hardware and cluster.hardware not in recipe.hardware:
        got = cluster.hardware or "no GPU"
        raise UnfitError(f"{got} on {cluster.key}", f"{' or '.join(recipe.hardware)} for {recipe.key}", change)
    if wanted and not covers(wanted, cluster.capability):
        got = f"compute capability {cluster.capability}" if cluster.capability else "no GPU"
        needed = f"compute capability {' or '.join(wanted)}{f' for {why}' if why else ''}"
        raise UnfitError(f"{got} on {cluster.key}", needed, change)
    if cluster.num_gpus and part.gpus_per_rank > cluster.num_gpus_per_host:
        raise UnfitError(
            f"hosts of {cluster.num_gpus_per_host} GPUs on {cluster.key}", f"{part.gpus_per_rank} in one for a rank",
            f"Set gpus_per_rank of the role {role} in {recipe.file}",
        )  # fmt: skip


def need_gpus(cluster: Cluster, what: str) -> None:
    """Refuse a cluster without GPUs.

    Raises:
        UnfitError: it has none.
    """
    if not cluster.num_gpus:
        raise UnfitError(
            f"no GPU on {cluster.key}",
            f"GPUs for {what}",
            f"Choose another cluster than {cluster.key}, or describe your own as data/clusters/README.md says",
        )


def covers(wanted: tuple[str, ...], capability: str | None) -> bool:
    """Whether a compute capability, e.g. "10.3", is among the wanted ones, e.g. "10.x"; any is if none is named."""
    if not wanted:
        return True
    return capability is not None and (capability in wanted or f"{capability.partition('.')[0]}.x" in wanted)
