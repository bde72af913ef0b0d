"""What can expert balancing recover?

The published balancedness before and after EPLB, the balancedness that uniform random routing of the same batch
reaches by chance alone (drawn here, and approximated without drawing), how much of the gap between them EPLB closes, as
far as the printed digits determine it; and balancing replayed on a router with fitted preferences, on loads of one's
own, and on those of a real server.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import polars as pl
from pydantic import BaseModel, ConfigDict, Field, model_validator

from rackbook import catalog, published
from rackbook.claims import OPEN, Checks, Finding
from rackbook.errors import DataError
from rackbook.experiments import live
from rackbook.experiments.stated_facts import printed_elsewhere
from rackbook.experts import audit
from rackbook.experts.loads import loads_of
from rackbook.experts.recovery import (
    MODEL,
    PRINTED,
    balance_states,
    printed_baselines,
    published_readings,
    recovered,
    uniform_row,
)
from rackbook.experts.replay import Eplb
from rackbook.experts.routing import experts_per_rank
from rackbook.experts.scenarios import Scenarios
from rackbook.experts.step_cost import cost
from rackbook.experts.uniform import (
    PER_LAYER_STEP,
    Batch,
    definitions,
    draws_in_bins,
    estimated,
    loads_in_order,
    sweep,
    uniform_balance,
)
from rackbook.locations import shown
from rackbook.models import wide_ep

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from rackbook.experts.loads import Loads
    from rackbook.experts.uniform import Part
    from rackbook.runs import Run

CHECKS = Checks("expert_balance")
CHOICES_PER_READING = 30_000_000
"""Draws at the published setting go on until so many experts were chosen: then the interval of the mean is about
± 0.0005 for every reading, far below half a unit of the printed digits."""

LOGS = (".log", ".txt")
"""Endings of a server's log among the files with loads."""

EPLB_LINES = "eplb"
"""Table of a run: lines of its servers' logs about their balance."""

LAB_RANKS = 4
"""Ranks that the experts of the lab's small model are spread over, on paper."""

_Pair = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=2, max_length=2)]


class Params(BaseModel):
    """Parameters of notebook 06."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ranks: int = Field(default=32, ge=2, description="expert-parallel size; divides both numbers of experts")
    requests_per_rank: int = Field(default=72, ge=1, description="decoding requests on each rank")
    tokens_per_request: _Pair = Field(default=[6, 5], description="tokens of a request in a step: target, draft")
    experts: _Pair = Field(default=[384, 128], description="routed experts of a layer: target, draft")
    top_k: _Pair = Field(default=[6, 3], description="experts per token: target, draft")
    redundant_per_rank: int = Field(default=1, ge=0, description="redundant experts on each rank")
    window_steps: int = Field(default=1000, ge=1, description="steps whose load a rearrangement goes by")
    interval_steps: int = Field(default=3000, ge=100, description="steps from one rearrangement to the next")
    memory_steps: float = Field(default=3e6, gt=0, description="steps in which a drifting preference falls to 1/e")
    draws: int = Field(default=400, ge=10, description="batches drawn at this setting; each is one layer in one step")
    confidence: float = Field(default=0.95, gt=0, lt=1, description="coverage of the intervals")
    seed: int = Field(default=1, ge=0, description="seed of every draw")
    loads_path: str = Field(default="", description="file with loads of your own model; or none")
    source: str = Field(default=live.PUBLISHED, description=live.SOURCE)
    cluster: str = Field(default="cpu-lab", description=live.CLUSTER)

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        experts, draft_experts = self.experts
        common = math.gcd(experts, draft_experts)
        if common % self.ranks:
            allowed = [n for n in range(2, common + 1) if common % n == 0]
            raise ValueError(
                f"{experts} experts of the target and {draft_experts} of the draft cannot both be spread "
                f"evenly over {self.ranks} ranks; ranks that divide both: {', '.join(map(str, allowed)) or '(none)'}"
            )
        for part, number, top_k in zip(("the target", "the draft"), self.experts, self.top_k, strict=True):
            if top_k > number:
                raise ValueError(f"{part} sends a token to {top_k} of {number} experts; at most {number} are there")
        return self

    @property
    def sweep_draws(self) -> int:
        """Batches drawn per point of a sweep."""
        return max(10, 3 * self.draws // 20)

    def batch(self, part: Part) -> Batch:
        """The batch of one part of the model."""
        place = ("target", "draft").index(part)
        tokens, experts, top_k = self.tokens_per_request[place], self.experts[place], self.top_k[place]
        return Batch(part, self.ranks, self.requests_per_rank, tokens, experts, top_k)

    @property
    def eplb(self) -> Eplb:
        """The balancing that is asked for."""
        return Eplb(self.ranks, self.redundant_per_rank * self.ranks, self.window_steps, self.interval_steps)


@dataclass(frozen=True)
class Evidence:
    """What the notebook shows.

    Attributes:
        params: as given.
        points: table ``expert_balance``, published rows.
        settings: table ``expert_balance_eplb``, published rows.
        at_published: table ``uniform_balance`` at the published setting, in every reading of what the source does not
            print; independent of the parameters but for seed and confidence.
        states: per part, balancedness_per_layer_step and busiest_to_mean of each ``balance_of``: published without and
            with EPLB, uniform routing as printed and as drawn here.
        recovered: per part and ``uniform_from``: before, after, uniform_balancedness, recovered_percent and the bounds
            that the printed digits leave.
        run: routed experts of a real server: the one that was asked for, or the recorded one; None if there is none.
        own: states of the loads in ``loads_path``, see :func:`rackbook.experts.audit.states`; None without a file.
    """

    params: Params
    points: pl.DataFrame
    settings: pl.DataFrame
    at_published: pl.DataFrame
    states: pl.DataFrame
    recovered: pl.DataFrame
    run: Run | None
    own: pl.DataFrame | None

    @property
    def printed_baselines(self) -> pl.DataFrame:
        """The printed balancedness of uniform routing by part, with all that rounds to it."""
        return printed_baselines(self.states)

    @cached_property
    def by_tokens(self) -> pl.DataFrame:
        """Table ``uniform_balance`` at the published setting, by tokens_per_request."""
        return sweep(published_readings(self.points)[:2], "tokens_per_request", range(1, 9), self.params)

    @cached_property
    def here(self) -> pl.DataFrame:
        """Table ``uniform_balance`` at the chosen setting."""
        return pl.concat([estimated(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def draws(self) -> pl.DataFrame:
        """At the chosen setting, share_of_draws_percent by part and bin (balancedness_low to balancedness_high)."""
        return pl.concat([draws_in_bins(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def order(self) -> pl.DataFrame:
        """At the chosen setting, load_to_mean by part and load_place, with the range of nine in ten draws."""
        return pl.concat([loads_in_order(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def definitions(self) -> pl.DataFrame:
        """At the chosen setting, balancedness by part, setting and definition, on the same draws."""
        return pl.concat([definitions(batch, loads, self.params) for batch, loads in self._loads])

    @cached_property
    def by_ranks(self) -> pl.DataFrame:
        """Table ``uniform_balance``, chosen setting but for num_ranks."""
        return sweep(self._batches, "num_ranks", _ranks_of_sweep(self.params), self.params)

    @cached_property
    def by_requests(self) -> pl.DataFrame:
        """Table ``uniform_balance``, chosen setting but for requests_per_rank."""
        values = sorted({*(2**n for n in range(8)), self.params.requests_per_rank})
        return sweep(self._batches, "requests_per_rank", values, self.params)

    @cached_property
    def replays(self) -> Scenarios:
        """Balancing replayed at the chosen setting, on routers fitted at the published one."""
        printed = self.states.select("part", "balance_of", "balancedness_per_layer_step").iter_rows()
        return Scenarios(
            batches={batch.part: batch for batch in self._batches},
            published={batch.part: batch for batch in reversed(published_readings(self.points)[:2])},
            printed={(part, balance_of): value for part, balance_of, value in printed},
            eplb=self.params.eplb,
            memory_steps=self.params.memory_steps,
            seed=self.params.seed,
        )

    @cached_property
    def all_definitions(self) -> pl.DataFrame:
        """Both: under uniform routing, and of the replay; balancedness and bias by part, setting and definition."""
        drawn = self.definitions
        of_source = drawn.filter(pl.col("definition") == PER_LAYER_STEP).select("part", "setting", own="balancedness")
        biased = drawn.join(of_source, on=["part", "setting"], maintain_order="left").with_columns(
            bias=pl.col("balancedness") - pl.col("own"), setting=pl.format("uniform; {}", "setting")
        )
        return pl.concat(
            [
                frame.select("part", "setting", "definition", "balancedness", "bias", "origin", "source")
                for frame in (biased, self.replays.definitions.rename({"balance_of": "setting"}))
            ]
        )

    @cached_property
    def step_cost(self) -> pl.DataFrame:
        """MoE time that a balancedness costs at the published size, see :func:`rackbook.experts.step_cost.cost`."""
        target = self.recovered.filter((pl.col("part") == "target") & (pl.col("uniform_from") == PRINTED))
        before, after, even = target.select("before", "after", "uniform_balancedness").row(0)
        values = sorted({before, after, even, *(n / 50 for n in range(10, round(50 * even)))})
        return cost(values, even, wide_ep.scaling(), uniform_row(self.points, "target")["ep_size"])

    @cached_property
    def measured_states(self) -> pl.DataFrame:
        """States of the run on :data:`LAB_RANKS` ranks, and of the loads in ``loads_path`` on the chosen ranks."""
        return pl.concat([self.lab, audit.no_states() if self.own is None else self.own])

    @cached_property
    def lab(self) -> pl.DataFrame:
        """States of the run's loads on :data:`LAB_RANKS` ranks; empty without a run."""
        return audit.no_states() if self._recorded is None else self._states_of_run(self._recorded)

    def _states_of_run(self, loads: Loads) -> pl.DataFrame:
        """A model of the published size on the chosen ranks, any other on :data:`LAB_RANKS`; with what its log says."""
        alike = loads.num_experts == self.params.experts[0]
        ranks = self.params.ranks if alike else LAB_RANKS
        redundant = (self.params.redundant_per_rank if alike else 1) * ranks
        found = audit.states(loads, ranks, redundant, seed=self.params.seed)
        if f"{EPLB_LINES}.csv" not in self.run.files:
            return found
        return pl.concat([audit.logged(self.run.points(EPLB_LINES), f"run {self.run.id}"), found])

    @cached_property
    def lab_places(self) -> pl.DataFrame:
        """The run's experts in the order of their load, by layer; empty without a run."""
        return audit.no_places() if self._recorded is None else audit.by_place(self._recorded)

    @cached_property
    def _recorded(self) -> Loads | None:
        return None if self.run is None else loads_of(self.run)

    @property
    def _batches(self) -> list[Batch]:
        return [self.params.batch("target"), self.params.batch("draft")]

    @cached_property
    def _loads(self) -> list[tuple[Batch, NDArray[np.int64]]]:
        return [(batch, batch.draw(self.params.draws, self.params.seed)) for batch in self._batches]


def collect(params: Params) -> Evidence:
    """Gather the published points and draw their baselines; the chosen setting is drawn when it is first looked at.

    Raises:
        DataError: the published tables or the catalog are not what they should be, or the loads of one's own are not.
        ParameterError: a source that is none, or loads that do not fit the ranks.
    """
    points = published.read("expert_balance")
    readings = published_readings(points)
    at_published = pl.concat(
        [
            uniform_balance(reading, max(10, CHOICES_PER_READING // (reading.num_tokens * reading.top_k)), params)
            for reading in readings
        ]
    )
    states = balance_states(points, at_published)
    run = live.run_of("expert_balance", params.source, lambda: measure(params))
    return Evidence(
        params=params,
        points=points,
        settings=published.read("expert_balance_eplb"),
        at_published=at_published,
        states=states,
        recovered=recovered(states, at_published),
        run=run or live.recorded("expert_balance"),
        own=own_states(params) if params.loads_path else None,
    )


def measured_subtitle(evidence: Evidence) -> str:
    """Model and sample of the run's routed experts, for their chart."""
    if evidence.run is None:
        return "no run"
    loads = loads_of(evidence.run)
    return f"measured; {loads.top_k} of {loads.num_experts} experts per token, {live.description(evidence.run)}"


def measure(params: Params) -> Run:
    """Record the routed experts of a server that the project starts, and keep them as a run.

    Raises:
        RackbookError: the cluster cannot do it, or it failed on the way.
    """
    from rackbook.measurements import expert_balance  # what talks to vLLM is imported when it is needed

    return expert_balance.measure(params)


def own_states(params: Params) -> pl.DataFrame:
    """States of the loads in ``loads_path`` on the chosen ranks, see :func:`rackbook.experts.audit.states`.

    Raises:
        DataError: the file is not there, or its loads cannot be.
        ParameterError: its experts do not divide among the ranks.
    """
    from rackbook.engine import logs
    from rackbook.importers import load_matrices, routed_experts

    path = Path(params.loads_path).expanduser()
    if path.suffix in LOGS:
        if not path.is_file():
            raise DataError(f"{shown(path)}: no such file, expected a server's log")
        return audit.logged(logs.eplb_steps(path.read_text("utf-8", errors="replace"), shown(path)), shown(path))
    num_experts, top_k = params.experts[0], params.top_k[0]
    if path.suffix in routed_experts.ANSWERS:
        loads = routed_experts.read_answers_file(path, num_experts=num_experts)
    else:
        loads = load_matrices.read(path, top_k=top_k, num_experts=num_experts)
    return audit.states(loads, params.ranks, params.redundant_per_rank * params.ranks, seed=params.seed)


def _ranks_of_sweep(params: Params) -> list[int]:
    most = max(64, params.ranks)
    return [n for n in range(2, most + 1) if 0 in (params.experts[0] % n, params.experts[1] % n)]


@CHECKS("target_top_k")
def _target_top_k(_: Evidence) -> Finding:
    return printed_elsewhere(catalog.model(MODEL).experts.top_k, "S1")


@CHECKS("draft_top_k")
def _draft_top_k(_: Evidence) -> Finding:
    return printed_elsewhere(catalog.model(MODEL).draft.top_k, "S1")


def _drawn_check(place: int) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        row = evidence.at_published.filter(pl.col("origin") == "simulated").row(place, named=True)
        half = (row["balancedness_high"] - row["balancedness_low"]) / 2
        note = (
            f"{row['balancedness_per_layer_step']:.4f} ± {half:.4f}, {row['num_draws']} draws of {row['num_ranks']} "
            f"ranks × {row['requests_per_rank']} requests × {row['tokens_per_request']} tokens, "
            f"{row['top_k']} of {row['num_experts']} experts"
        )
        return Finding(row["balancedness_per_layer_step"], "simulated", note)

    return check


for _place, _names in enumerate(
    (
        ("uniform_target", "simulated_target"),
        ("uniform_draft", "simulated_draft_128_experts"),
        ("simulated_draft",),
        ("simulated_draft_6_tokens",),
        ("simulated_draft_1_token",),
    )
):
    CHECKS(*_names)(_drawn_check(_place))


@CHECKS("target_without_eplb", "target_with_eplb", "draft_without_eplb", "draft_with_eplb")
def _real_routing(_: Evidence) -> Finding:
    return OPEN


def _setting_check(column: str) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        others = evidence.settings.filter(pl.col("source") != "S1")
        if others[column].n_unique() != 1:
            return Finding(None, note=f"the other sources do not agree: {others[column].to_list()}")
        sources = ", ".join(sorted(others["source"].unique()))
        return Finding(others[column][0], "derived", f"printed by {sources} as well")

    return check


CHECKS("eplb_interval_steps")(_setting_check("interval_steps"))
CHECKS("eplb_window_steps")(_setting_check("window_steps"))


def _recovered_check(part: str) -> Callable[[Evidence], Finding]:
    def check(evidence: Evidence) -> Finding:
        row = evidence.recovered.filter((pl.col("part") == part) & (pl.col("uniform_from") == PRINTED)).row(
            0, named=True
        )
        note = f"{row['formula']}; the printed digits allow {_range(row)}"
        return Finding(row["recovered_percent"], "derived", note)

    return check


def _range(row: dict[str, float]) -> str:
    return f"{row['recovered_low_percent']:.1f} to {row['recovered_high_percent']:.1f} %"


for _part in ("target", "draft"):
    CHECKS(f"recovered_{_part}_percent", f"recovered_{_part}_derived_percent")(_recovered_check(_part))


@CHECKS("target_experts_per_rank")
def _target_experts(evidence: Evidence) -> Finding:
    return _held(catalog.model(MODEL).experts.num_routed.known, 0, evidence)


@CHECKS("draft_experts_per_rank")
def _draft_experts(evidence: Evidence) -> Finding:
    return _held(catalog.model(MODEL).draft.num_routed.known, 0, evidence)


@CHECKS("slots_per_rank")
def _slots(evidence: Evidence) -> Finding:
    ranks = _ranks(evidence)
    redundant = evidence.settings.filter(pl.col("ep_size") == ranks)["num_redundant_experts"]
    return _held(catalog.model(MODEL).experts.num_routed.known, redundant.item(), evidence)


@CHECKS("draft_stages")
def _draft_stages(_: Evidence) -> Finding:
    per_stage = catalog.model(MODEL).draft.num_routed.known
    return _of_draft(per_stage)


@CHECKS("draft_routed_experts")
def _draft_routed_experts(_: Evidence) -> Finding:
    stages = catalog.model(MODEL).draft.num_stages.known
    return _of_draft(stages)


def _of_draft(divisor: int) -> Finding:
    model = catalog.model(MODEL)
    weights = model.checkpoint.draft_expert_entries.known
    in_target = model.num_layers.known * model.experts.num_routed.known
    experts = weights * in_target / (model.checkpoint.expert_entries.known - weights)
    note = f"{experts:.0f} experts by the draft's weights, if each is as large as one of the target's, ÷ {divisor}"
    return Finding(experts / divisor, "derived", note)


@CHECKS("draft_entries_billion")
def _draft_entries(_: Evidence) -> Finding:
    model = catalog.model(MODEL)
    in_draft = model.draft.num_stages.known * model.draft.num_routed.known
    in_target = model.num_layers.known * model.experts.num_routed.known
    weights = model.checkpoint.expert_entries.known / 1e9 * in_draft / (in_draft + in_target)
    note = f"{in_draft} of {in_draft + in_target:,} experts, if each is as large as one of the target's"
    return Finding(weights, "derived", note)


@CHECKS("redundant_experts_dep32", "redundant_experts_dep16")
def _redundant(_: Evidence) -> Finding:
    return Finding(None, note="a setting of one recipe; no other figure determines it")


def _held(num_experts: int, num_redundant: int, evidence: Evidence) -> Finding:
    ranks = _ranks(evidence)
    note = f"({num_experts} + {num_redundant}) ÷ {ranks}" if num_redundant else f"{num_experts} ÷ {ranks}"
    return Finding(float(experts_per_rank(num_experts + num_redundant, ranks)), "derived", note)


def _ranks(evidence: Evidence) -> int:
    return uniform_row(evidence.points, "target")["ep_size"]
