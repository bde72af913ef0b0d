"""What the last lines of a vLLM process say about why it ended."""

from __future__ import annotations

import re
from pathlib import Path

_READ_BYTES = 200_000

# first match wins: a cause before what follows from it
_CAUSES = (
    (r"Address already in use|EADDRINUSE", "a port is taken: by another server, or one that is just ending"),
    (r"unrecognized arguments?: (?P<found>.+)", "vLLM does not know these options: {found}"),
    (r"error: argument (?P<found>.+)", "vLLM refuses an option: {found}"),
    (r"No module named '?(?P<found>[\w.]+)", "the Python that runs vLLM lacks the module {found}"),
    (r"out of memory|OutOfMemoryError|Cannot allocate memory", "the memory is too small: fewer sequences, a shorter "
     "context, or another process holds it"),
    (r"Available memory on node|No available memory for the cache blocks", "the memory left is too small for the KV "
     "cache: make VLLM_CPU_KVCACHE_SPACE or the context smaller, or end what holds the memory"),
    (r"max_model_len .*greater than|maximum model length|max seq len .*larger than", "the context is longer than the "
     "model or its KV cache allows"),
    (r"(?:Repo id must be|not a valid model identifier|couldn't connect|Cannot find the requested files|"
     r"does not appear to have a file named)", "the model is not there: give a folder, or fetch it first"),
    (r"Free memory on device", "the GPU's memory is held by another process"),
    (r"No CUDA GPUs are available|no NVIDIA|Failed to infer device type", "there is no GPU that this vLLM can use"),
    (r"NotImplementedError", "this vLLM cannot do that on this machine"),
    (r"(?P<found>(?:\w+Error|\w+Exception): .+)", "{found}"),
)  # fmt: skip


def likely_cause(log: Path) -> str | None:
    """Why a process ended, in words; None if nothing known is in its log.

    Args:
        log: what it printed.
    """
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _READ_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    for pattern, words in _CAUSES:
        found = list(re.finditer(pattern, text))
        if found:
            return words.format(**{name: value.strip()[:200] for name, value in found[-1].groupdict().items()})
    return None
