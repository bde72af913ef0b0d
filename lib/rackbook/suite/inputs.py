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
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rackbook.errors import DataError
from rackbook.locations import DATA, shown
from rackbook.suite.notebooks import Notebook, load_json, source
from rackbook.suite.parameters import CLUSTER, PATH_UNIT
from rackbook.suite.tracing import State, state

_PACKAGE = Path(__file__).resolve().parents[1]
_RUNNER = _PACKAGE / "suite"
"""The runner executes a notebook and is no part of what it computes."""

_PACKAGES = (
    "rackbook", "altair", "llvmlite", "numba", "numpy", "polars", "pydantic", "scipy", "vl-convert-python", "vllm",
)  # fmt: skip
_ABSENT = "absent"
_MOST_NAMED = 3
_ROOTS = {"data": DATA.resolve(), "library": _PACKAGE}  # in a wheel the data lie within the library

States = dict[str, State]
"""The state in which each file or folder was when it was about to be read, by name."""


class ChangedError(DataError):
    """A file was not the same when an execution began to read it and when it had ended."""


def roots() -> str:
    """The folders whose files count as input, as tracing wants them.

    Runs outside the data are not among them: a run never changes, so its id among the parameters says all.
    """
    return os.pathsep.join(str(root) for root in _ROOTS.values())


class Digests:
    """Hashes of files, each read again only after it changed."""

    def __init__(self) -> None:
        self._known: dict[tuple[Path, State], str] = {}
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
            self._current[key] = next(self.changes(manifest, notebook, parameters), None) is None
        return self._current[key]

    def forget(self) -> None:
        """Look everything up anew from here on; what has not changed since is not read again."""
        self._current.clear()

    def changes(self, manifest: dict[str, Any], notebook: Notebook, parameters: dict[str, Any]) -> Iterator[str]:
        """What in a manifest is no longer what it was, in words for a person; arguments as for :meth:`current`."""
        if manifest["versions"] != versions():
            yield "the version of Python or of a package"
        if manifest["notebook"] != self.notebook(notebook):
            yield shown(notebook.path)
        paths = user_paths(notebook, parameters)
        for parameter in sorted(manifest["files"].keys() | paths.keys()):
            if manifest["files"].get(parameter) != [self.path(p) for p in paths.get(parameter, ())]:
                yield f"the files of the parameter {parameter}"
        for kind, root in _ROOTS.items():
            for relative, digest in manifest[kind].items():
                place = root / relative
                if (self.listing(place) if relative.endswith("/") else self.path(place)) != digest:
                    yield shown(place)

    def _file(self, path: Path) -> str:
        try:
            return self._kept(path, _content)
        except OSError:
            return _ABSENT

    def _kept(self, path: Path, digest: Callable[[Path], str]) -> str:
        key = (path, state(path))
        if key not in self._known:
            self._known[key] = digest(path)
        return self._known[key]

    def _tree(self, folder: Path) -> str:
        return _digest([[str(p.relative_to(folder)), self._file(p)] for p in _files(folder)])


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _notebook(path: Path) -> str:
    cells = load_json(path)["cells"]
    return _digest([[c["cell_type"], source(c), c.get("metadata", {}).get("tags", [])] for c in cells])


def before(notebook: Notebook, parameters: dict[str, Any]) -> States:
    """The states of what an execution will read and its trace does not tell: its notebook, the files of the user."""
    named = [path for paths in user_paths(notebook, parameters).values() for path in paths]
    return _states([notebook.path, *named])


def manifest(
    trace: Path, notebook: Notebook, parameters: dict[str, Any], digests: Digests, earlier: States
) -> dict[str, Any]:
    """What an execution depended on, by the trace of its kernel.

    No clocks are compared: a file counts as read if it is, when it has been hashed, in the state that it was in when
    the execution began to read it.

    Args:
        trace: as :mod:`rackbook.suite.tracing` wrote it.
        notebook: the notebook.
        parameters: all parameters with their values.
        digests: hashes that are known already.
        earlier: from :func:`before`, called before the execution started.

    Returns:
        Hashes by file, in groups; no path outside the library and its data.

    Raises:
        DataError: no trace: the kernel did not run to its end.
        ChangedError: something was changed or replaced in between, so that nobody knows what was read.
    """
    try:
        seen = json.loads(trace.read_text("utf-8"))
    except (OSError, ValueError) as problem:
        raise DataError(f"{notebook.name}: the kernel left no list of what it read ({problem})") from None
    named = user_paths(notebook, parameters)
    found: dict[str, Any] = {
        "notebook": digests.notebook(notebook),
        "versions": versions(),
        "files": {parameter: [digests.path(p) for p in paths] for parameter, paths in named.items()},
        "data": {},
        "library": {},
    }
    now = before(notebook, parameters)
    changed = {name for name in now.keys() | earlier.keys() if now.get(name) != earlier.get(name)}
    for name in sorted(seen):
        path = Path(name)
        if path.is_relative_to(_RUNNER) or _is_noise(path.name):
            continue
        kind = next((k for k, root in _ROOTS.items() if path.is_relative_to(root)), None)
        if kind is None or (kind == "library" and path.is_dir()):
            continue  # the import system lists folders for its own cache
        relative = path.relative_to(_ROOTS[kind]).as_posix()
        if path.is_dir():
            found[kind][f"{relative}/"] = digests.listing(path)
        else:
            found[kind][relative] = digests.path(path)
        then = seen[name]
        if state(name) != (None if then is None else tuple(then)):
            changed.add(name)
    if changed:
        names = ", ".join(shown(Path(name)) for name in sorted(changed)[:_MOST_NAMED])
        more = f" and {len(changed) - _MOST_NAMED} more" if len(changed) > _MOST_NAMED else ""
        raise ChangedError(f"changed while the notebook ran, so that nobody knows what it has read: {names}{more}")
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
        return _recipe_once(cluster, state(cluster))
    except OSError:
        return []


@cache
def _recipe_once(cluster: Path, _changed: State) -> list[Path]:
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


def _states(paths: Iterable[Path]) -> States:
    """The states of files, and of all files in folders."""
    files = (file for path in paths for file in (_files(path) if path.is_dir() else [path]))
    return {str(file): state(file) for file in files}


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and not _is_noise(p.name))


def _is_noise(name: str) -> bool:
    return name == "__pycache__" or name.endswith((".pyc", ".partial", ".lock"))


def _digest(value: Iterable[Any] | dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
