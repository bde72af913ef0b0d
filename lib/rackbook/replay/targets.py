"""Where the requests of each rank go, and how they are sent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from rackbook.errors import ParameterError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from rackbook.replay.traces import Trace


@dataclass(frozen=True)
class Target:
    """Where the requests of a rank go.

    Attributes:
        base_url: of the server.
        pinned_rank: value of the header X-data-parallel-rank; None sends none.
    """

    base_url: str
    pinned_rank: int | None


def targets(base_urls: Sequence[str], num_ranks: int) -> tuple[Target, ...]:
    """The target of each rank, for one server or several.

    One server gets the rank as a header. As many servers as ranks (external load balancing) get no header. Servers that
    each hold as many ranks (hybrid load balancing) get the rank among their own, in the order of the servers.

    Raises:
        ParameterError: the ranks cannot be dealt evenly to the servers, or an address is not one.
    """
    if not base_urls or num_ranks < 1 or num_ranks % len(base_urls):
        raise ParameterError(
            f"base_url: got {len(base_urls)} servers for {num_ranks} ranks, allowed: one server, or servers that hold "
            "equally many ranks"
        )
    for url in base_urls:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ParameterError(f"base_url: got {url!r}, allowed: an address such as http://127.0.0.1:8000")
    each = num_ranks // len(base_urls)
    alone = len(base_urls) == num_ranks and num_ranks > 1
    return tuple(
        Target(base_urls[rank // each].rstrip("/"), None if alone else rank % each) for rank in range(num_ranks)
    )


@dataclass(frozen=True)
class Settings:
    """How requests are sent.

    Attributes:
        model: name that the server serves.
        stream: whether tokens are streamed; without, there is no time of the first token.
        timeout_s: a request without its whole answer after this time has failed.
        lateness_limit_ms: the client has fallen behind if the P99 of sent − scheduled is above.
        api_key: sent as a bearer token; empty sends none.
    """

    model: str
    stream: bool = True
    timeout_s: float = 600.0
    lateness_limit_ms: float = 5.0
    api_key: str = ""


def bodies(trace: Trace, prompts: Sequence[NDArray[np.int64]], settings: Settings) -> list[bytes]:
    """The JSON of each request of the trace, without the opening brace and the salt that the client puts before it."""
    texts = [str(i) for i in range(1 + max(int(p.max()) for p in prompts))]
    stream = ',"stream":true,"stream_options":{"include_usage":true}' if settings.stream else ""
    model = json.dumps(settings.model)
    outputs = trace.requests["output_tokens"].to_list()
    return [
        (
            f'"model":{model},"max_tokens":{max(output, 1)},"ignore_eos":true,"temperature":0{stream},'
            f'"prompt":[{",".join([texts[i] for i in prompt.tolist()])}]}}'
        ).encode()
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def head(target: Target, settings: Settings) -> bytes:
    """The request line and headers of every request to a target, up to the length of the body."""
    parts = urlsplit(target.base_url)
    lines = [
        f"POST {parts.path}/v1/completions HTTP/1.1",
        f"Host: {parts.netloc}",
        "Content-Type: application/json",
        "Connection: keep-alive",
    ]
    if target.pinned_rank is not None:
        lines.append(f"X-data-parallel-rank: {target.pinned_rank}")
    if settings.api_key:
        lines.append(f"Authorization: Bearer {settings.api_key}")
    return "\r\n".join([*lines, "Content-Length: "]).encode()
