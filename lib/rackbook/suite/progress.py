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
    """

    def __init__(self, total: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._total = total
        self._done = 0
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

    def ended(self, outcome: Outcome) -> None:
        """A notebook is done; says how long it took, and why it failed."""
        self._done += 1
        self._running.pop(outcome.notebook, None)
        width = len(str(self._total))
        line = f"[{self._done:{width}}/{self._total}] {outcome.notebook:<24} {outcome.duration_s:6.1f} s  "
        line += "ok" if outcome.succeeded else f"FAILED: {first_line(outcome.reason)}"
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)
            self._bar.update()
            self._show_running()

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def _show_running(self) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(", ".join(self._running))


def first_line(text: str, width: int = 160) -> str:
    """A reason in one line."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    return line if len(line) <= width else line[: width - 1] + "…"
