"""Speed of the expert placement against vLLM's policy, both in the lab's Python, and memory of a long replay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from measure import Ratio, at_most, interleaved

LAYERS, EXPERTS, SLOTS, RANKS = 43, 256, 288, 32
STEPS, REPLAY_LAYERS, REPLAY_EXPERTS = 10_000, 40, 384
GIGABYTE = 1e9
LIBRARY = Path(__file__).resolve().parents[2] / "lib"


def against_vllm() -> dict[str, float]:
    """Milliseconds per call of vLLM's policy and ours, and the mean balancedness that each plans; in this Python."""
    from rackbook.engine import eplb_policy
    from rackbook.experts.placement import place

    loads = (np.random.default_rng(0).lognormal(0, 1, (LAYERS, EXPERTS)) * 1000).astype(np.int64)
    ours, theirs = (lambda: place(loads, SLOTS, RANKS)), (lambda: eplb_policy.place(loads, SLOTS, RANKS))
    planned = [even(call()) for call in (ours, theirs)]
    ours_s, theirs_s = interleaved(ours, theirs, repeats=9)
    return {
        "ours_ms": 1e3 * ours_s, "vllm_ms": 1e3 * theirs_s,
        "ours_planned": planned[0].mean(), "vllm_planned": planned[1].mean(),
        "worse_layers": int((planned[0] < planned[1] - 1e-12).sum()),
    }  # fmt: skip


def even(placement: object) -> np.ndarray:
    """Balancedness of the expected rank loads, by layer."""
    loads = (np.random.default_rng(0).lognormal(0, 1, (LAYERS, EXPERTS)) * 1000).astype(np.int64)
    by_rank = placement.expected_rank_loads(loads)
    return by_rank.mean(axis=-1) / by_rank.max(axis=-1)


def replay_peak() -> dict[str, float]:
    """Largest resident memory of this process after a long replay from a file of int32, the mapped file included."""
    import resource

    from rackbook.experts.popularity import Router
    from rackbook.experts.replay import Eplb, in_blocks, replay

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "loads.npy"
        shape = (STEPS, REPLAY_LAYERS, REPLAY_EXPERTS)
        table = np.lib.format.open_memmap(path, "w+", np.int32, shape)
        router = Router(REPLAY_LAYERS, REPLAY_EXPERTS, 6, 13_824, 1.5)
        (block,) = router.steps(50)
        for start in range(0, STEPS, len(block)):
            table[start : start + len(block)] = block
        table.flush()
        del table
        found = replay(in_blocks(np.load(path, mmap_mode="r")), STEPS, Eplb(32, 32, 1000, 3000))
    assert found.means.shape == (STEPS, REPLAY_LAYERS)
    return {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}


def run(python: Path | str, what: str) -> dict[str, float]:
    """Call one of the functions above in a process of its own."""
    code = f"import json, bench_eplb; print(json.dumps(bench_eplb.{what}()))"
    paths = os.pathsep.join([str(LIBRARY), str(Path(__file__).parent)])
    done = subprocess.run(
        [python, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONPATH": paths},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def ratios() -> list[Ratio]:
    """One row per promise; without the lab the first cannot be had and says so."""
    from rackbook.engine.lab import Lab

    lab = Lab()
    rows = []
    if lab.is_installed:
        found = run(lab.python, "against_vllm")
        ratio = found["vllm_ms"] / found["ours_ms"]
        holds = ratio >= 5 and found["worse_layers"] == 0
        what = f"placement of {LAYERS}×{EXPERTS} → {SLOTS} slots on {RANKS} ranks, against vLLM's"
        rows.append(Ratio(what, found["ours_ms"], found["vllm_ms"], "ms", ratio, "≥ 5× faster, no layer worse", holds))
        planned = found["ours_planned"], found["vllm_planned"]
        rows.append(
            Ratio("  its balancedness", *planned, "", planned[0] / planned[1], "≥ 1×", planned[0] >= planned[1])
        )
    else:
        print("placement against vLLM's: left out, the lab is not installed (`rackbook engine up`)", file=sys.stderr)
    peak = run(sys.executable, "replay_peak")["peak_bytes"]
    what = f"peak memory of a {STEPS:,}-step × {REPLAY_LAYERS} × {REPLAY_EXPERTS} replay"
    rows.append(at_most(what, peak / GIGABYTE, 2.0, "GB", 1.0))
    return rows
