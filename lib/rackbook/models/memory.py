"""What the weights take: all of them, by part of the checkpoint, and in the memory of each GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rackbook.errors import ParameterError

if TYPE_CHECKING:
    from rackbook.catalog import Checkpoint, Engram

GIB = 2**30
MXFP4_BLOCK = 32
"""Entries that share one scale byte (OCP Microscaling Formats specification, 1.0, MXFP4)."""


def mxfp4_bytes(entries: float, *, bits: int = 4, scales: bool = True) -> float:
    """Bytes of so many weights at 4 bit, with or without the scale byte of each block."""
    return entries * (bits / 8 + (1 / MXFP4_BLOCK if scales else 0))


def routed_entries(checkpoint: Checkpoint) -> int:
    """Weights in the target's routed experts, all layers: all expert entries less the draft's."""
    return checkpoint.expert_entries.known - checkpoint.draft_expert_entries.known


def routed_gb(checkpoint: Checkpoint, *, scales: bool = True) -> float:
    """Size of the target's routed experts in all layers, in 10⁹ bytes."""
    return mxfp4_bytes(routed_entries(checkpoint), bits=checkpoint.expert_bits.known, scales=scales) / 1e9


def checkpoint_gib(checkpoint: Checkpoint) -> float:
    """Sum of the five printed parts of a checkpoint."""
    c = checkpoint
    return sum(part.known for part in (c.expert_gib, c.engram_gib, c.dense_gib, c.embedding_gib, c.scale_gib))


def engram_parameters(engram: Engram) -> int:
    """Parameters of the Engram tables, from their shape: layers × rows × numbers per row."""
    return len(engram.layers.known) * engram.num_rows.known * engram.row_dimensions.known


def scales_gib(checkpoint: Checkpoint, engram: Engram) -> float:
    """Size of the scales if all experts and the Engram tables have one byte per block."""
    return (checkpoint.expert_entries.known + engram.num_parameters.known) / MXFP4_BLOCK / GIB


def weights_gib_per_gpu(checkpoint: Checkpoint, num_gpus: int, *, engram_scales: bool = True) -> dict[str, float]:
    """Weights that each GPU holds when experts and scales are split over the GPUs and everything else is on each.

    The Engram tables are outside the GPUs' memory. Redundant experts are not counted.

    Args:
        checkpoint: parts of the model.
        num_gpus: GPUs that share the experts.
        engram_scales: whether the printed scales stay with the experts as a whole; else only one scale byte per 32
            expert weights does, and what the Engram tables need of the scales is outside as well.

    Returns:
        GiB by part: "experts", "scales", "attention, dense, routers", "embedding, LM head".

    Raises:
        ParameterError: no GPU.
    """
    if num_gpus < 1:
        raise ParameterError(f"num_gpus: got {num_gpus}, allowed: a whole number ≥ 1")
    expert_gib = checkpoint.expert_gib.known
    expert_scales_gib = expert_gib * 8 / checkpoint.expert_bits.known / MXFP4_BLOCK
    scale_gib = checkpoint.scale_gib.known if engram_scales else expert_scales_gib
    return {
        "experts": expert_gib / num_gpus,
        "scales": scale_gib / num_gpus,
        "attention, dense, routers": checkpoint.dense_gib.known,
        "embedding, LM head": checkpoint.embedding_gib.known,
    }
