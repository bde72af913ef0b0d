"""Rank processes on this machine: started, pinned where the cores suffice, asked for timed blocks, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import rackbook
from rackbook.cores import core_ids, usable_cores
from rackbook.errors import ParameterError, RackbookError
from rackbook.hostwork.ranks.member import ALGORITHMS

MAX_RANKS = 256

OPEN_S, START_S, BLOCK_S = 180.0, 60.0, 60.0
"""Longest times: importing torch and vLLM; connecting all ranks; one block."""


_VLLM_DEFAULTS = {"VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
"""One function of vLLM is imported at most; it needs no device and has nothing to report."""


class RankError(RackbookError, RuntimeError):
    """Rank processes that failed, ended early or do not answer; the message says which and when."""


@dataclass(frozen=True)
class Block:
    """What a block of all-reduces took.

    Attributes:
        durations_ms: of each all-reduce the longest of any rank; shape [turns].
        cpu_us: CPU time per all-reduce and rank, all threads, mean.
        waits: times that a rank gave the CPU away per all-reduce, mean: each is a wait for another rank.
        segments: TCP segments with data that a rank sent per all-reduce, mean; None where that was not counted.
    """

    durations_ms: NDArray[np.float64]
    cpu_us: float
    waits: float
    segments: float | None = None

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """What :func:`rackbook.hostwork.ranks.timing.joined` tells of a block."""
        return cls(np.array(told["durations_ns"]) * 1e-6, told["cpu_ns"] * 1e-3, told["waits"], told.get("segments"))


class RankGroup:
    """Processes that run all-reduces; a context manager that leaves none behind.

    If this process ends, however that happens, its ranks end with it.

    Args:
        algorithms: names out of :data:`rackbook.hostwork.ranks.member.ALGORITHMS`.
        interpreter: the Python that runs the ranks; it needs nothing but, for the algorithms over torch, torch.

    Attributes:
        algorithms: those that the interpreter can run.
        absent: why it cannot run the others, by name.
        versions: torch and vllm as the ranks imported them; None where they did not.

    Raises:
        ParameterError: an unknown algorithm, or no such interpreter.
        RankError: the interpreter does not run the ranks.
    """

    def __init__(self, algorithms: Sequence[str], interpreter: Path | str | None = None) -> None:
        from rackbook.errors import one_of

        for name in algorithms:
            if name not in ALGORITHMS:
                raise ParameterError(one_of(name, ALGORITHMS, "all-reduce"))
        python = str(interpreter or sys.executable)
        if shutil.which(python) is None:
            raise ParameterError(
                f"interpreter: got {python!r}, which is no program here; allowed: the path of a Python with torch"
            )
        self._python, self._asked = python, list(algorithms)
        self._process: subprocess.Popen[bytes] | None = None
        self.algorithms: tuple[str, ...] = ()
        self.absent: dict[str, str] = {}
        self.versions: dict[str, str | None] = {}

    def __enter__(self) -> Self:
        self._folder = tempfile.mkdtemp(prefix="rackbook-ranks-")
        try:
            # The ranks see this package and, whatever the interpreter, no package beside it that was not asked for.
            (Path(self._folder) / "rackbook").symlink_to(Path(rackbook.__file__).resolve().parent)
            self._log = (Path(self._folder) / "log").open("wb")
            given = os.environ.get("PYTHONPATH")
            paths = [self._folder, *([given] if given else [])]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
            defaults = _VLLM_DEFAULTS | ({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform.startswith("linux") else {})
            environment = defaults | environment
            self._process = subprocess.Popen(  # noqa: S603
                [self._python, "-m", "rackbook.hostwork.ranks", "--nursery", str(os.getpid())],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=environment, cwd=self._folder,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
            opened = self._ask("open", {"algorithms": self._asked}, OPEN_S)
        except BaseException:
            self.__exit__()
            raise
        self.absent = opened["absent"]
        self.versions = {"torch": opened["torch"], "vllm": opened["vllm"]}
        self.algorithms = tuple(name for name in self._asked if name not in self.absent)
        return self

    @property
    def pid(self) -> int:
        """The process that starts the ranks and outlives them.

        Raises:
            RankError: it was ended.
        """
        if self._process is None:
            raise RankError("the rank processes were ended already")
        return self._process.pid

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(OSError):
                process.stdin.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()  # its ranks end with it
                process.wait()
            process.stdout.close()
        if log := getattr(self, "_log", None):
            log.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def ranks(self, num_ranks: int, *, port: int = 0) -> Iterator[Ranks]:
        """Start ranks and connect them; they end with the block.

        Args:
            num_ranks: how many.
            port: where they meet on the loopback address; 0 for any free port.

        Raises:
            ParameterError: a number of ranks out of range.
            RankError: the port is taken, or a rank does not start.
        """
        if not 2 <= num_ranks <= MAX_RANKS:
            raise ParameterError(f"num_ranks: got {num_ranks}, allowed: 2 to {MAX_RANKS}")
        numbers = core_ids()
        pinned = num_ranks <= min(len(numbers), usable_cores())
        given = {"ranks": num_ranks, "algorithms": self.algorithms, "port": port, "within_s": START_S}
        started = self._ask("start", given | {"cores": numbers[:num_ranks] if pinned else None}, START_S)
        try:
            yield Ranks(self, num_ranks, int(usable_cores()), pinned, tuple(started["pids"]))
        finally:
            if self._process is not None and self._process.poll() is None:
                with contextlib.suppress(RankError):  # after a failed block the ranks are ended already
                    self._ask("stop", {}, 10.0)

    def _ask(self, name: str, given: dict[str, Any], within_s: float) -> dict[str, Any]:
        process = self._process
        if process is None:
            raise RankError("the rank processes were ended already")
        try:
            process.stdin.write(json.dumps({name: given}).encode() + b"\n")
            answer = self._answer(process, within_s + 10.0)
        except (BrokenPipeError, EOFError):
            status = process.wait()
            words = self._last_words()
            raise RankError(f"the rank processes ended with status {status}; last words: {words}") from None
        if "error" in answer:
            raise RankError(answer["error"])
        return answer

    def _answer(self, process: subprocess.Popen[bytes], within_s: float) -> dict[str, Any]:
        deadline, data = time.monotonic() + within_s, b""
        while not data.endswith(b"\n"):
            if not select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                process.kill()
                raise RankError(f"no answer from the rank processes within {within_s:g} s; they were ended")
            part = os.read(process.stdout.fileno(), 1 << 20)
            if not part:
                raise EOFError
            data += part
        return json.loads(data)

    def _last_words(self) -> str:
        text = (Path(self._folder) / "log").read_text("utf-8", errors="replace").strip()
        return text.splitlines()[-1] if text else "(none)"


@dataclass(frozen=True)
class Ranks:
    """Connected ranks.

    Attributes:
        num_ranks: how many.
        num_cores: cores that they may use.
        pinned: whether each has a core of its own.
        pids: their process ids, by rank.
    """

    group: RankGroup
    num_ranks: int
    num_cores: int
    pinned: bool
    pids: tuple[int, ...]

    @property
    def oversubscribed(self) -> bool:
        """More ranks than cores: they take turns, and times say as much about that as about the algorithm."""
        return self.num_ranks > self.num_cores

    def block(self, algorithm: str, num_turns: int, *, within_s: float = BLOCK_S) -> Block:
        """Run all-reduces one after the other and check every sum.

        Args:
            algorithm: one of the group's.
            num_turns: how many.
            within_s: longest time.

        Raises:
            RankError: a rank ended, gave a wrong sum, or does not answer; all ranks are ended then.
        """
        found = self.group._ask("block", {"algorithm": algorithm, "turns": num_turns, "within_s": within_s}, within_s)
        return Block.of(found)
