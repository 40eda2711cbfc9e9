"""The supervisor's children: options on stdin, restarts with backoff, and giving up a child that never starts."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import hotrow
from plain_servable import write_version

from hotrow.errors import HotRowError
from hotrow.serve.processes import child as processes_child
from hotrow.serve.processes import child_runtime, supervisor
from hotrow.serve.processes.child import Child, stop_all
from hotrow.serve.processes.serve_options import ServeOptions

TOKEN = "tea-for-two-and-two-for-tea"


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    monkeypatch.setenv("CHILD_RUNTIME_FILE", child_runtime.__file__)
    monkeypatch.setattr(processes_child, "FIRST_PAUSE", 0.02)


@pytest.fixture
def start() -> Iterator[Callable[..., tuple[Child, list[dict[str, Any]]]]]:
    children = []

    def start(**options: Any) -> tuple[Child, list[dict[str, Any]]]:
        events: list[dict[str, Any]] = []
        children.append(Child("engine 7", "stub_child", options, lambda child, event: events.append(event)))
        children[-1].start()
        return children[-1], events

    yield start
    stop_all(children, 5.0)


def supervise_until(child: Child, condition: Callable[[], bool]) -> list[str]:
    """Restart the child like the supervisor until the condition holds; returns the messages for the user."""
    messages, until = [], time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, f"restarts {child.restarts}, {messages}"
        messages += [message] if (message := child.restart_if_due()) is not None else []
        time.sleep(0.005)
    return messages


def test_options_reach_the_child_at_every_start_and_are_no_arguments(
    start: Callable[..., Any], monkeypatch: Any
) -> None:
    monkeypatch.setenv("HOTROW_TOKEN", TOKEN)
    child, events = start(ready=True, token=TOKEN, padding="x" * 100_000)  # more than a pipe holds
    for start_number in range(2):
        supervise_until(child, lambda: child.ready)
        command = psutil.Process(child.process.pid).cmdline()
        assert command[1:] == ["-m", "stub_child", "engine 7"]
        assert events[-1]["options"]["token"] == TOKEN and "HOTROW_TOKEN" not in events[-1]["environment"]
        child.send({"others": start_number})
        supervise_until(child, lambda number=start_number: events[-1].get("line") == {"others": number})
        child.process.kill()
        supervise_until(child, lambda number=start_number: child.restarts == number + 1)


def test_child_that_never_was_ready_is_given_up_with_its_last_stderr(
    start: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    child, _ = start(code=7, stderr="first\n" * 10 + "no such device")
    messages = supervise_until(child, lambda: child.failed is not None)
    assert len(messages) == processes_child.MAX_STARTS - 1 and all(
        "engine 7 ended with 7" in message for message in messages
    )
    assert child.failed is not None
    assert (
        f"engine 7 ended with exit code 7 before it was ready, {processes_child.MAX_STARTS} times in a row"
        in child.failed
    )
    assert (
        child.failed.endswith("first\nno such device") and child.failed.count("first") == processes_child.LAST_LINES - 1
    )
    assert capfd.readouterr().err.count("no such device") == processes_child.MAX_STARTS  # forwarded as it comes


def test_child_that_was_ready_is_restarted_without_end_with_backoff(start: Callable[..., Any]) -> None:
    child, events = start(ready=True, code=3)
    messages = supervise_until(child, lambda: child.restarts == processes_child.MAX_STARTS + 2)
    assert child.failed is None
    pauses = [float(message.split()[-2]) for message in messages]
    assert pauses[:4] == [0.02, 0.04, 0.08, 0.16]
    assert len([event for event in events if event["event"] == "ready"]) >= processes_child.MAX_STARTS + 2


@pytest.fixture
def signals() -> Iterator[None]:
    """Restores the handlers that a Supervisor replaces."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_server_whose_engine_dies_at_once_ends_with_one_error(
    tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    died = {"code": 3, "stderr": "Illegal instruction"}
    monkeypatch.setattr(
        supervisor, "Child", lambda name, module, options, on_event: Child(name, "stub_child", died, on_event)
    )
    options = ServeOptions(str(tmp_path / "repository"), ("ctr",), http=0, grpc=None, metrics=None)
    served = supervisor.Supervisor(options)
    with pytest.raises(HotRowError, match=r"(?s)engine 0 ended with exit code 3 .*Illegal instruction"):
        served.run()
    assert not any(child.alive for child in served.engines) and not Path(served.folder).exists()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--token", "short"], "the token is short"),
        (["--token-file", "{open}"], "readable by every user"),
        (["--token-file", "{good}", "--token", TOKEN], "--token and --token-file: give one"),
        (["--bus", "redis://me@127.0.0.1:1/0?password_file={open}"], "readable by every user"),
        (["--bus", "redis://:hunter2@127.0.0.1:1/0", "--stale-after", "0s"], "stale_after=0: give seconds above 0"),
        (["--policy", "wiat"], "did you mean 'wait'?"),
        (["--poll", "-1s"], "poll"),
        (["--drain", "0s"], "drain=0: give seconds above 0"),
    ],
)
def test_wrong_option_is_an_error_before_any_process(
    arguments: list[str], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr("subprocess.Popen", None)  # none can be started
    write_version(tmp_path / "repository", "ctr", 1)
    for name, mode in (("good", 0o600), ("open", 0o644)):
        (tmp_path / name).write_text(TOKEN)
        (tmp_path / name).chmod(mode)
    given = [word.format(open=tmp_path / "open", good=tmp_path / "good") for word in arguments]
    ended = hotrow("serve", str(tmp_path / "repository"), "--model", "ctr", *given)
    assert ended.returncode == 2 and text in ended.stderr
    assert "hunter2" not in ended.stderr and TOKEN not in ended.stderr


def test_wrong_limits_of_the_front_end_are_found_at_once(tmp_path: Path) -> None:
    write_version(tmp_path / "repository", "ctr", 1)
    for limits, text in (({"rows": 0}, "rows=0; give a number above 0"), ({"row": 1}, "did you mean 'rows'")):
        with pytest.raises(HotRowError, match=text):
            ServeOptions(str(tmp_path / "repository"), limits=limits)
    with pytest.raises(HotRowError, match="http_port=99999"):
        ServeOptions(str(tmp_path / "repository"), http=99999)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["serve", "nowhere", "--token", TOKEN], "use --token-file or HOTROW_TOKEN"),
        (
            ["serve", "nowhere", "--bus", "ctr=redis://:hunter2@host/0"],
            "password for ctr=redis://host/0 in the command",
        ),
        (["release", "redis://:hunter2@127.0.0.1:1/0"], "password for redis://127.0.0.1:1/0 in the command"),
        (["rollback", "redis://:hunter2@127.0.0.1:1/0", "--to", "1"], "password for redis://127.0.0.1:1/0"),
        (
            ["publish-remote", "dir:bus", "redis+cluster://:hunter2@127.0.0.1:1"],
            "password for redis+cluster://127.0.0.1:1",
        ),
    ],
)
def test_secret_in_the_command_line_is_warned_of(
    arguments: list[str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    done = hotrow(*arguments)
    assert text in done.stderr and done.returncode == 2  # none of them can do more than that
    assert "hunter2" not in done.stderr + done.stdout and TOKEN not in done.stderr


def test_no_warning_of_what_is_not_in_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTROW_TOKEN", TOKEN)
    done = hotrow("serve", str(tmp_path / "nowhere"), "--bus", f"redis://me@host/0?password_file={tmp_path}")
    assert "there is no repository" in done.stderr and "command line" not in done.stderr
