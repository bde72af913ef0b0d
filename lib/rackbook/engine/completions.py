"""A handful of completions at once, by token ids: enough to put a server into a known state, no load client."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from rackbook.errors import RackbookError

_FIRST_WORD_TOKEN = 3  # below are special tokens


@dataclass(frozen=True)
class Answer:
    """What a server gave for one prompt.

    Attributes:
        prompt_tokens: as the server counts them.
        output_tokens: as the server counts them.
        latency_s: from sending to the whole answer.
        content: the whole answer.
    """

    prompt_tokens: int
    output_tokens: int
    latency_s: float
    content: dict[str, Any]


def random_prompts(count: int, num_tokens: int, vocabulary: int, seed: int) -> list[list[int]]:
    """Prompts of random token ids, none of which shares a prefix that a cache would find.

    Args:
        count: how many.
        num_tokens: length of each.
        vocabulary: ids lie below it.
        seed: of the generator.
    """
    generator = np.random.default_rng(seed)
    return generator.integers(_FIRST_WORD_TOKEN, vocabulary, size=(count, num_tokens)).tolist()


def complete_together(
    base_url: str,
    model: str,
    prompts: Sequence[Sequence[int]],
    output_tokens: int,
    *,
    ranks: Sequence[int | None] = (),
    timeout_s: float = 600.0,
) -> list[Answer]:
    """Send all prompts at once and wait for all answers.

    Args:
        base_url: of the server.
        model: as the server calls it.
        prompts: token ids.
        output_tokens: length of every answer; an end-of-text token does not end it.
        ranks: data-parallel rank for each prompt; the server chooses if empty or None.
        timeout_s: longest wait for one answer.

    Returns:
        One answer per prompt, in order.

    Raises:
        RackbookError: a request failed, or an answer has another length; with what the server said.
    """
    found: list[Answer | Exception | None] = [None] * len(prompts)
    pinned = list(ranks) or [None] * len(prompts)
    bodies = [_body(model, prompt, output_tokens) for prompt in prompts]
    together = threading.Barrier(
        len(prompts)
    )  # writing long bodies takes time, in which early requests would run alone

    def send(place: int) -> None:
        try:
            found[place] = _complete(base_url, bodies[place], pinned[place], timeout_s, together)
        except Exception as problem:
            together.abort()
            found[place] = problem

    threads = [threading.Thread(target=send, args=(place,), daemon=True) for place in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    answers = []
    for answer in found:
        if not isinstance(answer, Answer):
            problems = [a for a in found if not isinstance(a, Answer)]
            first = next((p for p in problems if not isinstance(p, threading.BrokenBarrierError)), answer)
            raise RackbookError(f"{base_url}: {len(problems)} of {len(prompts)} requests failed: {first}")
        if answer.output_tokens != output_tokens:
            raise RackbookError(
                f"{base_url}: asked for {output_tokens} tokens, got {answer.output_tokens}; is the context too long?"
            )
        answers.append(answer)
    return answers


def _body(model: str, prompt: Sequence[int], output_tokens: int) -> bytes:
    fields = {
        "model": model, "prompt": list(prompt), "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    return json.dumps(fields).encode()


def _complete(base_url: str, body: bytes, rank: int | None, timeout_s: float, together: threading.Barrier) -> Answer:
    address = urlsplit(base_url)
    headers = {"Content-Type": "application/json"}
    if rank is not None:
        headers["X-data-parallel-rank"] = str(rank)
    if key := os.environ.get("VLLM_API_KEY"):
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=timeout_s)
    try:
        connection.connect()
        together.wait(timeout_s)
        started = time.monotonic()
        connection.request("POST", "/v1/completions", body, headers)
        response = connection.getresponse()
        text = response.read().decode("utf-8", "replace")
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise RackbookError(f"status {response.status}: {text[:300]}")
    latency_s = time.monotonic() - started
    content = json.loads(text)
    usage = content["usage"]
    return Answer(usage["prompt_tokens"], usage["completion_tokens"], latency_s, content)
