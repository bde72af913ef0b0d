"""How fast a user reads: the two quantities that are both called tokens/s per user, and what they imply."""

from __future__ import annotations

from rackbook.errors import ParameterError


def tpot_ms(interactivity: float) -> float:
    """Time per output token in ms of a request that receives so many tokens/s: 1000 ÷ interactivity.

    Each request has its own rate, so it has percentiles; the P90 of TPOT is its *slow* tail.

    Args:
        interactivity: output tokens per second that one running request receives.

    Raises:
        ParameterError: the rate is not positive.
    """
    return 1000 / _positive("interactivity", interactivity)


def throughput_per_user_tok_per_s(tok_per_s: float, concurrency: float) -> float:
    """System throughput ÷ concurrency, in tokens/s.

    An average over users *and* over everything that they wait for: queue, prefill, the agent's own tools.
    It has no percentiles, and it counts whatever ``tok_per_s`` counts.

    Args:
        tok_per_s: throughput of the whole system, all GPUs.
        concurrency: clients or requests in flight.

    Raises:
        ParameterError: an argument is not positive.
    """
    return _positive("tok_per_s", tok_per_s) / _positive("concurrency", concurrency)


def implied_step_ms(interactivity: float, acceptance_length: float) -> float:
    """Duration of a decode step in ms that gives one request this rate: tokens per step ÷ rate.

    Args:
        interactivity: output tokens per second of one request.
        acceptance_length: tokens that a step yields on average, the target's own token included.

    Raises:
        ParameterError: a rate that is not positive, or fewer than one token per step.
    """
    return _tokens_per_step(acceptance_length) * tpot_ms(interactivity)


def decode_tok_per_s_per_gpu(requests_per_gpu: float, acceptance_length: float, step_ms: float) -> float:
    """Output tokens per second of one decoding GPU: requests × tokens per step ÷ step time.

    Args:
        requests_per_gpu: requests that a GPU decodes at once.
        acceptance_length: tokens that a step yields per request, the target's own token included.
        step_ms: duration of a step in ms.

    Raises:
        ParameterError: an argument is not positive, or fewer than one token per step.
    """
    tokens = _positive("requests_per_gpu", requests_per_gpu) * _tokens_per_step(acceptance_length)
    return tokens * 1000 / _positive("step_ms", step_ms)


def _tokens_per_step(acceptance_length: float) -> float:
    if not acceptance_length >= 1:
        raise ParameterError(
            f"acceptance_length: got {acceptance_length!r}, allowed: a number ≥ 1 "
            "(a step yields the target's own token)"
        )
    return acceptance_length


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ParameterError(f"{name}: got {value!r}, allowed: a number > 0")
    return value
