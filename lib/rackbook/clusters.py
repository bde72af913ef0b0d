"""Clusters: where to measure; ``data/clusters/*.toml`` or a user's own file. See ``data/clusters/README.md``."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from rackbook import catalog, records
from rackbook.catalog import Fact
from rackbook.errors import DataError, one_of
from rackbook.locations import DATA, shown
from rackbook.records import Environment

FOLDER = DATA / "clusters"

Words = Annotated[tuple[str, ...], Field(strict=False)]
Capability = Annotated[str, Field(pattern=r"^\d+\.\d+$")]


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Launcher(_Entry):
    """How processes come to their hosts.

    Attributes:
        kind: "local" (this machine only), "torchrun" (this machine is the first host, the others are reached by a
            command) or "slurm" (``srun``).
        addresses: torchrun: the hosts' addresses, this machine's first; empty if the file is only there to plan with.
        port: torchrun and slurm: where the ranks meet on the first host.
        reach: torchrun: command that runs another command on a host whose address follows.
        partition: slurm: empty for the default one.
        account: slurm: empty for the default one.
        minutes: slurm: time limit of one step; None for the partition's.
        options: slurm: further options of ``srun``; ``--exclusive`` not for a server's processes, which share their
            allocation with their clients.
    """

    kind: Literal["local", "torchrun", "slurm"] = "local"
    addresses: Words = ()
    port: int = Field(default=29400, ge=1024, le=65535)
    reach: Words = ("ssh", "-tt", "-o", "BatchMode=yes")
    partition: str = ""
    account: str = ""
    minutes: int | None = Field(default=None, ge=1)
    options: Words = ()

    @model_validator(mode="after")
    def _nothing_that_means_nothing(self) -> Launcher:
        of_others = {
            "addresses": "torchrun", "reach": "torchrun", "partition": "slurm", "account": "slurm", "minutes": "slurm",
            "options": "slurm",
        }  # fmt: skip
        for name in sorted(self.model_fields_set):
            if name in of_others and of_others[name] != self.kind:
                raise ValueError(f"{name} belongs to the launcher {of_others[name]!r}, got {self.kind!r}")
        return self


class Cluster(_Entry):
    """One machine or group of equal machines.

    A count may be a plain number, which is the user's own statement about the own machines, or a fact with its source.

    Attributes:
        name: in words, for a person.
        hardware: GPU, by its file name in ``data/hardware``; None where there is none.
        compute_capability: of the GPU, as nvidia-smi says it, e.g. "10.3"; None without GPUs.
        hosts: machines.
        gpus_per_host: GPUs in each.
        recipe: what to run here unless another one is named: its file name in ``data/recipes``, or the path of a file
            of one's own, from the folder of this one.
        launcher: how processes come to the hosts.
        python: command that starts the Python that has vLLM, the same on every host; empty for the CPU lab's.
        environment: variables for every vLLM process; nothing secret.
        note: what else a person should know.
    """

    name: str = Field(min_length=1)
    hardware: str | None = None
    compute_capability: Capability | Fact[Capability] | None = None
    hosts: Annotated[int, Field(ge=1)] | Fact[int]
    gpus_per_host: Annotated[int, Field(ge=0)] | Fact[int]
    recipe: str
    launcher: Launcher = Launcher()
    python: Words = ("python3",)
    environment: Environment = {}
    note: str = ""
    _key: str = PrivateAttr(default="")
    _file: str = PrivateAttr(default="")

    @field_validator("hardware")
    @classmethod
    def _known_gpu(cls, name: str | None) -> str | None:
        if name is not None and name not in catalog.names("hardware"):
            raise ValueError(one_of(name, catalog.names("hardware"), "GPU in data/hardware"))
        return name

    @model_validator(mode="after")
    def _whole(self) -> Cluster:
        if self.num_hosts < 1:
            raise ValueError(f"hosts: got {self.num_hosts}, allowed: a whole number ≥ 1")
        if self.num_gpus_per_host < 0:
            raise ValueError(f"gpus_per_host: got {self.num_gpus_per_host}, allowed: a whole number ≥ 0")
        has_gpus = self.num_gpus_per_host > 0
        if has_gpus != (self.hardware is not None) or has_gpus != (self.capability is not None):
            raise ValueError(
                "a cluster with GPUs names hardware and compute_capability, one without names neither; got "
                f"gpus_per_host {self.num_gpus_per_host}, hardware {self.hardware!r}, "
                f"compute_capability {self.capability!r}"
            )
        if self.is_lab and (has_gpus or self.num_hosts > 1 or self.launcher.kind != "local"):
            raise ValueError(
                "python: got nothing, which means the CPU lab: one host without GPUs, started locally; allowed here: "
                "the command that starts the Python with vLLM"
            )
        launcher = self.launcher
        if launcher.kind == "local" and self.num_hosts > 1:
            raise ValueError(f'{self.num_hosts} hosts need a launcher of kind "torchrun" or "slurm", got "local"')
        if launcher.addresses and len(launcher.addresses) != self.num_hosts:
            raise ValueError(
                f"launcher.addresses: got {len(launcher.addresses)}, expected {self.num_hosts}, one per host"
            )
        return self

    @property
    def key(self) -> str:
        """The name by which it is chosen: the file's."""
        return self._key

    @property
    def file(self) -> str:
        """The file that describes it, for messages."""
        return self._file

    @property
    def num_hosts(self) -> int:
        """Machines."""
        return _plain(self.hosts)

    @property
    def num_gpus_per_host(self) -> int:
        """GPUs in each machine."""
        return _plain(self.gpus_per_host)

    @property
    def num_gpus(self) -> int:
        """GPUs in all."""
        return self.num_hosts * self.num_gpus_per_host

    @property
    def capability(self) -> str | None:
        """Compute capability of the GPUs, e.g. "10.3"; None without GPUs."""
        return None if self.compute_capability is None else _plain(self.compute_capability)

    @property
    def is_lab(self) -> bool:
        """Whether its Python is the CPU lab's."""
        return not self.python

    def address(self, host: int) -> str:
        """The address of a host, or the word ``HOST_<number>`` where the file gives none."""
        if self.launcher.kind == "local":
            return "127.0.0.1"
        return self.launcher.addresses[host] if self.launcher.addresses else f"HOST_{host}"


def names() -> tuple[str, ...]:
    """The clusters that come with the project, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def cluster(name_or_path: str) -> Cluster:
    """Look a cluster up.

    Args:
        name_or_path: a file name in ``data/clusters``, e.g. "gb300-nvl72", or a path to a file of one's own.

    Raises:
        DataError: no such cluster, or its file is malformed.
    """
    if name_or_path in names():
        return _read(FOLDER / f"{name_or_path}.toml")
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml" or len(path.parts) > 1:
        return _read(path)
    raise DataError(f"{one_of(name_or_path, names(), 'cluster')} A path to a TOML file does, too")


def _plain(value: object) -> object:
    return value.known if isinstance(value, Fact) else value


def _read(path: Path) -> Cluster:
    return _read_once(path, path.stat().st_mtime_ns if path.is_file() else 0)


@cache
def _read_once(path: Path, _changed: int) -> Cluster:
    found = records.read(path, Cluster)
    recipe = Path(found.recipe).expanduser()
    if recipe.suffix == ".toml" or len(recipe.parts) > 1:
        found = found.model_copy(update={"recipe": str(path.parent / recipe)})
    found._key, found._file = path.stem, shown(path)
    return found
