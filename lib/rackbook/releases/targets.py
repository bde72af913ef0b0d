"""What a person names to be looked into: a release, a wheel, a folder, or what is installed."""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit
from urllib.request import url2pathname

import requests
from tqdm import tqdm

from rackbook.errors import DataError
from rackbook.locations import shown
from rackbook.releases.contents import Cached, Contents, Folder, Wheel
from rackbook.releases.index import Index, IndexFile, Page, PipSettings, wheel_version
from rackbook.releases.ranges import NotReadError, RangeFile, RangesRefusedError, why

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CHUNK_BYTES = 1 << 20


@dataclass
class Reading:
    """How much of a wheel was read, for a person who asks.

    Attributes:
        num_requests: to the server.
        num_bytes: received.
        in_full: whether the server refused parts, so that the whole wheel was downloaded.
    """

    num_requests: int = 0
    num_bytes: int = 0
    in_full: bool = False

    def __str__(self) -> str:
        if not self.num_requests:
            return "read from the cache"
        how = "in full" if self.in_full else "in parts"
        return f"read {how}, {self.num_bytes / 1e6:.2f} MB in {self.num_requests} requests"


@dataclass(frozen=True)
class Target:
    """Something to look into.

    Attributes:
        label: a version where there is one, else a name.
        contents: its files.
        file: the wheel on the index; None for a local one.
        reading: filled while ``contents`` is read.
    """

    label: str
    contents: Contents
    file: IndexFile | None
    reading: Reading


class Shelf:
    """Opens releases of one package; the index is asked only when one is needed, and once."""

    def __init__(
        self,
        package: str,
        platform: str,
        *,
        cache: Path | None,
        settings: Callable[[], PipSettings] = PipSettings.read,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Prepare.

        Args:
            package: name on the index.
            platform: pattern of the platform tag of the wheels to take.
            cache: folder for what is read of wheels; None to keep nothing.
            settings: where the index is.
            say: told, in a sentence, what takes long or is unusual.
        """
        self.package, self.platform = package, platform
        self._cache, self._settings, self._say = cache, settings, say
        self._index: Index | None = None
        self._pages: dict[str, Page] = {}

    @property
    def page(self) -> Page:
        """The package's files on the index."""
        return self.page_of(self.package)

    def page_of(self, package: str) -> Page:
        """The files of this or another package on the index.

        Raises:
            NotReadError: the index cannot be reached.
            DataError: it has no such package.
        """
        if package not in self._pages:
            if self._index is None:
                self._index = Index(self._settings())
            self._pages[package] = self._index.page(package)
        return self._pages[package]

    def open(self, name: str) -> Target:
        """Open what a person names.

        Args:
            name: ``package==version``, a version, ``latest``, ``installed``, a wheel file, or a folder.

        Raises:
            DataError: there is no such thing.
            NotReadError: the index cannot be reached.
        """
        package, double, version = name.partition("==")
        if double:
            if package.strip().lower() != self.package.lower():
                raise DataError(f"{name}: the list of pull requests is of {self.package}, expected {self.package}==…")
            return self.release(version.strip())
        if name == "latest":
            if not self.page.stable:
                raise DataError(f"{self.package} has no release on the package index that is neither yanked nor early")
            return self.release(self.page.stable[-1])
        if name == "installed":
            return installed(self.package)
        path = Path(name)
        if path.suffix == ".whl":
            return local_wheel(path)
        if path.is_dir():
            return Target(path.resolve().name, Folder(path), None, Reading())
        if wheel_version(f"{self.package.replace('-', '_')}-{name}-py3-none-any.whl") is None:
            raise DataError(
                f"{name}: neither a wheel nor a folder nor a version; allowed: {self.package}==VERSION, VERSION, "
                "latest, installed, path/to/file.whl, path/to/folder"
            )
        return self.release(name)

    def release(self, version: str) -> Target:
        """Open a release on the index.

        Raises:
            DataError: no such release, or no wheel of it for the platform.
            NotReadError: the index cannot be reached.
        """
        file = self.page.wheel(version, self.platform)
        if file.yanked:
            self._say(f"{self.package} {file.version} was yanked: its makers took it back")
        reading = Reading()
        label = f"{self.package} {file.version}"
        if self._cache is None or file.sha256 is None:
            return Target(str(file.version), self._wheel(file, label, reading), file, reading)
        kept = Cached(self._cache / file.sha256, lambda: self._wheel(file, label, reading))
        return Target(str(file.version), kept, file, reading)

    def _wheel(self, file: IndexFile, label: str, reading: Reading) -> Wheel:
        index = self._index
        if index is None:
            raise AssertionError("a file of the index without an index")
        settings = index.settings
        try:
            archive = _Counted(index.session, file.url, settings.timeout_s, label, reading)
            return Wheel(archive, label)
        except RangesRefusedError as problem:
            size = f" of {file.size / 1e6:.0f} MB" if file.size else ""
            self._say(f"{label}: {problem}, so the whole wheel{size} is downloaded")
        return Wheel(_downloaded(index.session, file, label, settings.timeout_s, reading), label)


class _Counted(RangeFile):
    """A remote file that keeps a reading up to date, and a person at a terminal informed."""

    def __init__(self, session: requests.Session, url: str, timeout_s: float, label: str, reading: Reading) -> None:
        self._reading = reading
        self._bar = tqdm(unit="B", unit_scale=True, desc=label, disable=None, leave=False)
        try:
            super().__init__(session, url, timeout_s=timeout_s)
        except BaseException:
            self._bar.close()
            raise

    def prefetch(self, spans: Sequence[tuple[int, int]]) -> None:
        super().prefetch(spans)
        self._bar.close()

    def received(self, num_bytes: int) -> None:
        super().received(num_bytes)
        self._bar.update(num_bytes)

    def _answer(self, part: str) -> tuple[bytes, int]:
        try:
            return super()._answer(part)
        finally:
            self._reading.num_requests, self._reading.num_bytes = self.num_requests, self.num_bytes


def local_wheel(path: Path) -> Target:
    """Open a wheel on disk.

    Raises:
        DataError: no such file, a name that is no wheel's, or no zip archive.
    """
    if not path.is_file():
        raise DataError(f"{shown(path)}: no such wheel")
    version = wheel_version(path.name)
    if version is None:
        raise DataError(f"{shown(path)}: not the name of a wheel, expected NAME-VERSION-PYTHON-ABI-PLATFORM.whl")
    return Target(version, Wheel(path.open("rb"), shown(path)), None, Reading())


def installed(package: str) -> Target:
    """Open the package that this Python would import.

    Raises:
        DataError: it is not installed.
    """
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        raise DataError(f"{package} is not installed in this environment ({shown(Path(sys.prefix))})") from None
    root = Path(str(distribution.locate_file("")))
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        root = Path(url2pathname(urlsplit(origin["url"]).path))
    return Target(distribution.version, Folder(root), None, Reading())


def _downloaded(session: requests.Session, file: IndexFile, label: str, timeout_s: float, reading: Reading):
    """The whole wheel in a temporary file that is gone when it is closed; checked against the index's digest."""
    digest = hashlib.sha256()
    target = tempfile.TemporaryFile()  # noqa: SIM115 (the wheel reads it later)
    try:
        with session.get(file.url, stream=True, timeout=timeout_s) as answer:
            reading.num_requests += 1
            reading.in_full = True
            if answer.status_code != 200:
                raise NotReadError(f"{label}: the wheel cannot be downloaded, the server answers {answer.status_code}")
            with tqdm(total=file.size, unit="B", unit_scale=True, desc=label, disable=None) as bar:
                for chunk in answer.iter_content(_CHUNK_BYTES):
                    target.write(chunk)
                    digest.update(chunk)
                    reading.num_bytes += len(chunk)
                    bar.update(len(chunk))
    except requests.RequestException as problem:
        raise NotReadError(f"{label}: the wheel cannot be downloaded: {why(problem)}") from None
    if file.sha256 and digest.hexdigest() != file.sha256:
        raise DataError(f"{label}: the downloaded wheel has another SHA-256 than the index says; try again")
    return target
