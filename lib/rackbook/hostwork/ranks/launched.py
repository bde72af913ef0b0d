"""One rank under torchrun or Slurm: the launcher starts the ranks, on one machine or several.

The blocks are fixed beforehand, because nobody outside can decide when the spread is small enough.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rackbook.cores import core_ids
from rackbook.hostwork.ranks import member, over_torch, timing, wiring

FORMAT = 1
"""Version of the file that rank 0 writes."""

_RANK = ("RANK", "SLURM_PROCID")
_NUM_RANKS = ("WORLD_SIZE", "SLURM_NTASKS")
_HOST = ("MASTER_ADDR", "SLURM_LAUNCH_NODE_IPADDR")
DEFAULT_PORT = 29_400


def place(environment: dict[str, str]) -> tuple[int, int, str, int]:
    """Rank, number of ranks, address of rank 0's machine and the launcher's port, from torchrun's or Slurm's variables.

    Raises:
        WiringError: a variable is missing or no number; names those that would do.
    """
    rank, num_ranks = _number(environment, _RANK), _number(environment, _NUM_RANKS)
    host = next((environment[name] for name in _HOST if environment.get(name)), None)
    if host is None:
        raise wiring.WiringError(f"no address of rank 0: set one of {', '.join(_HOST)}")
    if not 0 <= rank < num_ranks:
        raise wiring.WiringError(f"got rank {rank} of {num_ranks} ranks, allowed: 0 to {num_ranks - 1}")
    port = environment.get("MASTER_PORT", str(DEFAULT_PORT))
    if not port.isdigit() or not 0 < int(port) < 65_535:
        raise wiring.WiringError(f"MASTER_PORT: got {port!r}, allowed: 1 to 65534")
    return rank, num_ranks, host, int(port)


def run(out: Path, algorithms: Sequence[str], num_blocks: int, num_turns: int) -> int:
    """Measure as one of the launched ranks; rank 0 writes the file.

    Args:
        out: the file that rank 0 writes; :func:`rackbook.hostwork.collectives.read_launched` reads it.
        algorithms: names out of :data:`rackbook.hostwork.ranks.member.ALGORITHMS`; those that this interpreter cannot
            run are left out, and the file says why.
        num_blocks: timed blocks of each algorithm, in turn; one more is run first and dropped.
        num_turns: all-reduces of a block.

    Returns:
        Exit status.

    Raises:
        WiringError: a rank is missing, or the ranks do not agree on what can be run.
    """
    rank, num_ranks, host, port = place(dict(os.environ))
    # torch meets at the launcher's port, the ranks' own connections at the next one.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    absent = _absent(algorithms)
    usable = [name for name in algorithms if name not in absent]
    if not usable:
        raise wiring.WiringError("; ".join(f"{name}: {why}" for name, why in absent.items()) or "no all-reduce named")
    meeting = wiring.listen("", port + 1) if rank == 0 else None
    links = member.links(rank, num_ranks, host, port + 1, meeting)
    about = {"host": socket.gethostname(), "cores": len(core_ids()), "usable": usable}
    everyone = links.gather(about)
    if everyone is not None and any(one["usable"] != usable for one in everyone):
        raise wiring.WiringError(
            "the ranks cannot all run the same all-reduces: "
            + "; ".join(sorted({", ".join(one["usable"]) or "none" for one in everyone}))
        )
    me = member.Member(rank, num_ranks, usable, links, None)
    blocks: dict[str, list[dict[str, Any]]] = {name: [] for name in usable}
    for number in range(num_blocks + 1):
        for name in usable[number % len(usable) :] + usable[: number % len(usable)]:
            parts = links.gather(me.block(name, num_turns))
            if parts is not None and number > 0:
                blocks[name].append(timing.joined(parts, num_turns))
    if everyone is not None:
        hosts = [one["host"] for one in everyone]
        found = {
            "format": FORMAT,
            "num_ranks": num_ranks,
            "num_hosts": len(set(hosts)),
            # names of machines are nobody's business: only how full the fullest is
            "oversubscribed": any(hosts.count(one["host"]) > one["cores"] for one in everyone),
            "cores_per_host": max(one["cores"] for one in everyone),
            "absent": absent,
            "blocks": blocks,
        }
        partial = out.with_name(f".{out.name}.partial")
        partial.write_text(json.dumps(found), "utf-8")
        partial.replace(out)
    links.close()
    return 0


def _absent(algorithms: Sequence[str]) -> dict[str, str]:
    over = [name for name in algorithms if name in over_torch.FACTORIES]
    if over and (why := over_torch.missing_torch()):
        return dict.fromkeys(over, why)
    if "vLLM's all-reduce" in over and (why := over_torch.missing_vllm()):
        return {"vLLM's all-reduce": why}
    return {}


def _number(environment: dict[str, str], names: tuple[str, ...]) -> int:
    for name in names:
        if text := environment.get(name):
            if not text.isdigit():
                raise wiring.WiringError(f"{name}: got {text!r}, allowed: a whole number")
            return int(text)
    raise wiring.WiringError(
        f"no {' or '.join(names)} in the environment; start the ranks with torchrun or srun, or measure on this "
        "machine from the notebook"
    )
