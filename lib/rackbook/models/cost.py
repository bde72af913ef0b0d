"""What a GPU-hour earns: throughput × price × token mix, and the mixes that one price allows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from rackbook import catalog
from rackbook.errors import ParameterError

TOKENS_PER_PRICE = 1e6
SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class TokenPrices:
    """A price list in USD per million tokens.

    Attributes:
        cache_hit: of an input token that the prefix cache holds.
        cache_miss: of an input token that has to be computed.
        output: of a generated token.
    """

    cache_hit: float
    cache_miss: float
    output: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0):
                raise ParameterError(f"price of {name}: got {value!r}, allowed: a number ≥ 0 [USD per million tokens]")


def list_prices(period: Literal["off-peak", "peak"], model: str = "deepseek-v4.1-flash") -> TokenPrices:
    """A price list of the catalog.

    Args:
        period: which list.
        model: file name in ``data/prices``.

    Raises:
        DataError: no prices of such a model.
    """
    listed = catalog.prices(model)
    chosen = listed.peak if period == "peak" else listed.off_peak
    return TokenPrices(chosen.cache_hit.known, chosen.cache_miss.known, chosen.output.known)


@dataclass(frozen=True)
class Mix:
    """Shares of all tokens, from 0 to 1; they sum to 1.

    Attributes:
        cache_hit: input tokens that the prefix cache holds.
        cache_miss: input tokens that have to be computed.
        output: generated tokens.
    """

    cache_hit: float
    cache_miss: float
    output: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not -1e-12 <= value <= 1 + 1e-12:
                raise ParameterError(f"share of {name}: got {value!r}, allowed: a number from 0 to 1")
        total = self.cache_hit + self.cache_miss + self.output
        if not math.isclose(total, 1, abs_tol=1e-9):
            raise ParameterError(
                f"the shares of a mix: got a sum of {total:.9g}, allowed: 1 (cache_hit + cache_miss + output)"
            )

    @classmethod
    def of_input(cls, input_hit_rate: float, output_share: float) -> Mix:
        """Mix in which a share of the *input* is served from the prefix cache.

        Args:
            input_hit_rate: cached input ÷ all input, from 0 to 1.
            output_share: output ÷ all tokens, from 0 to 1.

        Raises:
            ParameterError: an argument is out of range.
        """
        if not 0 <= input_hit_rate <= 1:
            raise ParameterError(f"input_hit_rate: got {input_hit_rate!r}, allowed: a number from 0 to 1")
        input_share = 1 - output_share
        return cls(input_share * input_hit_rate, input_share * (1 - input_hit_rate), output_share)


def blended_usd_per_mtok(prices: TokenPrices, mix: Mix) -> float:
    """Mean price of a token of the mix, in USD per million tokens."""
    return prices.cache_hit * mix.cache_hit + prices.cache_miss * mix.cache_miss + prices.output * mix.output


def usd_per_gpu_hour(tok_per_s_per_gpu: float, usd_per_mtok: float) -> float:
    """Revenue of a GPU in an hour in which it serves at this rate without a pause."""
    return tok_per_s_per_gpu * SECONDS_PER_HOUR / TOKENS_PER_PRICE * usd_per_mtok


def implied_usd_per_mtok(revenue_usd_per_gpu_hour: float, tok_per_s_per_gpu: float) -> float:
    """Mean price of a token that a revenue and a throughput imply, in USD per million tokens.

    Raises:
        ParameterError: the throughput is not positive.
    """
    if not tok_per_s_per_gpu > 0:
        raise ParameterError(f"tok_per_s_per_gpu: got {tok_per_s_per_gpu!r}, allowed: a number > 0")
    return revenue_usd_per_gpu_hour / usd_per_gpu_hour(tok_per_s_per_gpu, 1.0)


def break_even_tok_per_s_per_gpu(cost_usd_per_gpu_hour: float, usd_per_mtok: float) -> float:
    """Throughput at which a GPU-hour earns what it costs.

    Raises:
        ParameterError: tokens of the mix earn nothing, so no throughput breaks even.
    """
    if not usd_per_mtok > 0:
        raise ParameterError(f"usd_per_mtok: got {usd_per_mtok!r}, allowed: a number > 0, or no throughput breaks even")
    return cost_usd_per_gpu_hour / usd_per_gpu_hour(1.0, usd_per_mtok)


def mixes_at(prices: TokenPrices, usd_per_mtok: float) -> tuple[Mix, Mix]:
    """The two ends of the segment of all mixes whose mean price is ``usd_per_mtok``.

    The mixes form a triangle, and a mean price cuts it in a straight line, so every mix on it lies between
    its two ends. At an end one of the three kinds of token is absent.

    Args:
        prices: three prices of which at least two differ.
        usd_per_mtok: mean price, in USD per million tokens.

    Returns:
        The end with most output and the end with least; the same mix twice where the line touches a corner.

    Raises:
        ParameterError: no mix has this price, or every mix has it.
    """
    names = ("cache_hit", "cache_miss", "output")
    price = {name: getattr(prices, name) for name in names}
    low, high = min(price.values()), max(price.values())
    if low == high:
        raise ParameterError(f"prices: all three are {low:g}, so the price says nothing about the mix")
    if not low <= usd_per_mtok <= high:
        raise ParameterError(
            f"usd_per_mtok: got {usd_per_mtok:.6g}, allowed: {low:g} to {high:g}, "
            "the lowest and the highest price of the list"
        )
    ends: list[Mix] = []
    for one, other in ((names[0], names[1]), (names[0], names[2]), (names[1], names[2])):
        if price[one] == price[other]:
            continue
        share = (usd_per_mtok - price[one]) / (price[other] - price[one])
        if -1e-12 <= share <= 1 + 1e-12:
            share = min(1.0, max(0.0, share))
            ends.append(Mix(**{name: {one: 1 - share, other: share}.get(name, 0.0) for name in names}))
    ends.sort(key=lambda mix: (mix.output, -mix.cache_miss))
    return ends[-1], ends[0]
