"""How processes come to their hosts: on this machine, by torchrun on several, or by Slurm's ``srun``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rackbook.clusters import Cluster
from rackbook.engine import fit, lab_model, lab_settings
from rackbook.engine.plan import Process

RANK_SCRIPT = Path(__file__).with_name("slurm_rank.py")
LAB_PYTHON = "LAB_PYTHON"
"""Stands for the lab's Python, until it is known where it lies."""

LAB_MODEL = "LAB_MODEL"
"""Stands for the folder of the model that the lab makes itself."""

LAB_BENCH = "LAB_BENCH"
"""Stands for the file with which ``vllm bench serve`` starts there."""

VLLM = "vllm.entrypoints.cli.main"
_HYBRID, _API_SERVERS = "--data-parallel-hybrid-lb", "--api-server-count"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
SERVER_PORT = 8000
RPC_PORT = 13345


def python(cluster: Cluster) -> tuple[str, ...]:
    """The command that starts the cluster's Python."""
    return cluster.python or (LAB_PYTHON,)


def ranks(
    cluster: Cluster, num_gpus: int, arguments: Sequence[str], environment: Mapping[str, str], role: str, parameter: str
) -> tuple[Process, ...]:
    """One vLLM process per GPU, which meet on the first host.

    Args:
        cluster: where.
        num_gpus: ranks in all.
        arguments: of vLLM, from ``bench`` on.
        environment: of every rank.
        role: what they do.
        parameter: of the experiment, that sets the number; for the message.

    Raises:
        UnfitError: the cluster has not so many GPUs, or they do not fill whole hosts.
    """
    hosts = fit.hosts_for(cluster, num_gpus, parameter)
    environment = dict(cluster.environment) | dict(environment)
    per_host = num_gpus // hosts
    module = ("-m", VLLM, *arguments)
    if cluster.launcher.kind == "slurm":
        command = (
            *srun(cluster, hosts, num_gpus, per_host),
            *python(cluster), str(RANK_SCRIPT), str(cluster.launcher.port), *module,
        )  # fmt: skip
        return (Process(role, command, environment, num_gpus=num_gpus),)
    processes = []
    for host in range(hosts):
        command = (
            *python(cluster), "-m", "torch.distributed.run",
            "--nnodes", str(hosts), "--nproc-per-node", str(per_host), "--node-rank", str(host),
            "--master-addr", "127.0.0.1" if hosts == 1 else cluster.address(0),
            "--master-port", str(cluster.launcher.port), *module,
        )  # fmt: skip
        processes.append(_process(cluster, role, command, environment, host, per_host))
    return tuple(processes)


def server(
    cluster: Cluster,
    *,
    model: str,
    num_ranks: int,
    gpus_per_rank: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    role: str,
    parameter: str,
    first_host: int = 0,
    port: int = SERVER_PORT,
    rpc_port: int = RPC_PORT,
    gpus: Sequence[int] | None = None,
) -> tuple[Process, ...]:
    """One vLLM server, on as many hosts as it needs, the first of which takes the requests.

    Args:
        cluster: where.
        model: what vLLM loads.
        num_ranks: data-parallel ranks in all.
        gpus_per_rank: GPUs that share a rank's weights.
        arguments: of vLLM, after the parallel sizes.
        environment: of every process.
        role: what it does.
        parameter: of the experiment, that sets the number of ranks; for the message.
        first_host: number of its first host.
        port: of the server.
        rpc_port: where its ranks meet.
        gpus: which GPUs of one host; None for the first ones.

    Raises:
        UnfitError: the cluster has not so many GPUs, or they do not fill whole hosts.
    """
    if cluster.is_lab:
        return (_lab_server(cluster, model, num_ranks, arguments, environment, role, port),)
    num_gpus = num_ranks * gpus_per_rank
    hosts = fit.hosts_for(cluster, num_gpus, parameter)
    environment = dict(cluster.environment) | dict(environment)
    if gpus is not None:
        environment[_VISIBLE] = ",".join(map(str, gpus))
    sizes: tuple[str, ...] = ()
    if gpus_per_rank > 1:
        sizes += ("--tensor-parallel-size", str(gpus_per_rank))
    if num_ranks > 1:
        sizes += ("--data-parallel-size", str(num_ranks))
    local = num_ranks // hosts
    processes = []
    for host in range(hosts):
        spread: tuple[str, ...] = ()
        shared = _HYBRID in arguments
        if hosts > 1:
            spread = (
                "--data-parallel-size-local", str(local), "--data-parallel-address", cluster.address(first_host),
                "--data-parallel-rpc-port", str(rpc_port),
            )  # fmt: skip
            spread += ("--data-parallel-start-rank", str(host * local)) if host or shared else ()
            spread += ("--headless",) if host and not shared else ()
        elif shared:  # which vLLM refuses without it, and drops with it on one host
            spread = ("--data-parallel-size-local", str(local))
        # vLLM listens on every interface unless told otherwise
        listens = "127.0.0.1" if cluster.num_hosts == 1 else cluster.address(first_host + host)
        at, given = ("--host", listens, "--port", str(port)), tuple(arguments)
        if "--headless" in spread:  # no API server there, and vLLM refuses a number of them
            at, given = (), _without(_API_SERVERS, given)
        command = (*python(cluster), "-m", VLLM, "serve", model, *sizes, *spread, *given, *at)
        processes.append(_process(cluster, role, command, environment, first_host + host, num_gpus // hosts))
    return tuple(processes)


def client(cluster: Cluster, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Process:
    """A client on the first host.

    Args:
        cluster: where.
        arguments: of vLLM, from ``bench`` on.
        environment: its variables.
    """
    return Process("client", (*python(cluster), "-m", VLLM, *arguments), dict(environment or {}))


def url(cluster: Cluster, host: int = 0, port: int = SERVER_PORT) -> str:
    """Where a server on a host takes requests."""
    return f"http://{'127.0.0.1' if cluster.num_hosts == 1 else cluster.address(host)}:{port}"


def srun(cluster: Cluster, hosts: int, num_tasks: int, per_host: int) -> tuple[str, ...]:
    """The part of a command that has Slurm start it, one task per rank."""
    launcher = cluster.launcher
    words = [
        "srun", f"--nodes={hosts}", f"--ntasks={num_tasks}", f"--ntasks-per-node={per_host}",
        f"--gpus-per-node={per_host}", "--gpu-bind=none", "--kill-on-bad-exit=1",
    ]  # fmt: skip
    return (*words, *_slurm_options(cluster), *launcher.options)


def srun_once(cluster: Cluster, num_gpus: int) -> tuple[str, ...]:
    """The part of a command that has Slurm start it once, on a host of its choice with so many GPUs."""
    words = ("srun", "--nodes=1", "--ntasks=1", f"--gpus-per-node={num_gpus}")
    return (*words, *_slurm_options(cluster), *cluster.launcher.options)


def _slurm_options(cluster: Cluster) -> tuple[str, ...]:
    launcher = cluster.launcher
    return (
        *((f"--partition={launcher.partition}",) if launcher.partition else ()),
        *((f"--account={launcher.account}",) if launcher.account else ()),
        *((f"--time={launcher.minutes}",) if launcher.minutes else ()),
    )


def _step_options(cluster: Cluster) -> tuple[str, ...]:
    """Those of a step that shares its allocation: partition, account and exclusiveness were the allocation's."""
    launcher = cluster.launcher
    return (
        *((f"--time={launcher.minutes}",) if launcher.minutes else ()),
        *(word for word in launcher.options if word.partition("=")[0] != "--exclusive"),
    )


def through(cluster: Cluster, host: int, environment: Mapping[str, str]) -> tuple[tuple[str, ...], bool]:
    """The command by which this machine starts a process on a host, and whether it hands its line to a shell there.

    The first host is this machine.

    Args:
        cluster: gives launcher and address.
        host: number of the host.
        environment: of the process.
    """
    launcher = cluster.launcher
    if host == 0 or launcher.kind == "local":
        return (), False
    address = cluster.address(host)
    if launcher.kind == "torchrun":
        return (*launcher.reach, address), True
    # a step sees all GPUs of its host: one that Slurm cut down would number the rest anew
    gpus = f"--gpus-per-node={cluster.num_gpus_per_host}"
    words = ("srun", "--nodes=1", "--ntasks=1", f"--nodelist={address}", gpus, "--overlap")
    return (*words, *_step_options(cluster), *_visible(environment)), False


def _visible(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The choice of GPUs, set behind ``srun``, which sets that variable itself."""
    return ("env", f"{_VISIBLE}={environment[_VISIBLE]}") if _VISIBLE in environment else ()


def _process(
    cluster: Cluster, role: str, command: tuple[str, ...], environment: Mapping[str, str], host: int, num_gpus: int
) -> Process:
    before, shell = through(cluster, host, environment)
    return Process(role, command, environment, host_index=host, num_gpus=num_gpus, through=before, through_shell=shell)


def _without(flag: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """Arguments without an option and its value."""
    if flag not in arguments:
        return arguments
    place = arguments.index(flag)
    return (*arguments[:place], *arguments[place + 2 :])


def _lab_server(
    cluster: Cluster,
    model: str,
    num_ranks: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    role: str,
    port: int,
) -> Process:
    command = lab_settings.server(LAB_PYTHON, model, port, num_ranks, lab_model.Shape().dtype, arguments)
    variables = lab_settings.environment(num_ranks) | dict(cluster.environment) | dict(environment)
    return Process(role, command, variables)
