"""What a result depends on beside its parameters: notebook source, library, data, files of the user.

A kernel's trace says which files it read, so that a change re-runs the executions that read the changed file and no
others. Nothing here guesses from names.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rackbook.errors import DataError
from rackbook.locations import DATA
from rackbook.suite.notebooks import Notebook, load_json, source
from rackbook.suite.parameters import CLUSTER, PATH_UNIT

_PACKAGE = Path(__file__).resolve().parents[1]
_RUNNER = _PACKAGE / "suite"
"""The runner executes a notebook and is no part of what it computes."""

_PACKAGES = (
    "rackbook", "altair", "llvmlite", "numba", "numpy", "polars", "pydantic", "scipy", "vl-convert-python", "vllm",
)  # fmt: skip
_ABSENT, _CHANGED = "absent", "changed during the execution"
_ROOTS = {"data": DATA.resolve(), "library": _PACKAGE}  # in a wheel the data lie within the library


def roots() -> str:
    """The folders whose files count as input, as tracing wants them.

    Runs outside the data are not among them: a run never changes, so its id among the parameters says all.
    """
    return os.pathsep.join(str(root) for root in _ROOTS.values())


class Digests:
    """Hashes of files, each read again only after it changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, int, int], str] = {}
        self._current: dict[tuple[str, tuple[str, ...]], bool] = {}

    def path(self, path: Path) -> str:
        """Hash of a file, or of all files of a folder with their names; a word where there is nothing."""
        return self._tree(path) if path.is_dir() else self._file(path)

    def listing(self, path: Path) -> str:
        """Hash of the names in a folder."""
        try:
            return _digest(sorted(entry.name for entry in path.iterdir() if not _is_noise(entry.name)))
        except OSError:
            return _ABSENT

    def notebook(self, notebook: Notebook) -> str:
        """Hash of a notebook's source: its cells without outputs, counts and ids."""
        return self._kept(notebook.path, _notebook)

    def current(self, name: str, manifest: dict[str, Any], notebook: Notebook, parameters: dict[str, Any]) -> bool:
        """Whether everything in a manifest still is what it was; looked up once per manifest.

        Args:
            name: the manifest's hash.
            manifest: as :func:`manifest` made it.
            notebook: the notebook as it is now.
            parameters: of the execution; they say where the files of the user lie.
        """
        paths = user_paths(notebook, parameters)
        key = (name, tuple(f"{k}={v}" for k, v in sorted(paths.items())))
        if key not in self._current:
            self._current[key] = self._is_current(manifest, notebook, paths)
        return self._current[key]

    def _is_current(self, manifest: dict[str, Any], notebook: Notebook, paths: dict[str, list[Path]]) -> bool:
        if manifest["versions"] != versions() or manifest["notebook"] != self.notebook(notebook):
            return False
        if manifest["files"] != {parameter: [self.path(p) for p in found] for parameter, found in paths.items()}:
            return False
        for kind, root in _ROOTS.items():
            for relative, digest in manifest[kind].items():
                place = root / relative
                if (self.listing(place) if relative.endswith("/") else self.path(place)) != digest:
                    return False
        return True

    def _file(self, path: Path) -> str:
        try:
            return self._kept(path, _content)
        except OSError:
            return _ABSENT

    def _kept(self, path: Path, digest: Callable[[Path], str]) -> str:
        about = path.stat()
        key = (path, about.st_size, about.st_mtime_ns)
        if key not in self._known:
            self._known[key] = digest(path)
        return self._known[key]

    def _tree(self, folder: Path) -> str:
        files = sorted(p for p in folder.rglob("*") if p.is_file() and not _is_noise(p.name))
        return _digest([[str(p.relative_to(folder)), self._file(p)] for p in files])


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _notebook(path: Path) -> str:
    cells = load_json(path)["cells"]
    return _digest([[c["cell_type"], source(c), c.get("metadata", {}).get("tags", [])] for c in cells])


def manifest(
    trace: Path, notebook: Notebook, parameters: dict[str, Any], digests: Digests, started: float
) -> dict[str, Any]:
    """What an execution depended on, by the trace of its kernel.

    Args:
        trace: as :mod:`rackbook.suite.tracing` wrote it.
        notebook: the notebook.
        parameters: all parameters with their values.
        digests: hashes that are known already.
        started: when the execution started, in seconds of the system's clock. A file that changed since then gets no
            hash, so that the result counts as out of date.

    Returns:
        Hashes by file, in groups; no path outside the library and its data.

    Raises:
        DataError: no trace: the kernel did not run to its end.
    """
    try:
        seen = json.loads(trace.read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(f"{notebook.name}: the kernel left no list of what it read ({problem})") from None

    def digest(path: Path, of: Callable[[Path], str]) -> str:
        return _CHANGED if path.exists() and path.stat().st_mtime > started else of(path)

    found: dict[str, Any] = {
        "notebook": digest(notebook.path, lambda _: digests.notebook(notebook)),
        "versions": versions(),
        "files": {
            parameter: [digest(p, digests.path) for p in paths]
            for parameter, paths in user_paths(notebook, parameters).items()
        },
        "data": {},
        "library": {},
    }
    for name in sorted({*seen["modules"], *seen["read"]}):
        path = Path(name)
        if path.is_relative_to(_RUNNER) or _is_noise(path.name):
            continue
        kind = next((k for k, root in _ROOTS.items() if path.is_relative_to(root)), None)
        if kind is None or (kind == "library" and path.is_dir()):
            continue  # the import system lists folders for its own cache
        relative = path.relative_to(_ROOTS[kind]).as_posix()
        if path.is_dir():
            found[kind][f"{relative}/"] = digest(path, digests.listing)
        else:
            found[kind][relative] = digest(path, digests.path)
    return found


def name_of(manifest: dict[str, Any]) -> str:
    """Name of a manifest: a hash of its content."""
    return _digest(manifest)[:16]


def user_paths(notebook: Notebook, parameters: dict[str, Any]) -> dict[str, list[Path]]:
    """The files and folders of the user that an execution is pointed to, by parameter."""
    found = {}
    for p in notebook.parameters:
        value = parameters.get(p.name)
        if p.unit == PATH_UNIT and value:
            found[p.name] = [Path(item) for item in (value if isinstance(value, list) else [value])]
        if p.name == CLUSTER and isinstance(value, str) and (path := Path(value).expanduser()).is_absolute():
            found[p.name] = [path, *_recipe_of(path)]
    return found


def _recipe_of(cluster: Path) -> list[Path]:
    """The recipe file of the user that a cluster file of the user names; none if it names one of the library's."""
    try:
        return _recipe_once(cluster, cluster.stat().st_mtime_ns)
    except OSError:
        return []


@cache
def _recipe_once(cluster: Path, _changed: int) -> list[Path]:
    try:
        recipe = tomllib.loads(cluster.read_text("utf-8")).get("recipe", "")
    except ValueError:  # no TOML: reading it again says so where it is used
        return []
    path = Path(recipe).expanduser() if isinstance(recipe, str) else Path()
    return [cluster.parent / path] if path.suffix == ".toml" or len(path.parts) > 1 else []


@cache
def versions() -> dict[str, str | None]:
    """Version of Python and of each package that results come from; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _is_noise(name: str) -> bool:
    return name == "__pycache__" or name.endswith((".pyc", ".partial", ".lock"))


def _digest(value: Iterable[Any] | dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
