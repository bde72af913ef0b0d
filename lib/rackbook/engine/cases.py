"""The batches that ``vllm bench forward`` times, as vLLM 0.33.0 writes them on its command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rackbook.errors import ParameterError

_REQUEST = re.compile(r"(?:(\d+)\*)?(\d+)(?:@(\d+))?(c)?(?::(\d+))?", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*", re.ASCII)
FORM = "NAME=[N*]Q[@K][c][:D],…"


@dataclass(frozen=True)
class Request:
    """Equal requests of one step.

    Attributes:
        query_tokens: tokens that the step computes for each.
        context_tokens: tokens in the KV cache after the step, the query's included.
        draft_tokens: how many of the query tokens are drafts.
        chunked: the prefix was computed by earlier chunks of the same prompt; else a prefill's prefix is a cache hit.
        count: how many such requests.
    """

    query_tokens: int
    context_tokens: int
    draft_tokens: int = 0
    chunked: bool = False
    count: int = 1

    def __post_init__(self) -> None:
        """Refuse what vLLM refuses.

        Raises:
            ParameterError: no query, a context shorter than it, drafts without their step, a chunk without a prefix.
        """
        where = f"request {self.query_tokens}@{self.context_tokens}"
        if self.query_tokens < 1 or self.count < 1 or self.draft_tokens < 0:
            raise ParameterError(
                f"{where}: got {self.count} requests with {self.query_tokens} query and {self.draft_tokens} draft "
                "tokens, allowed: from 1, 1 and 0"
            )
        if self.context_tokens < self.query_tokens:
            raise ParameterError(
                f"{where}: got a context of {self.context_tokens} tokens, allowed: from the {self.query_tokens} of the "
                "query, which are part of it"
            )
        if self.draft_tokens and not self.is_decode:
            raise ParameterError(
                f"{where}: got {self.draft_tokens} draft tokens, expected 1 + {self.draft_tokens} query tokens and a "
                "context that is longer than they are"
            )
        if self.chunked and (self.is_decode or not self.prefix_tokens):
            raise ParameterError(f"{where}: a chunk is a prefill with a prefix")

    @property
    def prefix_tokens(self) -> int:
        """Tokens in the KV cache before the step."""
        return self.context_tokens - self.query_tokens

    @property
    def is_decode(self) -> bool:
        """Whether the step only decodes: one token, or one and the drafts, after a prefix."""
        return self.prefix_tokens > 0 and self.query_tokens == 1 + self.draft_tokens

    def __str__(self) -> str:
        """The shortest way to write it."""
        return (
            (f"{self.count}*" if self.count > 1 else "")
            + f"{self.query_tokens}"
            + (f"@{self.context_tokens}" if self.prefix_tokens else "")
            + ("c" if self.chunked else "")
            + (f":{self.draft_tokens}" if self.draft_tokens else "")
        )

    @classmethod
    def parse(cls, text: str) -> Request:
        """Read ``[N*]Q[@K][c][:D]``.

        Raises:
            ParameterError: another form, or a request that vLLM refuses.
        """
        found = _REQUEST.fullmatch(text.strip())
        if found is None:
            raise ParameterError(f"request {text!r}: allowed: [N*]Q[@K][c][:D], e.g. 16*6@65536:5")
        count, query, context, chunked, drafts = found.groups()
        return cls(int(query), int(context or query), int(drafts or 0), bool(chunked), int(count or 1))


@dataclass(frozen=True)
class Case:
    """One batch, the same on every rank.

    Attributes:
        name: also the start of its profile files' names.
        requests: what the batch holds.
    """

    name: str
    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        """Refuse a name that is no file name, and a batch without requests.

        Raises:
            ParameterError: either of them.
        """
        if not _NAME.fullmatch(self.name):
            raise ParameterError(f"case {self.name!r}: a name has letters, digits, '.', '_' and '-' only")
        if not self.requests:
            raise ParameterError(f"case {self.name!r}: a batch has at least one request")

    @property
    def num_requests(self) -> int:
        """Requests per rank."""
        return sum(request.count for request in self.requests)

    @property
    def num_tokens(self) -> int:
        """Tokens that a rank computes in the step."""
        return sum(request.count * request.query_tokens for request in self.requests)

    @property
    def context_tokens(self) -> int:
        """Longest context in the batch."""
        return max(request.context_tokens for request in self.requests)

    def __str__(self) -> str:
        """As it stands after ``--case``."""
        return f"{self.name}={','.join(map(str, self.requests))}"

    @classmethod
    def parse(cls, text: str) -> Case:
        """Read ``NAME=[N*]Q[@K][c][:D],…``.

        Raises:
            ParameterError: another form, or a batch that vLLM refuses.
        """
        name, equals, body = text.partition("=")
        if not equals:
            raise ParameterError(f"case {text!r}: allowed: {FORM}, e.g. c64k=16*6@65536:5")
        return cls(name.strip(), tuple(Request.parse(item) for item in body.split(",")))


def decode(name: str, requests: int, context_tokens: int, draft_tokens: int) -> Case:
    """A decode step: equal requests, each with its next token and its drafts."""
    return Case(name, (Request(1 + draft_tokens, context_tokens, draft_tokens, count=requests),))


def cached_prefill(name: str, new_tokens: int, cached_tokens: int) -> Case:
    """A prefill of one request on top of a prefix that the cache holds."""
    return Case(name, (Request(new_tokens, cached_tokens + new_tokens),))


def in_k(tokens: int) -> str:
    """A token count as names have it: 64k for 65,536, the number itself if it is no multiple of 1,024."""
    return f"{tokens // 1024}k" if tokens % 1024 == 0 else str(tokens)
