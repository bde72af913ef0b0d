"""Gather and reduce-scatter of unequal parts on gloo: what a mixture of experts under data parallelism needs.

A data-parallel rank has its own number of tokens in each step. Before the experts every rank gets the tokens of all
ranks, in rank order; after them the partial results are summed and each rank keeps its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def gather_parts(tensors: Sequence[torch.Tensor], sizes: Sequence[int], group: ProcessGroup) -> list[torch.Tensor]:
    """Give every rank the parts of all ranks, concatenated along the first dimension in rank order.

    All tensors travel as the bytes of one buffer, padded to the longest part: one message instead of one per tensor.

    Args:
        tensors: this rank's parts, each with ``sizes[rank]`` rows; dtypes may differ.
        sizes: rows of each rank.
        group: the ranks.

    Returns:
        One tensor with ``sum(sizes)`` rows for each of ``tensors``.
    """
    rank = torch.distributed.get_rank(group)
    rows, longest = sizes[rank], max(sizes)
    if any(tensor.shape[0] != rows for tensor in tensors):
        shapes = [tuple(tensor.shape) for tensor in tensors]
        raise ValueError(f"gather: got shapes {shapes} on rank {rank}, allowed: {rows} rows of sizes {list(sizes)}")
    widths = [tensor[:1].numel() * tensor.itemsize if rows else _row_bytes(tensor) for tensor in tensors]
    sent = torch.zeros((longest, sum(widths)), dtype=torch.uint8)
    _rows_as_bytes(tensors, widths, sent[:rows])
    received = torch.empty((len(sizes), longest, sum(widths)), dtype=torch.uint8)
    torch.distributed.all_gather(list(received.unbind(0)), sent, group=group)
    parts = torch.cat([received[source, :size] for source, size in enumerate(sizes)])
    gathered, start = [], 0
    for tensor, width in zip(tensors, widths, strict=True):
        own = parts[:, start : start + width].contiguous()
        gathered.append(own.view(tensor.dtype).view(sum(sizes), *tensor.shape[1:]))
        start += width
    return gathered


def sum_own_part(tensor: torch.Tensor, sizes: Sequence[int], group: ProcessGroup) -> torch.Tensor:
    """Sum a tensor over the ranks and keep this rank's rows.

    The sum runs in rank order and, for 16-bit floats, in float32: it depends on the values alone, never on timing.

    Args:
        tensor: ``sum(sizes)`` rows on every rank.
        sizes: rows that each rank keeps.
        group: the ranks.

    Returns:
        ``sizes[rank]`` rows, of the tensor's dtype.
    """
    rank = torch.distributed.get_rank(group)
    if tensor.shape[0] != sum(sizes):
        raise ValueError(f"reduce: got {tensor.shape[0]} rows on rank {rank}, allowed: the {sum(sizes)} of {sizes}")
    own, rest = sizes[rank], tensor.shape[1:]
    width = _row_bytes(tensor)
    sent = tensor.contiguous().view(sum(sizes), -1).view(torch.uint8).view(-1)
    received = torch.empty(len(sizes) * own * width, dtype=torch.uint8)
    torch.distributed.all_to_all_single(
        received, sent, [own * width] * len(sizes), [size * width for size in sizes], group=group
    )
    parts = received.view(tensor.dtype).view(len(sizes), own, *rest)
    wide = torch.float32 if tensor.dtype in (torch.bfloat16, torch.float16) else tensor.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(tensor.dtype)


def install() -> None:
    """Give vLLM's CPU communicator the two operations, unless it has its own by now."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    for name, function in (("all_gatherv", _all_gatherv), ("reduce_scatterv", _reduce_scatterv)):
        if name not in vars(CpuCommunicator):
            setattr(CpuCommunicator, name, function)


def _all_gatherv(
    self: Any, input_: torch.Tensor | list[torch.Tensor], dim: int = 0, sizes: list[int] | None = None
) -> torch.Tensor | list[torch.Tensor]:
    """``all_gatherv`` as vLLM's communicators have it."""
    if dim != 0:
        raise NotImplementedError(f"all_gatherv on CPUs: got dim {dim}, allowed: 0")
    tensors = [input_] if isinstance(input_, torch.Tensor) else list(input_)
    wanted = sizes if sizes is not None else [tensors[0].shape[0]] * self.world_size
    gathered = gather_parts(tensors, wanted, self.device_group)
    return gathered[0] if isinstance(input_, torch.Tensor) else gathered


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    """``reduce_scatterv`` as vLLM's communicators have it."""
    moved = input_.movedim(dim, 0)
    if sizes is None and moved.shape[0] % self.world_size:
        raise ValueError(f"reduce_scatterv: got {moved.shape[0]} rows, allowed: a multiple of {self.world_size}")
    wanted = sizes if sizes is not None else [moved.shape[0] // self.world_size] * self.world_size
    return sum_own_part(moved, wanted, self.device_group).movedim(0, dim).contiguous()


def _row_bytes(tensor: torch.Tensor) -> int:
    elements = 1
    for size in tensor.shape[1:]:
        elements *= size
    return elements * tensor.itemsize


def _rows_as_bytes(tensors: Sequence[torch.Tensor], widths: Sequence[int], out: torch.Tensor) -> None:
    if not out.shape[0]:
        return
    start = 0
    for tensor, width in zip(tensors, widths, strict=True):
        out[:, start : start + width] = tensor.contiguous().view(out.shape[0], -1).view(torch.uint8)
        start += width
