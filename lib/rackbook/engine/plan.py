"""What a measurement would start: processes, their GPUs, and how long it is likely to take. Nothing is started here."""

from __future__ import annotations

import dataclasses
import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rackbook import provenance
from rackbook.clusters import Cluster
from rackbook.recipes import Recipe

RUN_FOLDER = "RUN_FOLDER"
"""Stands for the folder of the run in arguments, until there is one."""

_WIDTH = 116


@dataclass(frozen=True)
class Process:
    """One process.

    Attributes:
        role: what it does, e.g. "forward", "decode", "client".
        arguments: as given to the system, no shell between.
        environment: variables beside those that it inherits.
        host_index: number of the host that it starts on, from 0.
        num_gpus: GPUs that it and its children use.
        through: command of this machine that starts it on its host; empty on this one.
        through_shell: whether that command hands one line to a shell there instead of words.
    """

    role: str
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    host_index: int = 0
    num_gpus: int = 0
    through: tuple[str, ...] = ()
    through_shell: bool = False

    @property
    def words(self) -> tuple[str, ...]:
        """The command without variables: what is told of it beside those of them that may be told."""
        return (*self.through, *self.arguments)

    @property
    def command(self) -> tuple[str, ...]:
        """What this machine starts."""
        return self.command_with(self.environment)

    def command_with(self, environment: Mapping[str, str]) -> tuple[str, ...]:
        """The command with other variables, where they are part of it."""
        if not self.through_shell:
            return self.words
        variables = [f"{name}={value}" for name, value in environment.items()]
        return (*self.through, shlex.join(["env", *variables, *self.arguments]))


@dataclass(frozen=True)
class Stage:
    """Servers, and what is run against them; or only the latter.

    Attributes:
        name: unique in the plan, a word for file names.
        services: started first, awaited until ready, ended last.
        steps: run one after the other; the processes of one step run at the same time, and the step is over when all
            have ended.
        minutes: estimate of how long it takes.
        basis: what the estimate assumes.
    """

    name: str
    minutes: float
    basis: str
    services: tuple[Process, ...] = ()
    steps: tuple[tuple[Process, ...], ...] = ()

    @property
    def processes(self) -> tuple[Process, ...]:
        """All of them, in the order in which they start."""
        return self.services + tuple(process for step in self.steps for process in step)

    @property
    def num_gpus(self) -> int:
        """Most GPUs in use at the same time."""
        steps = [sum(process.num_gpus for process in step) for step in self.steps]
        return sum(process.num_gpus for process in self.services) + max(steps, default=0)


@dataclass(frozen=True)
class Needs:
    """What must be there before anything starts.

    Attributes:
        vllm: oldest release that takes the arguments.
        changes: pull requests that vLLM must hold, by number, each with what it brings.
        compute_capabilities: GPUs that can run it, "10.3" or "10.x"; empty where none is used.
        context_tokens: longest context that is asked for.
        checkpoint: whether the model's weights are read, not only its configuration.
    """

    vllm: str
    changes: Mapping[int, str] = field(default_factory=dict)
    compute_capabilities: tuple[str, ...] = ()
    context_tokens: int = 0
    checkpoint: bool = False


@dataclass(frozen=True)
class Plan:
    """A measurement.

    Attributes:
        topic: the experiment.
        cluster: where.
        recipe: of what.
        stages: one after the other.
        needs: what must be there.
        notes: what the plan leaves out or does otherwise than the source, in sentences.
        effective: the settings by name as they will have run, whatever was given; empty where nobody keeps them apart.
    """

    topic: str
    cluster: Cluster
    recipe: Recipe
    stages: tuple[Stage, ...]
    needs: Needs
    notes: tuple[str, ...] = ()
    effective: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_gpus(self) -> int:
        """Most GPUs in use at the same time."""
        return max((stage.num_gpus for stage in self.stages), default=0)

    @property
    def gpu_minutes(self) -> float:
        """Estimate of what the stages take: GPUs times minutes."""
        return sum(stage.num_gpus * stage.minutes for stage in self.stages)

    @property
    def minutes(self) -> float:
        """Estimate of how long it takes."""
        return sum(stage.minutes for stage in self.stages)

    @property
    def processes(self) -> tuple[Process, ...]:
        """All processes, in the order in which they start."""
        return tuple(process for stage in self.stages for process in stage.processes)

    def stage(self, name: str) -> Stage:
        """Look a stage up by its name."""
        return next(stage for stage in self.stages if stage.name == name)

    def replaced(self, words: Mapping[str, str]) -> Plan:
        """The plan with words of its arguments and variables replaced, e.g. :data:`RUN_FOLDER` by a path.

        A word is replaced where it stands alone or between characters that are no part of a name.
        """

        def changed(process: Process) -> Process:
            return dataclasses.replace(
                process,
                arguments=tuple(_replaced(argument, words) for argument in process.arguments),
                through=tuple(_replaced(argument, words) for argument in process.through),
                environment={name: _replaced(value, words) for name, value in process.environment.items()},
            )

        stages = tuple(
            dataclasses.replace(
                stage,
                services=tuple(map(changed, stage.services)),
                steps=tuple(tuple(map(changed, step)) for step in stage.steps),
            )
            for stage in self.stages
        )
        return dataclasses.replace(self, stages=stages)

    def text(self, *, whole: bool = False) -> str:
        """The plan as a person reads it: every process, argument and variable.

        Args:
            whole: whether the values of all variables are told, as on the user's own terminal; else, as in a run, only
                of those that :func:`rackbook.provenance.told` lets pass.
        """
        cluster, launcher = self.cluster, self.cluster.launcher.kind
        most = f"{gpus(self.num_gpus)} at most" if self.num_gpus else gpus(0)
        size = f"{cluster.num_hosts} × {gpus(cluster.num_gpus_per_host)}" if cluster.num_gpus else gpus(0)
        lines = [
            f"{self.topic} on {cluster.key} ({cluster.name}, {size}, {launcher}), recipe {self.recipe.key}",
            f"{most}, about {self.minutes:.0f} minutes and {self.gpu_minutes:.0f} GPU-minutes",
        ]
        for number, stage in enumerate(self.stages, start=1):
            lines += ["", f"stage {number} of {len(self.stages)}: {stage.name}, {gpus(stage.num_gpus)}"]
            lines += _wrapped(f"  about {stage.minutes:.1f} minutes: {stage.basis}", "    ")
            groups = [("server", stage.services)] if stage.services else []
            groups += [(f"step {place}", step) for place, step in enumerate(stage.steps, start=1)]
            for group, processes in groups:
                for process in processes:
                    lines.append(f"  {group}: {_where(process, cluster)}")
                    lines += _command(process, whole=whole)
        lines += ["", *_needs(self.needs)]
        if any("HOST_" in argument for process in self.processes for argument in process.command):
            lines.append(f"HOST_0 … stand for the hosts' addresses: {_address_source(cluster)}")
        lines.append(f"{RUN_FOLDER} stands for the folder of the run")
        untold = (
            process.environment.keys() - provenance.told(process.environment).keys() for process in self.processes
        )
        if not whole and any(untold):
            lines.append(f"{provenance.MASK} stands for the values of variables that a run does not keep")
        if cluster.is_lab:
            lines.append(
                "LAB_PYTHON and LAB_MODEL stand for the lab's Python and the model that it makes itself, LAB_BENCH"
            )
            lines.append("for the file that starts vllm bench serve there; the port is a free one when it runs")
        lines += [line for note in self.notes for line in _wrapped(f"note: {note}", "  ")]
        return "\n".join(lines)


def gpus(number: int) -> str:
    """A number of GPUs in words."""
    return "no GPU" if not number else "1 GPU" if number == 1 else f"{number} GPUs"


def _replaced(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = re.sub(rf"(?<![A-Za-z0-9_]){re.escape(word)}(?![A-Za-z0-9_])", lambda _, value=value: value, text)
    return text


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _where(process: Process, cluster: Cluster) -> str:
    host = "" if cluster.num_hosts == 1 else f", host {process.host_index}"
    return f"{process.role}{host}, {gpus(process.num_gpus)}"


def _command(process: Process, *, whole: bool) -> list[str]:
    told = process.environment if whole else provenance.told(process.environment)
    variables = {name: told.get(name, provenance.MASK) for name in process.environment}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items() if not process.through_shell]
    words += [shlex.quote(word) for word in process.command_with(variables)]
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word) > _WIDTH - 8:
            lines.append(line)
            line = ""
        line = f"{line} {word}" if line else word
    lines.append(line)
    return [f"{'    ' if place == 0 else '      '}{line}" for place, line in enumerate(_continued(lines))]


def _continued(lines: Sequence[str]) -> list[str]:
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def _needs(needs: Needs) -> list[str]:
    lines = [f"needs vLLM {needs.vllm} or newer"]
    lines += [f"needs {what} (#{number})" for number, what in needs.changes.items()]
    if needs.compute_capabilities:
        lines.append(f"needs GPUs of compute capability {' or '.join(needs.compute_capabilities)}")
    lines.append(
        f"longest context {needs.context_tokens:,} tokens"
        if needs.context_tokens
        else "the longest context is the model's"
    )
    lines.append("reads the model's weights" if needs.checkpoint else "random weights; reads the model's configuration")
    return lines


def _address_source(cluster: Cluster) -> str:
    if cluster.launcher.kind == "slurm":
        return "those of the allocation"
    return f"give them as launcher.addresses in {cluster.file}"
