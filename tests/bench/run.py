"""Print the bench table: every speed that rackbook promises, as a ratio within one run.

Each ``bench_<what>.py`` beside this file has ``ratios() -> list[Ratio]``. Names on the command line select.
"""

from __future__ import annotations

import importlib
import os
import platform
import sys
from pathlib import Path


def main() -> int:
    """Run the benches and print the table; the exit status is 1 if a ratio misses its goal."""
    folder = Path(__file__).parent
    sys.path.insert(0, str(folder))
    names = sorted(path.stem.removeprefix("bench_") for path in folder.glob("bench_*.py"))
    if unknown := set(sys.argv[1:]) - set(names):
        print(f"unknown bench {', '.join(sorted(unknown))}, allowed: {', '.join(names)}", file=sys.stderr)
        return 2
    print(f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, Python {platform.python_version()}; medians")
    print(f"{'what':<62} {'ours':>12} {'reference':>12} {'ratio':>8}  goal")
    missed = 0
    for name in sys.argv[1:] or names:
        for r in importlib.import_module(f"bench_{name}").ratios():
            missed += not r.holds
            figures = f"{r.ours:>9.3g} {r.unit:<3}{r.reference:>9.3g} {r.unit:<3}{r.ratio:>7.2f}×"
            print(f"{r.what:<62} {figures}  {r.goal}{'' if r.holds else '  MISSED'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
