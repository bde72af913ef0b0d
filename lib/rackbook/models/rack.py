"""What the sources print about the rack, put together: its serving point, its decode step, its price per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import polars as pl

from rackbook import published
from rackbook.models import cost
from rackbook.models.interactivity import decode_tok_per_s_per_gpu

DECODE_EP_SIZE = 32
"""The rack's decode engine, as S1's figure shows it."""


@dataclass(frozen=True)
class DecodeStep:
    """A decode step put together from its printed parts.

    Attributes:
        requests_per_gpu: requests that each GPU decodes in it.
        step_ms: its duration: MoE and everything else.
    """

    requests_per_gpu: int
    step_ms: float

    def output_tok_per_s_per_gpu(self, acceptance_length: float) -> float:
        """Output tokens per second of one decoding GPU at so many tokens per step and request."""
        return decode_tok_per_s_per_gpu(self.requests_per_gpu, acceptance_length, self.step_ms)


def serving_point() -> dict[str, Any]:
    """The row of table ``serving_pareto`` that S1 leads with: the only one of its points with a workload."""
    points = published.read("serving_pareto")
    return points.filter((pl.col("source") == "S1") & (pl.col("workload") == "AgentX")).row(0, named=True)


def decode_step() -> DecodeStep:
    """The decode step at the rack's expert-parallel size: the sum of the parts in table ``wide_ep_scaling``."""
    parts = published.read("wide_ep_scaling").filter(pl.col("ep_size") == DECODE_EP_SIZE)
    return DecodeStep(parts["requests_per_rank"].unique().item(), float(parts["step_ms"].sum()))


def acceptance_length() -> float:
    """Tokens per step that published runs of another engine on the same workload were set to."""
    return float(published.read("serving_pareto")["acceptance_length"].drop_nulls().unique().item())


def revenue_usd_per_gpu_hour() -> float:
    """What S1 says that a GPU-hour of the serving point is worth, off peak."""
    return published.read("cost").filter(pl.col("price_period") == "off-peak")["usd_per_gpu_hour"].item()


def usd_per_mtok() -> float:
    """Mean price of a token behind that revenue, in USD per million tokens."""
    return cost.implied_usd_per_mtok(revenue_usd_per_gpu_hour(), serving_point()["total_tok_per_s_per_gpu"])


def most_output() -> cost.Mix:
    """The mix of that price with most output: no input token misses the cache."""
    return cost.mixes_at(cost.list_prices("off-peak"), usd_per_mtok())[0]


def most_misses() -> cost.Mix:
    """The mix of that price with least output: none."""
    return cost.mixes_at(cost.list_prices("off-peak"), usd_per_mtok())[1]
