"""One decode step with speculative decoding: which experts it touches, which bytes it must read."""

from __future__ import annotations

from dataclasses import dataclass

from rackbook.errors import ParameterError


def expected_distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Expected number of different experts that a layer's tokens pick, at uniform, independent routing.

    A token leaves an expert out with probability 1 − k/E, so E·(1 − (1 − k/E)^n) are picked. Unequal
    popularity of the experts makes it less (1 − (1 − p)^n is concave in p); it never falls below ``top_k``.

    Args:
        num_experts: routed experts per layer, E.
        top_k: different experts per token, k.
        num_tokens: tokens in the step, n.

    Raises:
        ParameterError: more experts per token than there are, or an argument below 1.
    """
    if not 1 <= top_k <= num_experts:
        raise ParameterError(f"top_k: got {top_k}, allowed: 1 to {num_experts}, the number of experts")
    if num_tokens < 1:
        raise ParameterError(f"num_tokens: got {num_tokens}, allowed: a whole number ≥ 1")
    return num_experts * (1 - (1 - top_k / num_experts) ** num_tokens)


def experts_touched(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Share of a layer's experts that a step picks, 0 to 1; arguments and errors as the number of them, above."""
    return expected_distinct_experts(num_experts, top_k, num_tokens) / num_experts


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts of one kind of layer.

    Attributes:
        num_layers: layers with such experts.
        num_experts: experts per layer.
        top_k: experts per token.
        bytes_per_expert: weights of one expert in one layer, scales included.
    """

    num_layers: int
    num_experts: int
    top_k: int
    bytes_per_expert: float

    def bytes_read(self, num_experts_touched: float) -> float:
        """Bytes of one step that touches so many different experts in each layer."""
        return self.num_layers * num_experts_touched * self.bytes_per_expert


def read_ms(num_bytes: float, num_gpus: int, tb_per_s_per_gpu: float) -> float:
    """Time in ms to read bytes that are spread evenly over the GPUs, each at its full bandwidth.

    Args:
        num_bytes: over all GPUs.
        num_gpus: GPUs that read at once.
        tb_per_s_per_gpu: memory bandwidth of one, in 10¹² bytes per second.

    Raises:
        ParameterError: no GPU, or no bandwidth.
    """
    if num_gpus < 1 or not tb_per_s_per_gpu > 0:
        raise ParameterError(
            f"memory bandwidth: got {num_gpus} GPUs at {tb_per_s_per_gpu} TB/s, "
            "allowed: at least one GPU and more than 0 TB/s"
        )
    return num_bytes / (num_gpus * tb_per_s_per_gpu * 1e12) * 1e3
