"""A real vLLM on this machine's cores: it serves alone and on two ranks, says the same, and ends with its holder."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rackbook.engine import lab_model, processes
from rackbook.engine.readiness import ServerError, free_port

PROMPTS = ("t5 t6 t7 t8", "t100", "t3 t900 t41 t41 t77 t500 t12 t9 t10", "t700 t701")
SHAPE = {"dtype": "float32"}  # so that the order of a sum does not decide between two tokens
HOLDER = """
import json, sys, time
from pathlib import Path
from rackbook.engine.lab import Lab
from rackbook.engine.processes import descendants
folder, model, routed, log = sys.argv[1:]
environment = {"RACKBOOK_ROUTED_EXPERTS_DIR": routed}
with Lab(Path(folder)).server(num_ranks=2, model=Path(model), environment=environment, log=Path(log)) as server:
    pids = [server.supervisor.pid, *descendants(server.supervisor.pid)]
    print(json.dumps({"base_url": server.base_url, "model": server.model, "pids": pids}), flush=True)
    time.sleep(3600)
"""


@pytest.fixture(scope="module")
def routed(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("routed")


@pytest.fixture(scope="module")
def model(lab, tmp_path_factory) -> Path:
    return lab.model(tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture(scope="module")
def two_ranks(lab, model, routed, tmp_path_factory):
    """Held by a process of its own, as a notebook holds its server."""
    log = tmp_path_factory.mktemp("held") / "server.log"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, lab.folder, model, routed, log], stdout=subprocess.PIPE, text=True
    )
    try:
        told = holder.stdout.readline()
        assert told, "it did not start: see what it printed"
        yield SimpleNamespace(holder=holder, **json.loads(told))
    finally:
        holder.terminate()
        holder.wait()


@pytest.fixture(scope="module")
def one_rank(lab_server, model):
    return lab_server(num_ranks=1, model=model)


def logprobs(answer: dict) -> list[float]:
    return answer["choices"][0]["logprobs"]["token_logprobs"]


def complete(server, prompt, num_tokens=24, rank=None) -> dict:
    headers = {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})
    body = {"model": server.model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
    body["logprobs"] = 1
    request = urllib.request.Request(f"{server.base_url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        return json.load(response)


def finished(server) -> dict[str, float]:
    """Requests that each engine has finished."""
    with urllib.request.urlopen(f"{server.base_url}/metrics", timeout=30) as response:
        text = response.read().decode()
    counts: dict[str, float] = {}
    for engine, value in re.findall(r'^vllm:request_success_total\{.*?engine="(\d+)".*\} (\S+)$', text, re.MULTILINE):
        counts[engine] = counts.get(engine, 0.0) + float(value)
    return counts


def shared_memory(pids: list[int]) -> set[Path]:
    """The shared memory files that processes have open in memory; other servers of the machine have their own."""
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line and "(deleted)" not in line}


def gone(those: list[processes.Identity], limit_s: float = 120.0) -> bool:
    deadline = time.monotonic() + limit_s
    while alive := [process for process in those if process.is_alive]:
        if time.monotonic() > deadline:
            print(*(processes.command_line(process.pid) for process in alive), sep="\n")
            return False
        time.sleep(0.1)
    return True


def read_routed(path: Path) -> tuple[dict, list[tuple[int, np.ndarray]]]:
    header, _, content = path.read_bytes().partition(b"\n")
    head = json.loads(header)
    records, start = [], 0
    while start < len(content):
        layer, num_tokens = np.frombuffer(content, "<i4", 2, start)
        count = num_tokens * head["top_k"]
        records.append((int(layer), np.frombuffer(content, "<i2", count, start + 8).reshape(num_tokens, -1)))
        start += 8 + 2 * count
    return head, records


def test_one_rank_serves_what_was_asked_for(one_rank):
    answer = complete(one_rank, PROMPTS[0])
    assert answer["usage"] | {"prompt_tokens": 4, "completion_tokens": 24} == answer["usage"]
    assert re.fullmatch(r"( ?t\d+){24}", answer["choices"][0]["text"].strip())
    assert one_rank.model == "lab"


def test_decoding_and_encoding_again_keeps_the_length(one_rank):
    text = complete(one_rank, PROMPTS[1])["choices"][0]["text"]
    assert complete(one_rank, text, 1)["usage"]["prompt_tokens"] == 24


def test_pinned_requests_reach_their_rank(two_ranks):
    before = finished(two_ranks)
    for rank, repeats in ((0, 1), (1, 3)):
        for _ in range(repeats):
            complete(two_ranks, PROMPTS[0], 2, rank)
    deadline = time.monotonic() + 10
    while sum((after := finished(two_ranks)).values()) < sum(before.values()) + 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert {engine: after[engine] - before.get(engine, 0.0) for engine in after} == {"0": 1.0, "1": 3.0}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_two_ranks_say_what_one_rank_says(one_rank, two_ranks, prompt):
    """The experts are split over the ranks: a wrong sum or order between them would change text and probabilities."""
    alone = complete(one_rank, prompt)
    for rank in (0, 1):
        pinned = complete(two_ranks, prompt, rank=rank)
        assert pinned["choices"][0]["text"] == alone["choices"][0]["text"]
        assert logprobs(pinned) == pytest.approx(logprobs(alone), abs=1e-3)


def test_unequal_ranks_at_the_same_time_say_what_one_rank_says(one_rank, two_ranks):
    asked = [(PROMPTS[2], 0), (PROMPTS[0], 1), (PROMPTS[1], 0), (PROMPTS[3], 0), ("t9 " * 300, 1), (PROMPTS[2], 0)]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda pair: complete(two_ranks, pair[0], rank=pair[1]), asked))
    alone = [complete(one_rank, prompt) for prompt, _ in asked]
    assert [answer["choices"][0]["text"] for answer in together] == [a["choices"][0]["text"] for a in alone]


def test_recorded_experts_are_those_of_the_model(two_ranks, model, routed):
    """The first layer's choice for a prompt of one token, computed here from the weights in the file."""
    shape, tensors = lab_model.Shape(**SHAPE), weights(model / "model.safetensors")
    at = {rank: len(next(routed.glob(f"{rank}.*.routed")).read_bytes()) for rank in (0, 1)}
    token = 123
    complete(two_ranks, f"t{token}", 1, rank=1)
    head, records = read_routed(next(routed.glob("1.*.routed")))
    assert head == {"num_layers": shape.layers, "top_k": shape.top_k, "num_experts": shape.experts, "dtype": "int16"}
    assert len(next(routed.glob("0.*.routed")).read_bytes()) == at[0], "the idle rank's empty steps are no tokens"
    layer, ids = records[-shape.layers]
    assert (layer, ids.shape) == (0, (1, shape.top_k))
    assert set(ids[0].tolist()) == first_choice(tensors, token, shape.top_k)


def test_every_token_of_a_request_is_recorded_once_per_layer(two_ranks, routed):
    path = next(routed.glob("0.*.routed"))
    before = len(read_routed(path)[1])
    complete(two_ranks, "t4 " * 10, 5, rank=0)
    records = read_routed(path)[1][before:]
    # 10 tokens of the prompt, then 4 of the answer: the fifth is never fed back
    assert [(layer, len(ids)) for layer, ids in records] == [(0, 10), (1, 10), *[(0, 1), (1, 1)] * 4]


def test_a_request_that_cannot_be_served_leaves_the_server_alive(one_rank):
    with pytest.raises(urllib.error.HTTPError, match="400"):
        complete(one_rank, "t5 " * 20000)
    one_rank.check()
    assert complete(one_rank, PROMPTS[0], 1)["usage"]["completion_tokens"] == 1


def test_a_taken_port_is_reported(lab, one_rank, model):
    port = int(one_rank.base_url.rpartition(":")[2])
    with pytest.raises(ServerError, match=rf"port {port} is taken by process {one_rank.processes[0].pid}: .*python"):
        lab.server(model=model, port=port)


def test_wrong_options_are_reported_with_vllms_own_words(lab, model, tmp_path):
    with pytest.raises(ServerError, match=r"ended with status 2; likely cause: .*--no-such-option"):
        lab.server(model=model, extra_arguments=["--no-such-option"], log=tmp_path / "server.log", progress=print)


def test_a_killed_notebook_leaves_no_process_and_no_shared_memory(two_ranks):
    """The last test of this server."""
    assert len(two_ranks.pids) >= 6, "supervisor, API server, coordinator, two engines and their workers"
    alive, shared = [processes.identify(pid) for pid in two_ranks.pids], shared_memory(two_ranks.pids)
    assert all(process.is_alive for process in alive)
    assert shared, "engines and workers talk through shared memory"
    two_ranks.holder.send_signal(signal.SIGKILL)
    two_ranks.holder.wait()
    assert gone(alive)
    assert not [path for path in shared if path.exists()]


def test_engine_up_twice_then_a_dead_engine_then_down(lab, tmp_path, monkeypatch):
    monkeypatch.setenv("RACKBOOK_LAB", str(lab.folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def rackbook(*arguments, status=0):
        done = subprocess.run(
            [Path(sys.executable).with_name("rackbook"), *arguments],
            capture_output=True, text=True, timeout=900, check=False,
        )  # fmt: skip
        assert done.returncode == status, done.stdout + done.stderr
        return done.stdout + done.stderr

    port = free_port()
    try:
        assert "no server runs" in rackbook("engine", "status")
        assert f"started: http://127.0.0.1:{port} answers, 1 rank" in rackbook("engine", "up", "--port", str(port))
        assert f"runs already: http://127.0.0.1:{port} answers" in rackbook("engine", "up")
        assert "wanted 2 ranks" in rackbook("engine", "up", "--ranks", "2", status=2)
        assert "model 'lab' in" in rackbook("engine", "status")
        state = json.loads((tmp_path / "rackbook/engine/server.json").read_text())
        supervisor = state["supervisor"]["pid"]
        below = [processes.identify(pid) for pid in (supervisor, *processes.descendants(supervisor))]
        engine = next(p.pid for p in below if "EngineCore" in processes.command_line(p.pid))
        os.kill(engine, signal.SIGKILL)
        assert gone(below)
        assert "no server runs" in rackbook("engine", "status")
    finally:
        rackbook("engine", "down")


def test_a_server_that_dies_while_it_answers_is_reported(one_rank):
    """The last test of this server."""
    engine = next(
        pid for pid in processes.descendants(one_rank.supervisor.pid) if "EngineCore" in processes.command_line(pid)
    )
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(complete, one_rank, PROMPTS[0], 10000)
        time.sleep(1.0)
        os.kill(engine, signal.SIGKILL)
        assert isinstance(answer.exception(60), (OSError, ValueError))
    assert gone([one_rank.processes[0].identity])
    with pytest.raises(ServerError, match=r"server of the server at .*Its last lines"):
        one_rank.check()


def weights(path: Path) -> dict[str, np.ndarray]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    found = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = entry["data_offsets"]
            found[name] = np.frombuffer(content[8 + length + start : 8 + length + end], "<f4").reshape(entry["shape"])
    return found


def first_choice(tensors: dict[str, np.ndarray], token: int, top_k: int) -> set[int]:
    """Experts of the first layer for a single token: attention over one token is its value."""

    def normed(state):
        return state / np.sqrt(np.mean(state.astype(np.float64) ** 2) + 1e-6)

    at = "model.layers.0"
    state = tensors["model.embed_tokens.weight"][token].astype(np.float64)
    value = tensors[f"{at}.self_attn.v_proj.weight"] @ normed(state)
    heads = tensors[f"{at}.self_attn.q_proj.weight"].shape[0] // value.shape[0]
    state = state + tensors[f"{at}.self_attn.o_proj.weight"] @ np.tile(value, heads)
    logits = tensors[f"{at}.mlp.gate.weight"] @ normed(state)
    return set(np.argsort(logits)[-top_k:].tolist())
