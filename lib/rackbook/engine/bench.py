"""The command line of ``vllm bench serve``: what it sends, written and read back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rackbook.errors import DataError

PERCENTILES = (50, 90, 99)
"""Percentiles that the client is asked for."""


@dataclass(frozen=True)
class Load:
    """What the client sends in one run.

    Attributes:
        concurrency: requests under way at once.
        input_tokens: prompt length, the same for all.
        output_tokens: answer length, the same for all.
        num_prompts: requests in the run.
        num_warmups: requests before the clock starts; they repeat the run's first prompt, which a prefix cache then
            holds.
    """

    concurrency: int
    input_tokens: int
    output_tokens: int
    num_prompts: int
    num_warmups: int = 0

    def __post_init__(self) -> None:
        for name in ("concurrency", "input_tokens", "output_tokens", "num_prompts"):
            if getattr(self, name) < 1:
                raise DataError(f"load, {name}: got {getattr(self, name)}, allowed: at least 1")
        if self.num_warmups < 0:
            raise DataError(f"load, num_warmups: got {self.num_warmups}, allowed: 0 or more")
        if self.num_prompts < self.concurrency:
            raise DataError(
                f"load: {self.num_prompts} prompts never make {self.concurrency} requests under way at once; "
                "send at least as many as the concurrency"
            )

    def named(self) -> str:
        """A name for files and messages."""
        return f"c{self.concurrency}-{self.input_tokens}in-{self.output_tokens}out"


@dataclass(frozen=True)
class TraceLoad:
    """What the client sends in one run that replays a file of requests; lengths are those of the file.

    Attributes:
        concurrency: requests under way at once.
        num_prompts: requests in the run, the first of the file.
        workload: name of the file.
    """

    concurrency: int
    num_prompts: int
    workload: str
    input_tokens: None = None
    output_tokens: None = None
    num_warmups: int = 0

    def named(self) -> str:
        """A name for files and messages."""
        return f"c{self.concurrency}-{self.workload}"


def trace_variables(seed: int) -> dict[str, str]:
    """What a client that replays a trace needs in its environment for prompts of its own.

    vLLM 0.33.0 draws the tokens of a hash id with Python's ``hash`` of it as the seed. Another seed of that hash gives
    other prompts, which repeat each other where the trace says so and nothing that was sent before.
    """
    return {"PYTHONHASHSEED": str(seed)}


def arguments(
    client: Sequence[str],
    base_url: str,
    load: Load,
    seed: int,
    result: Path | str,
    *,
    model: str | None = None,
    tokenizer: str | None = None,
    extra: Sequence[str] = (),
) -> tuple[str, ...]:
    """The client's command line.

    Args:
        client: how it is started, e.g. ``("vllm", "bench", "serve")``.
        base_url: of the server.
        load: what to send.
        seed: of the prompts; equal seeds give equal prompts.
        result: file that it writes.
        model: as the server calls it; the first that the server names if None.
        tokenizer: name or folder of the tokenizer; that of the model if None.
        extra: further arguments, e.g. headers.
    """
    found = [
        *client, "--base-url", base_url, "--dataset-name", "random", "--random-input-len", str(load.input_tokens),
        "--random-output-len", str(load.output_tokens), "--random-range-ratio", "0", "--ignore-eos",
        "--num-prompts", str(load.num_prompts), "--max-concurrency", str(load.concurrency), "--seed", str(seed),
        "--num-warmups", str(load.num_warmups), "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", ",".join(map(str, PERCENTILES)), "--disable-tqdm", "--save-result", "--save-detailed",
        "--result-dir", str(Path(result).parent), "--result-filename", Path(result).name,
    ]  # fmt: skip
    found += ["--model", model] if model else []
    found += ["--tokenizer", tokenizer] if tokenizer else []
    return (*found, *extra)


@dataclass(frozen=True)
class Asked:
    """What a client's command line asks for.

    Attributes:
        load: what is sent.
        seed: of the prompts.
        result: file that the client writes.
    """

    load: Load | TraceLoad
    seed: int
    result: Path


def asked(command: Sequence[str]) -> Asked:
    """Read a client's command line: one of :func:`arguments`, or one that replays a trace.

    Raises:
        DataError: an argument that it always has is missing.
    """
    values = dict(itertools.pairwise(command))
    try:
        result, seed = Path(values["--result-dir"]) / values["--result-filename"], int(values["--seed"])
        concurrency, num_prompts = int(values["--max-concurrency"]), int(values["--num-prompts"])
        if values["--dataset-name"] == "timed_trace":
            return Asked(TraceLoad(concurrency, num_prompts, Path(values["--dataset-path"]).stem), seed, result)
        load = Load(
            concurrency=concurrency,
            input_tokens=int(values["--random-input-len"]),
            output_tokens=int(values["--random-output-len"]),
            num_prompts=num_prompts,
            num_warmups=int(values["--num-warmups"]),
        )
        return Asked(load, seed, result)
    except (KeyError, ValueError) as problem:
        raise DataError(f"the benchmark client's command line lacks {problem}: {' '.join(command)[:200]}") from None
