"""What a server consists of, before it is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rackbook.engine.readiness import ServerError

ROUTER = "router"
_SECRET_OPTIONS = ("--api-key", "--hf-token", "--token")


class Startable(Protocol):
    """A process to start; :class:`rackbook.engine.plan.Process` is one."""

    @property
    def role(self) -> str: ...  # noqa: D102
    @property
    def command(self) -> Sequence[str]: ...  # noqa: D102
    @property
    def environment(self) -> Mapping[str, str]: ...  # noqa: D102


@dataclass(frozen=True)
class Command:
    """The plainest process to start.

    Attributes:
        role: what it is in the server; the processes whose role is "router" start when the others answer.
        arguments: program and arguments; no shell reads them.
        environment: variables on top of this process's.
    """

    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> tuple[str, ...]:
        """What this machine starts."""
        return self.arguments


def names(commands: Sequence[Startable]) -> list[str]:
    """A name for each process: its role, with its place where several have the role."""
    roles = [command.role for command in commands]
    return [f"{role}-{place}" if roles.count(role) > 1 else role for place, role in enumerate(roles)]


def refuse_secrets(command: Startable) -> None:
    """Complain about a secret among the arguments.

    Raises:
        ServerError: which option, and where the secret belongs.
    """
    for argument in command.command:
        option = argument.partition("=")[0]
        if option in _SECRET_OPTIONS:
            raise ServerError(
                f"{command.role}: got the option {option}, which every user of the machine can read in the list of "
                "processes and vLLM prints to its log; set VLLM_API_KEY or HF_TOKEN in the environment instead"
            )
