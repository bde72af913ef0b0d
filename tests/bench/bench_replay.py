"""The replay client: on time at hundreds of requests a second on one core, and for how much CPU beside vLLM's own."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
from measure import Ratio, at_most

from rackbook.engine.lab import Lab
from rackbook.replay import client, trace_files
from rackbook.replay.loads import open_loop
from rackbook.replay.prompts import prompts
from rackbook.replay.targets import Settings, bodies, targets

REQUESTS_PER_S = 520
WANTED_PER_S = 500
LIMIT_MS = 5.0
MANY, FEW = 3_000, 300
INPUT_TOKENS = 64
BENCH_SERVE = (  # what `vllm bench serve` runs; the program itself looks for a distribution that the lab does not have
    "from vllm.benchmarks.serve import add_cli_args, main;"
    "from vllm.utils.argparse_utils import FlexibleArgumentParser as Parser;"
    "parser = Parser(); add_cli_args(parser); main(parser.parse_args())"
)
SERVER = Path(__file__).parents[1] / "completions_server.py"


@contextlib.contextmanager
def echo() -> Iterator[str]:
    """A completions server on the first core, which answers at once; its address."""
    process = subprocess.Popen(
        [sys.executable, str(SERVER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )  # fmt: skip
    try:
        os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.stdin.close()
        process.wait(10)


def write_trace(path: Path, num_requests: int) -> None:
    """A schedule for both clients: Poisson arrivals, 64 tokens each."""
    gaps = np.random.default_rng(1).exponential(1 / REQUESTS_PER_S, num_requests)
    blocks = INPUT_TOKENS // trace_files.TIMED_BLOCK_TOKENS
    with path.open("w") as file:
        for number, at in enumerate(np.cumsum(gaps) - gaps[0]):
            ids = list(range(number * blocks, (number + 1) * blocks))
            entry = {"timestamp": round(at, 6), "input_length": INPUT_TOKENS, "output_length": 1, "hash_ids": ids}
            file.write(json.dumps(entry) + "\n")


def cpu_s(command: list[str]) -> tuple[float, str]:
    """CPU seconds of a process on the last core, and what it printed."""
    core = max(os.sched_getaffinity(0))
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, preexec_fn=lambda: os.sched_setaffinity(0, {core})
    )
    if done.returncode:
        raise RuntimeError(f"{command[:6]} failed: {done.stderr[-2000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, done.stdout


def ours(url: str, trace: Path) -> list[str]:
    """Command that replays a trace with our client and prints what came of it."""
    return [sys.executable, __file__, url, str(trace)]


def theirs(url: str, trace: Path, num_requests: int, lab: Lab) -> list[str]:
    """Command that replays it with vLLM's client."""
    return [
        str(lab.python), "-W", "ignore", "-c", BENCH_SERVE, "--backend", "openai", "--base-url",
        url, "--endpoint", "/v1/completions", "--model", "lab", "--tokenizer", str(lab.model()),
        "--dataset-name", "timed_trace", "--dataset-path", str(trace), "--num-prompts", str(num_requests),
        "--disable-tqdm", "--ignore-eos",
    ]  # fmt: skip


def ratios() -> list[Ratio]:
    """The client's two promises; the second needs the lab, whose environment has vLLM's client."""
    lab = Lab()
    with tempfile.TemporaryDirectory() as folder, echo() as url:
        traces = {number: Path(folder) / f"{number}.jsonl" for number in (MANY, FEW)}
        for number, path in traces.items():
            write_trace(path, number)
        runs, shares = [], []
        for _ in range(3):
            (many_s, printed), (few_s, _) = (cpu_s(ours(url, traces[number])) for number in (MANY, FEW))
            runs.append(json.loads(printed))
            shares.append((many_s - few_s) / (MANY - FEW))
        if lab.is_installed:
            their_s = [cpu_s(theirs(url, traces[number], number, lab))[0] for number in (MANY, FEW)]
    late_ms = statistics.median(run["lateness_p99_ms"] for run in runs)
    per_s = statistics.median(run["requests_per_s"] for run in runs)
    found = [
        Ratio(
            f"replay client, {per_s:.0f} requests/s: lateness P99 against its limit",
            late_ms, LIMIT_MS, "ms", late_ms / LIMIT_MS, f"< 5 ms at ≥ {WANTED_PER_S}/s",
            late_ms < LIMIT_MS and per_s >= WANTED_PER_S,
        )
    ]  # fmt: skip
    if lab.is_installed:
        mine, other = (1e6 * s for s in (statistics.median(shares), (their_s[0] - their_s[1]) / (MANY - FEW)))
        found.append(at_most("replay client against `vllm bench serve`: CPU per request", mine, other, "µs", 0.5))
    else:
        print(f"no row for `vllm bench serve`: no lab at {lab.folder}; run `rackbook engine up`", file=sys.stderr)
    return found


def main() -> None:
    """Replay a trace, and print rate and lateness."""
    trace = trace_files.read(sys.argv[2])
    settings = Settings("lab", lateness_limit_ms=LIMIT_MS)
    load = open_loop(trace, 1)
    done = client.replay(load, bodies(trace, prompts(trace, 1), settings), targets([sys.argv[1]], 1), settings)
    answered = done.requests.filter(pl.col("error").is_null())
    if done.stopped or answered.height < len(load):
        raise SystemExit(f"the replay failed: {done.stopped}")
    rate = answered.height / done.requests["done_s"].max()
    print(json.dumps({"lateness_p99_ms": done.lateness_p99_ms, "requests_per_s": rate}))


if __name__ == "__main__":
    main()
