"""What a client that keeps a fixed number of requests in flight implies about their times, by Little's law.

Little's law: the mean number in a system is the rate at which they pass times the mean time that each stays.
Source: Little, A proof for the queuing formula L = λW, Operations Research 9 (1961).
"""

from __future__ import annotations

from dataclasses import dataclass

from rackbook.errors import ParameterError


@dataclass(frozen=True)
class ClosedLoop:
    """A run with fixed lengths whose client keeps ``concurrency`` requests in flight throughout.

    A run that starts and ends with fewer in flight has shorter requests than said here.

    Attributes:
        concurrency: requests in flight.
        output_tokens: tokens that each request generates.
        output_tok_per_s: tokens generated per second, all requests together.
        tpot_ms: mean time per output token after the first.
    """

    concurrency: int
    output_tokens: int
    output_tok_per_s: float
    tpot_ms: float

    def __post_init__(self) -> None:
        if self.concurrency < 1 or self.output_tokens < 1 or not (self.output_tok_per_s > 0 and self.tpot_ms > 0):
            raise ParameterError(
                f"closed loop: got {self}, allowed: at least one request and one token, and rates and times above 0"
            )

    @property
    def requests_per_s(self) -> float:
        """Requests that end per second."""
        return self.output_tok_per_s / self.output_tokens

    @property
    def ms_per_token(self) -> float:
        """Time in flight per output token: TPOT and the share of the waiting and the prefill."""
        return 1e3 * self.concurrency / self.output_tok_per_s

    @property
    def request_s(self) -> float:
        """Mean time of a request, end to end."""
        return self.concurrency / self.requests_per_s

    @property
    def decode_s(self) -> float:
        """Mean time from the first to the last token."""
        return (self.output_tokens - 1) * self.tpot_ms / 1e3

    @property
    def other_s(self) -> float:
        """What is left of a request: queueing, prefill, and seats that stay empty between two requests."""
        return self.request_s - self.decode_s

    @property
    def num_decoding(self) -> float:
        """Requests between their first and their last token at a time, on average."""
        return self.requests_per_s * self.decode_s
