"""A real Slurm on this machine: munged, slurmctld and slurmd on loopback, in a temporary folder, ended by their ids."""

from __future__ import annotations

import contextlib
import ctypes
import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "srun")
LARGEST_ARRAY = 8
"""Most jobs of an array here, so few that a small sweep takes several."""

_START_S = 30.0
_PR_SET_PDEATHSIG = 1

_CONFIG = """\
ClusterName=rackbook
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CryptoType=crypto/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=0,defer_batch
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
KillWait=2
MinJobAge=300
MaxArraySize={largest_array}
InactiveLimit=0
SlurmdTimeout=300
CommunicationParameters=NoAddrCache
MailProg=/bin/true
GresTypes=gpu
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{nodes}] CPUs=2 RealMemory=1024 Gres=gpu:2 State=UNKNOWN
PartitionName=work Nodes=node[1-2] Default=YES MaxTime=120 PriorityTier=1 PreemptMode=REQUEUE State=UP
PartitionName=urgent Nodes=node[1-2] MaxTime=60 PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> list[str]:
    """Programs that are not installed."""
    return [name for name in PROGRAMS if which(name) is None]


def which(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on, the last ones in a row."""
    for _ in range(200):
        first = secrets.randbelow(20_000) + 30_000
        sockets = []
        try:
            for port in range(first, first + count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", port))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for opened in sockets:
                opened.close()
    raise RuntimeError("no free ports")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Cluster:
    """Two nodes of two cores and two (pretended) GPUs each; start with ``with``."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.user = folder, getpass.getuser()
        self._processes: list[subprocess.Popen] = []
        self.environment = os.environ | {
            "SLURM_CONF": str(folder / "slurm.conf"),
            "PATH": f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin",
        }

    def __enter__(self) -> Cluster:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command of Slurm and return what it prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{command}: {done.stderr}")
        return done.stdout

    def jobs(self) -> dict[str, str]:
        """State of each job that the controller knows, by id."""
        found = {}
        for line in self.run("scontrol", "show", "job", "-o", "--all").splitlines():
            fields = dict(word.partition("=")[::2] for word in line.split() if "=" in word)
            if "JobId" in fields:
                found[fields["JobId"]] = fields["JobState"]
        return found

    def _start(self) -> None:
        controller, daemon, *nodes = free_ports(4)
        (self.folder / "state").mkdir()
        config = _CONFIG.format(
            folder=self.folder, host=socket.gethostname(), user=getpass.getuser(), controller=controller,
            daemon=daemon, largest_array=LARGEST_ARRAY, nodes=f"{nodes[0]}-{nodes[1]}",
        )  # fmt: skip
        (self.folder / "slurm.conf").write_text(config)
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        for number in (0, 1):
            (self.folder / f"gpu{number}").touch()  # Slurm asks only whether the device's file is there
        (self.folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={self.folder}/gpu[0-1]\n")
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        munge = self.folder / "munge.socket"
        self._launch(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge}",
            f"--pid-file={self.folder}/munged.pid", f"--log-file={self.folder}/munged.log",
            f"--seed-file={self.folder}/munged.seed",
        )  # fmt: skip
        self._until(munge.exists, "munged")
        self._launch("slurmctld", "-D", "-i")
        for node in ("node1", "node2"):
            self._launch("slurmd", "-D", "-N", node)
        self._until(lambda: self.run("sinfo", "-h", "-N", "-o", "%T", check=False).split().count("idle") >= 4, "slurmd")

    def _launch(self, name: str, *arguments: str) -> None:
        program = which(name)
        assert program is not None
        with (self.folder / f"{name}.out").open("ab") as output:
            self._processes.append(
                subprocess.Popen(
                    [program, *arguments],
                    preexec_fn=_die_with_parent,
                    env=self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                )
            )

    def _until(self, holds, what: str) -> None:
        deadline = time.monotonic() + _START_S
        while not holds():
            if time.monotonic() > deadline or any(p.poll() is not None for p in self._processes):
                logs = "\n".join(
                    f"--- {p.name}\n{p.read_text(errors='replace')[-2000:]}" for p in self.folder.glob("*.[lo][ou][gt]")
                )
                raise RuntimeError(f"{what} did not start:\n{logs}")
            time.sleep(0.1)

    def _end(self) -> None:
        if len(self._processes) > 1 and self._processes[1].poll() is None:
            with contextlib.suppress(Exception):
                self.run("scancel", "--signal=KILL", "--full", "--user", getpass.getuser(), check=False)
                self.run("scancel", "--user", getpass.getuser(), check=False)
                time.sleep(0.5)
        for process in reversed(self._processes):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in reversed(self._processes):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
