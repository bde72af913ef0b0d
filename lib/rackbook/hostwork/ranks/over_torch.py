"""All-reduces through torch.distributed's Gloo back end; this is the only module that needs torch."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rackbook.hostwork.ranks.schedules import ADD, EXCHANGE, SEND, TAKE, doubling

TIMEOUT = datetime.timedelta(seconds=60)
TAG = 41
"""Message tag of the point-to-point steps; any number that nothing else in the process uses."""


def join(rank: int, num_ranks: int, store: str | None) -> None:
    """Join the process group.

    Args:
        rank: this rank.
        num_ranks: all ranks.
        store: a file that the ranks of one machine share; None to meet as torchrun's environment says.
    """
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    method = f"file://{store}" if store else "env://"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=num_ranks, timeout=TIMEOUT)


class _OverTorch:
    def __init__(self, rank: int, num_ranks: int) -> None:
        import torch
        from torch import distributed

        self.rank, self.num_ranks = rank, num_ranks
        self._torch, self._distributed = torch, distributed
        self._tensor: Any = None

    def put(self, values: Sequence[int]) -> None:
        """Take this rank's numbers."""
        self._tensor = self._torch.tensor(values, dtype=self._torch.int32)

    def result(self) -> list[int]:
        """The sum."""
        return self._tensor.tolist()


class GlooAllReduce(_OverTorch):
    """``torch.distributed.all_reduce``, as vLLM did it before."""

    def run(self) -> None:
        """Add up over all ranks; every rank holds the sum then."""
        self._distributed.all_reduce(self._tensor)


class DoublingOverGloo(_OverTorch):
    """Recursive doubling by Gloo's own sends and receives: another algorithm on the same transport."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        self._steps = doubling(rank, num_ranks)

    def run(self) -> None:
        """Add up over all ranks; every rank holds the sum then."""
        send, receive, tensor = self._distributed.isend, self._distributed.irecv, self._tensor
        incoming = self._torch.empty_like(tensor)
        for kind, peer in self._steps:
            works = []
            if kind != SEND:
                works.append(receive(incoming, src=peer, tag=TAG))
            if kind in (SEND, EXCHANGE):
                works.append(send(tensor, dst=peer, tag=TAG))
            for work in works:
                work.wait()
            if kind in (ADD, EXCHANGE):
                tensor.add_(incoming)
            elif kind == TAKE:
                tensor.copy_(incoming)


class VllmAllReduce(_OverTorch):
    """The all-reduce that vLLM itself ships from 0.33.0 on."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__(rank, num_ranks)
        from vllm.distributed.utils import cpu_all_reduce_

        self._all_reduce, self._group = cpu_all_reduce_, self._distributed.group.WORLD

    def run(self) -> None:
        """Add up over all ranks; every rank holds the sum then."""
        self._all_reduce(self._tensor, self._group)


def missing_torch() -> str | None:
    """Why torch cannot be used here; None where it can."""
    try:
        from torch import distributed
    except Exception as problem:  # a torch that breaks at import does so with any exception
        return f"torch cannot be imported here ({_reason(problem)})"
    if not (distributed.is_available() and distributed.is_gloo_available()):
        return "this torch is built without Gloo"
    return None


def missing_vllm() -> str | None:
    """Why vLLM's own all-reduce cannot be used here; None where it can.

    Importing vLLM takes many seconds, so its source is looked at first.
    """
    found = find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        return "vLLM is not installed here"
    module = Path(found.submodule_search_locations[0]) / "distributed" / "utils.py"
    if not module.is_file() or "def cpu_all_reduce_(" not in module.read_text("utf-8"):
        return "the vLLM that is installed here has no all-reduce of its own, which it has from 0.33.0 on"
    try:
        from vllm.distributed.utils import cpu_all_reduce_  # noqa: F401
    except Exception as problem:
        return f"vLLM's all-reduce cannot be imported here ({_reason(problem)})"
    return None


def _reason(problem: Exception) -> str:
    text = " ".join(str(problem).split()).partition(" (/")[0]  # without the path that an ImportError ends with
    return f"{type(problem).__name__}: {text[:160]}"


FACTORIES: dict[str, Callable[[int, int], Any]] = {
    "Gloo all-reduce": GlooAllReduce,
    "doubling over Gloo": DoublingOverGloo,
    "vLLM's all-reduce": VllmAllReduce,
}
