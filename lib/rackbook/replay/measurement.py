"""The experiment on a server: warm-up, probes, and interleaved pairs of a mirror and a lag replay."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl

from rackbook.errors import ParameterError
from rackbook.replay import client, paired_losses, server_evidence, step_probe
from rackbook.replay.loads import Load, closed_loop, open_loop
from rackbook.replay.prompts import Vocabulary, prompts
from rackbook.replay.targets import Settings, bodies, targets
from rackbook.replay.traces import Trace

API_KEY = "VLLM_API_KEY"
"""Environment variable with the key that a server may ask for; it is never written down."""

_SETTLE_S = 0.3


@dataclass(frozen=True)
class Design:
    """What is replayed.

    Attributes:
        trace: the requests; every rank gets all of them.
        num_ranks: data-parallel ranks.
        lag_s: delay from one rank to the next in a lag replay.
        pairs: of a mirror and a lag replay.
        users: per rank, who work through the sessions; 0 sends at the trace's times instead.
        think_s: mean time from an answer to the same user's next request.
        seed: of the prompts and of the times to think.
        known_prefixes: the prompts share the prefixes that the trace knows.
        control: each pair also has a second mirror replay.
        warm_up_requests: requests of the trace that every rank gets first; not measured.
        probe_lengths: lengths of the single prompts that the step-time function is fitted to; none sends none.
        probe_repeats: how often they are sent.
        step_tokens: most tokens that a rank computes in a step, as far as the probes need to know.
        vocabulary: token ids of the prompts.
    """

    trace: Trace
    num_ranks: int
    lag_s: float
    pairs: int
    users: int = 0
    think_s: float = 0.0
    seed: int = 0
    known_prefixes: bool = False
    control: bool = True
    warm_up_requests: int = 8
    probe_lengths: tuple[int, ...] = ()
    probe_repeats: int = 3
    step_tokens: int = 2_048
    vocabulary: Vocabulary = field(default_factory=Vocabulary)

    def load(self, schedule: str) -> Load:
        """What goes out in a replay: lagged in a lag replay, else mirrored."""
        lag_s = self.lag_s if schedule == paired_losses.LAG else 0.0
        if self.users:
            return closed_loop(
                self.trace, self.num_ranks, lag_s, users=self.users, think_s=self.think_s, seed=self.seed
            )
        return open_loop(self.trace, self.num_ranks, lag_s)


@dataclass(frozen=True, eq=False)
class Measured:
    """What a server did.

    Attributes:
        requests: replay, pair, schedule and the columns of :attr:`rackbook.replay.client.Replayed.requests`; warm-up
            and probes are replays of their own, with the pair null.
        steps: replay, pair, schedule, and what the log says of each iteration; empty without a log.
        counted: replay, rank, sent_tokens, counted_tokens, hit_tokens, by the servers' counters.
        doubts: why a replay may not be used, by its number.
        flags: all doubts in words, for the run.
        interrupted: the user ended it.
    """

    requests: pl.DataFrame
    steps: pl.DataFrame
    counted: pl.DataFrame
    doubts: dict[int, str]
    flags: tuple[str, ...]
    interrupted: bool


def measure(
    design: Design,
    base_urls: Sequence[str],
    settings: Settings,
    *,
    log_paths: Sequence[Path] = (),
    progress: Callable[[str], None] = lambda _: None,
    keep: Callable[[Measured], None] = lambda _: None,
) -> Measured:
    """Run the experiment; it ends at the first failed request, with what was measured until then.

    Args:
        design: what is replayed.
        base_urls: one server, or several that hold equally many ranks.
        settings: how requests are sent.
        log_paths: a log per server, where it can be read.
        progress: told what is going on.
        keep: given what was measured so far after every replay, so that it is on disk whatever happens next.

    Raises:
        ParameterError: fewer than one pair, or a design that the trace does not allow.
    """
    if design.pairs < 1:
        raise ParameterError(f"pairs: got {design.pairs}, allowed: ≥ 1")
    experiment = _Experiment(design, base_urls, settings, log_paths, keep)
    experiment.warm_up(progress)
    if not experiment.ended and design.probe_lengths:
        experiment.probe(progress)
    for number, (pair, schedule) in enumerate(paired_losses.order(design.pairs, control=design.control), start=1):
        if experiment.ended:
            break
        load = design.load(schedule)
        of = design.pairs * (3 if design.control else 2)
        progress(f"replay {number} of {of}: {schedule}, {len(load)} requests on {design.num_ranks} ranks")
        experiment.run([(load, experiment.bodies)], schedule, pair)
    return experiment.measured()


class _Experiment:
    def __init__(
        self,
        design: Design,
        base_urls: Sequence[str],
        settings: Settings,
        log_paths: Sequence[Path],
        keep: Callable[[Measured], None],
    ) -> None:
        self.design, self.settings, self.keep = design, settings, keep
        if not settings.api_key and os.environ.get(API_KEY):
            self.settings = replace(settings, api_key=os.environ[API_KEY])
        self.targets = targets(base_urls, design.num_ranks)
        self.witness = server_evidence.Witness(base_urls, design.num_ranks, log_paths)
        self.bodies = self._bodies(design.trace, design.seed)
        self.requests: list[pl.DataFrame] = []
        self.steps: list[pl.DataFrame] = []
        self.counted: list[pl.DataFrame] = []
        self.doubts: dict[int, str] = {}
        self.ended = self.interrupted = False

    def _bodies(self, trace: Trace, seed: int) -> list[bytes]:
        known = self.design.known_prefixes and trace is self.design.trace
        drawn = prompts(trace, seed, known_prefixes=known, vocabulary=self.design.vocabulary)
        return bodies(trace, drawn, self.settings)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Send a few requests that are not measured; their prompts are others."""
        if not self.design.warm_up_requests:
            return
        trace = self.design.trace.head(self.design.warm_up_requests)
        progress(f"warm-up: {trace.requests.height} requests on each rank")
        load = closed_loop(trace, self.design.num_ranks, users=1)
        self.run([(load, self._bodies(trace, self.design.seed + 1))], "warm-up", None)

    def probe(self, progress: Callable[[str], None]) -> None:
        """Send single prompts, to all ranks and to one."""
        design = self.design
        loads = step_probe.probes(design.probe_lengths, design.probe_repeats, design.num_ranks, design.step_tokens)
        progress(f"probes: {len(loads)} single prompts, on all ranks or on one")
        parts = [(load, self._bodies(load.trace, design.seed + 2 + n)) for n, load in enumerate(loads)]
        self.run(parts, "probe", None)

    def run(self, parts: Sequence[tuple[Load, Sequence[bytes]]], schedule: str, pair: int | None) -> None:
        """One replay of loads, each when the one before is done; times and requests of each are counted on its own.

        Its salt keeps the servers' prefix caches from answering it with an earlier one.
        """
        number = len(self.requests)
        names = [pl.lit(number).cast(pl.Int64).alias("replay"), pl.lit(pair).cast(pl.Int64).alias("pair")]
        names.append(pl.lit(schedule).alias("schedule"))
        time.sleep(_SETTLE_S)  # lets the last steps of the replay before be logged and counted
        self.witness.begin()
        settings = self.settings  # how late the client was matters where throughput is measured
        settings = settings if pair is not None else replace(settings, lateness_limit_ms=math.inf)
        sent, doubts, before = [], [], 0
        for place, (load, own_bodies) in enumerate(parts):
            salt = f"{self.design.seed}-{number}-{place}"
            done = client.replay(load, own_bodies, self.targets, settings, salt=salt)
            sent.append(done.requests.with_columns(pl.col("request") + before))
            doubts += [flag for flag in done.flags if flag not in doubts]
            before += load.trace.requests.height
            if done.stopped:
                break
        requests = pl.concat(sent)
        if not done.interrupted:
            time.sleep(_SETTLE_S)
        self.requests.append(requests.select(*names, pl.all()))
        self.steps.append(self.witness.steps().select(*names, pl.all()))
        if not done.stopped:
            tokens = requests.group_by("rank").agg(pl.col("input_tokens").sum().alias("sent_tokens"))
            counted = self.witness.counted()
            doubts += server_evidence.doubts(requests, counted, hits_wanted=self.design.known_prefixes)
            if not counted.is_empty():
                self.counted.append(tokens.join(counted, on="rank").sort("rank").select(*names, pl.all()))
        if doubts:
            self.doubts[number] = "; ".join(doubts)
        self.ended, self.interrupted = bool(done.stopped), done.interrupted
        self.keep(self.measured())

    def measured(self) -> Measured:
        """All of it."""
        requests = pl.concat(self.requests)
        names = dict(requests.select("replay", "schedule").unique().iter_rows())
        flags = [f"replay {n} ({names[n]}): {doubt}" for n, doubt in self.doubts.items()]
        if self.witness.silent:
            flags.append(f"no server-side evidence: {self.witness.silent}")
        if self.witness.unread:
            flags.append(f"no step times: {self.witness.unread}")
        return Measured(
            requests=requests,
            steps=pl.concat(self.steps),
            counted=pl.concat(self.counted) if self.counted else pl.DataFrame(),
            doubts=dict(self.doubts),
            flags=tuple(flags),
            interrupted=self.interrupted,
        )
