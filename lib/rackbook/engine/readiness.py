"""Whether a server answers, under which name, and what it printed last; and which ports are free."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from pathlib import Path
from urllib.parse import urlsplit

from rackbook.engine import processes
from rackbook.errors import RackbookError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ANSWER_S = 5.0
_BYTES_PER_LINE = 400


class ServerError(RackbookError, RuntimeError):
    """A server that does not start, does not answer, or ended while it was needed."""


def free_port() -> int:
    """A port of this machine that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(base_url: str) -> str | None:
    """The name of the model that a server serves; None while it does not answer.

    It answers when ``/health`` says so and ``/v1/models`` lists a model.
    """
    address = urlsplit(base_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=_ANSWER_S)
    try:
        with contextlib.closing(connection):
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            if response.status != http.HTTPStatus.OK:
                return None
            key = os.environ.get("VLLM_API_KEY")
            connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {})
            listed = json.loads(connection.getresponse().read())
            return str(listed["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError):
        return None


def tail(path: Path, lines: int) -> str:
    """The last lines of a file that may be large; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _BYTES_PER_LINE * lines))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError:
        return ""


def require_free_port(base_url: str) -> None:
    """Complain if somebody listens where a server of this machine shall answer; other machines are not asked.

    Raises:
        ServerError: who listens there.
    """
    address = urlsplit(base_url)
    if address.scheme != "http" or not address.hostname or not address.port:
        raise ServerError(f"where the server answers: got {base_url!r}, allowed: http://HOST:PORT")
    if address.hostname not in _LOOPBACK:
        return
    family = socket.AF_INET6 if ":" in address.hostname else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.hostname, address.port))
        except OSError as problem:
            holder = processes.listener(address.port)
            who = f"process {holder}: {processes.command_line(holder)[:120]}" if holder else "another user's process"
            raise ServerError(
                f"port {address.port} is taken by {who} ({problem.strerror}); choose another port or end that process"
            ) from problem
