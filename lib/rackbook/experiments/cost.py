"""What does a GPU-hour earn, and which token mixes fit the published revenue?

Revenue is throughput × price × mix. The published revenue and throughput give one mean price, which is one equation
in the mix: a line of mixes. Any price list, mix, throughput and calendar week can be put in.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, date, datetime, time, timedelta, timezone
from typing import TYPE_CHECKING, Annotated

import numpy as np
import polars as pl
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from rackbook import catalog, published
from rackbook.claims import Checks, Finding
from rackbook.errors import ParameterError
from rackbook.models import cost, rack
from rackbook.models.price_calendar import BEIJING, PeakHours

if TYPE_CHECKING:
    from collections.abc import Callable

CHECKS = Checks("cost")
MODEL = "deepseek-v4.1-flash"
WEEKDAYS = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
KINDS = {"cache hit": "cache_hit", "cache miss": "cache_miss", "output": "output"}
_SHARES = tuple(f"{kind}_share_percent" for kind in KINDS.values())
_PAYING = {"total_tok_per_s_per_gpu": pl.Float64, "missing_reason": pl.String}
_PARAMETERS = "parameters"
"""Source of what the user gave."""

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

ZONES = {"Asia/Shanghai": BEIJING}
"""Fixed offsets of the zones that price lists are stated in: no time-zone data base is needed."""


class Params(BaseModel):
    """Parameters of notebook 14."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    tok_per_s_per_gpu: float = Field(default=954_000.0, gt=0, description="tokens that the mix is counted in, per GPU")
    hit_share: float = Field(default=0.965, ge=0, le=1, description="cache hits ÷ all tokens; an example")
    output_share: float = Field(
        default=0.007, ge=0, le=1, validate_default=True, description="output ÷ all tokens; an example"
    )
    off_peak_usd_per_mtok: list[Price] = Field(default=[], description="hit, miss, output; empty for DeepSeek's list")
    peak_usd_per_mtok: list[Price] = Field(
        default=[], validate_default=True, description="the same for peak hours; give both lists or none"
    )
    revenue_usd_per_gpu_hour: float = Field(default=38.96, gt=0, description="revenue whose mixes are looked for")
    input_hit_rates: list[Share] = Field(
        default=[0.9, 0.95, 0.98, 1.0], min_length=1, description="cached ÷ all input, one line each"
    )
    max_output_share: float = Field(default=0.03, gt=0, le=1, description="right end of the output axis")
    gpu_hour_cost_usd: float = Field(default=10.0, gt=0, description="what a GPU-hour costs; an example, no quotation")
    week_of: str = Field(default="2026-10-19", description="a day of the week to show, YYYY-MM-DD")
    holidays: list[str] = Field(default=[], description="Chinese holidays, YYYY-MM-DD; none are known here")
    shown_utc_offset_h: int = Field(default=8, ge=-12, le=14, description="clock of the chart, hours ahead of UTC")

    @field_validator("off_peak_usd_per_mtok", "peak_usd_per_mtok")
    @classmethod
    def _three_prices(cls, value: list[float]) -> list[float]:
        if len(value) not in (0, 3):
            raise ValueError(f"got {len(value)} prices, allowed: three (hit, miss, output) or none")
        return value

    @field_validator("peak_usd_per_mtok")
    @classmethod
    def _both_lists_or_none(cls, value: list[float], info: ValidationInfo) -> list[float]:
        if "off_peak_usd_per_mtok" in info.data and bool(value) != bool(info.data["off_peak_usd_per_mtok"]):
            raise ValueError(
                "got one of off_peak_usd_per_mtok and peak_usd_per_mtok, allowed: both or none "
                "(give the same list twice where there are no peak hours)"
            )
        return value

    @field_validator("output_share")
    @classmethod
    def _no_more_than_all_tokens(cls, value: float, info: ValidationInfo) -> float:
        hits = info.data.get("hit_share", 0.0)
        if hits + value > 1 + 1e-12:
            raise ValueError(
                f"got {value:g}, allowed: at most {1 - hits:.6g}, what hit_share {hits:g} leaves of all tokens"
            )
        return value

    @field_validator("week_of", "holidays")
    @classmethod
    def _days(cls, value: str | list[str]) -> str | list[str]:
        for day in [value] if isinstance(value, str) else value:
            try:
                date.fromisoformat(day)
            except ValueError:
                raise ValueError(f"got {day!r}, allowed: a day as YYYY-MM-DD") from None
        return value


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``cost``, published.
        prices: both price lists in use: token_kind, price_period, usd_per_mtok; origin "published", or "modelled" for
            the user's own.
        mix: the example mix, by price_period ("off-peak", "peak"): its shares, usd_per_mtok, usd_per_gpu_hour.
        line: mixes that give the revenue looked for at off-peak prices: cache_hit_share_percent,
            cache_miss_share_percent, output_share_percent; the first and last row are its ends. Where no mix, or every
            mix, gives it: one row without shares, with a missing_reason.
        sensitivity: usd_per_gpu_hour by output_share_percent and input_hit_rate_percent at off-peak prices.
        slopes: what one percentage point of cache hits, turned into another kind, adds.
        week: hour by hour: weekday, hour_of_day, price_period.
        weekly: hours_per_week and usd_per_gpu_hour of each period and of the whole week.
        break_even: throughput that pays for a GPU-hour, by gpu_hour_cost_usd and input_hit_rate_percent; null with a
            missing_reason where the tokens earn nothing.
        margins: at the throughput, output share and GPU-hour cost given: usd_per_gpu_hour of a flat week, by hit rate.
    """

    points: pl.DataFrame
    prices: pl.DataFrame
    mix: pl.DataFrame
    line: pl.DataFrame
    sensitivity: pl.DataFrame
    slopes: pl.DataFrame
    week: pl.DataFrame
    weekly: pl.DataFrame
    break_even: pl.DataFrame
    margins: pl.DataFrame


@dataclass(frozen=True)
class Lists:
    """The price lists in use.

    Attributes:
        off_peak: outside peak hours.
        peak: in peak hours.
        source: id of the registered source, or "parameters" for the user's.
    """

    off_peak: cost.TokenPrices
    peak: cost.TokenPrices
    source: str

    @property
    def origin(self) -> str:
        """Of the prices: a list of one's own is an assumption."""
        return "modelled" if self.source == _PARAMETERS else "published"

    @property
    def by_period(self) -> dict[str, cost.TokenPrices]:
        """Both lists by price_period."""
        return {"off-peak": self.off_peak, "peak": self.peak}


def price_lists(params: Params) -> Lists:
    """The user's price lists, or DeepSeek's."""
    if not params.off_peak_usd_per_mtok:
        return Lists(cost.list_prices("off-peak"), cost.list_prices("peak"), "deepseek-prices")
    return Lists(
        cost.TokenPrices(*params.off_peak_usd_per_mtok), cost.TokenPrices(*params.peak_usd_per_mtok), _PARAMETERS
    )


def collect(params: Params) -> Evidence:
    """Work out what the parameters earn, and which mixes fit the revenue."""
    lists = price_lists(params)
    mix = cost.Mix(params.hit_share, 1 - params.hit_share - params.output_share, params.output_share)
    calendar = peak_hours(params.holidays)
    monday = week_start(params)
    weekly = weekly_revenue(params, lists, mix, calendar, monday)
    return Evidence(
        points=published.read("cost"),
        prices=_price_table(lists),
        mix=mix_revenue(params, lists, mix),
        line=mixes_of_revenue(params, lists),
        sensitivity=sensitivity(params, lists),
        slopes=slopes(params, lists),
        week=week(calendar, monday),
        weekly=weekly,
        break_even=break_even(params, lists, weekly),
        margins=margins(params, lists, weekly),
    )


def mix_revenue(params: Params, lists: Lists, mix: cost.Mix) -> pl.DataFrame:
    """What the example mix earns in an hour of each period.

    Returns:
        price_period, the three shares in percent, usd_per_mtok, usd_per_gpu_hour, origin "modelled", source.
    """
    return pl.DataFrame(
        [
            {
                "price_period": period,
                **_shares(mix),
                "usd_per_mtok": (price := cost.blended_usd_per_mtok(prices, mix)),
                "usd_per_gpu_hour": cost.usd_per_gpu_hour(params.tok_per_s_per_gpu, price),
                "origin": "modelled",
                "source": lists.source,
            }
            for period, prices in lists.by_period.items()
        ]
    )


def mixes_of_revenue(params: Params, lists: Lists) -> pl.DataFrame:
    """The line of mixes that give ``revenue_usd_per_gpu_hour`` at off-peak prices, from most output to least.

    Returns:
        cache_hit_share_percent, cache_miss_share_percent, output_share_percent, usd_per_mtok, usd_per_gpu_hour,
        origin "derived", source, formula, missing_reason; 51 rows, or one without shares where they are not determined.
    """
    price = cost.implied_usd_per_mtok(params.revenue_usd_per_gpu_hour, params.tok_per_s_per_gpu)
    printed = (rack.serving_point()["total_tok_per_s_per_gpu"], rack.revenue_usd_per_gpu_hour())
    stated = "S1" if (params.tok_per_s_per_gpu, params.revenue_usd_per_gpu_hour) == printed else _PARAMETERS
    common = {
        "usd_per_mtok": price,
        "usd_per_gpu_hour": params.revenue_usd_per_gpu_hour,
        "origin": "derived",
        "source": f"{stated}+{lists.source}",
        "formula": f"hit·h + miss·m + output·o = {price:.5g} USD per million tokens",
        "missing_reason": None,
    }
    try:
        most, least = cost.mixes_at(lists.off_peak, price)
    except ParameterError as problem:
        rows = [dict.fromkeys(_SHARES) | common | {"missing_reason": f"no line of mixes: {problem}"}]
    else:
        rows = [
            _shares(cost.Mix(**{k: (1 - place) * getattr(most, k) + place * getattr(least, k) for k in KINDS.values()}))
            | common
            for place in np.linspace(0, 1, 51)
        ]
    return pl.DataFrame(rows, schema_overrides=dict.fromkeys(_SHARES, pl.Float64) | {"missing_reason": pl.String})


def sensitivity(params: Params, lists: Lists) -> pl.DataFrame:
    """Off-peak revenue against the share of output, one line per hit rate of the input.

    Returns:
        input_hit_rate_percent, output_share_percent, usd_per_mtok, usd_per_gpu_hour, origin "modelled", source.
    """
    rows = []
    for rate in params.input_hit_rates:
        for share in np.linspace(0, params.max_output_share, 31):
            price = cost.blended_usd_per_mtok(lists.off_peak, cost.Mix.of_input(rate, float(share)))
            rows.append(
                {
                    "input_hit_rate_percent": 100 * rate,
                    "output_share_percent": 100 * float(share),
                    "usd_per_mtok": price,
                    "usd_per_gpu_hour": cost.usd_per_gpu_hour(params.tok_per_s_per_gpu, price),
                    "origin": "modelled",
                    "source": lists.source,
                }
            )
    return pl.DataFrame(rows)


def slopes(params: Params, lists: Lists) -> pl.DataFrame:
    """What it adds to turn one percentage point of all tokens from cache hits into another kind.

    Returns:
        token_kind, price_period, usd_per_gpu_hour_per_point, origin "modelled", source.
    """
    return pl.DataFrame(
        [
            {
                "token_kind": kind,
                "price_period": period,
                "usd_per_gpu_hour_per_point": cost.usd_per_gpu_hour(
                    params.tok_per_s_per_gpu, (getattr(prices, KINDS[kind]) - prices.cache_hit) / 100
                ),
                "origin": "modelled",
                "source": lists.source,
            }
            for period, prices in lists.by_period.items()
            for kind in ("cache miss", "output")
        ]
    )


def peak_hours(holidays: list[str]) -> PeakHours:
    """The peak rule of the price list, with the holidays that the user knows.

    Args:
        holidays: ISO dates on the rule's clock.
    """
    rule = catalog.prices(MODEL)
    if rule.time_zone not in ZONES:
        raise ParameterError(f"time_zone of the prices: got {rule.time_zone!r}, allowed: {', '.join(ZONES)}")
    return PeakHours(
        weekdays=frozenset(WEEKDAYS.index(day) for day in rule.weekdays),
        hours=rule.peak_hours.known,
        holidays=frozenset(map(date.fromisoformat, holidays)),
        zone=ZONES[rule.time_zone],
    )


def week_start(params: Params) -> datetime:
    """Monday, 0 o'clock, of the chosen week on the clock that is shown."""
    day = date.fromisoformat(params.week_of)
    zone = timezone(timedelta(hours=params.shown_utc_offset_h))
    return datetime.combine(day - timedelta(days=day.weekday()), time(), zone)


def week(calendar: PeakHours, monday: datetime) -> pl.DataFrame:
    """Price period of each of the 168 hours from ``monday`` on.

    Returns:
        weekday, hour_of_day, price_period, origin "derived", source.
    """
    return pl.DataFrame(
        [
            {
                "weekday": WEEKDAYS[instant.weekday()],
                "hour_of_day": instant.hour,
                "price_period": "peak" if calendar.is_peak(instant) else "off-peak",
                "origin": "derived",
                "source": "deepseek-prices",
            }
            for instant in (monday + timedelta(hours=hour) for hour in range(7 * 24))
        ]
    )


def weekly_revenue(params: Params, lists: Lists, mix: cost.Mix, calendar: PeakHours, monday: datetime) -> pl.DataFrame:
    """What a GPU-hour earns in each period and in the mean over a week of even load.

    Returns:
        price_period ("off-peak", "peak", null for the whole week), hours_per_week, usd_per_gpu_hour, origin
        "modelled", source.
    """
    start = monday.astimezone(UTC)
    peak = calendar.peak_hours_between(start, start + timedelta(days=7))
    hours = {"off-peak": 7 * 24 - peak, "peak": peak}
    earned = {
        period: cost.usd_per_gpu_hour(params.tok_per_s_per_gpu, cost.blended_usd_per_mtok(prices, mix))
        for period, prices in lists.by_period.items()
    }
    rows: list[tuple[str | None, float, float]] = [(period, hours[period], earned[period]) for period in hours]
    rows.append((None, 168.0, sum(hours[period] * earned[period] for period in hours) / 168))
    return pl.DataFrame(
        [
            {
                "price_period": period,
                "hours_per_week": hours_per_week,
                "usd_per_gpu_hour": usd,
                "origin": "modelled",
                "source": lists.source,
            }
            for period, hours_per_week, usd in rows
        ],
        schema_overrides={"price_period": pl.String},
    )


def break_even(params: Params, lists: Lists, weekly: pl.DataFrame) -> pl.DataFrame:
    """Throughput at which a GPU-hour pays for itself over a week of even load, by its cost and by hit rate.

    Returns:
        input_hit_rate_percent, gpu_hour_cost_usd (0 to twice the cost given), total_tok_per_s_per_gpu,
        missing_reason, origin "modelled", source.
    """
    rows = []
    for rate in params.input_hit_rates:
        price = _week_price(lists, cost.Mix.of_input(rate, params.output_share), weekly)
        for hour_cost in np.linspace(0, 2 * params.gpu_hour_cost_usd, 21):
            rows.append(
                {
                    "input_hit_rate_percent": 100 * rate,
                    "gpu_hour_cost_usd": float(hour_cost),
                    **_paying_throughput(float(hour_cost), price),
                    "origin": "modelled",
                    "source": lists.source,
                }
            )
    return pl.DataFrame(rows, schema_overrides=_PAYING)


def margins(params: Params, lists: Lists, weekly: pl.DataFrame) -> pl.DataFrame:
    """Revenue of a GPU-hour over a week of even load, which is also the cost at which it breaks even, by hit rate.

    Returns:
        input_hit_rate_percent, output_share_percent, usd_per_mtok, usd_per_gpu_hour, gpu_hour_cost_usd,
        total_tok_per_s_per_gpu (the throughput that pays for that cost), missing_reason, origin "modelled", source.
    """
    rows = []
    for rate in params.input_hit_rates:
        price = _week_price(lists, cost.Mix.of_input(rate, params.output_share), weekly)
        rows.append(
            {
                "input_hit_rate_percent": 100 * rate,
                "output_share_percent": 100 * params.output_share,
                "usd_per_mtok": price,
                "usd_per_gpu_hour": cost.usd_per_gpu_hour(params.tok_per_s_per_gpu, price),
                "gpu_hour_cost_usd": params.gpu_hour_cost_usd,
                **_paying_throughput(params.gpu_hour_cost_usd, price),
                "origin": "modelled",
                "source": lists.source,
            }
        )
    return pl.DataFrame(rows, schema_overrides=_PAYING)


def at_hand(params: Params) -> pl.DataFrame:
    """The throughput and the GPU-hour cost given, as one point: gpu_hour_cost_usd, total_tok_per_s_per_gpu."""
    return pl.DataFrame(
        [
            {
                "gpu_hour_cost_usd": params.gpu_hour_cost_usd,
                "total_tok_per_s_per_gpu": params.tok_per_s_per_gpu,
                "origin": "modelled",
                "source": _PARAMETERS,
            }
        ]
    )


def _week_price(lists: Lists, mix: cost.Mix, weekly: pl.DataFrame) -> float:
    hours = dict(weekly.drop_nulls("price_period").select("price_period", "hours_per_week").iter_rows())
    paid = sum(hours[period] * cost.blended_usd_per_mtok(prices, mix) for period, prices in lists.by_period.items())
    return paid / sum(hours.values())


def _shares(mix: cost.Mix) -> dict[str, float]:
    return {f"{kind}_share_percent": 100 * max(0.0, getattr(mix, kind)) for kind in KINDS.values()}


def _paying_throughput(hour_cost_usd: float, usd_per_mtok: float) -> dict[str, object]:
    """The throughput that pays for a GPU-hour; null with a reason where the tokens earn nothing."""
    earns = usd_per_mtok > 0
    return {
        "total_tok_per_s_per_gpu": cost.break_even_tok_per_s_per_gpu(hour_cost_usd, usd_per_mtok) if earns else None,
        "missing_reason": None if earns else "the tokens of this mix earn nothing, so no throughput pays",
    }


def _price_table(lists: Lists) -> pl.DataFrame:
    return pl.DataFrame(
        [
            {
                "token_kind": kind,
                "price_period": period,
                "usd_per_mtok": getattr(prices, KINDS[kind]),
                "origin": lists.origin,
                "source": lists.source,
            }
            for kind in KINDS
            for period, prices in lists.by_period.items()
        ]
    )


@CHECKS("usd_per_gpu_hour")
def _revenue(_: Evidence) -> Finding:
    return Finding(None, note="the token mix is not printed, and the revenue is the only equation in it")


@CHECKS("peak_morning", "peak_afternoon")
def _peak_hours(_: Evidence) -> Finding:
    return Finding(None, note="hours of one price page; nothing else determines them")


@CHECKS("hit_off_peak", "hit_peak", "miss_off_peak", "miss_peak", "output_off_peak", "output_peak")
def _listed(_: Evidence) -> Finding:
    return Finding(None, note="a listed price; nothing else determines it")


@CHECKS("blended_usd_per_million")
def _blended(_: Evidence) -> Finding:
    rate, revenue = rack.serving_point()["total_tok_per_s_per_gpu"], rack.revenue_usd_per_gpu_hour()
    return Finding(rack.usd_per_mtok(), "derived", f"{revenue:g} USD ÷ ({rate:,.0f} × 3600 tokens)")


def _share_check(mix: Callable[[], cost.Mix], kind: str) -> Callable[[Evidence], Finding]:
    def check(_: Evidence) -> Finding:
        return Finding(100 * getattr(mix(), kind), "derived", "end of the line of mixes at the off-peak list")

    return check


CHECKS("max_output_share_percent")(_share_check(rack.most_output, "output"))
CHECKS("max_miss_share_percent")(_share_check(rack.most_misses, "cache_miss"))


@CHECKS("output_from_price")
def _output_from_price(_: Evidence) -> Finding:
    share = rack.most_output().output
    return Finding(
        share * rack.serving_point()["total_tok_per_s_per_gpu"], "derived", f"{100 * share:.3f} % of the rate"
    )


@CHECKS("two_roads_agree")
def _two_roads(_: Evidence) -> Finding:
    by_price = rack.most_output().output * rack.serving_point()["total_tok_per_s_per_gpu"]
    by_step = rack.decode_step().output_tok_per_s_per_gpu(rack.acceptance_length())
    return Finding(0.1 < by_step / by_price < 10, "derived", f"{by_price:,.0f} by price, {by_step:,.0f} by step time")


@CHECKS("tokens_are_logical")
def _logical(_: Evidence) -> Finding:
    prices, mean = cost.list_prices("off-peak"), rack.usd_per_mtok()
    dearer = min(prices.cache_miss, prices.output)
    return Finding(mean < dearer, "derived", f"mean price {mean:.5f}, cheapest token outside the cache {dearer:g}")
