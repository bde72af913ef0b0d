"""Whether a cluster can run a plan: checked when it is made, and again on the machine before anything starts."""

from __future__ import annotations

from rackbook.clusters import Cluster
from rackbook.errors import RackbookError
from rackbook.recipes import Recipe


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
