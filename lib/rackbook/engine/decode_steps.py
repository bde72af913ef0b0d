"""Decode steps of a running server at a known batch and context, by the clock of the server itself."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from rackbook.engine import logs
from rackbook.engine.completions import complete_together, random_prompts
from rackbook.errors import DataError, RackbookError

_SETTLE_S = 0.5
_WAIT_S = 10.0
_ATTEMPTS = 3
_SEED_STRIDE = 1_000_003  # so that a repeated batch has prompts that no other one has


@dataclass(frozen=True)
class Batch:
    """What the server decodes.

    Attributes:
        requests_per_rank: requests that decode at once on each rank.
        context_tokens: length of their prompts.
        steps: decode steps of each; the context grows by one token a step.
        num_ranks: data-parallel ranks.
    """

    requests_per_rank: int
    context_tokens: int
    steps: int
    num_ranks: int = 1

    def __post_init__(self) -> None:
        for name in ("requests_per_rank", "context_tokens", "steps", "num_ranks"):
            if getattr(self, name) < 1:
                raise DataError(f"batch, {name}: got {getattr(self, name)}, allowed: at least 1")


def measure(base_url: str, model: str, log: Path, batch: Batch, *, vocabulary: int, seed: int) -> pl.DataFrame:
    """Decode one batch and read the times of the steps that held all of it and nothing else.

    The server must run with ``--enable-logging-iteration-details`` and without prefix caching. Steps in which a prompt
    is still computed, or a request has not begun or is over, are left out; if none is left, as on a busy machine that
    does not get the requests off together, the batch is sent again, with other prompts.

    Args:
        base_url: of the server.
        model: as the server calls it.
        log: what the server prints.
        batch: what to decode.
        vocabulary: of the model.
        seed: of the prompts.

    Returns:
        One row per step and rank: as :func:`rackbook.engine.logs.iterations`.

    Raises:
        RackbookError: a request failed, or the log has no such step.
    """
    count = batch.requests_per_rank * batch.num_ranks
    ranks = [place % batch.num_ranks for place in range(count)] if batch.num_ranks > 1 else []
    for attempt in range(_ATTEMPTS):
        begin = log.stat().st_size
        prompts = random_prompts(count, batch.context_tokens, vocabulary, seed + attempt * _SEED_STRIDE)
        complete_together(base_url, model, prompts, batch.steps + 1, ranks=ranks)  # the first token is the prefill's
        steps = _settled(log, begin)
        whole = steps.filter(
            (pl.col("num_prefill_tokens") == 0)
            & (pl.col("num_decode_requests") == batch.requests_per_rank)
            & ~pl.col("dummy_step")
        )
        if not whole.is_empty():
            return whole
    raise RackbookError(
        f"{log.name}: {_ATTEMPTS} batches gave no step that decodes {batch.requests_per_rank} requests and nothing "
        f"else, the last one had {steps.height} iterations. The server needs --enable-logging-iteration-details and "
        "room for so many requests, and the machine must not be too busy to send them together"
    )


def _settled(log: Path, begin: int) -> pl.DataFrame:
    """The iterations since a place in the log, once no more come."""
    deadline, size, since = time.monotonic() + _WAIT_S, -1, time.monotonic()
    while time.monotonic() < deadline and (log.stat().st_size != size or time.monotonic() - since < _SETTLE_S):
        if log.stat().st_size != size:
            size, since = log.stat().st_size, time.monotonic()
        time.sleep(0.05)
    with log.open("rb") as file:
        file.seek(begin)
        text = file.read().decode("utf-8", "replace")
    return logs.iterations(text, log.name)
