"""A file on an HTTP server, read in parts."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import requests

from rackbook.errors import RackbookError

if TYPE_CHECKING:
    from collections.abc import Sequence

TAIL_BYTES = 65_536
"""First read: the end of a zip file, where its directory begins to be found."""
_CHUNK_BYTES = 65_536
GAP_BYTES = 8_192
"""Parts nearer than this are read as one: a request costs more than the bytes between them."""


class RangesRefusedError(RackbookError):
    """The server does not serve parts of a file."""


class NotReadError(RackbookError):
    """The server could not be reached or did not answer as it should; the message says why and names no host."""


class _BrokenOffError(NotReadError):
    """An answer that began well and did not end."""


class RangeFile(io.RawIOBase):
    """A seekable file over HTTP range requests; what was read once is not asked for again.

    Attributes:
        num_requests: requests sent so far.
        num_bytes: bytes received so far.
    """

    def __init__(self, session: requests.Session, url: str, *, timeout_s: float, repeats: int = 2) -> None:
        """Read the end of the file.

        Args:
            session: sends the requests, and repeats those that fail to connect.
            url: of the file.
            timeout_s: longest wait for an answer.
            repeats: how often a part that breaks off on its way is asked for again.

        Raises:
            RangesRefusedError: the server sends the whole file, or none, when asked for a part.
            NotReadError: the server cannot be reached.
        """
        super().__init__()
        self._session, self._url = session, url
        self._timeout_s, self._repeats = timeout_s, repeats
        self._blocks: list[tuple[int, bytes]] = []
        self._position = 0
        self.num_requests = self.num_bytes = 0
        self.size = self._read_tail()

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Where the next read begins."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; see :meth:`io.IOBase.seek`."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = max(0, start + offset)
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read from the position; asks the server for what is not here yet."""
        start = min(self._position, self.size)
        end = self.size if size is None or size < 0 else min(start + size, self.size)
        data = b"" if start == end else self._part(start, end)
        self._position = end
        return data

    def prefetch(self, spans: Sequence[tuple[int, int]]) -> None:
        """Get parts in as few requests as their distances allow.

        Args:
            spans: from the first byte to the one after the last; may overlap, and may end beyond the file.
        """
        merged: list[list[int]] = []
        for start, end in sorted((start, min(end, self.size)) for start, end in spans):
            if self._held(start, end) is not None:
                continue
            if merged and start - merged[-1][1] <= GAP_BYTES:
                merged[-1][1] = max(merged[-1][1], end)
            else:
                merged.append([start, end])
        for start, end in merged:
            self._part(start, end)

    def _held(self, start: int, end: int) -> bytes | None:
        for offset, block in self._blocks:
            if offset <= start and end <= offset + len(block):
                return block[start - offset : end - offset]
        return None

    def _part(self, start: int, end: int) -> bytes:
        held = self._held(start, end)
        if held is None:
            held, _ = self._request(f"bytes={start}-{end - 1}")
            if len(held) != end - start:
                raise NotReadError(f"asked for {end - start:,} bytes of the wheel, got {len(held):,}; try again")
            self._blocks.append((start, held))
        return held

    def _read_tail(self) -> int:
        data, total = self._request(f"bytes=-{TAIL_BYTES}")
        self._blocks.append((total - len(data), data))
        return total

    def _request(self, part: str) -> tuple[bytes, int]:
        for _ in range(self._repeats):
            try:
                return self._answer(part)
            except _BrokenOffError:
                continue
        return self._answer(part)

    def _answer(self, part: str) -> tuple[bytes, int]:
        # an encoded answer would have other byte positions than the file
        headers = {"Range": part, "Accept-Encoding": "identity"}
        # streamed, so that a server that sends the whole file is not read to its end
        try:
            answer = self._session.get(self._url, headers=headers, stream=True, timeout=self._timeout_s)
        except requests.RequestException as problem:
            raise NotReadError(f"a part of the wheel could not be read: {why(problem)}") from None
        with answer:
            self.num_requests += 1
            total = re.fullmatch(r"bytes \d+-\d+/(\d+)", answer.headers.get("Content-Range", ""))
            if answer.status_code in (200, 416, 501) or (answer.status_code == 206 and total is None):
                raise RangesRefusedError("the server does not serve parts of a file")
            if answer.status_code != 206:
                raise NotReadError(f"a part of the wheel could not be read: the server answers {answer.status_code}")
            data = bytearray()
            try:
                for chunk in answer.iter_content(_CHUNK_BYTES):
                    data += chunk
                    self.received(len(chunk))
            except requests.RequestException as problem:
                raise _BrokenOffError(f"a part of the wheel could not be read: {why(problem)}") from None
        return bytes(data), int(total[1])

    def received(self, num_bytes: int) -> None:
        """Called for every piece that arrives."""
        self.num_bytes += num_bytes


def why(problem: Exception) -> str:
    """The reason of a failed request, without the host that the exception names."""
    reasons = {
        requests.exceptions.ProxyError: "the proxy did not let it through",
        requests.exceptions.SSLError: "the certificate was not accepted (see pip's option cert)",
        requests.exceptions.Timeout: "no answer in time",
        requests.exceptions.ChunkedEncodingError: "the answer broke off",
        requests.exceptions.ConnectionError: "no connection",
    }
    return next((words for kind, words in reasons.items() if isinstance(problem, kind)), type(problem).__name__)
