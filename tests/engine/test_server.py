"""Servers start, answer, complain and end; the processes are real, vLLM is not among them."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rackbook.engine import processes, readiness
from rackbook.engine.failures import likely_cause
from rackbook.engine.readiness import ServerError, free_port
from rackbook.engine.server import START_TIMEOUT_S, serve, stop_detached
from rackbook.engine.starting import Command, names

FAKE = Path(__file__).with_name("fake_server.py")
HOLDER = """
import sys, time
sys.path.insert(0, {tests!r})
from pathlib import Path
from test_server import command
from rackbook.engine.server import serve
url = "http://127.0.0.1:{port}"
with serve([command({port}, "stubborn")], url, Path({log!r}), say=lambda line: None) as server:
    {detach}
    from rackbook.engine.processes import descendants
    time.sleep(0.5)
    print(server.supervisor.pid, *descendants(server.supervisor.pid), flush=True)
    {then}
"""


def command(port: int, *wishes: str, role: str = "server", **environment: str) -> Command:
    return Command(role, (sys.executable, str(FAKE), str(port), *wishes), environment)


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


def gone(pids, limit_s=15.0) -> bool:
    deadline = time.monotonic() + limit_s
    while alive := [pid for pid in pids if (identity := processes.identify(pid)) and identity.is_alive]:
        if time.monotonic() > deadline:
            print("alive:", alive)
            return False
        time.sleep(0.05)
    return True


@pytest.fixture
def log(tmp_path) -> Path:
    return tmp_path / "server.log"


@pytest.fixture
def holder(log):
    """Starts another Python that holds a server and tells its processes; ended with the test."""
    started = []

    def start(then="time.sleep(600)", detach="") -> tuple[subprocess.Popen, list[int]]:
        program = HOLDER.format(tests=str(FAKE.parent), port=free_port(), log=str(log), then=then, detach=detach)
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        started.append(process)
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 4, "supervisor, server, child and the stubborn grandchild"
        return process, pids

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_a_server_answers_and_is_gone_after_its_block(log):
    port = free_port()
    lines = []
    with serve([command(port, "stubborn")], url(port), log, say=lines.append) as server:
        assert (server.model, server.base_url, server.log_path) == ("fake", url(port), log)
        server.check()
        time.sleep(0.3)
        below = processes.descendants(server.supervisor.pid)
        assert len(below) == 3
        assert "starting" in server.log_tail()
    assert lines[-1].startswith(f"server: {url(port)} answers after")
    assert not [pid for pid in below if processes.identify(pid)], "ended and waited for, none a zombie"
    server.stop()


def test_an_exception_in_the_block_ends_the_server(log):
    port = free_port()
    below = []

    def use() -> None:
        with serve([command(port)], url(port), log, say=print) as server:
            below.extend([server.supervisor.pid, *processes.descendants(server.supervisor.pid)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        use()
    assert len(below) == 3
    assert gone(below, 0.0)


def test_a_process_that_dies_at_the_start_is_explained(log):
    port = free_port()
    started = time.monotonic()
    with pytest.raises(ServerError, match="server of the server at .* ended with status 1") as caught:
        serve([command(port, "die")], url(port), log, say=print)
    message = str(caught.value)
    assert "likely cause: RuntimeError: the weights are made of cheese" in message
    assert "Traceback" in message
    assert time.monotonic() - started < START_TIMEOUT_S / 2, "it does not wait for the time to run out"


def test_a_program_that_is_not_there_is_named(log):
    with pytest.raises(ServerError, match="does not start: .*no/such/python.*the program is '/no/such/python'"):
        serve([Command("server", ("/no/such/python", "-m", "vllm"))], url(free_port()), log, say=print)


def test_a_server_that_never_answers_is_ended(log):
    port = free_port()
    with pytest.raises(ServerError, match=r"does not answer: waited .* Its last lines:\n.*server.log:\nstarting"):
        serve([command(port, "mute")], url(port), log, timeout_s=1.0, say=print)
    assert not [pid for pid, _ in processes._all() if f"{FAKE} {port}" in processes.command_line(pid)]


def test_a_server_that_dies_later_is_noticed_and_all_of_it_ended(log):
    port = free_port()
    with serve([command(port, "stubborn")], url(port), log, say=print) as server:
        time.sleep(0.3)
        below = processes.descendants(server.supervisor.pid)
        os.kill(server.processes[0].pid, signal.SIGKILL)
        assert gone(below)
        with pytest.raises(ServerError, match="was ended by SIGKILL"):
            server.check()


def test_a_taken_port_is_reported_with_its_holder_before_anything_starts(log):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} is taken by process {os.getpid()}: .*python"):
            serve([command(port)], url(port), log, say=print)
    assert not log.exists()


def test_a_port_of_another_of_this_machine_s_addresses_is_looked_at_too():
    with socket.socket() as other:
        other.bind(("127.0.0.2", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=rf"port {port} is taken by process {os.getpid()}"):
            readiness.require_free_port(f"http://127.0.0.2:{port}")
    readiness.require_free_port(f"http://127.0.0.2:{port}")


def test_a_stranger_on_another_machine_is_not_taken_for_the_server(monkeypatch):
    monkeypatch.setattr(readiness, "_is_free_here", lambda *_: False)  # as for an address that is not this machine's
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=rf"http://127.0.0.1:{port} takes connections already"):
            readiness.require_free_port(url(port))
    readiness.require_free_port(url(port))


def test_a_name_that_means_no_machine_is_refused_at_once(monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ServerError, match="'host_0' is no known host"):
        readiness.require_free_port("http://HOST_0:8000")


@pytest.mark.parametrize("argument", ["--api-key", "--api-key=abc", "--hf-token"])
def test_secrets_among_the_arguments_are_refused(log, argument):
    port = free_port()
    with pytest.raises(ServerError, match="set VLLM_API_KEY or HF_TOKEN in the environment") as caught:
        serve([command(port, argument)], url(port), log, say=print)
    assert "abc" not in str(caught.value)


def test_variables_reach_the_process_but_no_command_line(log):
    port = free_port()
    with serve([command(port, "env=SWEET", SWEET="honey-4711")], url(port), log, say=print) as server:
        assert "SWEET is honey-4711" in server.log_tail()
        pids = [server.supervisor.pid, *processes.descendants(server.supervisor.pid)]
        assert not [pid for pid in pids if "honey-4711" in processes.command_line(pid)]


def test_a_router_starts_when_the_servers_behind_it_answer(log):
    prefill, decode, router = free_port(), free_port(), free_port()
    commands = [command(router, role="router"), command(prefill, role="prefill"), command(decode, role="decode")]
    with serve(commands, url(router), log, ready_urls=[url(prefill), url(decode)], say=print) as server:
        assert [process.name for process in server.processes] == ["prefill", "decode", "router"]
        assert [process.log.name for process in server.processes] == [
            "server-prefill.log", "server-decode.log", "server.log",
        ]  # fmt: skip
        started = [process.identity.start_ticks for process in server.processes]
        assert started[2] > max(started[:2])


def test_one_of_several_processes_that_dies_ends_all(log):
    first, second = free_port(), free_port()
    with serve([command(first), command(second)], url(first), log, say=print) as server:
        os.kill(server.processes[1].pid, signal.SIGKILL)
        assert gone([server.supervisor.pid, server.processes[0].pid])
        with pytest.raises(ServerError, match="server-1 of the server"):
            server.check()


def test_processes_of_the_same_role_are_numbered():
    assert names([command(1, role="decode"), command(2, role="decode"), command(3, role="router")]) == [
        "decode-0", "decode-1", "router",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_the_end_of_the_holder_ends_everything(holder, number):
    process, pids = holder()
    process.send_signal(number)
    process.wait()
    assert gone(pids)


def test_a_forked_child_that_keeps_the_pipe_does_not_keep_the_server(holder):
    process, pids = holder(then="import os; os.fork() or time.sleep(30) or os._exit(0); time.sleep(600)")
    time.sleep(0.3)
    (forked,) = [pid for pid in processes.descendants(process.pid) if pid not in pids]
    process.kill()
    process.wait()
    assert gone(pids)
    os.kill(forked, signal.SIGKILL)


def test_a_killed_supervisor_is_noticed_and_its_processes_are_swept_away(log):
    port = free_port()
    with serve([command(port)], url(port), log, say=print) as server:
        below = processes.descendants(server.supervisor.pid)
        os.kill(server.supervisor.pid, signal.SIGKILL)
        server._supervisor.wait()
        with pytest.raises(ServerError, match="ended"):
            server.check()
    assert gone(below)


def test_holder_and_supervisor_killed_together_leave_no_server(holder):
    process, pids = holder()
    process.kill()
    os.kill(pids[0], signal.SIGKILL)
    process.wait()
    assert gone(pids[1:2]), "the server process is asked to end by the system itself"
    for pid in pids[2:]:
        os.kill(pid, signal.SIGKILL)


def test_a_detached_server_outlives_its_holder_until_it_is_stopped(holder):
    process, pids = holder(detach="server.detach()", then="")
    assert process.wait(20) == 0
    time.sleep(1.0)
    assert all(processes.identify(pid).is_alive for pid in pids)
    stop_detached(processes.identify(pids[0]), [processes.identify(pids[1])])
    assert gone(pids, 1.0)


def test_a_later_process_with_the_same_number_is_not_taken_for_the_first():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        identity = processes.identify(sleeper.pid)
        earlier = processes.Identity(sleeper.pid, identity.start_ticks - 1, identity.boot)
        other_boot = processes.Identity(sleeper.pid, identity.start_ticks, "another")
        assert identity.is_alive
        for stranger in (earlier, other_boot):
            assert not stranger.is_alive
            stranger.send(signal.SIGKILL)
            stop_detached(stranger, [stranger])
            time.sleep(0.1)
        assert sleeper.poll() is None
        identity.send(signal.SIGKILL)
        assert sleeper.wait(5) == -signal.SIGKILL
        assert not identity.is_alive
    finally:
        sleeper.kill()
        sleeper.wait()


def test_answers_are_those_of_the_protocol():
    assert readiness.answers(url(free_port())) is None


@pytest.mark.parametrize(
    ("printed", "words"),
    [
        ("OSError: [Errno 98] Address already in use", "a port is taken"),
        ("api_server.py: error: unrecognized arguments: --magic 3", "vLLM does not know these options: --magic 3"),
        ("api_server.py: error: argument --port: invalid int value: 'x'", "refuses an option: --port: invalid int"),
        ("ModuleNotFoundError: No module named 'vllm.engine'", "lacks the module vllm.engine"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "the memory is too small"),
        ("first\nValueError: one\nKeyError: 'two'", "KeyError: 'two'"),
        ("all is well", None),
    ],
)
def test_likely_causes(log, printed, words):
    log.write_text(printed, "utf-8")
    cause = likely_cause(log)
    assert cause is None if words is None else words in cause


def test_reports_are_plain_objects(log):
    """What the supervisor prints is JSON, one object a line: its protocol can be spoken by hand."""
    port = free_port()
    request = {"start": "a", "arguments": [sys.executable, str(FAKE), str(port), "die"], "log": str(log)}
    request |= {"environment": dict(os.environ)}
    done = subprocess.run(
        [sys.executable, "-m", "rackbook.engine.supervisor"], input=json.dumps(request) + "\n", capture_output=True,
        text=True, timeout=30, check=True,
    )  # fmt: skip
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert reports[0]["started"] == "a"
