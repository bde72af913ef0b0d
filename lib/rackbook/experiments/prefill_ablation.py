"""Which of three fixes bought the prefill?

The printed gains of three fixes over the number of new tokens, the two ways in which gains combine against the printed
total, what that leaves for the two fixes without a printed size, the ladder as time per token, and which part of it a
user can switch on a released vLLM. A user's own gains are combined beside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import polars as pl
from pydantic import BaseModel, ConfigDict, Field

from rackbook import catalog, prefill_switches, published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.errors import DataError, ParameterError, one_of
from rackbook.experiments import forward_runs, live, prefill_measured, vocabulary
from rackbook.locations import DATA, shown
from rackbook.models.gains import COMPOSITIONS, combined, from_time_cut, remaining
from rackbook.runs import Run

CHECKS = Checks("prefill_ablation")
doubts = live.doubts

K = 1024
SIZED_FIX = "SWA bounded replay extended to layer 20"
"""The one fix whose gain is printed for several numbers of new tokens."""

SHORT_SIZED_FIX = "SWA replay"
ALL = "all three"
OWN = "your gains"
MODEL = "deepseek-v4.1-flash"
K_TOKENS = 1000
HALF_UNIT = 50
"""Half a unit of the last printed digit of a throughput, in tokens/s."""

Gain = Annotated[float, Field(gt=-100, allow_inf_nan=False)]


class Params(BaseModel):
    """Parameters of notebook 04."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    new_tokens: int = Field(default=32_768, ge=1, description="size of the step-by-step ladder")
    gain_error_percent: float = Field(
        default=0.05, ge=0, lt=50, description="error of every single gain, printed or your own"
    )
    own_gains_percent: list[Gain] = Field(default=[], description="gains of the single fixes, measured by yourself")
    own_total_gain_percent: Gain | None = Field(default=None, description="gain of all of them, measured by yourself")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="gb300-nvl72", description=live.CLUSTER)
    measured_new_tokens: list[int] = Field(
        default=[4 * K, 8 * K, 16 * K, 32 * K, 64 * K], min_length=1, description="new tokens to measure with"
    )
    measured_fixes: list[str] = Field(
        default=list(prefill_switches.NAMES), min_length=1, description="what is switched on and off"
    )
    measured_ranks: int = Field(default=4, ge=1, description="ranks to measure with, one prefill on each")


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        points: table ``prefill_ablation``, published rows; new_tokens is null where no size is printed.
        totals: table ``prefill_ablation_total``, published row.
        total_points: fix, new_tokens, gain_percent of all fixes where two throughputs give it, "derived".
        totals_by_size: gains_of, new_tokens and the least and most that all fixes gain there; your own total last.
        compositions: gains_of, composition, gain_percent with bounds, and how far the total is from it, "derived".
        ladder: the fixes switched on one after the other at ``new_tokens``, both ways, "derived".
        others: new_tokens, composition and what the total leaves for the two other fixes, "derived".
        times: reading, time_of, us_per_token: what takes the time of a new token away at 64K, "derived".
        readings: the single percentages as gains in throughput and as cuts of the time, at each size, "derived".
        switches: fix, pr and what can be switched, one row per fix.
        run: the run that ``source`` names; None for "published".
        measured: every prefill of that run with its quality; empty without one.
        measured_gains: fix, new_tokens, gain_percent of the switches of that run; empty without one.
    """

    points: pl.DataFrame
    totals: pl.DataFrame
    total_points: pl.DataFrame
    totals_by_size: pl.DataFrame
    compositions: pl.DataFrame
    ladder: pl.DataFrame
    others: pl.DataFrame
    times: pl.DataFrame
    readings: pl.DataFrame
    switches: pl.DataFrame
    run: Run | None
    measured: pl.DataFrame
    measured_gains: pl.DataFrame


def collect(params: Params) -> Evidence:
    """Gather the published gains, what follows from them, and a run, measured now if asked for.

    Raises:
        ParameterError: a size without printed gains, a total of your own without its gains, or a ``source`` that is
            not allowed.
        DataError: the file of switches, or a stored run, is not what it should be.
        RackbookError: the measurement cannot start, or failed.
    """
    run = forward_runs.run_of(CHECKS.topic, params)
    measured = prefill_measured.prefills(run)
    points = published.read("prefill_ablation")
    totals = published.read("prefill_ablation_total")
    throughput = published.read("prefill_ablation_throughput")
    total_points = gain_of_all(throughput)
    by_size = totals_by_size(points, totals, total_points)
    beside = pl.concat([by_size, own_total(params)])
    return Evidence(
        points=points,
        totals=totals,
        total_points=total_points,
        totals_by_size=beside,
        compositions=compositions(points, beside, params),
        ladder=ladder(points, params.new_tokens),
        others=others(points, by_size),
        times=times(points, throughput),
        readings=readings(points, by_size, params.gain_error_percent),
        switches=switches(points),
        run=run,
        measured=measured,
        measured_gains=prefill_measured.gains(measured),
    )


def measured_subtitle(evidence: Evidence) -> str:
    """Hardware, model and sample of the measured prefills, for their chart."""
    row = evidence.measured.row(0, named=True)
    return (
        f"{row['model']} on {row['hardware']}, {row['num_ranks']} ranks, {row['cached_tokens']:,} tokens cached; "
        f"{live.description(evidence.run)}"
    )


def gains_at(points: pl.DataFrame, new_tokens: int) -> dict[str, float]:
    """The three printed gains at one size, those without a printed size taken at every size.

    Args:
        points: table ``prefill_ablation``.
        new_tokens: a size with a printed gain.

    Returns:
        Gain in percent by fix, in the order of the table.

    Raises:
        ParameterError: no gain is printed for the size.
    """
    sizes = sized(points)
    if new_tokens not in sizes:
        raise ParameterError(
            f"new_tokens: got {new_tokens}, allowed: {', '.join(map(str, sizes))}, the sizes with a printed gain; "
            "nothing is interpolated"
        )
    chosen = points.filter(pl.col("new_tokens").is_null() | (pl.col("new_tokens") == new_tokens))
    return dict(chosen.select("fix", "gain_percent").iter_rows())


def sized(points: pl.DataFrame) -> list[int]:
    """The sizes with a printed gain, ascending."""
    return points["new_tokens"].drop_nulls().unique().sort().to_list()


def gain_of_all(throughput: pl.DataFrame) -> pl.DataFrame:
    """The gain of all fixes where the throughput is printed before and after them.

    Args:
        throughput: table ``prefill_ablation_throughput``.

    Returns:
        fix, new_tokens, gain_percent, min_gain_percent and max_gain_percent (what the rounding of the two throughputs
        allows), origin "derived", source, formula.
    """
    rows = []
    for (size,), pair in throughput.group_by("new_tokens", maintain_order=True):
        rate = dict(pair.select("stage", "prefill_tok_per_s_per_gpu").iter_rows())
        before, after = rate["before"], rate["after"]
        rows.append(
            {
                "fix": ALL,
                "new_tokens": size,
                "gain_percent": 100 * (after / before - 1),
                "min_gain_percent": 100 * ((after - HALF_UNIT) / (before + HALF_UNIT) - 1),
                "max_gain_percent": 100 * ((after + HALF_UNIT) / (before - HALF_UNIT) - 1),
                "origin": "derived",
                "source": pair["source"].unique().item(),
                "formula": f"{after / K_TOKENS:g}K ÷ {before / K_TOKENS:g}K − 1",
            }
        )
    return pl.DataFrame(rows)


def totals_by_size(points: pl.DataFrame, totals: pl.DataFrame, total_points: pl.DataFrame) -> pl.DataFrame:
    """The gain of all fixes at each size with a printed gain of one: known from throughputs, or only its range.

    Returns:
        gains_of, new_tokens, min_total_gain_percent, max_total_gain_percent, origin ("derived" where throughputs give
        it, "published" where only the range over all sizes is printed), source, formula.
    """
    known = {row["new_tokens"]: row for row in total_points.iter_rows(named=True)}
    printed = totals.row(0, named=True)
    rows = []
    for size in sized(points):
        row = known.get(size, printed)
        rows.append(
            {
                "gains_of": _size_name(size),
                "new_tokens": size,
                "min_total_gain_percent": row["min_gain_percent"],
                "max_total_gain_percent": row["max_gain_percent"],
                "origin": row["origin"],
                "source": row["source"],
                "formula": row["formula"] if size in known else "range over all sizes",
            }
        )
    return pl.DataFrame(rows)


def own_total(params: Params) -> pl.DataFrame:
    """Your own total beside the printed ones; like :func:`totals_by_size`, empty without one.

    Raises:
        ParameterError: ``own_total_gain_percent`` without ``own_gains_percent``.
    """
    total, error = params.own_total_gain_percent, params.gain_error_percent
    if total is not None and not params.own_gains_percent:
        raise ParameterError(
            f"own_total_gain_percent: got {total:g} without own_gains_percent, the gains that it is the total of"
        )
    columns = (
        "gains_of", "new_tokens", "min_total_gain_percent", "max_total_gain_percent", "origin", "source", "formula",
    )  # fmt: skip
    if total is None:
        return vocabulary.frame(columns)
    row = (OWN, None, total - error, total + error, "measured", "own_total_gain_percent", f"± {error:g}")
    return vocabulary.frame(columns, [dict(zip(columns, row, strict=True))])


def compositions(points: pl.DataFrame, totals: pl.DataFrame, params: Params) -> pl.DataFrame:
    """Single gains combined in both ways, beside the gain of all together.

    Args:
        points: table ``prefill_ablation``.
        totals: from :func:`totals_by_size` and :func:`own_total`.
        params: gives the error of a single gain, and your own gains.

    Returns:
        gains_of, composition, gain_percent, min_gain_percent and max_gain_percent (every single gain off by
        ``gain_error_percent``), min_residual_points and max_residual_points (all together − combined),
        inside_total (whether the two intervals meet), origin "derived", source, formula, missing_reason.
    """
    source = points["source"].unique().item()
    groups = [(_size_name(size), list(gains_at(points, size).values()), source) for size in sized(points)]
    if params.own_gains_percent:
        groups.append((OWN, params.own_gains_percent, "own_gains_percent"))
    together = {row["gains_of"]: row for row in totals.iter_rows(named=True)}
    rows = []
    for name, gains, origin_of in groups:
        for composition in COMPOSITIONS:
            low, middle, high = (
                combined([gain + error for gain in gains], composition)
                for error in (-params.gain_error_percent, 0, params.gain_error_percent)
            )
            total = together.get(name)
            least, most = (total["min_total_gain_percent"], total["max_total_gain_percent"]) if total else (None, None)
            rows.append(
                {
                    "gains_of": name,
                    "composition": composition,
                    "gain_percent": middle,
                    "min_gain_percent": low,
                    "max_gain_percent": high,
                    "min_residual_points": None if least is None else least - middle,
                    "max_residual_points": None if most is None else most - middle,
                    "inside_total": None if total is None else low <= most and high >= least,
                    "origin": "derived",
                    "source": origin_of,
                    "formula": _formula(gains, composition),
                    "missing_reason": None if total else "no own_total_gain_percent to compare with",
                }
            )
    return vocabulary.frame(tuple(rows[0]), rows)


def ladder(points: pl.DataFrame, new_tokens: int) -> pl.DataFrame:
    """The fixes switched on one after the other, in the order of the table.

    Returns:
        fix, gain_percent, multiplied_gain_percent and added_gain_percent (the gain so far), origin "derived", source,
        formula.

    Raises:
        ParameterError: as :func:`gains_at`.
    """
    gains = gains_at(points, new_tokens)
    rows = []
    for number, (fix, gain) in enumerate(gains.items(), start=1):
        so_far = list(gains.values())[:number]
        rows.append(
            {
                "fix": fix,
                "gain_percent": gain,
                "multiplied_gain_percent": combined(so_far, "multiplied"),
                "added_gain_percent": combined(so_far, "added"),
                "origin": "derived",
                "source": points["source"].unique().item(),
                "formula": _formula(so_far, "multiplied"),
            }
        )
    return pl.DataFrame(rows)


def others(points: pl.DataFrame, totals: pl.DataFrame) -> pl.DataFrame:
    """What the total leaves for the two fixes without a printed size, beside their printed gains combined.

    Args:
        points: table ``prefill_ablation``.
        totals: from :func:`totals_by_size`.

    Returns:
        gains_of, new_tokens, composition, min_other_gain_percent, max_other_gain_percent, other_gain_percent (as
        printed), origin "derived", source, formula.
    """
    unsized = points.filter(pl.col("new_tokens").is_null())["gain_percent"].to_list()
    rows = []
    for total in totals.drop_nulls("new_tokens").iter_rows(named=True):
        gain = gains_at(points, total["new_tokens"])[SIZED_FIX]
        least, most = total["min_total_gain_percent"], total["max_total_gain_percent"]
        for composition in COMPOSITIONS:
            rows.append(
                {
                    "gains_of": total["gains_of"],
                    "new_tokens": total["new_tokens"],
                    "composition": composition,
                    "min_other_gain_percent": remaining(least, gain, composition),
                    "max_other_gain_percent": remaining(most, gain, composition),
                    "other_gain_percent": combined(unsized, composition),
                    "origin": "derived",
                    "source": total["source"],
                    "formula": f"total {least:.1f} to {most:.1f} %, less {gain:g} %, {composition}",
                }
            )
    return pl.DataFrame(rows)


def times(points: pl.DataFrame, throughput: pl.DataFrame) -> pl.DataFrame:
    """The prefill time of a new token before the fixes, by what takes it away, for both orders of the fixes.

    What a fix saves depends on what was switched on before it, so it has no single value.

    Args:
        points: table ``prefill_ablation``.
        throughput: table ``prefill_ablation_throughput``, one size.

    Returns:
        reading (the order), time_of, us_per_token, origin "derived", source, formula; the parts of one order add up to
        the time before.
    """
    size = throughput["new_tokens"].unique().item()
    rate = dict(throughput.select("stage", "prefill_tok_per_s_per_gpu").iter_rows())
    before, after = 1e6 / rate["before"], 1e6 / rate["after"]
    factor = 1 + gains_at(points, size)[SIZED_FIX] / 100
    rows = []
    for order, saved, formula in (
        (f"{SHORT_SIZED_FIX} first", before - before / factor, f"{before:.2f} µs · (1 − 1 ÷ {factor:.3f})"),
        (f"{SHORT_SIZED_FIX} last", after * factor - after, f"{after:.2f} µs · ({factor:.3f} − 1)"),
    ):
        rows += [
            (order, "left after all three", after, f"1 ÷ {rate['after'] / K_TOKENS:g}K tokens/s"),
            (order, f"saved by {SHORT_SIZED_FIX}", saved, formula),
            (order, "saved by the two others", before - after - saved, "what remains"),
        ]
    return pl.DataFrame(rows, schema=["reading", "time_of", "us_per_token", "formula"], orient="row").with_columns(
        pl.lit("derived").alias("origin"), pl.lit(throughput["source"].unique().item()).alias("source")
    )


def readings(points: pl.DataFrame, totals: pl.DataFrame, gain_error_percent: float) -> pl.DataFrame:
    """The printed percentages of the single fixes read as gains in throughput and as cuts of the time, multiplied.

    The total is a gain in throughput for certain: its largest value is that of the two printed throughputs. For the
    single fixes the source does not say.

    Args:
        points: table ``prefill_ablation``.
        totals: from :func:`totals_by_size`.
        gain_error_percent: error of every single percentage.

    Returns:
        gains_of, reading, gain_percent (in throughput) with min_gain_percent and max_gain_percent,
        min_total_gain_percent, max_total_gain_percent, inside_total (whether the two intervals meet), origin "derived",
        source.
    """
    rows = []
    for total in totals.iter_rows(named=True):
        printed = gains_at(points, total["new_tokens"]).values()
        least, most = total["min_total_gain_percent"], total["max_total_gain_percent"]
        for reading, as_gain in (("gains in throughput", float), ("cuts of the time", from_time_cut)):
            low, middle, high = (
                combined([as_gain(value + error) for value in printed], "multiplied")
                for error in (-gain_error_percent, 0, gain_error_percent)
            )
            rows.append(
                {
                    "gains_of": total["gains_of"],
                    "reading": reading,
                    "gain_percent": middle,
                    "min_gain_percent": low,
                    "max_gain_percent": high,
                    "min_total_gain_percent": least,
                    "max_total_gain_percent": most,
                    "inside_total": low <= most and high >= least,
                    "origin": "derived",
                    "source": total["source"],
                }
            )
    return pl.DataFrame(rows)


def switches(points: pl.DataFrame) -> pl.DataFrame:
    """What of each fix can be switched on the release that ``data/prefill_switches.toml`` describes.

    Args:
        points: table ``prefill_ablation``, for the fixes and their pull requests.

    Returns:
        fix, pr, package, version, alone, switch_on, switch_off, switches, against_fix, needs, source, locator; a row
        per fix.

    Raises:
        DataError: the file is malformed, or a fix is missing or unknown.
    """
    path = DATA / "prefill_switches.toml"
    found = prefill_switches.read(path)
    published.source(found.source)
    by_fix = {switch.fix: switch for switch in found.switch}
    fixes = dict(points.select("fix", "pr").unique(maintain_order=True).iter_rows())
    for fix in by_fix:
        if fix not in fixes:
            raise DataError(f"{shown(path)}: {one_of(fix, fixes, 'fix')}")
    if missing := [fix for fix in fixes if fix not in by_fix]:
        raise DataError(f"{shown(path)}: no entry for the fix {missing[0]!r}; add one [[switch]]")
    rows = [
        {
            "fix": fix,
            "pr": pr,
            "package": found.package,
            "version": found.version,
            "alone": by_fix[fix].alone,
            "switch_on": by_fix[fix].on,
            "switch_off": by_fix[fix].off,
            "switches": by_fix[fix].switches,
            "against_fix": by_fix[fix].against_fix,
            "needs": by_fix[fix].needs,
            "source": found.source,
            "locator": by_fix[fix].locator,
        }
        for fix, pr in fixes.items()
    ]
    return pl.DataFrame(rows)


def _size_name(new_tokens: int) -> str:
    return f"{new_tokens // K}K new tokens"


def _formula(gains: Sequence[float], composition: str) -> str:
    if composition == "added":
        return " + ".join(f"{gain:g}" for gain in gains)
    return " · ".join(f"{1 + gain / 100:.4g}" for gain in gains) + " − 1"


def _one_print(what: str) -> Finding:
    return Finding(None, note=f"one printed {what}; no other printed figure determines it")


@CHECKS("full_index_layers")
def _full_index_layers(_: Evidence) -> Finding:
    model = catalog.model(MODEL)
    layers = model.attention.kv_compressing_layers
    encoder = model.num_encoder_layers.known
    found = [layer for layer in layers.known if layer < encoder]
    return Finding(
        len(found), "derived", f"layers below {encoder} that compress their own KV: {found}, {layers.source}"
    )


@CHECKS("replay_window_tokens")
def _replay_window(_: Evidence) -> Finding:
    window = catalog.model(MODEL).attention.sliding_window_tokens
    return Finding(window.known, "derived", f"sliding window of every layer, {window.source}")


@CHECKS("last_replay_layer")
def _last_replay_layer(_: Evidence) -> Finding:
    layers = catalog.model(MODEL).num_layers
    return Finding(layers.known - 1, "derived", f"{layers.known} layers counted from 0, {layers.source}")


@CHECKS("replay_boundary_layer")
def _replay_boundary(_: Evidence) -> Finding:
    encoder = catalog.model(MODEL).num_encoder_layers
    return Finding(
        encoder.known, "derived", f"first layer after an encoder of {encoder.known}, counted from 0, {encoder.source}"
    )


@CHECKS("kv_compressing_layers")
def _kv_compressing(_: Evidence) -> Finding:
    attention = catalog.model(MODEL).attention
    found = [*attention.full_index_layers.known, attention.replay_boundary_layer.known]
    return Finding(
        len(found), "derived", f"layers that index the full context and the one that keeps all KV: {found}, S1"
    )


@CHECKS("model_layers")
def _model_layers(_: Evidence) -> Finding:
    last = catalog.model(MODEL).attention.replay_layers.known[-1]
    return Finding(last + 1, "derived", f"layer {last}, counted from 0, ends the replay, S1")


@CHECKS("encoder_layers")
def _encoder_layers(_: Evidence) -> Finding:
    boundary = catalog.model(MODEL).attention.replay_boundary_layer
    return Finding(boundary.known, "derived", f"layers before layer {boundary.known}, where the replay begins, S1")


@CHECKS("decoder_layers")
def _decoder_layers(_: Evidence) -> Finding:
    attention = catalog.model(MODEL).attention
    first, last = attention.replay_boundary_layer.known, attention.replay_layers.known[-1]
    return Finding(last - first + 1, "derived", f"layers {first} to {last}, S1")


@CHECKS("sliding_window_tokens")
def _sliding_window(_: Evidence) -> Finding:
    replay = catalog.model(MODEL).attention.replay_tokens
    return Finding(replay.known, "derived", f"length of the bounded replay, which refills the window, {replay.source}")


@CHECKS("index_compression", "indexer_latents", "indexer_blocks", "indexer_block_latents")
def _indexer(_: Evidence) -> Finding:
    return OPEN


def _switch_check(fix: str, size: int | None, printed: str) -> Callable[[Evidence], Finding]:
    """A printed gain of one fix; a run only tells what its switch gains, and none switches a fix by itself."""

    def check(evidence: Evidence) -> Finding:
        rows = evidence.measured_gains.filter(pl.col("fix") == fix)
        if size is not None:
            rows = rows.filter(pl.col("new_tokens") == size)
        if rows.is_empty():
            return _one_print(printed)
        words = ", ".join(
            f"{gain:+.1f} % at {_size_name(tokens)}"
            for tokens, gain in rows.select("new_tokens", "gain_percent").rows()
        )
        row = rows.row(0, named=True)
        return Finding(None, note=f"run {row['source']}: its switch gains {words}, but that is {row['against_fix']}")

    return check


for _name, _fix, _size, _printed in (
    *((f"swa_replay_{k}k_percent", SIZED_FIX, k * K, "gain per size") for k in (4, 32, 64)),
    ("engram_pages_percent", "Engram host table on 2 MB GPU pages", None, "gain, without its number of new tokens"),
    ("deepselect_percent", "DeepSelect top-k in the prefill indexer", None, "gain, without its number of new tokens"),
):
    CHECKS(_name)(_switch_check(_fix, _size, _printed))


@CHECKS("total_low_percent")
def _total_low(_: Evidence) -> Finding:
    return _one_print("gain; the size it belongs to is not printed either")


@CHECKS("before_64k", "after_64k")
def _throughput(_: Evidence) -> Finding:
    return _one_print("throughput")


@CHECKS("total_high_percent", "gain_64k_percent")
def _total_high(evidence: Evidence) -> Finding:
    row = evidence.total_points.filter(pl.col("new_tokens") == 64 * K).row(0, named=True)
    return Finding(row["gain_percent"], "derived", row["formula"])


@CHECKS("ratio_64k")
def _ratio(evidence: Evidence) -> Finding:
    row = evidence.total_points.filter(pl.col("new_tokens") == 64 * K).row(0, named=True)
    return Finding(1 + row["gain_percent"] / 100, "derived", row["formula"].removesuffix(" − 1"))


def _product(evidence: Evidence, size_k: int) -> tuple[float, str]:
    gains = list(gains_at(evidence.points, size_k * K).values())
    return combined(gains, "multiplied"), _formula(gains, "multiplied")


def _printed_range(evidence: Evidence) -> tuple[float, float]:
    return evidence.totals.select("min_gain_percent", "max_gain_percent").row(0)


@CHECKS("product_32k")
def _product_32k(evidence: Evidence) -> Finding:
    gain, formula = _product(evidence, 32)
    return Finding(1 + gain / 100, "derived", formula.removesuffix(" − 1"))


def _product_percent(size_k: int) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        gain, formula = _product(evidence, size_k)
        return Finding(gain, "derived", formula)

    return check


for _size_k in (4, 64):
    CHECKS(f"product_{_size_k}k_percent")(_product_percent(_size_k))


@CHECKS("product_in_range")
def _product_in_range(evidence: Evidence) -> Finding:
    (gain, _), (least, most) = _product(evidence, 32), _printed_range(evidence)
    summed = combined(list(gains_at(evidence.points, 32 * K).values()), "added")
    inside = f"{gain:.1f} % against {least:g} to {most:g} %"
    return Finding(least < gain < most, "derived", f"{inside}; the sum, {summed:.1f} %, lies inside as well")


@CHECKS("gains_vary_with_size")
def _gains_vary(evidence: Evidence) -> Finding:
    (small, _), (large, _), (least, most) = _product(evidence, 4), _product(evidence, 64), _printed_range(evidence)
    return Finding(
        small < least and most < large,
        "derived",
        f"{small:.1f} % at 4K and {large:.1f} % at 64K against {least:g} to {most:g} %",
    )
