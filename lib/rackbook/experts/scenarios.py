"""Balancing replayed at one setting, under one assumption after the other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import polars as pl

from rackbook import catalog
from rackbook.experts import balancing
from rackbook.experts.balancing import DRIFTS, STAYS
from rackbook.experts.recovery import MODEL, WITH, WITHOUT
from rackbook.experts.setups import Setup, fitted_router, for_batch, shortened
from rackbook.models.memory import mxfp4_bytes, routed_gb

if TYPE_CHECKING:
    from rackbook.experts.popularity import Router
    from rackbook.experts.replay import Eplb
    from rackbook.experts.uniform import Batch, Part

LAYERS, SWEEP_LAYERS = 10, 4
"""Layers of the target that are replayed; the model has more, and they are as good as independent here."""

STEPS_AFTER = 750
"""Replayed steps after a rearrangement where preferences stay, so that more would show the same."""

OTHER_SEEDS = 4
"""Routers of other seeds that the assumptions are tried on."""

REDUNDANT_PER_RANK = (0, 1, 2, 3, 4)
MEMORIES = (3e4, 3e5, 1e6, 3e6, 3e7)
WINDOWS = (100, 300, 1000, 3000)
INTERVALS = (400, 1200)
RECEIVING_GB_PER_S = 50.0
"""Assumed rate at which a rank receives experts while it serves; nothing that is printed gives it."""


@dataclass(frozen=True)
class Scenarios:
    """What the replays share; each table is made when it is first looked at.

    Attributes:
        batches: the chosen batch of each part.
        published: the batch of each part at which a balancedness without EPLB is printed, and a skew is fitted.
        printed: printed balancedness by part and ``balance_of``.
        eplb: the chosen balancing.
        memory_steps: how long preferences last where they drift.
        seed: of everything.
    """

    batches: dict[Part, Batch]
    published: dict[Part, Batch]
    printed: dict[tuple[Part, str], float]
    eplb: Eplb
    memory_steps: float
    seed: int

    @cached_property
    def course(self) -> pl.DataFrame:
        """Balancedness over the steps under preferences that drift, see :func:`rackbook.experts.balancing.course`."""
        return balancing.course(self._drifting)

    @cached_property
    def moves(self) -> pl.DataFrame:
        """What each rearrangement under drift moves, see :func:`rackbook.experts.balancing.moves`."""
        return balancing.moves(self._drifting, _expert_gb(), RECEIVING_GB_PER_S)

    @cached_property
    def recoverable(self) -> pl.DataFrame:
        """What the replay recovers, see :func:`rackbook.experts.balancing.recoverable`."""
        setups = [(STAYS, shortened(setup, STEPS_AFTER)) for setup in self._staying]
        return balancing.recoverable([*setups, *((DRIFTS, setup) for setup in self._drifting)], self.printed)

    @cached_property
    def definitions(self) -> pl.DataFrame:
        """What goes by the name of balancedness, of the replay under drift."""
        return balancing.replayed_definitions(self._drifting)

    @cached_property
    def assumptions(self) -> pl.DataFrame:
        """How far the replay depends on what is assumed: before, after and printed_after by part and assumption."""
        return pl.DataFrame(
            [
                balancing.point(setup, assumption=assumption, printed_after=self.printed[setup.part, WITH])
                for part in ("target", "draft")
                for assumption, setup in self._variants(part)
            ]
        )

    @cached_property
    def by_redundancy(self) -> pl.DataFrame:
        """Balancedness and bound by redundant experts on each rank, preferences that stay."""
        setups = [self._short(part, STEPS_AFTER) for part in ("target", "draft")]
        return balancing.by_redundancy(setups, sorted({*REDUNDANT_PER_RANK, self._redundant_per_rank}))

    @cached_property
    def by_memory(self) -> pl.DataFrame:
        """Balancedness by how long preferences last."""
        setups = [self._short(part, self.eplb.interval_steps) for part in ("target", "draft")]
        return balancing.by_memory(setups, sorted({*MEMORIES, self.memory_steps}))

    @cached_property
    def by_window(self) -> pl.DataFrame:
        """The target's balancedness by window and interval, under drift."""
        setup = self._drifted(self._setup("target", SWEEP_LAYERS))
        return balancing.by_window(
            setup,
            sorted({*WINDOWS, self.eplb.window_steps}),
            sorted({*INTERVALS, self.eplb.interval_steps}),
        )

    @cached_property
    def by_ep_size(self) -> pl.DataFrame:
        """Balancedness by expert-parallel size, redundant experts and requests of each rank as chosen."""
        rows = []
        for batch in self.batches.values():
            sizes = {2**n for n in range(2, 7)} | {batch.num_ranks}
            for ranks in sorted(size for size in sizes if batch.num_experts % size == 0):
                resized = replace(batch, num_ranks=ranks)
                rows.append(balancing.point(self._short(batch.part, STEPS_AFTER, resized)))
        return pl.DataFrame(rows)

    @property
    def _redundant_per_rank(self) -> int:
        return self.eplb.num_redundant // self.eplb.num_ranks

    @cached_property
    def _staying(self) -> list[Setup]:
        return [self._setup(part, LAYERS) for part in ("target", "draft")]

    @cached_property
    def _drifting(self) -> list[Setup]:
        return [self._drifted(setup) for setup in self._staying]

    def _drifted(self, setup: Setup) -> Setup:
        return replace(setup, router=replace(setup.router, memory_steps=self.memory_steps))

    def _short(self, part: Part, steps_after: int, batch: Batch | None = None) -> Setup:
        return shortened(self._setup(part, SWEEP_LAYERS, batch), steps_after)

    def _setup(self, part: Part, layers: int, batch: Batch | None = None) -> Setup:
        """A part with preferences that stay, its skew fitted to the printed balancedness without EPLB."""
        chosen = batch or self.batches[part]
        redundant = self._redundant_per_rank * chosen.num_ranks
        eplb = replace(self.eplb, num_ranks=chosen.num_ranks, num_redundant=redundant)
        steps = eplb.first_step + 2 * eplb.interval_steps
        return Setup(chosen, for_batch(self._router(part, layers), chosen), eplb, steps, self.seed)

    def _router(self, part: Part, layers: int, **changes: object) -> Router:
        stages = catalog.model(MODEL).draft.num_stages.known
        number = stages if part == "draft" else layers
        return fitted_router(self.published[part], number, self.printed[part, WITHOUT], **{"seed": self.seed} | changes)

    def _variants(self, part: Part) -> list[tuple[str, Setup]]:
        """The setup, and what becomes of it when one assumption is another; skews are fitted anew."""
        fitted = self._router(part, SWEEP_LAYERS)

        def on(router: Router, steps_after: int = STEPS_AFTER) -> Setup:
            return replace(self._short(part, steps_after), router=for_batch(router, self.batches[part]))

        seeds = [on(self._router(part, SWEEP_LAYERS, seed=self.seed + more)) for more in range(1, OTHER_SEEDS + 1)]
        drifting = replace(fitted, memory_steps=self.memory_steps)
        return [
            ("log-normal popularity", on(fitted)),
            ("power law popularity", on(self._router(part, SWEEP_LAYERS, family="power law"))),
            ("log-uniform popularity", on(self._router(part, SWEEP_LAYERS, family="log-uniform"))),
            (f"the worst of {OTHER_SEEDS} other seeds", min(seeds, key=Setup.after)),
            ("3 tokens choose as one", on(replace(fitted, tokens_alike=3))),
            ("drift", on(drifting, self.eplb.interval_steps)),
        ]


def _expert_gb() -> dict[Part, float]:
    """Size of one expert of one layer with its scales, in 10⁹ bytes."""
    model = catalog.model(MODEL)
    draft = mxfp4_bytes(model.checkpoint.draft_expert_entries.known, bits=model.checkpoint.expert_bits.known) / 1e9
    return {
        "target": routed_gb(model.checkpoint) / (model.num_layers.known * model.experts.num_routed.known),
        "draft": draft / (model.draft.num_stages.known * model.draft.num_routed.known),
    }
