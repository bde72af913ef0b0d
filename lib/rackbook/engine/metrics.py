"""The counters of a vLLM server: ``/metrics`` in Prometheus' text format, and their growth between two readings."""

from __future__ import annotations

import math
import re
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import polars as pl

from rackbook.errors import DataError, one_of
from rackbook.tables import column

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'\s*([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES = {r"\\": "\\", r"\"": '"', r"\n": "\n"}

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Snapshot:
    """One reading of all metrics.

    Attributes:
        values: value by name and sorted labels.
        kinds: counter, gauge, histogram, summary or untyped, by the name in the ``# TYPE`` line.
    """

    values: Mapping[tuple[str, Labels], float]
    kinds: Mapping[str, str]

    @classmethod
    def parse(cls, text: str, where: str = "/metrics") -> Self:
        """Read the text format.

        ``_created`` series are left out: they hold the moment at which a series began.

        Raises:
            DataError: a line of another form, or no sample at all; names the line.
        """
        values: dict[tuple[str, Labels], float] = {}
        kinds: dict[str, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            stripped = line.strip()
            if stripped.startswith("#"):
                words = stripped.split()
                if len(words) == 4 and words[1] == "TYPE":
                    kinds[words[2]] = words[3]
                continue
            if not stripped:
                continue
            match = _SAMPLE.match(stripped)
            try:
                if match is None:
                    raise ValueError("not a sample")
                key, value = (match[1], _labels(match[2] or "")), float(match[3])
            except ValueError as problem:
                raise DataError(f"{where}, line {number}: {problem}: got {line[:200]!r}") from None
            if not match[1].endswith("_created"):
                values[key] = value
        if not values:
            raise DataError(f"{where}: no metric in {len(text)} characters; is it the address of a vLLM server?")
        return cls(values, kinds)

    def names(self) -> set[str]:
        """The names of all series."""
        return {name for name, _ in self.values}

    def total(self, name: str, **labels: str) -> float:
        """Sum of a series over all labels that are not given.

        Raises:
            DataError: no such series.
        """
        found = [v for (n, own), v in self.values.items() if n == name and labels.items() <= dict(own).items()]
        if not found:
            raise DataError(one_of(name, self.names(), "metric"))
        return math.fsum(found)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums of a series by the value of one label; empty if there is no such series."""
        found: dict[str, float] = {}
        for (n, own), value in self.values.items():
            if n == name and label in dict(own):
                found[dict(own)[label]] = found.get(dict(own)[label], 0.0) + value
        return found

    def is_counter(self, name: str) -> bool:
        """Whether a series only grows: a counter, or the buckets, sum or count of a histogram."""
        base = re.sub(r"_(?:bucket|sum|count)$", "", name)
        kind = self.kinds.get(name) or self.kinds.get(name.removesuffix("_total"))
        return kind == "counter" or (base != name and self.kinds.get(base) in ("histogram", "summary"))


def fetch(base_url: str, timeout_s: float = 10.0) -> Snapshot:
    """Read the metrics of a running server.

    Args:
        base_url: of the server, e.g. "http://127.0.0.1:8000".
        timeout_s: longest wait.

    Raises:
        DataError: no answer, or none in the text format.
    """
    return Snapshot.parse(fetch_text(base_url, timeout_s), f"{base_url}/metrics")


def fetch_text(base_url: str, timeout_s: float = 10.0) -> str:
    """The text of ``/metrics``, to be kept with a run.

    Raises:
        DataError: no answer.
    """
    url = f"{base_url.rstrip('/')}/metrics"
    if not url.startswith(("http://", "https://")):
        raise DataError(f"got the server address {base_url!r}, expected one like http://127.0.0.1:8000")
    try:
        # a proxy of the environment is for the world outside, not for a server of one's own
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(url, timeout=timeout_s) as answer:
            return answer.read().decode("utf-8")
    except (urllib.error.URLError, OSError, UnicodeDecodeError) as problem:
        raise DataError(f"{url}: no metrics: {problem}; is the server running?") from None


def growth(before: Snapshot, after: Snapshot) -> Snapshot:
    """What every counter grew by between two readings of one server.

    A series appears when it first counts, so one that the first reading lacks began at 0.

    Raises:
        DataError: a counter fell or vanished: the server was restarted in between.
    """
    counters = {key: value for key, value in after.values.items() if after.is_counter(key[0])}
    for key, value in before.values.items():
        if before.is_counter(key[0]) and key not in counters:
            raise DataError(f"metric {_shown(key)}: vanished between two readings; was the server restarted?")
        if key in counters and counters[key] < value:
            raise DataError(
                f"metric {_shown(key)}: fell from {value:g} to {counters[key]:g} between two readings; "
                "was the server restarted?"
            )
    return Snapshot({key: value - before.values.get(key, 0.0) for key, value in counters.items()}, after.kinds)


def prefix_hits(grown: Snapshot) -> pl.DataFrame:
    """Prefix-cache hits of each engine.

    Args:
        grown: of :func:`growth`.

    Returns:
        By engine: rank, looked_up_tokens, hit_tokens, prefix_hit_percent (null where nothing was looked up, as with
        prefix caching off).
    """
    queries = grown.by_label("vllm:prefix_cache_queries_total", "engine")
    hits = grown.by_label("vllm:prefix_cache_hits_total", "engine")
    rows = [
        {
            "rank": int(engine),
            "looked_up_tokens": round(queries[engine]),
            "hit_tokens": round(hits.get(engine, 0.0)),
            "prefix_hit_percent": 100 * hits.get(engine, 0.0) / queries[engine] if queries[engine] else None,
        }
        for engine in sorted(queries, key=int)
    ]
    names = ("rank", "looked_up_tokens", "hit_tokens", "prefix_hit_percent")
    return pl.DataFrame(rows, schema={name: column(name).dtype for name in names}, orient="row")


def prefix_hit_percent(*grown: Snapshot) -> float | None:
    """Prefix-cache hits of all engines of all servers, in percent of the looked-up tokens; None where none was."""
    found = [prefix_hits(each) for each in grown]
    looked_up = sum(each["looked_up_tokens"].sum() for each in found)
    return 100 * sum(each["hit_tokens"].sum() for each in found) / looked_up if looked_up else None


def _labels(text: str) -> Labels:
    found, position = [], 0
    while position < len(text):
        match = _LABEL.match(text, position)
        if match is None:
            raise ValueError("labels of an unknown form")
        found.append((match[1], re.sub(r"\\.", lambda m: _ESCAPES.get(m[0], m[0]), match[2])))
        position = match.end()
    return tuple(sorted(found))


def _shown(key: tuple[str, Labels]) -> str:
    name, labels = key
    return name + (f"{{{','.join(f'{k}={v}' for k, v in labels)}}}" if labels else "")
