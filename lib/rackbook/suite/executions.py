"""One execution of a sweep: a notebook, its parameters, and what it may use."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rackbook.suite.notebooks import Notebook

SEED = "seed"
"""The parameter that tells repeats of the same setting apart, where a notebook has it."""

MACHINE, ELSEWHERE = "machine", "cluster "
"""What an execution may want for itself: this machine, or the cluster or servers whose name follows."""


@dataclass(frozen=True)
class Limits:
    """What an execution may use.

    Attributes:
        timeout_s: longest time of all its cells together.
        memory_gib: most memory of its kernel and what that starts; None for no limit.
        gpus: GPUs that it has for itself.
        retries: how often it is tried again after a failure that is known to be transient.
        exclusive: what no other execution of a run or sweep may use at the same time: MACHINE for a measurement on
            this machine, with all its processors, GPUs and ports, ``cluster <name>`` for one on other machines; empty
            for a share of this machine and the GPUs.
        hosts: machines that its plan spreads it over; None where no plan says so.
        gpus_per_host: GPUs that the plan's cluster has in each; None without a plan.
    """

    timeout_s: float = 1800.0
    memory_gib: float | None = None
    gpus: int = 0
    retries: int = 2
    exclusive: str = ""
    hosts: int | None = None
    gpus_per_host: int | None = None

    @property
    def gpus_here(self) -> int:
        """GPUs of this machine; those of other machines are not ours to hand out."""
        return 0 if self.exclusive.startswith(ELSEWHERE) else self.gpus


@dataclass(frozen=True)
class Execution:
    """One point of a sweep.

    Attributes:
        notebook: which notebook.
        values: the parameters that are not left on their default.
        swept: the values that tell it from the other executions of its sweep, by parameter.
        repeat: counts from 1.
        limits: what it may use.
    """

    notebook: Notebook
    values: dict[str, Any]
    swept: dict[str, Any]
    repeat: int
    limits: Limits

    @property
    def parameters(self) -> dict[str, Any]:
        """All parameters with their values."""
        return {p.name: p.default for p in self.notebook.parameters} | self.values

    @cached_property
    def request(self) -> str:
        """The hash of what is asked for: notebook, parameters, and the number of the repeat if no seed tells it."""
        parameters = self.parameters
        asked = {
            "notebook": self.notebook.name,
            "parameters": parameters,
            "repeat": 1 if SEED in parameters else self.repeat,
        }
        text = json.dumps(asked, sort_keys=True, ensure_ascii=False, allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def label(self) -> str:
        """How it is called on the screen and in the report, e.g. ``06_expert_balance ranks=32 seed=2``."""
        words = [f"{name}={shown(value)}" for name, value in self.swept.items()]
        if self.repeat > 1 and SEED not in self.swept:
            words.append(f"repeat {self.repeat}")
        return " ".join([self.notebook.name, *words])


def shown(value: Any) -> str:
    """A value as it is typed after ``-p``, in one line and not too long."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return ",".join(shown(item) for item in value) or '""'
    text = " ".join(str(value).split()) or '""'
    return text if len(text) <= 40 else f"…{text[-39:]}"
