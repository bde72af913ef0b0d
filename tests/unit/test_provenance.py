"""What is stored of machine and processes: complete, and without secret, host name or home folder."""

import json
import os
import platform
import socket
import sys
from pathlib import Path

import polars as pl
import pytest

from rackbook import __version__, provenance, runs
from rackbook.provenance import MASK


def test_the_machine_is_described_in_plain_values():
    found = provenance.machine()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["usable_cores"] > 0
    assert found["python"] == platform.python_version()
    assert found["packages"]["rackbook"] == __version__
    assert found["packages"]["nixl"] is None
    assert found["load_1min"] >= 0
    absent = [key for key, value in found.items() if value is None]
    assert all(found[f"{key}_missing_reason"] for key in absent)


def test_no_name_of_host_or_home_is_stored():
    text = json.dumps(provenance.machine())
    assert str(Path.home()) + "/" not in text
    assert socket.gethostname() not in text or len(socket.gethostname()) < 4


def test_packages_of_another_interpreter_are_those_it_has():
    assert provenance.packages(sys.executable)["polars"] == provenance.packages()["polars"]
    other = provenance.packages(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    assert other.keys() == provenance.packages().keys()
    assert other["rackbook"] is None


GPUS = """NVIDIA GB300, 580.82.07, 284208, 1920, 2032, 3996, 1400.00, 1400.00, 10.3
NVIDIA GB300, 580.82.07, 284208, 1905, 2032, 3996, 1400.00, 1400.00, 10.3
NVIDIA GB300, 580.82.07, 284208, [N/A], 2032, 3996, 1200.00, 1400.00, 10.3
"""


def test_equal_gpus_stand_together_and_a_throttled_one_apart():
    full, throttled = provenance.read_gpus(GPUS)
    assert full == {
        "count": 2,
        "name": "NVIDIA GB300",
        "driver": "580.82.07",
        "memory_mib": 284208.0,
        "max_sm_clock_mhz": 2032.0,
        "memory_clock_mhz": 3996.0,
        "power_limit_w": 1400.0,
        "max_power_limit_w": 1400.0,
        "compute_capability": "10.3",
        "sm_clocks_mhz": [1920.0, 1905.0],
    }
    assert (throttled["count"], throttled["power_limit_w"], throttled["sm_clocks_mhz"]) == (1, 1200.0, [None])


def fake_nvidia_smi(folder, body):
    file = folder / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{body}\n")
    file.chmod(0o755)


def test_nvidia_smi_is_asked_and_its_failure_is_a_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "answer").write_text(GPUS)
    answer = f'cat "{tmp_path}/answer"'
    fake_nvidia_smi(tmp_path, f'case "$1" in --query*) {answer};; *) echo "| CUDA Version: 13.0 |";; esac')
    found = provenance.machine()
    assert (found["num_gpus"], found["cuda"], len(found["gpus"])) == (3, "13.0", 2)
    fake_nvidia_smi(tmp_path, "echo 'NVIDIA-SMI has failed'; exit 9")
    found = provenance.machine()
    assert found["gpus"] is None
    assert found["gpus_missing_reason"] == "nvidia-smi failed with status 9: NVIDIA-SMI has failed"


def test_the_gpus_of_another_host_are_asked_through_a_command(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "answer").write_text(GPUS)
    fake_nvidia_smi(tmp_path, f'cat "{tmp_path}/answer"')
    found = provenance.gpus(["env"])
    assert (found["num_gpus"], found["cuda"]) == (3, None)
    assert found["cuda_missing_reason"].startswith("not asked through env")
    assert provenance.gpus(["no-such-srun"])["gpus_missing_reason"] == "no-such-srun is not installed here"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--api-key", "abc", "def", "--port", "8000"], ["--api-key", MASK, MASK, "--port", "8000"]),
        (["--api-key=abc"], [f"--api-key={MASK}"]),
        (["--hf-token", "abc"], ["--hf-token", MASK]),
        (
            ["--max-num-batched-tokens", "8192", "--tokenizer", "x"],
            ["--max-num-batched-tokens", "8192", "--tokenizer", "x"],
        ),
        (["--header", "Authorization: Bearer abcdef"], ["--header", f"Authorization: Bearer {MASK}"]),
        (["--header", "x-api-key=abcdef"], ["--header", f"x-api-key={MASK}"]),
        (["--speculative-config", '{"method":"dspark"}'], ["--speculative-config", '{"method":"dspark"}']),
        (["--endpoint", "/v1/completions"], ["--endpoint", "/v1/completions"]),
    ],
)
def test_secrets_in_arguments_are_masked_and_nothing_else(given, kept):
    assert provenance.public_arguments(given) == kept


def test_bearer_and_known_forms_of_secrets_are_masked_in_text():
    text = provenance.public_text("curl -H 'Authorization: Bearer abc.def' hf_ABCDEFGHIJKLMNOPQRST")
    assert "abc" not in text
    assert "hf_A" not in text


def test_paths_in_arguments_are_cut(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    here = Path(__file__)
    arguments = [str(model), f"--model={model}", str(here), f"--out={Path.home()}/x/y"]
    assert provenance.public_arguments(arguments) == [
        "model",
        "--model=model",
        "tests/unit/test_provenance.py",
        "--out=~/x/y",
    ]


def test_only_allowed_variables_are_kept():
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_API_KEY": "secret",
        "VLLM_MAX_TOKENS_PER_EXPERT": "65536",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_USER": "somebody",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PATH": "/bin",
    }
    kept = provenance.process(["vllm"], environment)["environment"]
    assert kept == {
        "NCCL_DEBUG": "INFO", "SLURM_JOB_ID": "7", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_MAX_TOKENS_PER_EXPERT": "65536",
    }  # fmt: skip


def test_a_secret_of_the_environment_is_masked_wherever_it_stands(monkeypatch):
    monkeypatch.setenv("MY_SECRET", "correct horse battery")
    monkeypatch.setenv("TOKENIZER", "deepseek-v4.1-flash")
    assert provenance.public_text("x correct horse battery y") == f"x {MASK} y"
    assert provenance.public_text("serve deepseek-v4.1-flash") == "serve deepseek-v4.1-flash"


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("open {}/a.txt", "open a.txt"),
        ("in {}: x", "in .: x"),
        ("in {}. Then", "in .. Then"),
        ("{}2/trace.jsonl", "{}2/trace.jsonl"),
        ("{}.jsonl", "{}.jsonl"),
        ("{}-old/x", "{}-old/x"),
    ],
)
def test_a_folder_ends_where_its_name_ends(tmp_path, monkeypatch, text, public):
    monkeypatch.chdir(tmp_path)
    assert provenance.public_text(text.format(tmp_path)) == public.format(tmp_path)


@pytest.fixture
def named_host(monkeypatch):
    """This machine bears the name of a thing that is measured."""
    provenance._host_pattern.cache_clear()
    monkeypatch.setattr(socket, "gethostname", lambda: "decode")
    yield "decode"
    monkeypatch.undo()
    provenance._host_pattern.cache_clear()


def test_a_value_that_is_called_like_the_host_stays(named_host):
    given = {"phase": named_host, "url": f"http://{named_host}:8000", "steps": [1, named_host], named_host: None}
    assert provenance.public_values(given) == {
        "phase": "decode", "url": "http://(host):8000", "steps": [1, "decode"], "decode": None,
    }  # fmt: skip


def test_points_and_parameters_are_kept_as_they_were_measured(named_host, tmp_path, monkeypatch):
    monkeypatch.setenv("OTHER_SECRET", "of no concern")
    points = pl.DataFrame({"setting": [f"{named_host}, 4 at once"], "error": [f"{named_host} died"]})
    with runs.record("a", {"role": named_host}, machine={}, root=tmp_path) as run:
        run.write_points(points)
        run.write_json("effective.json", {"role": named_host, "key": "x of no concern"})
        run.raw("server.log").write_text(f"on {named_host}: ready")
    found = runs.read(tmp_path / run.id)
    assert found.points().select("setting", "error").row(0) == ("decode, 4 at once", "(host) died")
    assert found.params == {"role": "decode"}
    assert found.raw("effective.json").read_text().count(MASK) == 1
    assert found.raw("server.log").read_text() == "on (host): ready"


def test_the_host_name_is_masked_as_a_word(monkeypatch):
    provenance._host_pattern.cache_clear()
    monkeypatch.setattr(socket, "gethostname", lambda: "rack7-tray3")
    try:
        assert provenance.public_text("on rack7-tray3: ready, rack7-tray31") == "on (host): ready, rack7-tray31"
    finally:
        monkeypatch.undo()
        provenance._host_pattern.cache_clear()
