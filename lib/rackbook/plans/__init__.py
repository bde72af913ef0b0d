"""What each experiment would run to measure: pure functions of its settings, a recipe and a cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rackbook.errors import DataError, one_of

if TYPE_CHECKING:
    from types import ModuleType

    from rackbook.clusters import Cluster
    from rackbook.engine.plan import Plan
    from rackbook.recipes import Recipe

TOPICS = (
    "context_sweep", "step_breakdown", "wide_ep_scaling", "prefill_ablation", "dp_imbalance", "expert_balance",
    "engine_gap", "serving_pareto", "decode_parity", "single_user", "single_node",
)  # fmt: skip
"""Experiments that can measure, in the order of their notebooks."""


def load(topic: str) -> ModuleType:
    """The module of one experiment: ``Settings``, and ``plan(settings, recipe, cluster)``.

    Raises:
        DataError: the experiment has nothing to measure.
    """
    if topic not in TOPICS:
        raise DataError(one_of(topic, TOPICS, "experiment that can measure"))
    return import_module(f"{__name__}.{topic}")


def plan(topic: str, settings: Any, cluster: str | Cluster, recipe: str | Recipe | None = None) -> Plan:
    """What an experiment would run on a cluster.

    Args:
        topic: the experiment.
        settings: its settings, or the parameters of its notebook, of which those that concern the measurement count.
        cluster: the cluster, or its name or file.
        recipe: the recipe, or its name or file; the cluster's own if None.

    Raises:
        DataError: an unknown topic, cluster or recipe, or a malformed file.
        UnfitError: the cluster cannot do it.
    """
    from rackbook import clusters, recipes

    where = clusters.cluster(cluster) if isinstance(cluster, str) else cluster
    what = where.recipe if recipe is None else recipe
    return load(topic).plan(settings, recipes.recipe(what) if isinstance(what, str) else what, where)
