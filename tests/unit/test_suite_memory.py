"""What counts as the memory of a kernel."""

import subprocess
import sys

from rackbook.suite import memory

MIB = 2**20
CHILD = "kept = bytearray(64 * 2**20); kept[::4096] = b'x' * len(kept[::4096]); print('ready', flush=True); input()"
KERNEL = (
    "import subprocess, sys\n"
    "child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=subprocess.PIPE, start_new_session=True)\n"
    "input()"
)


def test_a_server_in_a_session_of_its_own_counts_as_its_kernels():
    kernel = subprocess.Popen(
        [sys.executable, "-c", KERNEL, CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        assert kernel.stdout.readline() == b"ready\n"
        assert 64 * MIB < memory.used_bytes(kernel.pid) < 256 * MIB
    finally:
        kernel.communicate()  # the ends of their inputs end both
    assert memory.used_bytes(kernel.pid) == 0
