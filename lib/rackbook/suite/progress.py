"""How a person sees a batch going on: a bar with times on a terminal, one line per notebook elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

from rackbook.suite.outcomes import Outcome


class Progress:
    """Progress of one batch, on the error stream.

    Args:
        total: number of notebooks.
        stream: where to; the error stream if None.
        forecast: say with each notebook how many run, have failed, and about how long the rest takes.
        width: columns of the name.
    """

    def __init__(self, total: int, stream: TextIO | None = None, *, forecast: bool = False, width: int = 24) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._done = self._failed = 0
        self._begin = time.monotonic()
        self._forecast, self._width = forecast, width
        self._running: dict[str, float] = {}
        self._bar = None
        if self._stream.isatty():
            from tqdm import tqdm

            layout = "{n_fmt}/{total_fmt} |{bar:20}| {elapsed}{postfix}"
            self._bar = tqdm(total=total, file=self._stream, leave=False, bar_format=layout, dynamic_ncols=True)

    def started(self, notebook: str) -> None:
        """A notebook has gone to a worker."""
        self._running[notebook] = time.monotonic()
        self._show_running()

    def ended(self, outcome: Outcome, label: str | None = None) -> None:
        """A notebook is done; says how long it took, and why it failed.

        Args:
            outcome: what became of it.
            label: as it was started; the notebook's name if None.
        """
        self._done += 1
        self._failed += not outcome.succeeded
        self._running.pop(label or outcome.notebook, None)
        width = len(str(self._total))
        name = f"{label or outcome.notebook:<{self._width}}"
        line = f"[{self._done:{width}}/{self._total}] {name} {outcome.duration_s:6.1f} s  "
        line += "ok" if outcome.succeeded else f"FAILED: {first_line(outcome.reason)}"
        self._say(line + self._outlook())

    def again(self, outcome: Outcome, label: str) -> None:
        """A notebook failed for a passing reason and will be tried again."""
        self._running.pop(label, None)
        self._say(f"{label}: tried again after: {first_line(outcome.reason)}", step=0)

    def waits(self, reason: str) -> None:
        """Nothing can start at the moment."""
        self._say(f"waits: {reason}", step=0)

    def elsewhere(self, label: str) -> None:
        """Another process has done it."""
        self._done += 1
        self._say(f"[{self._done:{len(str(self._total))}}/{self._total}] {label:<{self._width}} done by another run")

    def _outlook(self) -> str:
        if not self._forecast:
            return ""
        left = self._total - self._done
        seconds = (time.monotonic() - self._begin) / self._done * left
        rest = f", about {shown_duration(seconds)} left" if left else ""
        return f"  ({len(self._running)} running, {self._failed} failed{rest})"

    def _say(self, line: str, step: int = 1) -> None:
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)
            self._bar.update(step)
            self._show_running()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def _show_running(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._running))


def shown_duration(seconds: float) -> str:
    """A time as a person says it: ``40 s``, ``12 min``, ``3.5 h``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def first_line(text: str, width: int = 160) -> str:
    """A reason in one line."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= width else line[: width - 1] + "…"
