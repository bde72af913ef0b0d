"""What the servers themselves say about a replay: tokens and cache hits of each rank, and the steps in their log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import polars as pl

from rackbook.engine import logs, metrics
from rackbook.errors import DataError

_PROMPT = "vllm:prompt_tokens_total"
_COUNTED = {"rank": pl.Int64, "counted_tokens": pl.Int64, "hit_tokens": pl.Int64}


@dataclass
class Witness:
    """Reads the counters and the log before and after each replay.

    Attributes:
        base_urls: of the servers, in the order of the ranks.
        num_ranks: on all servers together.
        log_paths: one log per server where there is any; a log that is still being written is read as far as it goes.
        silent: why there are no counters; empty while there are.
        unread: why there are no steps although there is a log; empty while there are.
    """

    base_urls: Sequence[str]
    num_ranks: int
    log_paths: Sequence[Path] = ()
    silent: str = ""
    unread: str = ""
    _before: list[metrics.Snapshot] = field(default_factory=list)
    _read_to: list[int] = field(default_factory=list)

    def begin(self) -> None:
        """Note where the counters and the logs stand."""
        self._before = self._snapshots()
        self._read_to = [path.stat().st_size if path.is_file() else 0 for path in self.log_paths]

    def counted(self) -> pl.DataFrame:
        """What the counters grew by since :meth:`begin`.

        Returns:
            rank, counted_tokens (prompt tokens, those in the cache included), hit_tokens (null without a prefix cache);
            empty where the servers do not tell by engine.
        """
        after = self._snapshots()
        if not after or not self._before:
            return pl.DataFrame(schema=_COUNTED)
        each, rows = self.num_ranks // len(self.base_urls), []
        for server, (old, new) in enumerate(zip(self._before, after, strict=True)):
            try:
                grown = metrics.growth(old, new)
            except DataError as problem:
                self.silent = str(problem)
                return pl.DataFrame(schema=_COUNTED)
            tokens, hits = (grown.by_label(name, "engine") for name in (_PROMPT, "vllm:prefix_cache_hits_total"))
            engines = sorted(tokens, key=int)
            if len(engines) != each:
                self.silent = f"{self.base_urls[server]}/metrics: {_PROMPT} of {len(engines)} engines, expected {each}"
                return pl.DataFrame(schema=_COUNTED)
            rows += [
                {
                    "rank": server * each + place,
                    "counted_tokens": round(tokens[engine]),
                    "hit_tokens": round(hits[engine]) if engine in hits else None,
                }
                for place, engine in enumerate(engines)
            ]
        return pl.DataFrame(rows, schema=_COUNTED)

    def steps(self) -> pl.DataFrame:
        """The iterations that the servers logged since :meth:`begin`; see :func:`rackbook.engine.logs.iterations`.

        Returns:
            rank, iteration, num_prefill_requests, num_prefill_tokens, num_decode_tokens, step_ms, dummy_step.
        """
        columns = ("rank", "iteration", "num_prefill_requests", "num_prefill_tokens", "num_decode_tokens", "step_ms")
        each, parts = self.num_ranks // max(len(self.log_paths), 1), [logs.iterations("")]
        for server, (path, begin) in enumerate(zip(self.log_paths, self._read_to, strict=True)):
            try:
                with path.open("rb") as file:
                    file.seek(begin)
                    text = file.read().decode("utf-8", "replace")
                found = logs.iterations(text, path.name)
            except (OSError, DataError) as problem:  # the replay is worth keeping without
                self.unread = str(problem)
                continue
            parts.append(found.with_columns((pl.col("rank").fill_null(0) + server * each).alias("rank")))
        return pl.concat(parts).select(*columns, "dummy_step")

    def _snapshots(self) -> list[metrics.Snapshot]:
        if self.silent:
            return []
        try:
            return [metrics.fetch(url) for url in self.base_urls]
        except DataError as problem:
            self.silent = str(problem)
            return []


def doubts(sent: pl.DataFrame, counted: pl.DataFrame, *, hits_wanted: bool) -> list[str]:
    """What the counters say against a replay.

    Args:
        sent: rank, input_tokens of its requests.
        counted: of :meth:`Witness.counted`; empty gives no doubt.
        hits_wanted: the prompts share known prefixes, so hits are wanted.
    """
    found = []
    per_rank = dict(sent.group_by("rank").agg(pl.col("input_tokens").sum()).iter_rows())
    for row in counted.iter_rows(named=True):
        wanted = per_rank.get(row["rank"], 0)
        if row["counted_tokens"] != wanted:
            found.append(f"rank {row['rank']} counted {row['counted_tokens']:,} prompt tokens, sent were {wanted:,}")
        if row["hit_tokens"] and not hits_wanted:
            found.append(f"rank {row['rank']} found {row['hit_tokens']:,} prompt tokens in its prefix cache")
    return found
