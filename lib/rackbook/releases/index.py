"""The package index as pip is set up to use it: which files a package has, and how to read them.

Nothing here names an index: the address, certificate, proxy and time limits come from pip's configuration.
"""

from __future__ import annotations

import ast
import datetime
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from html.parser import HTMLParser
from typing import TYPE_CHECKING, Any
from urllib.parse import urldefrag, urljoin, urlsplit

import requests
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from rackbook.errors import DataError
from rackbook.releases.ranges import NotReadError, why

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = f"{_JSON}, application/vnd.pypi.simple.v1+html;q=0.2, text/html;q=0.1"
_PIP_TIMEOUT_S = 15.0
_PIP_RETRIES = 5


@dataclass(frozen=True)
class PipSettings:
    """The part of pip's configuration that says how to reach an index.

    Attributes:
        index_urls: the indexes, in pip's order.
        cert: file of certificate authorities; None for the usual ones.
        client_cert: file with this client's certificate and key.
        proxy: for both schemes; None to take it from the environment.
        trusted_hosts: whose certificates are not checked.
        timeout_s: longest wait for an answer.
        retries: of a request that fails to connect.
    """

    index_urls: tuple[str, ...]
    cert: str | None = None
    client_cert: str | None = None
    proxy: str | None = None
    trusted_hosts: tuple[str, ...] = ()
    timeout_s: float = _PIP_TIMEOUT_S
    retries: int = _PIP_RETRIES

    @classmethod
    def read(cls) -> PipSettings:
        """Ask pip: environment before command before global settings, and pip's own default index.

        Raises:
            DataError: pip cannot be asked, or its configuration allows no index that can be reached over HTTP.
        """
        found = _options(_pip("config", "list"))
        if found.get("no-index", "").lower() in ("1", "true", "yes", "on"):
            raise DataError("pip's configuration says no-index: allow an index, or name a wheel or a folder instead")
        main = found.get("index-url") or found.get("pypi-url") or _default_index()
        urls = (main, *found.get("extra-index-url", "").split())
        reachable = tuple(url for url in urls if urlsplit(url).scheme in ("http", "https"))
        if not reachable:
            raise DataError(
                "pip's configuration names no index with an http or https address; set index-url, or name a wheel or a "
                "folder instead"
            )
        return cls(
            index_urls=reachable,
            cert=found.get("cert"),
            client_cert=found.get("client-cert"),
            proxy=found.get("proxy"),
            trusted_hosts=tuple(found.get("trusted-host", "").split()),
            timeout_s=float(found.get("timeout") or found.get("default-timeout") or _PIP_TIMEOUT_S),
            retries=int(found.get("retries") or _PIP_RETRIES),
        )

    def session(self) -> requests.Session:
        """An HTTP session with these settings; netrc and proxies of the environment hold as they do for pip."""
        session = _Session()
        retry = Retry(total=self.retries, backoff_factor=0.25, status_forcelist=(500, 502, 503, 504, 520, 524, 527))
        for scheme in ("https://", "http://"):
            session.mount(scheme, HTTPAdapter(max_retries=retry))
        for host in self.trusted_hosts:
            session.mount(f"https://{host}", _Unchecked(max_retries=retry))
        if self.cert:
            session.verify = self.cert
        if self.client_cert:
            session.cert = self.client_cert
        if self.proxy:
            session.proxies = {"http": self.proxy, "https": self.proxy}
        return session


class _Session(requests.Session):
    """Lets its own certificate file and proxy win over the environment's, as pip does."""

    def merge_environment_settings(self, url: Any, proxies: Any, stream: Any, verify: Any, cert: Any) -> Any:
        return super().merge_environment_settings(
            url, proxies or dict(self.proxies), stream, self.verify if verify is None else verify, cert
        )


class _Unchecked(HTTPAdapter):
    """For hosts that pip is told to trust."""

    def cert_verify(self, conn: Any, url: str, verify: Any, cert: Any) -> None:  # noqa: ARG002
        super().cert_verify(conn, url, False, cert)


@dataclass(frozen=True)
class IndexFile:
    """One file of a package.

    Attributes:
        filename: e.g. of a wheel.
        url: where it lies.
        version: of the package; None where the name does not tell.
        sha256: of its bytes; None if the index does not say.
        size: in bytes; None if the index does not say.
        uploaded_on: day in UTC; None if the index does not say.
        yanked: whether its makers took it back.
    """

    filename: str
    url: str = field(repr=False)
    version: str | None
    sha256: str | None = None
    size: int | None = None
    uploaded_on: datetime.date | None = None
    yanked: bool = False


@dataclass(frozen=True)
class Page:
    """All files of one package."""

    package: str
    files: tuple[IndexFile, ...]

    @property
    def versions(self) -> tuple[str, ...]:
        """The released versions that have a wheel, oldest first."""
        return tuple(sorted({f.version for f in self.files if f.version is not None}, key=Version))

    @property
    def stable(self) -> tuple[str, ...]:
        """Those that are neither pre-releases nor yanked, oldest first."""
        return tuple(
            v for v in self.versions if not Version(v).is_prerelease and any(not f.yanked for f in self._of(v))
        )

    def wheel(self, version: str, platform: str) -> IndexFile:
        """The wheel of a version for a platform.

        Args:
            version: as a person writes it.
            platform: pattern of the platform tag; a wheel for any platform fits as well.

        Raises:
            DataError: no such version, or none of its wheels fits; lists what there is.
        """
        found = next((v for v in self.versions if _same(v, version)), None)
        if found is None:
            newest = ", ".join(self.versions[-8:]) or "none"
            raise DataError(f"{self.package} {version} is not on the package index; the newest there: {newest}")
        wheels = self._of(found)
        fitting = [w for w in wheels if any(_fits(tag, platform) for tag in _platforms(w.filename))]
        if not fitting:
            tags = sorted({tag for w in wheels for tag in _platforms(w.filename)})
            raise DataError(
                f"{self.package} {found} has no wheel for {platform}; its wheels are for {', '.join(tags)}. "
                "Set platform in the list of pull requests"
            )
        # not yanked first; of several builds the name decides, so that every run takes the same one
        return min(fitting, key=lambda w: (w.yanked, w.filename))

    def _of(self, version: str) -> list[IndexFile]:
        return [f for f in self.files if f.version == version]


class Index:
    """The configured indexes, asked one after the other."""

    def __init__(self, settings: PipSettings) -> None:
        self.settings = settings
        self.session = settings.session()

    def page(self, package: str) -> Page:
        """The files of a package, from the first index that has it.

        Raises:
            NotReadError: an index cannot be reached or gives no list of files.
            DataError: no index has the package.
        """
        name = canonicalize_name(package)
        for base in self.settings.index_urls:
            url = f"{base.rstrip('/')}/{name}/"
            try:
                answer = self.session.get(url, headers={"Accept": _ACCEPT}, timeout=self.settings.timeout_s)
            except requests.RequestException as problem:
                raise NotReadError(f"the package index cannot be reached: {why(problem)}") from None
            if answer.status_code == 404:
                continue
            if answer.status_code != 200:
                raise NotReadError(f"the package index answers {answer.status_code} when asked for {name}")
            return Page(name, tuple(_files(answer)))
        raise DataError(f"the package index has no package {name!r}; see `pip config list` for where it looks")


def wheel_version(filename: str) -> str | None:
    """The version in a wheel's file name; None if it is no wheel's name."""
    try:
        return str(parse_wheel_filename(filename)[1])
    except InvalidWheelFilename:
        return None


def _platforms(filename: str) -> set[str]:
    return {tag.platform for tag in parse_wheel_filename(filename)[3]}


def _fits(tag: str, platform: str) -> bool:
    return tag == "any" or fnmatchcase(tag, platform)


def _same(left: str, right: str) -> bool:
    try:
        return Version(left) == Version(right)
    except ValueError:
        return left == right


def _files(answer: requests.Response) -> Iterable[IndexFile]:
    if answer.headers.get("Content-Type", "").startswith(_JSON):
        try:
            entries = answer.json()["files"]
        except (ValueError, KeyError, TypeError):
            raise NotReadError("the package index answers with a list of files that cannot be read") from None
    else:
        entries = _from_html(answer.text)
    for entry in entries:
        name = entry["filename"]
        uploaded = entry.get("upload-time")
        yield IndexFile(
            filename=name,
            url=urljoin(answer.url, entry["url"]),
            version=wheel_version(name),
            sha256=entry.get("hashes", {}).get("sha256"),
            size=entry.get("size"),
            uploaded_on=datetime.datetime.fromisoformat(uploaded).astimezone(datetime.UTC).date() if uploaded else None,
            yanked=entry.get("yanked", False) is not False,
        )


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.entries: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found: Mapping[str, str | None] = dict(attributes)
        if tag == "a" and found.get("href"):
            url, fragment = urldefrag(found["href"])
            digest = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else None
            self._open = {
                "url": url,
                "filename": "",
                "hashes": {"sha256": digest} if digest else {},
                "yanked": "data-yanked" in found,
            }

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self._open["filename"] += data.strip()

    def handle_endtag(self, tag: str) -> None:
        if tag == "a" and self._open is not None:
            self.entries.append(self._open)
            self._open = None


def _from_html(text: str) -> list[dict[str, Any]]:
    links = _Links()
    links.feed(text)
    return links.entries


def _pip(*arguments: str) -> str:
    # wide, so that the help text does not break an address
    environment = os.environ | {"COLUMNS": "4000"}
    command = [sys.executable, "-m", "pip", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        done = None
    if done is None or done.returncode:
        raise DataError(
            f"`python -m pip {' '.join(arguments)}` failed, and where packages come from is pip's setting; install pip "
            "into this environment"
        )
    return done.stdout


def _options(listing: str) -> dict[str, str]:
    """Settings by option name, from the lines of ``pip config list``; the environment wins, then the command."""
    ranks = {"global": 0, "download": 1, "install": 1, ":env:": 2}
    found: dict[str, tuple[int, str]] = {}
    for line in listing.splitlines():
        key, _, literal = line.partition("=")
        section, _, option = key.rpartition(".")
        if section not in ranks:
            continue
        rank, value = ranks[section], str(ast.literal_eval(literal))
        if option not in found or rank >= found[option][0]:
            found[option] = (rank, value)
    return {option: value for option, (_, value) in found.items()}


def _default_index() -> str:
    match = re.search(r"--index-url <url>.*?\(default (\S+?)\)", _pip("install", "--help"), re.DOTALL)
    if match is None:
        raise DataError("pip names no default index; set index-url, e.g. in the environment as PIP_INDEX_URL")
    return match[1]
