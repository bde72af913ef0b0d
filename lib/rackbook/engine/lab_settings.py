"""How servers and clients of the CPU lab are started: what the lab runs and what a plan for it prints are the same."""

from __future__ import annotations

from collections.abc import Sequence

from rackbook.cores import core_ids

SERVER = "vllm.entrypoints.openai.api_server"
"""Module of the server: the program ``vllm`` looks for a distribution of that name and does not find the lab's."""

SERVED_MODEL = "lab"
"""What requests call the model."""

KV_CACHE_GIB = 1
"""KV cache of a rank."""

_POLITE = ("nice", "-n", "5")
"""The server gives way to the client, which shares the cores with ranks that wait busily: at equal priority the
client's timers fired up to 1.7 s late."""

CLIENT_MODEL = ("--served-model-name", SERVED_MODEL)
"""What a client of the lab is told besides the model's folder, which it takes the tokenizer from."""


def server(
    python: str, model: str, port: int, num_ranks: int, dtype: str, extra: Sequence[str] = ()
) -> tuple[str, ...]:
    """The command of a server.

    Args:
        python: the lab's interpreter.
        model: folder of the model.
        port: on 127.0.0.1.
        num_ranks: data-parallel ranks.
        dtype: of the weights, unless ``extra`` names one; vLLM would otherwise round 32-bit weights to 16 bits.
        extra: more options; they win over these.
    """
    weights = () if "--dtype" in extra else ("--dtype", dtype)
    ranks = ("--data-parallel-size", str(num_ranks)) if num_ranks > 1 else ()
    return (
        *_POLITE, python, "-W", "ignore", "-m", SERVER, "--model", model, *CLIENT_MODEL, *weights, "--enforce-eager",
        *ranks, "--host", "127.0.0.1", "--port", str(port), *extra,
    )  # fmt: skip


def environment(num_ranks: int, cores: str | None = None) -> dict[str, str]:
    """The variables of a server.

    Args:
        num_ranks: data-parallel ranks.
        cores: of each rank, as :func:`cores_by_rank` gives them; shared out of all usable ones if None.
    """
    return {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_CACHE_GIB),
        "VLLM_CPU_OMP_THREADS_BIND": cores or cores_by_rank(core_ids(), num_ranks),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",  # compiling vLLM's imports anew in each of its processes takes minutes
    }


def cores_by_rank(cores: Sequence[int], num_ranks: int) -> str:
    """Share out the cores: equally, one left to the API server and the client where there are more cores than ranks.

    vLLM's own choice gives every data-parallel rank the same core, which makes the ranks wait for each other.

    Args:
        cores: numbers of the cores that may be used.
        num_ranks: data-parallel ranks.

    Returns:
        Cores of each rank, as vLLM reads it: ranks between bars, cores between commas.
    """
    each = max(1, (len(cores) - 1) // num_ranks)
    start = len(cores) - each * num_ranks if len(cores) > num_ranks else 0
    shares = [[cores[(start + rank * each + place) % len(cores)] for place in range(each)] for rank in range(num_ranks)]
    return "|".join(",".join(str(core) for core in share) for share in shares)
