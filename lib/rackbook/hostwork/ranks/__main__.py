"""Entry of rank processes: ``python -m rackbook.hostwork.ranks``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rackbook.hostwork.ranks import launched, member, nursery, timing, wiring


def main() -> int:
    """Serve a parent on this machine, or run as one launched rank; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rackbook.hostwork.ranks",
        description="Time all-reduces of a small vector over processes. Start one process per rank with torchrun or "
        "srun; rank 0 writes the file.",
    )
    parser.add_argument("--nursery", type=int, metavar="PID", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=Path("collectives.json"), metavar="FILE")
    parser.add_argument("--algorithms", nargs="+", choices=member.ALGORITHMS, default=list(member.ALGORITHMS))
    parser.add_argument("--blocks", type=int, default=20, metavar="N", help="timed blocks of each (default: 20)")
    parser.add_argument("--turns", type=int, default=50, metavar="N", help="all-reduces of a block (default: 50)")
    given = parser.parse_args()
    if given.nursery is not None:
        member.die_with_parent(given.nursery)
        return nursery.serve()
    if given.blocks < 1 or given.turns < 1:
        parser.error("--blocks and --turns: allowed: 1 or more")
    try:
        return launched.run(given.out, given.algorithms, given.blocks, given.turns)
    except (wiring.WiringError, timing.WrongSumError) as problem:
        print(f"rackbook ranks: {problem}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # torch's threads may hold up an orderly exit once a peer is gone
