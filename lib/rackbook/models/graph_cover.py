"""Which engine steps a CUDA graph of a limited size covers when prompts start among decoding requests.

Every rank of a data-parallel engine pads its step to the largest one, so one rank with a prompt decides for all.
"""

from __future__ import annotations

from dataclasses import dataclass

from scipy import special

from rackbook.errors import ParameterError


@dataclass(frozen=True)
class MixedSteps:
    """Steps of ranks that always have the same number of requests, each of fixed prompt and output length.

    Attributes:
        requests_per_rank: requests on each rank: those that decode and those whose prompt starts.
        prompt_tokens: tokens of a prompt.
        output_tokens: tokens that each request generates.
        tokens_per_step: tokens that a step yields for a decoding request.
        draft_tokens: tokens drafted per step; a decoding request takes one more of the step.
        max_step_tokens: tokens that a step takes at most; what exceeds it waits.
        num_ranks: ranks that pad to the largest.
    """

    requests_per_rank: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_step: float
    draft_tokens: int
    max_step_tokens: int
    num_ranks: int

    def __post_init__(self) -> None:
        counts = (self.requests_per_rank, self.prompt_tokens, self.output_tokens, self.num_ranks)
        if min(counts) < 1 or self.draft_tokens < 0 or not 1 <= self.tokens_per_step <= 1 + self.draft_tokens:
            raise ParameterError(
                f"mixed steps: got {self}, allowed: counts of at least 1, and from 1 to {1 + self.draft_tokens} "
                "tokens per step"
            )
        if self.decode_only_tokens > self.max_step_tokens:
            raise ParameterError(
                f"max_step_tokens: got {self.max_step_tokens}, allowed: at least {self.decode_only_tokens}, what "
                f"{self.requests_per_rank} decoding requests take"
            )

    @property
    def decode_only_tokens(self) -> int:
        """Tokens of a step in which every request decodes."""
        return self.requests_per_rank * (1 + self.draft_tokens)

    @property
    def starts_per_rank_and_step(self) -> float:
        """Prompts that start on a rank per step, on average: as many as requests end."""
        return self.requests_per_rank * self.tokens_per_step / self.output_tokens

    def step_tokens(self, num_new_prompts: int) -> int:
        """Tokens of a step in which so many of the requests bring their prompt and the others decode."""
        decoding = self.requests_per_rank - num_new_prompts
        return min(decoding * (1 + self.draft_tokens) + num_new_prompts * self.prompt_tokens, self.max_step_tokens)

    def most_prompts_within(self, capture_tokens: int) -> int:
        """New prompts that a step can hold and stay within the graphs; −1 where not even decoding alone fits."""
        if self.decode_only_tokens > capture_tokens:
            return -1
        fits = [n for n in range(self.requests_per_rank + 1) if self.step_tokens(n) <= capture_tokens]
        return len(fits) - 1

    def covered_if_independent(self, capture_tokens: int) -> float:
        """Share of steps within the graphs if requests start independently of each other, on all ranks.

        The number of starts per rank and step is then Poisson; a step is covered if it is on every rank. A prompt that
        does not fit into one step prolongs the mixed steps, which is left out: less is covered then.
        """
        most = self.most_prompts_within(capture_tokens)
        return float(special.pdtr(most, self.starts_per_rank_and_step)) ** self.num_ranks if most >= 0 else 0.0

    def covered_if_together(self, capture_tokens: int) -> float:
        """Share of steps within the graphs if all requests start in one wave, and decode by themselves after it.

        The prompts fill as many steps as they can; what is left of them is one smaller step.
        """
        full, left = divmod(self.requests_per_rank * self.prompt_tokens, self.max_step_tokens)
        steps = [
            (self.max_step_tokens, full),
            (left, 1 if left else 0),
            (self.decode_only_tokens, self.output_tokens / self.tokens_per_step),
        ]
        return sum(number for tokens, number in steps if tokens <= capture_tokens) / sum(number for _, number in steps)
