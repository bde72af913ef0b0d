"""What admitting a prompt costs the CPU: ways to copy its token ids, timed by length, allocation and cache.

An engine holds a new prompt as a Python list or as an int32 array, and copies it into its own buffers when it admits
the request. These are the copies alone, by themselves: an engine's admission also hashes blocks, builds tables and
talks to other processes. Times are CPU time of the copying thread, which other work on the machine disturbs least.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from rackbook.errors import ParameterError
from rackbook.hostwork.sampling import cpu_us, interleaved

VOCABULARY = 129_280
"""Ids are drawn below this; ids above 256 are separate Python objects, as in a real prompt."""

CHUNK_TOKENS = 8_192
FLUSH_BYTES = 96 * 1024 * 1024
"""Written before each cold copy; larger than the last-level cache of the usual host processors' core complex."""


class _Prompt:
    """One prompt in both forms, and the buffers that are reused."""

    def __init__(self, num_tokens: int, generator: np.random.Generator) -> None:
        self.array = generator.integers(0, VOCABULARY, num_tokens, dtype=np.int32)
        self.tokens: list[int] = self.array.tolist()
        self.buffer = np.zeros(num_tokens, dtype=np.int32)

    def list_copy(self) -> object:
        return self.tokens.copy()

    def list_to_new_array(self) -> object:
        return np.array(self.tokens, dtype=np.int32)

    def list_to_buffer(self) -> object:
        self.buffer[:] = self.tokens
        return self.buffer

    def array_copy(self) -> object:
        return self.array.copy()

    def array_to_buffer(self) -> object:
        self.buffer[:] = self.array
        return self.buffer

    def array_to_buffer_in_chunks(self) -> object:
        for start in range(0, self.array.size, CHUNK_TOKENS):
            end = start + CHUNK_TOKENS
            self.buffer[start:end] = self.array[start:end]
        return self.buffer


METHODS: dict[tuple[str, str], Callable[[_Prompt], object]] = {
    ("list → list", "new"): _Prompt.list_copy,
    ("list → int32", "new"): _Prompt.list_to_new_array,
    ("list → int32", "reused"): _Prompt.list_to_buffer,
    ("int32 → int32", "new"): _Prompt.array_copy,
    ("int32 → int32", "reused"): _Prompt.array_to_buffer,
    ("int32 → int32 in chunks", "reused"): _Prompt.array_to_buffer_in_chunks,
}
"""By copy and by what happens to the memory that is written: allocated for this copy, or there already."""

CACHES = ("warm", "cold")


def measure(
    prompt_tokens: Sequence[int], *, budget_s: float = 8.0, relative_halfwidth: float = 0.03, seed: int = 0
) -> pl.DataFrame:
    """Time every way to copy a prompt, at every length, with warm and with cold caches.

    Args:
        prompt_tokens: lengths.
        budget_s: time for all of it; what the short prompts do not need goes to the long ones.
        relative_halfwidth: see :func:`rackbook.hostwork.sampling.interleaved`.
        seed: of the token ids.

    Returns:
        One row per copy, allocation, cache state and length: copy, allocation, cache_state, prompt_tokens,
        copy_p50_ms with its interval copy_low_ms and copy_high_ms, num_repeats, tight, missing_reason.

    Raises:
        ParameterError: no or doubled lengths, or one below 1.
    """
    if not prompt_tokens or min(prompt_tokens) < 1 or len(set(prompt_tokens)) < len(prompt_tokens):
        raise ParameterError(f"prompt_tokens: got {list(prompt_tokens)}, allowed: different lengths ≥ 1")
    generator = np.random.default_rng(seed)
    flush = np.zeros(FLUSH_BYTES // 8)
    rows = []
    end = time.monotonic() + budget_s
    for done, length in enumerate(sorted(prompt_tokens)):
        prompt = _Prompt(length, generator)
        variants = {
            (*method, cache): _timed(prompt, run, flush if cache == "cold" else None)
            for method, run in METHODS.items()
            for cache in CACHES
        }
        found = interleaved(
            variants,
            budget_s=max(1e-3, end - time.monotonic()) / (len(prompt_tokens) - done),
            relative_halfwidth=relative_halfwidth,
            max_repeats=60,
        )
        for (copy, allocation, cache), samples in found.items():
            bounds = samples.interval
            rows.append(
                {
                    "copy": copy,
                    "allocation": allocation,
                    "cache_state": cache,
                    "prompt_tokens": length,
                    "copy_p50_ms": bounds.estimate,
                    "copy_low_ms": bounds.low,
                    "copy_high_ms": bounds.high,
                    "num_repeats": bounds.num_values,
                    "tight": samples.tight,
                    "missing_reason": None if bounds.low is not None else "interval: it takes 6 repeats",
                }
            )
    return pl.DataFrame(rows, infer_schema_length=None)


def _timed(prompt: _Prompt, run: Callable[[_Prompt], object], flush: NDArray[np.float64] | None) -> Callable[[], float]:
    """A function that measures once, in ms of this thread's CPU time; a copy that was allocated is freed in it."""

    def cold() -> float:
        flush.fill(1.0)
        before = time.thread_time_ns()
        run(prompt)
        return (time.thread_time_ns() - before) * 1e-6

    def warm() -> float:
        return cpu_us(partial(run, prompt)) * 1e-3

    return warm if flush is None else cold
