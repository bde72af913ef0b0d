"""vLLM 0.33.0's own parsers, without its GPU code: the Python files of its wheel beside the lab's packages."""

import json
import os
import subprocess
from pathlib import Path
from typing import NoReturn

import pytest

from rackbook import cache
from rackbook.engine.lab import Lab
from rackbook.errors import RackbookError
from rackbook.releases.targets import Shelf

VERSION = "0.33.0"
_SCRIPT = Path(__file__).with_name("parse_033.py")
_BEYOND_THE_LAB = ("orjson",)
"""What 0.33.0 imports and the lab's 0.32.0 does not have."""


def without(reason: str) -> NoReturn:
    """Skip the test, visibly; fail where RACKBOOK_REQUIRE_LAB is set, as in CI."""
    if os.environ.get("RACKBOOK_REQUIRE_LAB"):
        pytest.fail(reason)
    pytest.skip(reason)


def interpreter() -> Path:
    """The lab's Python, installed if there is none."""
    lab = Lab()
    if not lab.is_installed:
        try:
            lab.install()
        except RackbookError as problem:
            without(f"no lab to parse with: {problem}")
    return lab.python


def files(python: Path) -> Path:
    """A folder with the Python files of 0.33.0 and what they need beyond the lab, read once and kept."""
    folder = cache.folder("vllm-files") / VERSION
    stamp = folder / "complete"
    if stamp.is_file():
        return folder
    try:
        contents = Shelf("vllm", "manylinux*_x86_64", cache=None).release(VERSION).contents
        names = [name for name in contents.matching("vllm/**") if name.endswith(".py")]
        contents.fetch(names)
        for name in names:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(contents.text(name), "utf-8")
    except RackbookError as problem:
        without(f"the wheel of vLLM {VERSION} cannot be read: {problem}")
    pip = [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), *_BEYOND_THE_LAB]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=300)
    if done.returncode:
        without(f"pip cannot install {', '.join(_BEYOND_THE_LAB)}: {done.stderr.strip().splitlines()[-1:]}")
    stamp.touch()
    return folder


def ask(commands: list[list[str]], cases: list[str]) -> dict:
    """What the parsers make of command lines (from ``serve`` or ``bench`` on) and of cases."""
    python = interpreter()
    environment = os.environ | {
        "PYTHONPATH": str(files(python)),
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        [str(python), str(_SCRIPT)],
        input=json.dumps({"commands": commands, "cases": cases}),
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)
