"""Where the data and the notebooks lie: beside the library in a checkout, inside the package in a wheel."""

import os
import re
import sys
from functools import cache
from pathlib import Path

_package = Path(__file__).resolve().parent
_checkout = _package.parents[1]
_root = _checkout if (_checkout / "data" / "sources.toml").is_file() else _package / "_bundled"

DATA = _root / "data"
NOTEBOOKS = _root / "notebooks"
LAB_PLUGIN = (_package.parent if _root == _checkout else _root) / "rackbook_lab_plugin"


def runs_home() -> Path:
    """Where new runs go: ``$RACKBOOK_RUNS``, else ``build/runs`` of the checkout, or of the working folder outside it.

    A notebook's working folder is its own: whoever executes one tells it by the variable, so that a run that it records
    is found from the command line as well.
    """
    if named := os.environ.get("RACKBOOK_RUNS"):
        return Path(named).absolute()
    here, checkout = Path.cwd(), DATA.parent
    inside = here.is_relative_to(checkout) and (checkout / "pyproject.toml").is_file()
    return (checkout if inside else here) / "build" / "runs"


def without_folders(text: str, *others: Path) -> str:
    """A text without the folders above the project, the environment and the user's home, which tell a name.

    Args:
        text: of any kind.
        others: further folders that are left out.
    """
    for pattern, word in _private_folders(others):
        text = pattern.sub(lambda match, word=word: (f"{word}/" if word else "") if match[1] else word or ".", text)
    return text


@cache
def _private_folders(others: tuple[Path, ...]) -> list[tuple[re.Pattern[str], str]]:
    """What stands for a folder, the longest first; a folder ends at a slash, at the end of a word or of a sentence."""
    found = [(Path.home(), "~"), (Path(sys.prefix), "(environment)"), (DATA.parent, "")]
    found += [(path, "") for path in others]
    named = {str(folder): word for folder, word in found if folder != Path(folder.anchor)}
    ordered = sorted(named.items(), key=lambda pair: len(pair[0]), reverse=True)
    return [(re.compile(re.escape(folder) + r"(?:(/)|(?![\w.-])|(?=\.(?:\s|$)))"), word) for folder, word in ordered]


def shown(path: Path) -> str:
    """Name a file for a person: relative to the checkout or the working folder where that is shorter."""
    resolved = Path(path).resolve()
    for base in (_root, Path.cwd()):
        if resolved.is_relative_to(base):
            return str(resolved.relative_to(base))
    return str(path)
