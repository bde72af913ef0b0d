"""Whether a server answers, under which name, and what it printed last; and which ports are free."""

from __future__ import annotations

import contextlib
import errno
import http.client
import json
import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rackbook.engine import processes
from rackbook.errors import RackbookError

_ANSWER_S = 5.0
_CONNECT_S = 2.0
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
    """Complain if somebody listens where a server shall answer, on this machine or on another one.

    Raises:
        ServerError: who listens there, or that the name means no machine.
    """
    address = urlsplit(base_url)
    if address.scheme != "http" or not address.hostname or not address.port:
        raise ServerError(f"where the server answers: got {base_url!r}, allowed: http://HOST:PORT")
    place = (address.hostname, address.port)
    try:
        found = socket.getaddrinfo(*place, type=socket.SOCK_STREAM)
    except socket.gaierror as problem:
        raise ServerError(f"where the server answers: {address.hostname!r} is no known host ({problem})") from None
    here = [_is_free_here(family, each) for family, *_, each in found]
    if any(here):
        return
    with contextlib.suppress(OSError), socket.create_connection(place, timeout=_CONNECT_S):
        raise ServerError(
            f"{base_url} takes connections already, before a server was started there; end what listens there"
        )


def _is_free_here(family: int, place: tuple[Any, ...]) -> bool:
    """Whether an address is this machine's, with nobody who listens there; complains if somebody does."""
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as problem:
        if problem.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return False
        holder = processes.listener(place[1])
        who = f"process {holder}: {processes.command_line(holder)[:120]}" if holder else "another user's process"
        raise ServerError(
            f"port {place[1]} is taken by {who} ({problem.strerror}); choose another port or end that process"
        ) from problem
    return True
