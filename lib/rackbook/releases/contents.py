"""What a release holds: the files of a wheel or of a folder, read one by one."""

from __future__ import annotations

import json
import re
import tempfile
import zipfile
import zlib
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol
from urllib.parse import quote

from rackbook.errors import DataError
from rackbook.locations import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# A local header may carry other extra fields than the central one that announces it.
_HEADER_SLACK = 128
_HEADER = 30


class Contents(Protocol):
    """The files of one release."""

    def matching(self, glob: str) -> list[str]:
        """The files whose path fits, sorted; ``*`` stands for a part of a name, ``**`` for any folders."""

    def text(self, name: str) -> str:
        """A file's text; bytes that are no UTF-8 are replaced."""

    def fetch(self, names: Sequence[str]) -> None:
        """Get ready to read these files, where that is cheaper together than one by one."""


class Wheel:
    """A wheel as a zip file; the archive may be a file on disk or one that reads ranges of a remote one."""

    def __init__(self, archive: IO[bytes], name: str) -> None:
        """Read the list of files.

        Args:
            archive: seekable; with a method ``prefetch(spans)`` if reading many parts at once is cheaper.
            name: what the wheel is called in messages.

        Raises:
            DataError: not a zip archive.
        """
        self.name = name
        self._archive = archive
        with self._explained("its list of files"):
            self._zip = zipfile.ZipFile(archive)
        self._infos = {info.filename: info for info in self._zip.infolist() if not info.is_dir()}

    @property
    def paths(self) -> list[str]:
        """All files, sorted."""
        return sorted(self._infos)

    def matching(self, glob: str) -> list[str]:
        """See :class:`Contents`."""
        return _matching(glob, self._infos)

    def fetch(self, names: Sequence[str]) -> None:
        """See :class:`Contents`."""
        prefetch = getattr(self._archive, "prefetch", None)
        if prefetch is not None:
            prefetch([self._span(self._infos[name]) for name in names])

    def text(self, name: str) -> str:
        """See :class:`Contents`.

        Raises:
            DataError: the archive is damaged there.
        """
        with self._explained(name):
            return self._zip.read(self._infos[name]).decode("utf-8", "replace")

    @staticmethod
    def _span(info: zipfile.ZipInfo) -> tuple[int, int]:
        name = len(info.filename.encode())
        end = info.header_offset + _HEADER + name + len(info.extra) + _HEADER_SLACK + info.compress_size
        return info.header_offset, end

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as problem:
            raise DataError(
                f"{self.name}: the wheel is damaged or no zip archive, {what} cannot be read ({problem}); "
                "download it again"
            ) from None


class Folder:
    """A folder laid out as a wheel is: a source checkout, or the place where a package is installed."""

    def __init__(self, root: Path) -> None:
        """Take a folder.

        Raises:
            DataError: no such folder.
        """
        self.root = root.resolve()
        if not self.root.is_dir():
            raise DataError(f"{shown(root)}: no such folder")

    def matching(self, glob: str) -> list[str]:
        """See :class:`Contents`."""
        found = self.root.glob(glob) if re.search(r"[*?]", glob) else [self.root / glob]
        return sorted(path.relative_to(self.root).as_posix() for path in found if path.is_file())

    def fetch(self, names: Sequence[str]) -> None:
        """Nothing to get ready."""

    def text(self, name: str) -> str:
        """See :class:`Contents`."""
        return (self.root / name).read_bytes().decode("utf-8", "replace")


class Cached:
    """A wheel of which the list of files and the files read so far lie in a folder; opened only for others."""

    def __init__(self, folder: Path, opener: Callable[[], Wheel]) -> None:
        """Take a cache folder.

        Args:
            folder: of this one wheel, named by what identifies its bytes; made when something is kept.
            opener: opens the wheel.
        """
        self._folder = folder
        self._opener = opener
        self._wheel: Wheel | None = None
        self._paths: list[str] | None = None

    def matching(self, glob: str) -> list[str]:
        """See :class:`Contents`."""
        if self._paths is None:
            self._paths = self._kept_paths()
        if self._paths is None:
            self._paths = self._open().paths
            _keep(self._folder / "files.json", json.dumps(self._paths).encode())
        return _matching(glob, self._paths)

    def fetch(self, names: Sequence[str]) -> None:
        """See :class:`Contents`."""
        absent = [name for name in names if not self._place(name).is_file()]
        if absent:
            self._open().fetch(absent)

    def text(self, name: str) -> str:
        """See :class:`Contents`."""
        place = self._place(name)
        if not place.is_file():
            _keep(place, self._open().text(name).encode())
        return place.read_text("utf-8")

    def _open(self) -> Wheel:
        if self._wheel is None:
            self._wheel = self._opener()
        return self._wheel

    def _kept_paths(self) -> list[str] | None:
        try:
            return json.loads((self._folder / "files.json").read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return None

    def _place(self, name: str) -> Path:
        return self._folder / quote(name, safe="")


def _keep(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)


def _matching(glob: str, names: Iterable[str]) -> list[str]:
    if not re.search(r"[*?]", glob):
        return [glob] if glob in names else []
    expression = _expression(glob)
    return sorted(name for name in names if expression.fullmatch(name))


@cache
def _expression(glob: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*/|\*\*|\*|\?)", glob)
    stand_for = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return re.compile("".join(stand_for.get(part, re.escape(part)) for part in parts))
