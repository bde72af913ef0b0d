"""vLLM's own placement of experts, for whoever has vLLM in the same Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import RackbookError
from rackbook.experts.placement import Placement, checked_loads

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


def place(loads: ArrayLike, num_slots: int, num_ranks: int, *, num_groups: int = 1, num_nodes: int = 1) -> Placement:
    """As :func:`rackbook.experts.placement.place`, by vLLM's default policy; a policy of :func:`replay`.

    Args:
        loads: load per expert, shape (layers, experts).
        num_slots: experts and redundant copies together.
        num_ranks: ranks.
        num_groups: groups of experts.
        num_nodes: nodes.

    Raises:
        RackbookError: vLLM is not importable here.
        DataError: loads that are no table, negative or not finite.
    """
    try:
        import torch
        from vllm.distributed.eplb.policy.default import DefaultEplbPolicy
    except ImportError as problem:
        raise RackbookError(
            f"vLLM's placement policy cannot be imported ({problem}); run this with the lab's Python, or use "
            "rackbook.experts.placement.place, which is as even"
        ) from None
    table = checked_loads(loads)
    slots = DefaultEplbPolicy.rebalance_experts(torch.from_numpy(table), num_slots, num_groups, num_nodes, num_ranks)
    return Placement(np.asarray(slots, dtype=np.int64), table.shape[1], num_ranks)
