"""How many TCP segments with data this process has sent: a count that other programs on the machine do not touch."""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
_RESENT, _SENT = 100, 156
_INFO_BYTES = _SENT + 4
"""Of Linux' ``struct tcp_info``: where ``tcpi_total_retrans`` and ``tcpi_data_segs_out`` (from 4.6 on) lie."""


def sent() -> int | None:
    """Segments with data that the open TCP connections of this process have sent; None where the system hides that.

    Acknowledgements without data are left out, and so are repetitions: how many there are hangs on how fast it goes.
    Sends that follow each other at once may share a segment, so there may be fewer segments than sends.
    """
    option = getattr(socket, "TCP_INFO", None)
    if option is None or not _DESCRIPTORS.is_dir():
        return None
    total = 0
    for descriptor in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed since, or no connection
            if not str(descriptor.readlink()).startswith("socket:"):
                continue
            connection = socket.socket(fileno=int(descriptor.name))
            try:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, option, _INFO_BYTES)
            finally:
                connection.detach()  # it is not ours to close
            if len(info) < _INFO_BYTES:
                return None
            total += struct.unpack_from("=I", info, _SENT)[0] - struct.unpack_from("=I", info, _RESENT)[0]
    return total
