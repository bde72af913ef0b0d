"""Uniform random routing: every set of ``top_k`` different experts is equally likely for every token.

This is the balanced reference of a real router: no expert is preferred, and only chance loads the ranks unevenly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import ParameterError, RackbookError

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK_ENTRIES = 2**18
"""Choices that are drawn at a time. It bounds the working memory, and it fixes the order in which random numbers are
used: another value gives another, equally likely, result for the same seed."""

MANY = 4
"""Above top_k² = MANY × experts, marking the experts that a token has is faster than comparing them; by timing."""

MOST_PAIRS = 2**12
"""Largest table of pairs that is faster than counting one by one; by timing."""


def experts_per_rank(num_experts: int, num_ranks: int) -> int:
    """How many experts each rank holds when all hold the same number.

    Raises:
        ParameterError: the experts do not divide among the ranks.
    """
    if num_ranks < 1 or num_experts < 1:
        raise ParameterError(f"got {num_experts} experts on {num_ranks} ranks, allowed: at least 1 of each")
    if num_experts % num_ranks:
        allowed = ", ".join(str(n) for n in range(1, num_experts + 1) if num_experts % n == 0)
        raise ParameterError(
            f"{num_experts} experts cannot be spread evenly over {num_ranks} ranks; "
            f"a number of ranks that divides {num_experts}: {allowed}"
        )
    return num_experts // num_ranks


def sample_expert_counts(
    *, num_tokens: int, num_experts: int, top_k: int, num_draws: int, seed: int | np.random.Generator
) -> NDArray[np.int64]:
    """How many tokens each expert gets, in independent draws of one batch under uniform routing.

    The law is exact. A token's experts are drawn one after the other, and one that the token has already is drawn
    again until it is new, so each is uniform over the experts that are left. Where ``top_k`` is large, Floyd's
    algorithm does the same without redrawing, and above half of the experts those that a token leaves out are drawn.

    Memory beside the result stays below 24 bytes × max(``BLOCK_ENTRIES``, ``num_experts``), 12 MiB for fewer than half
    a million experts, whatever the number of tokens and draws.

    Args:
        num_tokens: tokens in the batch, over all ranks.
        num_experts: routed experts of the layer.
        top_k: different experts that each token goes to.
        num_draws: independent batches.
        seed: a seed, or a generator that is advanced.

    Returns:
        Tokens per expert, shape (num_draws, num_experts); every row sums to num_tokens × top_k.

    Raises:
        ParameterError: a size below 1, or more experts per token than there are.
    """
    return _sample(num_experts, num_tokens, num_experts, top_k, num_draws, np.random.default_rng(seed))


def sample_rank_loads(
    *,
    num_ranks: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    num_draws: int,
    seed: int | np.random.Generator,
) -> NDArray[np.int64]:
    """How many (token, expert) pairs each rank computes, in independent draws of one batch under uniform routing.

    Rank r holds the experts r·m to r·m + m − 1, m experts per rank; which ones does not matter here, since all are
    equally likely. Law and memory as in :func:`sample_expert_counts`.

    Args:
        num_ranks: expert-parallel size; divides num_experts.
        num_tokens: tokens in the batch, over all ranks.
        num_experts: routed experts of the layer.
        top_k: different experts that each token goes to.
        num_draws: independent batches; each stands for one layer in one step.
        seed: a seed, or a generator that is advanced.

    Returns:
        Pairs per rank, shape (num_draws, num_ranks); every row sums to num_tokens × top_k.

    Raises:
        ParameterError: a size below 1, more experts per token than there are, or experts that do not divide among the
            ranks.
    """
    return _sample(num_ranks, num_tokens, num_experts, top_k, num_draws, np.random.default_rng(seed))


def _sample(
    num_groups: int, num_tokens: int, num_experts: int, top_k: int, num_draws: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Chosen (token, expert) pairs by draw and by group of neighbouring experts."""
    for name, got in (("num_tokens", num_tokens), ("num_experts", num_experts), ("num_draws", num_draws)):
        if got < 1:
            raise ParameterError(f"{name}: got {got}, allowed: at least 1")
    if not 1 <= top_k <= num_experts:
        raise ParameterError(f"top_k: got {top_k}, allowed: 1 to num_experts, which is {num_experts}")
    held = experts_per_rank(num_experts, num_groups)
    left_out = top_k > num_experts // 2
    num_columns = num_experts - top_k if left_out else top_k
    many = num_columns**2 > MANY * num_experts
    choose = _choices_marked if many else _choices_redrawn
    tokens_at_once = max(1, BLOCK_ENTRIES // (num_experts if many else max(num_columns, 1)))
    draws_at_once = max(1, min(tokens_at_once // num_tokens, BLOCK_ENTRIES // num_experts))
    counts = np.zeros((num_draws, num_groups), np.int64)
    for first in range(0, num_draws if num_columns else 0, draws_at_once):
        rows = counts[first : first + draws_at_once]
        for start in range(0, num_tokens, tokens_at_once):
            tokens = min(tokens_at_once, num_tokens - start)
            choices = choose(num_columns, len(rows) * tokens, num_experts, rng)
            rows += _counted(choices, held, len(rows), num_groups)
    if left_out:
        counts = num_tokens * held - counts
    if (counts.sum(axis=1) != num_tokens * top_k).any():
        raise RackbookError(f"fault of the sampler: a draw does not hold {num_tokens} tokens × {top_k} experts")
    return counts


def _word(num_experts: int) -> type[np.unsignedinteger]:
    return np.uint16 if num_experts < 2**16 else np.uint32


def _choices_redrawn(
    num_columns: int, num_rows: int, num_experts: int, rng: np.random.Generator
) -> NDArray[np.unsignedinteger]:
    """Different experts for each row, uniformly, fast for few of many: shape (num_columns, num_rows).

    Most of the work is one array of random bits: each word, divided by the largest whole number that still gives
    every expert the same number of words, is an expert. The few words beyond that, and experts that the row has
    already, are drawn again one by one.
    """
    word = _word(num_experts)
    size = np.dtype(word).itemsize
    num_words = num_columns * num_rows
    bits = rng.integers(0, 2**64 - 1, endpoint=True, dtype=np.uint64, size=-(-num_words * size // 8))
    choices = bits.view(word)[:num_words].reshape(num_columns, num_rows)
    np.floor_divide(choices, word(2 ** (8 * size) // num_experts), out=choices)
    for column, chosen in enumerate(choices):
        again = chosen >= num_experts
        for earlier in choices[:column]:
            again |= chosen == earlier
        rows = np.flatnonzero(again)
        while rows.size:
            redrawn = rng.integers(0, num_experts, dtype=word, size=rows.size)
            chosen[rows] = redrawn
            rows = rows[(choices[:column, rows] == redrawn).any(axis=0)]
    return choices


def _choices_marked(
    num_columns: int, num_rows: int, num_experts: int, rng: np.random.Generator
) -> NDArray[np.unsignedinteger]:
    """Different experts for each row, uniformly, fast for many of few: shape (num_columns, num_rows).

    Source: Floyd's algorithm (J. Bentley and R. Floyd, "A sample of brilliance", Communications of the ACM 30(9),
    1987) in all rows at once: draw from the first n experts, take the last of them where the draw is taken already,
    and go on with n + 1.
    """
    word = _word(num_experts)
    choices = np.empty((num_columns, num_rows), word)
    taken = np.zeros(num_rows * num_experts, bool)
    row_start = np.arange(num_rows, dtype=np.intp) * num_experts
    for chosen, last in zip(choices, range(num_experts - num_columns, num_experts), strict=True):
        chosen[:] = rng.integers(0, last, endpoint=True, dtype=word, size=num_rows)
        chosen[taken[row_start + chosen]] = last
        taken[row_start + chosen] = True
    return choices


def _counted(choices: NDArray[np.unsignedinteger], held: int, num_draws: int, num_groups: int) -> NDArray[np.int64]:
    """Choices per draw and group of ``held`` experts; the draws lie one after the other in the rows of ``choices``.

    Counting one value at a time takes longer than drawing it, so two tokens are counted as one pair of groups where
    the table of pairs is small.
    """
    groups = (choices // choices.dtype.type(held)).reshape(len(choices), num_draws, -1)
    tokens = groups.shape[2]
    paired = num_groups**2 <= MOST_PAIRS and tokens % 2 == 0
    if paired:
        groups = groups[:, :, : tokens // 2] * groups.dtype.type(num_groups) + groups[:, :, tokens // 2 :]
    num_bins = num_groups**2 if paired else num_groups
    bins = groups + np.arange(num_draws, dtype=np.intp)[:, None] * num_bins
    counts = np.bincount(bins.ravel(), minlength=num_draws * num_bins)
    if not paired:
        return counts.reshape(num_draws, num_groups)
    table = counts.reshape(num_draws, num_groups, num_groups)
    return table.sum(axis=1) + table.sum(axis=2)
