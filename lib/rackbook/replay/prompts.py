"""Prompts of a trace as token ids: drawn from a seed, the same on every rank and in every replay.

Two requests differ within their first three tokens, so a prefix cache has nothing to offer, however large it is; unless
the known prefixes are asked for. Then the turns of a session are cuts of one stream of tokens, and the part that every
request knows, such as a system prompt, is the same in all sessions. What an engine answers is not in it: a conversation
goes on with drawn tokens where the answer would stand, so that a replay does not depend on what was generated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rackbook.errors import ParameterError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rackbook.replay.traces import Trace

_NAMED_TOKENS = 3
"""Tokens at the beginning of a prompt that tell it from all others."""

_COMMON, _OWN = 0, 1


@dataclass(frozen=True)
class Vocabulary:
    """Which token ids prompts are made of.

    Attributes:
        lowest: the smallest id; special tokens usually lie below.
        num_ids: how many ids from there; the model must know them all.
    """

    lowest: int = 100
    num_ids: int = 900

    def __post_init__(self) -> None:
        if self.lowest < 0 or self.num_ids < 2:
            raise ParameterError(
                f"token ids: got {self.num_ids} ids from {self.lowest}, allowed: at least 2 ids from 0 or above"
            )


def prompts(
    trace: Trace, seed: int, *, known_prefixes: bool = False, vocabulary: Vocabulary | None = None
) -> list[NDArray[np.int64]]:
    """The prompt of each request.

    Args:
        trace: the requests.
        seed: of the tokens.
        known_prefixes: requests share the prefixes that the trace knows; else nothing.
        vocabulary: the ids to use.

    Returns:
        Token ids of each request, as many as its input tokens.

    Raises:
        ParameterError: known prefixes are asked for and the trace does not know them, or there are too few ids to tell
            the requests apart.
    """
    ids = vocabulary or Vocabulary()
    frame = trace.requests
    if frame.height > ids.num_ids**_NAMED_TOKENS:
        raise ParameterError(
            f"{frame.height:,} requests cannot be told apart by {_NAMED_TOKENS} tokens of {ids.num_ids} ids; use more"
        )
    lengths = frame["input_tokens"].to_list()
    if not known_prefixes:
        return [_own(ids, seed, request, length) for request, length in enumerate(lengths)]
    if frame["cached_tokens"].null_count():
        raise ParameterError(f"{trace.name}: known prefixes are asked for, but this trace does not know them")
    cached = frame["cached_tokens"].to_list()
    common = _drawn(ids, [seed, _COMMON], max(cached))
    if frame["session"].null_count():
        return [
            np.concatenate([common[:known], _own(ids, seed, request, length - known)])
            for request, (known, length) in enumerate(zip(cached, lengths, strict=True))
        ]
    return _of_sessions(ids, seed, common[: min(cached)], frame["session"].to_list(), lengths)


def _of_sessions(
    ids: Vocabulary, seed: int, common: NDArray[np.int64], sessions: list[str], lengths: list[int]
) -> list[NDArray[np.int64]]:
    longest: dict[str, int] = {}
    for session, length in zip(sessions, lengths, strict=True):
        longest[session] = max(longest.get(session, 0), length)
    streams = {
        session: np.concatenate([common, _own(ids, seed, number, max(length - common.size, 0))])
        for number, (session, length) in enumerate(longest.items())
    }
    return [streams[session][:length] for session, length in zip(sessions, lengths, strict=True)]


def _own(ids: Vocabulary, seed: int, number: int, length: int) -> NDArray[np.int64]:
    tokens = _drawn(ids, [seed, _OWN, number], length)
    for place in range(min(_NAMED_TOKENS, length)):
        number, digit = divmod(number, ids.num_ids)
        tokens[place] = ids.lowest + digit
    return tokens


def _drawn(ids: Vocabulary, seeds: list[int], length: int) -> NDArray[np.int64]:
    return np.random.default_rng(seeds).integers(ids.lowest, ids.lowest + ids.num_ids, length)
