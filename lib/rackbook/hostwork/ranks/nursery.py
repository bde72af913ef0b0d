"""The process that forks ranks on this machine, hands them commands and ends them.

It imports torch once and forks, so that a rank costs a hundredth of a second. It takes one JSON object per line from
its standard input and answers each with one line. When its input ends, because whoever started it is gone, it kills
the ranks and ends; when it is killed itself, the kernel ends the ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rackbook.hostwork.ranks import member, over_torch, timing, wiring


class RanksError(Exception):
    """A rank that failed, ended or does not answer; the message says which."""


class Ranks:
    """Forked ranks, connected and ready.

    Args:
        num_ranks: how many.
        algorithms: what they will run.
        cores: the core of each rank; None where they are not pinned.
        port: where they meet; 0 for any free port.
        parent_gone: returns True once nobody waits for the result any more.
    """

    def __init__(
        self, num_ranks: int, algorithms: Sequence[str], cores: Sequence[int] | None, port: int, parent_gone: Any
    ) -> None:
        self.num_ranks, self._parent_gone = num_ranks, parent_gone
        self._doing = "connecting"
        self.pids: list[int] = []
        self._channels: list[socket.socket] = []
        self._pending: list[bytes] = []
        meeting = wiring.listen("127.0.0.1", port)
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        try:
            place = (*meeting.getsockname(), str(Path(self._folder) / "store"))
            for rank in range(num_ranks):
                self._fork(rank, algorithms, cores[rank] if cores else None, place, meeting)
        except OSError as problem:
            self.end()
            raise RanksError(f"rank {len(self.pids)} of {num_ranks} cannot be started: {problem.strerror}") from None
        finally:
            meeting.close()

    def _fork(
        self, rank: int, algorithms: Sequence[str], core: int | None, place: tuple[str, int, str], meeting: Any
    ) -> None:
        ours, theirs = socket.socketpair()
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                for channel in (*self._channels, ours):
                    channel.close()
                member.die_with_parent(nursery)
                status = _live(rank, self.num_ranks, algorithms, core, place, meeting, theirs)
            finally:
                os._exit(status)  # a forked child must not run its parent's exit handlers
        theirs.close()
        self.pids.append(pid)
        self._channels.append(ours)
        self._pending.append(b"")

    def ready(self, within_s: float) -> None:
        """Wait until every rank is connected.

        Raises:
            RanksError: a rank failed, ended, or is not there in time.
        """
        self._answers(within_s)

    def block(self, algorithm: str, num_turns: int, within_s: float) -> dict[str, Any]:
        """Let all ranks run a block.

        Returns:
            As :func:`rackbook.hostwork.ranks.timing.joined`.

        Raises:
            RanksError: as :meth:`ready`.
        """
        self._doing = f"in a block of {num_turns} × {algorithm}"
        command = json.dumps({"algorithm": algorithm, "turns": num_turns}).encode() + b"\n"
        for channel in self._channels:
            with contextlib.suppress(OSError):  # a rank that is gone shows in the answers
                channel.sendall(command)
        return timing.joined(self._answers(within_s), num_turns)

    def _answers(self, within_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + within_s
        answers: dict[int, dict[str, Any]] = {}
        ended: list[int] = []
        complaints: list[str] = []
        suspicious = True
        while len(answers) < self.num_ranks:
            now = time.monotonic()
            if now >= deadline:
                silent = [rank for rank in range(self.num_ranks) if rank not in answers]
                raise RanksError(f"no answer from rank {_listed(silent)} of {self.num_ranks} {self._doing} within "
                                 f"{within_s:g} s")  # fmt: skip
            waiting = {self._channels[rank]: rank for rank in range(self.num_ranks) if rank not in answers}
            for channel in select.select([*waiting, sys.stdin], [], [], max(0.0, deadline - now))[0]:
                if channel is sys.stdin:
                    self._parent_gone()
                    continue
                rank = waiting[channel]
                answer = self._read(rank, channel)
                if answer is None:
                    continue
                if "ended" in answer or "error" in answer:
                    ended.append(rank)
                    complaints += [answer["error"]] if "error" in answer else []
                    suspicious = suspicious and answer.get("suspicious", True)
                else:
                    answers[rank] = answer
            if ended:
                raise RanksError(self._explained(ended, complaints, suspicious=suspicious))
        return [answers[rank] for rank in range(self.num_ranks)]

    def _read(self, rank: int, channel: socket.socket) -> dict[str, Any] | None:
        try:
            data = channel.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            return {"ended": True}
        self._pending[rank] += data
        if not self._pending[rank].endswith(b"\n"):
            return None
        line, self._pending[rank] = self._pending[rank], b""
        return json.loads(line)

    def _explained(self, ended: list[int], complaints: list[str], *, suspicious: bool) -> str:
        """Why a block failed: which rank was ended, if one was, else what the first rank complained of.

        Args:
            ended: ranks that ended or failed.
            complaints: what they said.
            suspicious: whether the complaints may come of another rank's end, which may take a moment to show.
        """
        deadline = time.monotonic() + (2.0 if suspicious else 0.0)
        killed: list[str] = []
        while not killed:
            for rank, pid in enumerate(self.pids):
                done, status = os.waitpid(pid, os.WNOHANG) if pid else (0, 0)
                if done:
                    self.pids[rank] = 0
                if done and os.WIFSIGNALED(status):
                    name = signal.Signals(os.WTERMSIG(status)).name
                    killed.append(f"rank {rank} of {self.num_ranks} was ended by {name}")
            if time.monotonic() > deadline:
                break
            time.sleep(0.005)
        if killed:
            return f"{'; '.join(killed)}, {self._doing}"
        if complaints:
            return f"{complaints[0]}, {self._doing}"
        return f"rank {_listed(sorted(ended))} of {self.num_ranks} ended {self._doing} without a word"

    def _reap(self, rank: int, deadline: float) -> tuple[int, int]:
        while True:
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid or time.monotonic() > deadline:
                return pid, status
            time.sleep(0.002)

    def end(self) -> None:
        """End every rank, and remove what they met at."""
        for channel in self._channels:
            channel.close()  # a rank whose channel ends stops by itself
        deadline = time.monotonic() + 0.5
        for rank, pid in enumerate(self.pids):
            if pid and not self._reap(rank, deadline)[0]:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            self.pids[rank] = 0
        shutil.rmtree(self._folder, ignore_errors=True)


def _listed(ranks: list[int]) -> str:
    head = ", ".join(map(str, ranks[:8]))
    return head if len(ranks) <= 8 else f"{head} and {len(ranks) - 8} more"


def _live(
    rank: int,
    num_ranks: int,
    algorithms: Sequence[str],
    core: int | None,
    place: tuple[str, int, str],
    meeting: socket.socket,
    channel: socket.socket,
) -> int:
    """The life of a forked rank; returns its exit status."""
    host, port, store = place
    try:
        if core is not None:
            os.sched_setaffinity(0, {core})
        links = member.links(rank, num_ranks, host, port, meeting if rank == 0 else None)
        me = member.Member(rank, num_ranks, algorithms, links, store)
        channel.sendall(json.dumps({"ready": True}).encode() + b"\n")
        with channel.makefile("r") as commands:
            for line in commands:
                command = json.loads(line)
                found = me.block(command["algorithm"], command["turns"])
                channel.sendall(json.dumps(found).encode() + b"\n")
    except Exception as problem:  # whatever it is, the nursery must hear of it
        text = " ".join(str(problem).split())
        known = isinstance(problem, wiring.WiringError | timing.WrongSumError)
        told = text if known else f"rank {rank} of {num_ranks} failed: {type(problem).__name__}: {text}"
        with contextlib.suppress(OSError):
            wrong = isinstance(problem, timing.WrongSumError)
            channel.sendall(json.dumps({"error": told, "suspicious": not wrong}).encode() + b"\n")
        return 1
    return 0


def serve() -> int:
    """Take commands from standard input until it ends; returns the exit status.

    Commands and answers, one JSON object per line:
        {"open": {"algorithms": […]}} → {"absent": {name: why}, "torch": version or null}
        {"start": {"ranks": n, "algorithms": […], "cores": […] or null, "port": p, "within_s": s}} → {"pids": […]}
        {"block": {"algorithm": a, "turns": k, "within_s": s}} → durations_ns, cpu_ns, waits, segments
        {"stop": {}} → {}
    An answer {"error": text} ends the ranks, not the nursery.
    """
    ranks: Ranks | None = None

    def parent_gone() -> None:
        # Between a command and its answer nothing may come: it is the end of the input.
        if ranks is not None:
            ranks.end()
        os._exit(1)

    for line in sys.stdin:
        ((name, given),) = json.loads(line).items()
        try:
            if name == "open":
                answer: dict[str, Any] = _opened(given["algorithms"])
            elif name == "start":
                ranks = Ranks(given["ranks"], given["algorithms"], given["cores"], given["port"], parent_gone)
                ranks.ready(given["within_s"])
                answer = {"pids": ranks.pids}
            elif name == "block":
                if ranks is None:
                    raise RanksError("no ranks were started")
                answer = ranks.block(given["algorithm"], given["turns"], given["within_s"])
            else:
                answer = {}
                if ranks is not None:
                    ranks.end()
                    ranks = None
        except (RanksError, wiring.WiringError, OSError) as problem:
            answer = {"error": str(problem)}
            if ranks is not None:
                ranks.end()
                ranks = None
        print(json.dumps(answer), flush=True)
    if ranks is not None:
        ranks.end()
    return 0


def _opened(algorithms: Sequence[str]) -> dict[str, Any]:
    absent: dict[str, str] = {}
    over = [name for name in algorithms if name in over_torch.FACTORIES]
    if over and (why := over_torch.missing_torch()):
        absent = dict.fromkeys(over, why)
    elif "vLLM's all-reduce" in over and (why := over_torch.missing_vllm()):
        absent = {"vLLM's all-reduce": why}
    torch = sys.modules.get("torch")
    vllm = sys.modules.get("vllm")
    return {
        "absent": absent,
        "torch": getattr(torch, "__version__", None) if torch else None,
        "vllm": getattr(vllm, "__version__", None) if vllm else None,
    }
