"""The receiving end of the KV-row experiment: ``python -m rackbook.hostwork.row_receiver PARENT``.

Standard library only. Takes one TCP connection on the loopback address, prints its port first. Per transfer it reads
8 bytes that say how many follow, then those, and answers with one byte. It ends with its connection or its parent.
"""

from __future__ import annotations

import socket
import struct
import sys

from rackbook.hostwork.ranks.member import die_with_parent

HEAD = struct.Struct("<Q")
DONE = b"!"
BUFFER_BYTES = 1 << 20


def main() -> None:
    """Receive until the sender closes the connection."""
    die_with_parent(int(sys.argv[1]))
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    listener.settimeout(30.0)
    connection, _ = listener.accept()
    listener.close()
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    buffer = memoryview(bytearray(BUFFER_BYTES))
    while len(head := connection.recv(HEAD.size, socket.MSG_WAITALL)) == HEAD.size:
        (left,) = HEAD.unpack(head)
        while left:
            got = connection.recv_into(buffer[: min(left, BUFFER_BYTES)])
            if not got:
                return
            left -= got
        connection.sendall(DONE)


if __name__ == "__main__":
    main()
