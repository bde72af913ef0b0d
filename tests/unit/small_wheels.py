"""Small wheels and a package index on this machine, with and without ranges, for the tests of releases."""

from __future__ import annotations

import hashlib
import io
import json
import re
import threading
import zipfile
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rackbook.releases.index import PipSettings

PLATFORM = "manylinux_2_28_x86_64"


def wheel_bytes(files: dict[str, str | bytes], *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip archive of these files."""
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), content, compression)
    return target.getvalue()


def wheel_name(version: str, package: str = "pkg", platform: str = PLATFORM) -> str:
    return f"{package}-{version}-py3-none-{platform}.whl"


@dataclass
class Entry:
    content: bytes
    uploaded: str | None = "2026-10-18T10:03:52Z"
    yanked: bool | str = False


@dataclass
class SmallIndex:
    """A package index; start it with ``with``.

    Attributes:
        files: by package, then by file name.
        ranges: "served", "ignored" (the whole file comes), "refused" (416), "cut" (answers break off), or
            "short" (one byte less than was asked for).
        form: "json" or "html".
        num_cuts: how many answers are cut, if ranges are "cut".
        requests: path and Range header of every request so far.
    """

    files: dict[str, dict[str, Entry]] = field(default_factory=dict)
    ranges: str = "served"
    form: str = "json"
    num_cuts: int = 10**6
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def add(self, filename: str, content: bytes, *, package: str = "pkg", **details) -> None:
        self.files.setdefault(package, {})[filename] = Entry(content, **details)

    def __enter__(self) -> SmallIndex:
        index = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                index.requests.append((self.path, self.headers.get("Range")))
                kind, _, rest = self.path.strip("/").partition("/")
                package, _, name = rest.partition("/")
                if package not in index.files or (name and name not in index.files[package]):
                    self.answer(404, b"not here", "text/plain")
                elif kind == "simple":
                    self.answer(200, *index.page(package))
                else:
                    self.file(index.files[package][name].content)

            def file(self, content):
                wanted = self.headers.get("Range")
                if wanted is None or index.ranges == "ignored":
                    self.answer(200, content, "application/octet-stream")
                    return
                if index.ranges == "refused":
                    self.answer(416, b"", "text/plain")
                    return
                first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", wanted).groups()
                start = int(first) if first else max(0, len(content) - int(last))
                end = min(int(last) + 1, len(content)) if first else len(content)
                extra = {"Content-Range": f"bytes {start}-{end - 1}/{len(content)}"}
                cut = index.ranges == "cut" and index.num_cuts > 0
                index.num_cuts -= cut
                end -= index.ranges == "short" and end - start > 1
                self.answer(206, content[start:end], "application/octet-stream", extra, cut=cut)

            def answer(self, status, body, kind, extra=None, *, cut=False):
                self.send_response(status)
                for key, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(extra or {})}.items():
                    self.send_header(key, value)
                self.end_headers()
                self.wfile.write(body[: len(body) // 2] if cut else body)
                self.close_connection = cut

            def log_message(self, *_):
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # a client that hangs up on a cut answer
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def page(self, package: str) -> tuple[bytes, str]:
        entries = self.files[package].items()
        if self.form == "html":
            lines = [
                f'<a href="../../files/{package}/{name}#sha256={_digest(entry.content)}"'
                f"{' data-yanked=&quot;&quot;' if entry.yanked else ''}>{name}</a><br>"
                for name, entry in entries
            ]
            return "\n".join(lines).encode(), "text/html; charset=utf-8"
        files = [
            {
                "filename": name,
                "url": f"/files/{package}/{name}",
                "hashes": {"sha256": _digest(entry.content)},
                "size": len(entry.content),
                "yanked": entry.yanked,
            }
            | ({"upload-time": entry.uploaded} if entry.uploaded else {})
            for name, entry in entries
        ]
        content = json.dumps({"meta": {"api-version": "1.1"}, "name": package, "files": files})
        return content.encode(), "application/vnd.pypi.simple.v1+json"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}/simple"

    def file_url(self, name: str, package: str = "pkg") -> str:
        return f"http://127.0.0.1:{self._server.server_port}/files/{package}/{name}"

    def settings(self, **options) -> PipSettings:
        return PipSettings(index_urls=(self.url,), retries=0, timeout_s=5, **options)

    def file_requests(self) -> list[str]:
        return [path for path, _ in self.requests if path.startswith("/files/")]


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
