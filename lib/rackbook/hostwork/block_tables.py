"""What filling a request's block table costs the CPU, with and without the null blocks of a sliding window.

A layer group with a sliding window keeps only the blocks of the window; all earlier entries of its table are the null
block. A prompt of 855K tokens with blocks of 64 has 13,680 entries of which three are real. Written either way the
table reads the same, if the row is known to be zero before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import polars as pl

from rackbook.errors import ParameterError
from rackbook.hostwork.sampling import cpu_us, interleaved

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Block:
    """A block of the KV cache, as a block manager holds it."""

    block_id: int


class Row:
    """The row of one request in the table of a sliding-window group.

    Args:
        prompt_tokens: length of the prompt.
        window_tokens: sliding window.
        block_tokens: tokens of a block.
    """

    def __init__(self, prompt_tokens: int, window_tokens: int, block_tokens: int) -> None:
        num_blocks = -(-prompt_tokens // block_tokens)
        self.num_null = max(0, prompt_tokens - window_tokens) // block_tokens
        null = Block(NULL_BLOCK)
        self.blocks = [null] * self.num_null + [Block(1 + i) for i in range(num_blocks - self.num_null)]
        self.table = np.zeros(num_blocks, dtype=np.int32)

    def write_all(self) -> None:
        """Write every entry, null blocks too."""
        self.table[:] = [block.block_id for block in self.blocks]

    def write_window(self) -> None:
        """Write the entries of the window alone."""
        first = self.num_null
        self.table[first:] = [block.block_id for block in self.blocks[first:]]


METHODS: dict[str, Callable[[Row], None]] = {
    "every block": Row.write_all,
    "null blocks skipped": Row.write_window,
}


def measure(
    prompt_tokens: Sequence[int],
    *,
    window_tokens: int,
    block_tokens: int,
    budget_s: float = 2.0,
    relative_halfwidth: float = 0.03,
) -> pl.DataFrame:
    """Time both ways to fill the row, at every length.

    Args:
        prompt_tokens: lengths.
        window_tokens: sliding window.
        block_tokens: tokens of a block.
        budget_s: time for all of it, shared out evenly over the lengths.
        relative_halfwidth: see :func:`rackbook.hostwork.sampling.interleaved`.

    Returns:
        One row per way and length: table_fill, prompt_tokens, block_tokens, num_blocks, num_null_blocks, fill_p50_us
        with its interval fill_low_us and fill_high_us, num_repeats, tight, missing_reason.

    Raises:
        ParameterError: no lengths, or a length, window or block below 1.
    """
    if not prompt_tokens or min(*prompt_tokens, window_tokens, block_tokens) < 1:
        raise ParameterError(
            f"got prompt_tokens = {list(prompt_tokens)}, window_tokens = {window_tokens}, block_tokens = "
            f"{block_tokens}; allowed: lengths, a window and blocks of 1 token or more"
        )
    rows = []
    for length in sorted(prompt_tokens):
        row = Row(length, window_tokens, block_tokens)
        variants = {name: partial(cpu_us, partial(method, row)) for name, method in METHODS.items()}
        share = budget_s / len(prompt_tokens)
        found = interleaved(variants, budget_s=share, relative_halfwidth=relative_halfwidth, max_repeats=60)
        for name, samples in found.items():
            bounds = samples.interval
            rows.append(
                {
                    "table_fill": name,
                    "prompt_tokens": length,
                    "block_tokens": block_tokens,
                    "num_blocks": len(row.blocks),
                    "num_null_blocks": row.num_null,
                    "fill_p50_us": bounds.estimate,
                    "fill_low_us": bounds.low,
                    "fill_high_us": bounds.high,
                    "num_repeats": bounds.num_values,
                    "tight": samples.tight,
                    "missing_reason": None if bounds.low is not None else "interval: it takes 6 repeats",
                }
            )
    return pl.DataFrame(rows, infer_schema_length=None)
