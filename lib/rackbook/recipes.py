"""Recipes: how vLLM is started for a model on a kind of hardware; ``data/recipes/*.toml``, see its README."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from rackbook import catalog, records
from rackbook.errors import DataError, one_of
from rackbook.locations import DATA, shown
from rackbook.records import Environment, names_a_secret

FOLDER = DATA / "recipes"

RoleName = Literal["aggregated", "prefill", "decode", "single_user"]
ROLES: tuple[RoleName, ...] = ("aggregated", "prefill", "decode", "single_user")
"""Prefill and decode in one engine; each in engines of its own; one user on GPUs that share every weight."""

Checked = Literal["parsed", "configured", "ran", "read"]
"""How far an argument was tried: by vLLM's own argument parser; in vLLM's own configuration object with a stand-in for
the GPU; in a run on a CPU; or not at all, only read in vLLM's code. None of them is a run on a GPU."""

Words = Annotated[tuple[str, ...], Field(strict=False)]

_RANKS = (
    "a plan takes the number of ranks from the notebook (measured_ranks, measured_ep_sizes, ranks, "
    "measured_decode_ranks), for prefill from num_ranks of the role"
)
_GPUS = "a plan counts gpus_per_rank GPUs for each rank and no others"
_HOSTS = "the cluster's file and its launcher say which hosts there are and where they meet"
_ADDRESS = "the plan chooses where a server listens, and tells its clients"

OWNED = {
    "--tensor-parallel-size": "gpus_per_rank of the role single_user sets it",
    "--pipeline-parallel-size": _GPUS, "--prefill-context-parallel-size": _GPUS,
    "--data-parallel-size": _RANKS, "--data-parallel-size-local": _HOSTS, "--data-parallel-start-rank": _HOSTS,
    "--data-parallel-rank": _HOSTS, "--data-parallel-address": _HOSTS, "--data-parallel-rpc-port": _HOSTS,
    "--data-parallel-backend": _HOSTS, "--data-parallel-external-lb": _HOSTS,
    "--data-parallel-multi-port-external-lb": _HOSTS, "--nnodes": _HOSTS, "--node-rank": _HOSTS,
    "--master-addr": _HOSTS, "--master-port": _HOSTS, "--headless": _HOSTS,
    "--host": _ADDRESS, "--port": _ADDRESS, "--uds": _ADDRESS,
    "--model": "model_id sets it", "--config": "its options stand here, one by one, where they can be checked",
}  # fmt: skip
"""Arguments that no recipe has, each with what sets it: a plan would otherwise count other GPUs than those that run."""

OWNED_BY_ROLE: dict[RoleName, dict[str, str]] = {
    "aggregated": {
        "--max-model-len": "a plan takes it from the contexts or max_model_len of the notebook",
        "--max-num-seqs": "requests_per_rank or measured_requests_per_rank of the notebook set it",
        "--max-num-batched-tokens": "measured_step_tokens, max_step_tokens or max_num_batched_tokens set it",
    },
    "decode": {"--max-num-seqs": "measured_max_seqs of the notebook sets it"},
    "single_user": {"--max-model-len": "a plan takes it from measured_input_tokens and measured_output_tokens"},
}
"""What the plans set for one role only."""

_SEEN = "every user of the machine would see the secret on the command line; set it in the environment of the process"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Option(_Entry):
    """One argument of vLLM.

    Attributes:
        flag: with its dashes.
        value: None for a switch; a table becomes JSON.
        checked: how far it was tried.
        why: what it is for, or what it must not be.
    """

    flag: str = Field(pattern=r"^--[a-z0-9][a-z0-9-]*$")
    value: bool | int | float | str | dict[str, Any] | None = None
    checked: Annotated[tuple[Checked, ...], Field(strict=False, min_length=1)]
    why: str = ""

    @field_validator("flag")
    @classmethod
    def _no_secret(cls, flag: str) -> str:
        if names_a_secret(flag):
            raise ValueError(_SEEN)
        return flag

    @field_validator("value")
    @classmethod
    def _no_bare_truth(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError("a switch has no value: leave it out, or use the flag that starts with --no-")
        return value

    @property
    def arguments(self) -> tuple[str, ...]:
        """The option as it stands on a command line."""
        return argument(self.flag, self.value)


class Role(_Entry):
    """The part that an engine plays.

    Attributes:
        gpus_per_rank: GPUs that share one rank's weights (TP); the ranks of an engine share the experts (EP).
        num_ranks: usual number of ranks of one engine; None where any number does.
        compute_capabilities: GPUs that can play it, as in the recipe; empty for all of the recipe's.
        environment: further variables; nothing secret.
        option: its arguments, in order, after those of the recipe.
        note: what else a person should know.
    """

    gpus_per_rank: int = Field(default=1, ge=1)
    num_ranks: int | None = Field(default=None, ge=1)
    compute_capabilities: Words = ()
    environment: Environment = {}
    option: Annotated[tuple[Option, ...], Field(strict=False)] = ()
    note: str = ""


class Startup(_Entry):
    """How long an engine takes until it computes; only estimates of GPU time depend on it.

    Attributes:
        dummy_minutes: with random weights.
        real_minutes: with the weights of the checkpoint.
        basis: where the two come from.
    """

    dummy_minutes: float = Field(gt=0)
    real_minutes: float = Field(gt=0)
    basis: str = Field(min_length=10)


class Recipe(_Entry):
    """How to start vLLM for one model on one kind of hardware.

    Attributes:
        name: in words, for a person.
        model: the model's file name in ``data/models``; None for one that the catalog lacks.
        model_id: what vLLM loads: a name on a hub, a folder, or "lab" for the CPU lab's own.
        max_context_tokens: longest context; None for the catalog's.
        hardware: GPUs that it is for, by file name in ``data/hardware``; empty for none.
        compute_capabilities: of those GPUs: "10.3", or "10.x" for a whole family.
        vllm: the first release that takes these arguments.
        startup: how long an engine takes to start.
        environment: variables of every process; nothing secret.
        option: arguments of every role.
        roles: the parts that an engine can play.
        router: command between clients and P/D engines; ``PREFILL_URLS`` and ``DECODE_URLS`` stand for their addresses.
        note: what else a person should know.
    """

    name: str = Field(min_length=1)
    model: str | None = None
    model_id: str = Field(min_length=1)
    max_context_tokens: int | None = Field(default=None, ge=1)
    hardware: Words = ()
    compute_capabilities: Words = ()
    vllm: str = Field(pattern=r"^\d+\.\d+\.\d+$")
    startup: Startup
    environment: Environment = {}
    option: Annotated[tuple[Option, ...], Field(strict=False)] = ()
    roles: dict[RoleName, Role]
    router: Words = ()
    note: str = ""
    _key: str = PrivateAttr(default="")
    _file: str = PrivateAttr(default="")

    @field_validator("model")
    @classmethod
    def _known_model(cls, name: str | None) -> str | None:
        if name is not None and name not in catalog.names("models"):
            raise ValueError(one_of(name, catalog.names("models"), "model in data/models"))
        return name

    @field_validator("hardware")
    @classmethod
    def _known_gpus(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in catalog.names("hardware"):
                raise ValueError(one_of(name, catalog.names("hardware"), "GPU in data/hardware"))
        return names

    @field_validator("router")
    @classmethod
    def _no_secret(cls, words: tuple[str, ...]) -> tuple[str, ...]:
        if any(word.startswith("-") and names_a_secret(word.partition("=")[0]) for word in words):
            raise ValueError(_SEEN)
        return words

    @model_validator(mode="after")
    def _whole(self) -> Recipe:
        if self.model is None and self.max_context_tokens is None:
            raise ValueError("max_context_tokens: got nothing; it must be there if model is not")
        if not self.roles:
            raise ValueError(f"roles: got none, allowed: {', '.join(ROLES)}")
        for name, role in self.roles.items():
            if role.gpus_per_rank > 1 and name != "single_user":
                raise ValueError(
                    f"role {name}: gpus_per_rank: got {role.gpus_per_rank}, allowed: 1; only the role single_user "
                    "shares a rank's weights over GPUs"
                )
            flags = [option.flag for option in self.options(name)]
            owned = OWNED | OWNED_BY_ROLE.get(name, {})
            if others := [f"{flag} ({owned[flag]})" for flag in flags if flag in owned]:
                raise ValueError(f"role {name}: a recipe cannot set {', '.join(others)}; leave it out")
            if twice := sorted({flag for flag in flags if flags.count(flag) > 1}):
                raise ValueError(f"role {name}: {', '.join(twice)} stands twice")
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
    def context_limit(self) -> int:
        """Longest context of the model, in tokens."""
        if self.max_context_tokens is not None:
            return self.max_context_tokens
        return catalog.model(str(self.model)).max_context_tokens.known

    @property
    def model_name(self) -> str:
        """The word in the column ``model``: the catalog's name, else what vLLM loads."""
        return self.model or self.model_id

    def role(self, name: str) -> Role:
        """Look a role up.

        Raises:
            DataError: the recipe has no such role.
        """
        if name not in self.roles:
            raise DataError(f"{self.file}: {one_of(name, self.roles, f'role of the recipe {self.key}')}")
        return self.roles[name]

    def options(self, role: str) -> tuple[Option, ...]:
        """The options of a role, the recipe's own first."""
        return (*self.option, *self.role(role).option)

    def arguments(self, role: str, *, without: tuple[str, ...] = ()) -> tuple[str, ...]:
        """The arguments of a role as they stand on a command line.

        Args:
            role: its name.
            without: flags to leave out, because the plan sets them itself.
        """
        return tuple(word for option in self.options(role) if option.flag not in without for word in option.arguments)

    def variables(self, role: str) -> dict[str, str]:
        """The environment of a role."""
        return self.environment | self.role(role).environment


def names() -> tuple[str, ...]:
    """The recipes that come with the project, sorted."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def recipe(name_or_path: str) -> Recipe:
    """Look a recipe up.

    Args:
        name_or_path: a file name in ``data/recipes``, or a path to a file of one's own.

    Raises:
        DataError: no such recipe, or its file is malformed.
    """
    if name_or_path in names():
        return _read(FOLDER / f"{name_or_path}.toml")
    path = Path(name_or_path).expanduser()
    if path.suffix == ".toml" or len(path.parts) > 1:
        return _read(path)
    raise DataError(f"{one_of(name_or_path, names(), 'recipe')} A path to a TOML file does, too")


def argument(flag: str, value: object = None) -> tuple[str, ...]:
    """One option as it stands on a command line: a switch, a value, or a table as JSON.

    The value follows as a word of its own, except one that starts with a dash, which a parser would take for a flag.
    """
    if value is None:
        return (flag,)
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, dict) else str(value)
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)


def _read(path: Path) -> Recipe:
    return _read_once(path, path.stat().st_mtime_ns if path.is_file() else 0)


@cache
def _read_once(path: Path, _changed: int) -> Recipe:
    found = records.read(path, Recipe)
    found._key, found._file = path.stem, shown(path)
    return found
