"""Stands in for a Python that has vLLM: writes what ``bench forward`` would, with numbers made by hand.

Started as the real one is, behind ``-m torch.distributed.run`` or by ``slurm_rank.py``. FAKE_VLLM says what goes wrong:
"crash" ends it with a message, "hang" makes it sleep, "unsteady" spreads its samples, "few kernels" forgets a rank.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from forward_output import kernels, latency, result
from rackbook.engine.cases import Case

FASTER_WITH_MORE_RANKS_US = 24_000.0


def option(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def main() -> None:
    words = sys.argv[1:]
    if words[0] == "-c":
        print(json.dumps({"name": "vllm", "version": os.environ.get("FAKE_VERSION", "0.33.0"), "folder": None}))
        return
    print("loading", flush=True)
    behaviour = os.environ.get("FAKE_VLLM", "")
    if behaviour == "crash":
        sys.exit("torch.OutOfMemoryError: CUDA out of memory")
    if behaviour == "hang":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    print(*(f"{name}={os.environ.get(name)}" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")), flush=True)
    if option(words, "--node-rank") not in (None, "0") or os.environ.get("RANK", "0") != "0":
        return
    cases = [Case.parse(words[place + 1]) for place, word in enumerate(words) if word == "--case"]
    num_ranks = int(option(words, "--data-parallel-size"))
    scope = {"timing_scope": "target_only"} if "--exclude-drafter" in words else {}
    if behaviour == "unsteady":
        scope |= {"latency_us": latency(spread=3.0), "routing": "real"}
    Path(option(words, "--output-json")).write_text(json.dumps(result(cases, num_ranks, **scope)))
    folder = option(words, "--profile-dir")
    if folder:
        Path(folder).mkdir()
        for case in cases:
            for rank in range(num_ranks - (behaviour == "few kernels")):
                content = kernels(3000.0 + FASTER_WITH_MORE_RANKS_US / num_ranks + 10 * rank)
                (Path(folder) / f"{case.name}.rank{rank}.kernels.json").write_text(json.dumps(content))


if __name__ == "__main__":
    main()
