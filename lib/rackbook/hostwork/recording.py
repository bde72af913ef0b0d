"""One recorded run of all host-side measurements: all-reduces, copies of a prompt, block tables, rows of KV cache."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from rackbook import catalog, provenance, runs
from rackbook.errors import RackbookError
from rackbook.hostwork import block_tables, collectives, kv_rows, prompt_copies
from rackbook.hostwork.foreign_load import Watch
from rackbook.runs import Recorder, Run

TOPIC = "cpu_overhead"

MODEL = "deepseek-v4.1-flash"

PROMPT_TOKENS = (4_096, 16_384, 65_536, 262_144, 875_520, 1_048_576)
"""Prompt lengths of the copies and the block tables; 875,520 is the published 855K."""

ROW_COUNTS = (256, 2_048, 16_384)

SHARES = {"all-reduces": 0.6, "copies": 0.22, "tables": 0.04, "rows": 0.12}
"""Parts of the budget; the rest is for starting processes."""


def record(
    params: Mapping[str, Any],
    *,
    rank_counts: Sequence[int],
    interpreter: Path | str | None,
    block_tokens: int,
    budget_s: float,
    seed: int,
    ranks_file: str | None = None,
    root: Path | None = None,
) -> Run:
    """Measure everything on this machine and keep it as a run.

    Each part is watched by itself, the all-reduces by the number of ranks: work of others that is little over the whole
    run can be much in one part. The load average at the start is only noted: it still counts work that ended before.

    Args:
        params: parameters of the notebook, to be kept with the run.
        rank_counts: numbers of ranks, 2 to 256.
        interpreter: Python of the ranks; see :func:`default_interpreter`.
        block_tokens: tokens of a KV block.
        budget_s: time for all of it, about.
        seed: of token ids and of where the rows lie.
        ranks_file: what ranks that torchrun or Slurm started wrote, on this machine or others; joins the run.
        root: folder of runs; the usual one if None.

    Returns:
        The run, with the tables all_reduces, copies, tables and rows, and with the reason for every all-reduce that
        was not measured in its provenance under ``absent``.

    Raises:
        ParameterError: a parameter that is not allowed.
        DataError: the file of the launched ranks cannot be read.
        RankError: a rank failed.
        TransferError: the transfer of rows failed.
    """
    attention = catalog.model(MODEL).attention
    machine = provenance.machine()
    elsewhere = None if ranks_file is None else collectives.read_launched(Path(ranks_file))
    num_cores = machine["usable_cores"]
    with runs.record(TOPIC, params, machine=machine, root=root) as run:
        found = collectives.measure(rank_counts, interpreter=interpreter, budget_s=SHARES["all-reduces"] * budget_s)
        run.describe(absent=found.absent, ranks=found.versions)
        for doubt in found.doubts:
            run.flag(f"all-reduces, {doubt}")
        measured = [found.points] if elsewhere is None else [found.points, elsewhere.points]
        run.write_points(pl.concat(measured, how="diagonal_relaxed"), "all_reduces")
        with _watched(run, "copies", num_cores):
            copies = prompt_copies.measure(PROMPT_TOKENS, budget_s=SHARES["copies"] * budget_s, seed=seed)
        run.write_points(copies, "copies")
        with _watched(run, "tables", num_cores):
            tables = block_tables.measure(
                PROMPT_TOKENS,
                window_tokens=attention.sliding_window_tokens.known,
                block_tokens=block_tokens,
                budget_s=SHARES["tables"] * budget_s,
            )
        run.write_points(tables, "tables")
        with _watched(run, "rows", num_cores):
            rows = kv_rows.measure(
                ROW_COUNTS,
                row_bytes=round(attention.kv_bytes_per_token.known),
                budget_s=SHARES["rows"] * budget_s,
                seed=seed,
            )
        run.write_points(rows, "rows")
    return runs.read(run.folder.parent / run.id)


@contextmanager
def _watched(run: Recorder, part: str, num_cores: float) -> Iterator[None]:
    before = Watch.now()
    yield
    for doubt in Watch.now().doubts(before, num_cores):
        run.flag(f"{part}: {doubt}")


def default_interpreter() -> Path | None:
    """The Python whose torch runs the Gloo ranks: this one if it has torch, else the CPU lab's where it is installed.

    None where neither has it: the all-reduces over sockets need no torch, and the run says why the others are absent.
    """
    from importlib.util import find_spec

    if find_spec("torch") is not None:
        return Path(sys.executable)
    try:
        from rackbook.engine.lab import Lab

        lab = Lab()
        return lab.python if lab.is_installed else None
    except RackbookError:
        return None
