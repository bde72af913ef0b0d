"""Started by ``srun`` once per GPU: tells the process its rank as torchrun would, then becomes it.

Runs with the Python that has vLLM, where rackbook need not be installed: standard library only.
Usage: slurm_rank.py PORT ARGUMENTS-OF-PYTHON…
"""

import os
import re
import sys


def first_host(node_list: str) -> str:
    """The first host of a Slurm node list, e.g. "tray03" of "tray[03-05,9],spare1".

    Raises:
        ValueError: not a node list.
    """
    found = re.match(r"([^\[\],]+)(?:\[(\d+)[^\]]*\])?([^\[\],]*)", node_list)
    if found is None:
        raise ValueError(f"SLURM_JOB_NODELIST: got {node_list!r}, expected e.g. tray[03-05]")
    return found[1] + (found[2] or "") + found[3]


def variables(slurm: dict[str, str], port: str) -> dict[str, str]:
    """What torchrun would set, from what Slurm sets.

    Raises:
        KeyError: a variable of Slurm's is missing.
    """
    nodes = slurm.get("SLURM_STEP_NODELIST") or slurm["SLURM_JOB_NODELIST"]
    return {
        "RANK": slurm["SLURM_PROCID"],
        "LOCAL_RANK": slurm["SLURM_LOCALID"],
        "WORLD_SIZE": slurm["SLURM_NTASKS"],
        "LOCAL_WORLD_SIZE": slurm["SLURM_NTASKS_PER_NODE"],
        "MASTER_ADDR": first_host(nodes),
        "MASTER_PORT": port,
    }


def main() -> None:
    """Become the rank."""
    try:
        os.environ.update(variables(dict(os.environ), sys.argv[1]))
    except (KeyError, IndexError, ValueError) as problem:
        sys.exit(f"slurm_rank.py: must be started by srun, as slurm_rank.py PORT ARGUMENTS…: {problem!r}")
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])  # noqa: S606 - no shell, and this process becomes it


if __name__ == "__main__":
    main()
