"""The client of a replay: sends a load to any server with vLLM's completions interface, and notes what came when.

One process, one event loop. What is sent is prepared before, so that nothing but writing and reading happens in the
replay. A replay in which a request failed says nothing about throughput, so it ends at the first failure; what was
measured until then is kept.
"""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from rackbook.errors import ParameterError
from rackbook.replay.loads import NONE, Load
from rackbook.replay.sender import Sender
from rackbook.replay.targets import Settings, Target

_NEVER_SENT = "not sent: the replay had ended"
_SLICE_S = 0.1
_CUT_OFF = "no answer yet when the replay ended"


@dataclass(frozen=True, eq=False)
class Replayed:
    """What came of a replay.

    Attributes:
        requests: one row per send in order of the load: rank, request, session, scheduled_s, sent_s, first_token_s,
            done_s (since the start of the replay; null where it did not happen), input_tokens and output_tokens (as the
            server counts them, null without an answer), http_status, error (null if there was none).
        stopped: why it ended early; empty if it did not.
        interrupted: it was ended by the user.
        num_resent: sends repeated because a kept connection had been closed by the server.
        lateness_p99_ms: P99 of sent − scheduled; null if nothing was sent.
        cpu_us_per_request: CPU time of the client per request sent.
        flags: doubts; a replay with a flag gives no loss.
    """

    requests: pl.DataFrame
    stopped: str
    interrupted: bool
    num_resent: int
    lateness_p99_ms: float | None
    cpu_us_per_request: float | None
    flags: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether throughput may be read from it."""
        return not self.flags


def replay(
    load: Load, bodies: Sequence[bytes], targets: Sequence[Target], settings: Settings, *, salt: str = ""
) -> Replayed:
    """Send a load and wait for the answers.

    Args:
        load: what goes out when.
        bodies: of each request of the trace, from :func:`rackbook.replay.targets.bodies`.
        targets: one per rank.
        settings: how to send.
        salt: the server's prefix cache keeps requests of different salts apart; empty sends none.

    Returns:
        What was measured, also when the replay failed or the user interrupted it.

    Raises:
        ParameterError: another number of targets than ranks, or of bodies than requests.
    """
    if len(targets) != load.num_ranks or len(bodies) != load.trace.requests.height:
        raise ParameterError(
            f"got {len(targets)} targets and {len(bodies)} bodies for {load.num_ranks} ranks and "
            f"{load.trace.requests.height} requests"
        )
    sender = Sender(load, bodies, targets, settings, salt)
    done = threading.Event()
    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(sender.run())
        except BaseException as problem:
            failed.append(problem)
        finally:
            done.set()

    # A thread of its own, since a notebook's kernel has a running event loop already.
    gc.collect()
    gc.freeze()  # a full collection among a caller's many objects would delay sends by tens of milliseconds
    thread = threading.Thread(target=run, name="replay", daemon=True)
    thread.start()
    try:
        # In slices, since a signal that another thread happened to get does not end a wait without a limit.
        while not done.wait(_SLICE_S):
            pass
    except BaseException as problem:  # a request to end, such as SIGTERM, raises here as well
        sender.interrupt()
        if not isinstance(problem, KeyboardInterrupt):
            raise
    finally:
        thread.join()
        gc.unfreeze()
    if failed:
        raise failed[0]
    return _result(load, settings, sender)


def _result(load: Load, settings: Settings, sent: Sender) -> Replayed:
    frame = _frame(load, sent, streamed=settings.stream)
    late = (frame["sent_s"] - frame["scheduled_s"]).drop_nulls()
    p99 = None if late.is_empty() else 1e3 * float(late.quantile(0.99, interpolation="linear"))
    return Replayed(
        requests=frame,
        stopped=sent.stopped,
        interrupted=sent.interrupted,
        num_resent=len(sent.resent),
        lateness_p99_ms=p99,
        cpu_us_per_request=1e6 * sent.cpu_s / late.len() if late.len() else None,
        flags=_flags(load, settings, frame, sent.stopped, p99),
    )


def _frame(load: Load, sent: Sender, *, streamed: bool) -> pl.DataFrame:
    exchanges, indices = sent.exchanges, range(len(load))

    def seconds(times_ns: Iterable[int]) -> list[float | None]:
        return [(t - sent.start_ns) * 1e-9 if t else None for t in times_ns]

    session = load.trace.requests["session"].to_numpy()[load.request]
    counts = [sent.usage.get(index, (None, None)) for index in indices]
    errors = [
        None if index in sent.usage else sent.errors.get(index, _CUT_OFF if exchanges[index] else _NEVER_SENT)
        for index in indices
    ]
    ended = [e if e and (e.index in sent.usage or e.index in sent.errors) else None for e in exchanges]
    return pl.DataFrame(
        {
            "rank": load.rank,
            "request": load.request,
            "session": pl.Series(session.tolist(), dtype=pl.String),
            "scheduled_s": [None if at == NONE else at * 1e-9 for at in sent.scheduled_ns.tolist()],
            "sent_s": seconds(e.sent_ns if e else 0 for e in exchanges),
            "first_token_s": seconds(e.first_ns if e and streamed else 0 for e in exchanges),
            "done_s": seconds(e.done_ns if e else 0 for e in ended),
            "input_tokens": [count[0] for count in counts],
            "output_tokens": [count[1] for count in counts],
            "http_status": [e.status or None if e else None for e in exchanges],
            "error": errors,
        },
        schema_overrides=dict.fromkeys(("scheduled_s", "sent_s", "first_token_s", "done_s"), pl.Float64)
        | dict.fromkeys(("input_tokens", "output_tokens", "http_status"), pl.Int64)
        | {"error": pl.String},
    )


def _flags(
    load: Load, settings: Settings, frame: pl.DataFrame, stopped: str, lateness_p99_ms: float | None
) -> tuple[str, ...]:
    flags = []
    if stopped:
        flags.append(f"ended early: {stopped}")
    limit_ms = settings.lateness_limit_ms
    if lateness_p99_ms is not None and lateness_p99_ms > limit_ms:
        flags.append(f"client fell behind: lateness p99 {lateness_p99_ms:.1f} ms, limit {limit_ms:g} ms")
    wanted = load.trace.requests["input_tokens"].gather(load.request).alias("wanted")
    other = frame.with_columns(wanted).filter(pl.col("input_tokens") != pl.col("wanted"))
    if not other.is_empty():
        row = other.row(0, named=True)
        flags.append(
            f"the server counted {row['input_tokens']} prompt tokens of request {row['request']}, sent were "
            f"{row['wanted']}"
        )
    return tuple(flags)
