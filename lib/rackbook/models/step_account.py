"""The account of an engine step: what its length says about work on the CPU, and what it cannot say.

The identity is step = max(GPU, CPU) + unhidden. GPU is the time of the step's kernels, CPU the host work that can
run while they do, unhidden what delays the next launch whatever the GPU does. It is a definition, not a law: it holds
for a step with one critical path, and "unhidden" takes whatever the other two do not explain, other ranks included.
"""

from __future__ import annotations

from dataclasses import dataclass

from rackbook.errors import DataError

Bounds = tuple[float, float]
"""Smallest and largest possible value."""


def step_ms(gpu_ms: float, cpu_ms: float, unhidden_ms: float) -> float:
    """Length of a step by the identity: max(GPU, CPU) + unhidden."""
    return max(gpu_ms, cpu_ms) + unhidden_ms


@dataclass(frozen=True)
class Removal:
    """One piece of host work, made shorter, beside the step it belongs to, before and after.

    Everything derived here assumes that nothing else in the step changed. If something else became faster too, more
    of the work was hidden than it says; if something else became slower, less.

    Attributes:
        work_before_ms: the work before.
        work_after_ms: the work after.
        step_before_ms: the step before.
        step_after_ms: the step after.

    Raises:
        DataError: the work or the step became longer, or the step fell by more than the work, which another change
            must then have caused.
    """

    work_before_ms: float
    work_after_ms: float
    step_before_ms: float
    step_after_ms: float

    def __post_init__(self) -> None:
        if not 0 <= self.step_saved_ms <= self.work_saved_ms or self.work_after_ms < 0:
            raise DataError(
                f"work {self.work_before_ms:g} → {self.work_after_ms:g} ms, step {self.step_before_ms:g} → "
                f"{self.step_after_ms:g} ms: the step must fall, and by no more than the work; otherwise something "
                "else changed as well and this account does not apply"
            )

    @property
    def work_saved_ms(self) -> float:
        """By how much the work became shorter."""
        return self.work_before_ms - self.work_after_ms

    @property
    def step_saved_ms(self) -> float:
        """By how much the step became shorter."""
        return self.step_before_ms - self.step_after_ms

    @property
    def hidden_saved_ms(self) -> float:
        """Work that went away without making the step shorter: it had run behind something else."""
        return self.work_saved_ms - self.step_saved_ms

    @property
    def hidden_saved_share(self) -> float:
        """The hidden part of the work that went away, 0 to 1.

        Raises:
            DataError: no work went away.
        """
        if self.work_saved_ms == 0:
            raise DataError("no work was saved, so no part of it was hidden or exposed")
        return self.hidden_saved_ms / self.work_saved_ms

    @property
    def exposed_before_ms(self) -> Bounds:
        """Work that the step waited for, before: at least what the step saved, at most that plus all that is left."""
        return self.step_saved_ms, self.step_saved_ms + self.work_after_ms

    @property
    def hidden_before_ms(self) -> Bounds:
        """Work that ran behind something else, before: the rest of the work."""
        low, high = self.exposed_before_ms
        return self.work_before_ms - high, self.work_before_ms - low

    def step_with_floor_ms(self, work_ms: float) -> float:
        """The step at another amount of this work, if the work is serial with the step until something else binds.

        From ``work_before_ms`` down the step falls one for one, to the floor of ``step_after_ms``.
        """
        return max(self.step_after_ms, self.step_before_ms - (self.work_before_ms - work_ms))

    def step_with_even_share_ms(self, work_ms: float) -> float:
        """The step at another amount of this work, if the same share of every millisecond is exposed."""
        share = 1 - self.hidden_saved_share
        return self.step_before_ms - share * (self.work_before_ms - work_ms)

    @property
    def floor_reached_at_ms(self) -> float:
        """Work at which :meth:`step_with_floor_ms` reaches its floor; less work than this buys nothing."""
        return self.work_before_ms - self.step_saved_ms


@dataclass(frozen=True)
class StepGrowth:
    """Two engine steps, and how much less the second runs on the GPU; the GPU times themselves are unknown.

    Attributes:
        from_step_ms: the first step.
        to_step_ms: the second step.
        gpu_saving_ms: GPU time of the first minus GPU time of the second.

    Raises:
        DataError: a step is not positive, or the saving is larger than the first step.
    """

    from_step_ms: float
    to_step_ms: float
    gpu_saving_ms: float

    def __post_init__(self) -> None:
        if not (self.from_step_ms > 0 and self.to_step_ms > 0 and self.gpu_saving_ms <= self.from_step_ms):
            raise DataError(
                f"got steps of {self.from_step_ms:g} and {self.to_step_ms:g} ms and a GPU saving of "
                f"{self.gpu_saving_ms:g} ms; allowed: steps > 0 and a saving no larger than the first step"
            )

    @property
    def step_growth_ms(self) -> float:
        """Growth of the step."""
        return self.to_step_ms - self.from_step_ms

    @property
    def gap_growth_ms(self) -> float:
        """Growth of what is not GPU time: the gap, step minus GPU time, of the second minus that of the first."""
        return self.step_growth_ms + self.gpu_saving_ms

    @property
    def from_gap_ms(self) -> Bounds:
        """The first step's gap: neither gap can be negative, and the GPU time of neither."""
        low = max(0.0, -self.gap_growth_ms)
        return low, min(self.from_step_ms, self.from_step_ms - self.gpu_saving_ms)


@dataclass(frozen=True)
class Pair:
    """An engine step and the forward pass of the same batch, by itself; optionally the host work of the step too.

    Attributes:
        forward_ms: forward pass on the GPU, measured without the engine.
        engine_ms: step of the running engine.
        cpu_ms: all host work of the step, hidden or not; None where it was not measured.

    Raises:
        DataError: a time that is not positive, or more host work than one thread can do in the step.
    """

    forward_ms: float
    engine_ms: float
    cpu_ms: float | None = None

    def __post_init__(self) -> None:
        if not (self.forward_ms > 0 and self.engine_ms > 0):
            raise DataError(f"forward_ms, engine_ms: got {self.forward_ms:g} and {self.engine_ms:g}, allowed: > 0")
        if self.cpu_ms is not None and not 0 <= self.cpu_ms <= self.engine_ms:
            raise DataError(
                f"cpu_ms: got {self.cpu_ms:g}, allowed: 0 to engine_ms = {self.engine_ms:g}, the work of the one "
                "thread that drives the step"
            )

    @property
    def gap_ms(self) -> float:
        """What the engine adds: engine step minus forward pass. Negative if the two are not of one batch."""
        return self.engine_ms - self.forward_ms

    @property
    def gap_share(self) -> float:
        """The gap's part of the engine step."""
        return self.gap_ms / self.engine_ms

    @property
    def total_cpu_ms(self) -> Bounds | None:
        """All host work of the step, CPU + unhidden; None where the gap is negative.

        With GPU = forward, the gap is max(0, CPU − GPU) + unhidden, so the host work is the gap plus what hides:
        from the gap to the whole step.
        """
        if self.gap_ms < 0:
            return None
        return (self.gap_ms, self.engine_ms) if self.cpu_ms is None else (self.cpu_ms, self.cpu_ms)

    @property
    def hidden_cpu_ms(self) -> Bounds | None:
        """Host work that runs behind the GPU, min(CPU, GPU); None where the gap is negative.

        Two totals leave it anywhere from none to the whole forward pass. The host work, measured, fixes it: whatever
        exceeds the gap is hidden.
        """
        if self.gap_ms < 0:
            return None
        if self.cpu_ms is None:
            return 0.0, self.forward_ms
        hidden = max(0.0, self.cpu_ms - self.gap_ms)
        return hidden, hidden

    @property
    def not_cpu_ms(self) -> float | None:
        """Part of the gap that cannot be this rank's host work, at least; None where the host work is unknown.

        It is GPU work that the forward pass does not contain (sampling, rejection), or waiting for another rank.
        """
        if self.cpu_ms is None or self.gap_ms < 0:
            return None
        return max(0.0, self.gap_ms - self.cpu_ms)
