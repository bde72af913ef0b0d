"""The one lab server that stays: started by ``rackbook engine up``, ended by ``rackbook engine down``."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rackbook import cache
from rackbook.engine import readiness
from rackbook.engine.lab import Lab
from rackbook.engine.lab_install import Say
from rackbook.engine.processes import Identity
from rackbook.engine.readiness import ServerError
from rackbook.engine.server import stop_detached

_STATE = "server.json"


@dataclass(frozen=True)
class Resident:
    """The server that stays.

    Attributes:
        base_url: where it answers.
        model: the name that requests give.
        model_folder: where the model and its tokenizer lie.
        num_ranks: data-parallel ranks.
        since: when it started, UTC.
        log: what it prints.
        supervisor: the process that looks after it.
        members: what it consists of, as far as it was started directly.
    """

    base_url: str
    model: str
    model_folder: str
    num_ranks: int
    since: str
    log: str
    supervisor: Identity
    members: tuple[Identity, ...]

    def text(self) -> str:
        """What a person wants to know."""
        answering = "answers" if readiness.answers(self.base_url) else "does not answer"
        ranks = "1 rank" if self.num_ranks == 1 else f"{self.num_ranks} data-parallel ranks"
        return (
            f"{self.base_url} {answering}, {ranks}, since {self.since}, process {self.supervisor.pid}\n"
            f"model {self.model!r} in {self.model_folder}\nlog {self.log}"
        )


def up(lab: Lab, num_ranks: int, port: int | None, say: Say) -> tuple[Resident, bool]:
    """Start the server that stays, unless it runs.

    Args:
        lab: where it runs; installed first if needed.
        num_ranks: data-parallel ranks.
        port: on 127.0.0.1; a free one if None.
        say: takes a line every few seconds.

    Returns:
        The server, and whether it was started now.

    Raises:
        ServerError: one runs with other ranks or another port, or it does not start.
        LabError: the lab cannot be installed.
    """
    with _lock(say):
        running = read()
        if running is not None:
            _require_same(running, num_ranks, port)
            return running, False
        lab.install(say)
        model = lab.model()
        with lab.server(num_ranks, model, port, log=_folder() / "server.log", progress=say) as server:
            resident = Resident(
                server.base_url, server.model, str(model), num_ranks,
                datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), str(server.log_path),
                server.supervisor, tuple(process.identity for process in server.processes),
            )  # fmt: skip
            _write(resident)
            server.detach()
        return resident, True


def down(say: Say) -> Resident | None:
    """End the server that stays.

    Returns:
        The one that was ended; None if none ran.
    """
    with _lock(say):
        running = read()
        if running is not None:
            stop_detached(running.supervisor, running.members)
        (_folder() / _STATE).unlink(missing_ok=True)
        return running


def read() -> Resident | None:
    """The server that stays; None if none runs."""
    try:
        content = json.loads((_folder() / _STATE).read_text("utf-8"))
        content["supervisor"] = Identity(**content["supervisor"])
        content["members"] = tuple(Identity(**member) for member in content["members"])
        resident = Resident(**content)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError) as problem:
        raise ServerError(
            f"what is known of the lab's server, {_folder() / _STATE}, cannot be read ({problem}); "
            "end the server by hand if one runs, and remove that file"
        ) from problem
    alive = resident.supervisor.is_alive or any(member.is_alive for member in resident.members)
    return resident if alive else None


def _require_same(running: Resident, num_ranks: int, port: int | None) -> None:
    wanted = [] if running.num_ranks == num_ranks else [f"{num_ranks} ranks"]
    if port is not None and not running.base_url.endswith(f":{port}"):
        wanted.append(f"port {port}")
    if wanted:
        raise ServerError(
            f"wanted {' and '.join(wanted)}, but a server of {running.num_ranks} ranks runs at {running.base_url}: "
            "`rackbook engine down` ends it"
        )


def _folder() -> Path:
    return cache.folder("engine")


def _write(resident: Resident) -> None:
    content: dict[str, Any] = asdict(resident)
    path = _folder() / _STATE
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
    partial.replace(path)


@contextlib.contextmanager
def _lock(say: Say) -> Iterator[None]:
    """One `up` or `down` at a time."""
    _folder().mkdir(parents=True, exist_ok=True)
    with (_folder() / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another `rackbook engine` is at work, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
