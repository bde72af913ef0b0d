"""Runs in the lab's Python: `collective_ranks.py FOLDER` does the plugin's collectives on groups of real processes.

Prints, for each rank, group size and case, what came out and with what it was fed.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed
import torch.multiprocessing
from rackbook_lab_plugin.collectives import gather_parts, sum_own_part

SIZES = {2: [[3, 3], [0, 4], [5, 1]], 3: [[2, 2, 2], [0, 5, 1], [4, 0, 0]], 4: [[1, 1, 1, 1], [3, 0, 2, 7]]}


def parts(rank: int, rows: int) -> list[torch.Tensor]:
    """What a layer sends: states, weights of the chosen experts, and their numbers, each of another type."""
    generator = torch.Generator().manual_seed(100 + rank)
    states = torch.randn((rows, 4, 2), generator=generator).to(torch.bfloat16)
    weights = torch.rand((rows, 2), generator=generator)
    ids = torch.randint(0, 8, (rows, 2), generator=generator, dtype=torch.int32)
    return [states, weights, ids]


def run(rank: int, num_ranks: int, folder: str) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks
    )  # fmt: skip
    groups = {size: torch.distributed.new_group(list(range(size))) for size in SIZES}
    found = {size: [case(rank, sizes, groups[size]) for sizes in SIZES[size]] for size in SIZES if rank < size}
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def case(rank: int, sizes: list[int], group: torch.distributed.ProcessGroup) -> dict:
    sent = parts(rank, sizes[rank])
    summand = torch.randn((sum(sizes), 3), generator=torch.Generator().manual_seed(7 * rank))
    narrow = summand.to(torch.bfloat16)
    gathered = gather_parts(sent, sizes, group)
    return {
        "sizes": sizes,
        "sent": [tensor.tolist() for tensor in sent],
        "gathered": [tensor.tolist() for tensor in gathered],
        "types": [str(tensor.dtype) for tensor in gathered],
        "summand": summand.tolist(),
        "summed": sum_own_part(summand, sizes, group).tolist(),
        "narrow_summand": narrow.tolist(),
        "narrow": sum_own_part(narrow, sizes, group).tolist(),
    }


if __name__ == "__main__":
    most, folder = max(SIZES), sys.argv[1]
    torch.multiprocessing.spawn(run, (most, folder), nprocs=most)
    print(json.dumps([json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(most)]))
