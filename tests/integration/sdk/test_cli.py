"""The command line as a user and as a script see it: output, exit codes, resumption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rollgrid.export import from_jsonl

from tests.support.stack import Stack
from tests.support.waiting import wait_until

PROGRAM = [sys.executable, "-c", "from rollgrid.cli import main; main()"]


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    lines: list[Any] = [{"prompt": f"{k}+1=", "answer": str(k + 1)} for k in range(4)]
    lines += [{"messages": [{"role": "user", "content": "hi"}], "task": {"answer": "ho"}}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join([*map(json.dumps, lines), json.dumps("just text"), json.dumps([5, 6, 7]), ""]))
    return str(path)


def rollgrid(pipe: Stack | None, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    url = {} if pipe is None else {"ROLLGRID_URL": pipe.url}
    env = {**{k: v for k, v in os.environ.items() if not k.startswith("ROLLGRID_")}, **url, "COLUMNS": "120"}
    return subprocess.run([*PROGRAM, *arguments], input=stdin, capture_output=True, text=True, timeout=100, env=env)


def lines_of(result: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in result.stdout.splitlines()]


def submit(pipe: Stack, prompts: str, *more: str) -> subprocess.CompletedProcess[str]:
    return rollgrid(pipe, "rollouts", "submit", prompts, "--max-tokens", "12", *more)


def test_submit_and_follow_for_people(pipe: Stack, prompts: str) -> None:
    done = submit(pipe, prompts, "-n", "2", "--scorer", "exact_match", "--run", "people")
    assert done.returncode == 0, done.stderr
    assert "7 tasks, 14 samples" in done.stderr
    assert "samples   14 succeeded" in done.stdout
    assert "reward    0.000 over 10 samples, 4 without" in done.stdout  # two tasks hold no answer to match


def test_submit_and_follow_for_machines(pipe: Stack, prompts: str) -> None:
    scorer = '{"type": "exact_match", "name": "em", "weight": 2}'
    done = submit(pipe, prompts, "-n", "2", "--scorer", scorer, "--run", "machines", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    accepted, *groups, summary = lines_of(done)
    assert (accepted["event"], accepted["samples"]) == ("accepted", 14)
    assert {group["event"] for group in groups} == {"group"}
    assert sorted(group["group_id"] for group in groups) == sorted(accepted["group_ids"])
    by_position = {group["position"]: group for group in groups}
    assert by_position[0]["task"] == {"answer": "1"}
    assert by_position[6]["prompt_token_ids"] == [5, 6, 7]
    assert by_position[0]["scorers"][0]["weight"] == 2
    assert summary["event"] == "summary"
    assert summary["samples"] == {"succeeded": 14}


def test_submit_now_and_follow_later(pipe: Stack, prompts: str, tmp_path: Path) -> None:
    batch = submit(pipe, prompts, "--run", "later", "--no-follow").stdout.strip()
    output = tmp_path / "groups.jsonl"
    output.write_text('{"torn')  # of a process that died while it wrote
    more = ("--cursor-file", str(tmp_path / "cursor"), "--output", str(output))
    assert rollgrid(pipe, "rollouts", "follow", batch, *more).returncode == 0
    assert {group.batch_id for group in from_jsonl(output)} == {batch}
    assert len(list(from_jsonl(output))) == 7
    again = rollgrid(pipe, "rollouts", "follow", batch, *more)
    assert "samples   none" in again.stdout  # all of it was read before
    status = lines_of(rollgrid(pipe, "rollouts", "status", batch, "--json"))[0]
    assert (status["done"], status["closed"], status["samples"]) == (True, 7, 7)


def test_tasks_from_a_pipe(pipe: Stack) -> None:
    done = rollgrid(pipe, "rollouts", "submit", "-", "--max-tokens", "4", "--run", "piped", "--json", stdin='"hello"\n')
    assert done.returncode == 0, done.stderr
    assert lines_of(done)[-1]["groups"] == 1


def test_files_that_cannot_be_used_are_refused_before_anything_is_submitted(
    pipe: Stack, prompts: str, tmp_path: Path
) -> None:
    damaged, missing = tmp_path / "damaged.cursor", str(tmp_path / "no" / "file")
    damaged.write_text("?")
    for more in (("--cursor-file", str(damaged)), ("--cursor-file", missing), ("--output", missing)):
        refused = submit(pipe, prompts, "--run", "unused", *more)
        assert (refused.returncode, "Traceback" in refused.stderr) == (2, False), refused.stderr
    exported = rollgrid(pipe, "trajectories", "export", "unused", "-o", missing, "--json")
    assert (exported.returncode, json.loads(exported.stderr)["error"]["type"]) == (2, "ConfigurationError")
    assert rollgrid(pipe, "trajectories", "tail", "unused", "--no-follow", "--json").stdout == ""


@pytest.mark.parametrize("line", ['{"prompt": "a", "task": "b", "answer": 1}', "[" * 100_000, '"\\ud800"', "[NaN]"])
def test_a_line_that_is_no_task_is_wrong_usage(pipe: Stack, line: str) -> None:
    refused = rollgrid(pipe, "rollouts", "submit", "-", "--max-tokens", "4", stdin=line)
    assert (refused.returncode, "Traceback" in refused.stderr) in [(2, False), (4, False)], refused.stderr


def test_a_reader_of_the_pipe_that_leaves_is_no_failure(pipe: Stack, prompts: str) -> None:
    submit(pipe, prompts, "--run", "headed")
    arguments = ["trajectories", "tail", "headed", "--no-follow", "--json"]
    env = {**os.environ, "ROLLGRID_URL": pipe.url}
    with subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env) as tail:
        assert tail.stdout is not None
        tail.stdout.close()
        assert tail.wait(60) == 0


def test_samples_that_do_not_succeed_are_in_the_exit_code(pipe: Stack, prompts: str) -> None:
    pipe["sampler-0"].pause()
    try:
        done = submit(pipe, prompts, "--run", "expiring", "--deadline", "0.5", "--json")
        assert done.returncode == 6
        assert lines_of(done)[-1]["samples"] == {"expired": 7}
        batch = submit(pipe, prompts, "--run", "stopped", "--no-follow").stdout.strip()
        assert rollgrid(pipe, "rollouts", "cancel", batch).returncode == 0
        assert rollgrid(pipe, "rollouts", "follow", batch).returncode == 6
        timed_out = submit(pipe, prompts, "--run", "slow", "--timeout", "0.5", "--json")
        assert timed_out.returncode == 5
        assert json.loads(timed_out.stderr.splitlines()[-1])["error"]["type"] == "DeadlineExceeded"
    finally:
        pipe["sampler-0"].resume()


def test_trajectories(pipe: Stack, prompts: str, tmp_path: Path) -> None:
    submit(pipe, prompts, "-n", "2", "--scorer", "exact_match", "--run", "shown")
    tail = lines_of(rollgrid(pipe, "trajectories", "tail", "shown", "--no-follow", "--json"))
    assert len(tail) == 7
    assert len(rollgrid(pipe, "trajectories", "tail", "shown", "--limit", "3").stdout.splitlines()) == 3
    behind = rollgrid(pipe, "trajectories", "tail", "shown", "--no-follow", "--cursor", str(tail[4]["cursor"]))
    assert len(behind.stdout.splitlines()) == 2

    shown = rollgrid(pipe, "trajectories", "show", tail[0]["group_id"], "--index", "1")
    assert "[1] succeeded" in shown.stdout
    assert "[0] succeeded" not in shown.stdout
    assert lines_of(rollgrid(pipe, "trajectories", "show", tail[0]["group_id"], "--json")) == [tail[0]]

    parquet, jsonl = tmp_path / "out.parquet", tmp_path / "out.jsonl"
    assert rollgrid(pipe, "trajectories", "export", "shown", "-o", str(parquet)).returncode == 0
    assert rollgrid(pipe, "trajectories", "export", "shown", "-o", str(jsonl)).returncode == 0
    table = pq.read_table(parquet)
    assert table.num_rows == 14
    assert [json.loads(line) for line in jsonl.read_text().splitlines()] == tail
    assert [group.cursor for group in from_jsonl(jsonl)] == [line["cursor"] for line in tail]
    first = table.to_pylist()[0]
    assert first["group_id"] == tail[0]["group_id"]
    assert first["token_ids"] == tail[0]["entries"][0]["sample"]["token_ids"]


def test_rewards(pipe: Stack, prompts: str, tmp_path: Path) -> None:
    submit(pipe, prompts, "-n", "2", "--run", "judged")
    tail = lines_of(rollgrid(pipe, "trajectories", "tail", "judged", "--no-follow", "--json"))
    first, second = tail[0]["group_id"], tail[1]["group_id"]
    (posted,) = lines_of(
        rollgrid(pipe, "rewards", "post", first, "--index", "1", "--value", "0.5", "--name", "tests", "--json")
    )
    assert (posted["group_id"], posted["duplicate"]) == (first, False)
    file = tmp_path / "rewards.jsonl"
    file.write_text(json.dumps({"group_id": second, "rewards": [{"index": 0, "turn_values": [2]}]}) + "\n")
    assert rollgrid(pipe, "rewards", "post", "--file", str(file)).returncode == 0
    assert rollgrid(pipe, "rewards", "post", first, "--index", "9", "--value", "1").returncode == 4
    assert rollgrid(pipe, "rewards", "post", first).returncode == 2

    read = lines_of(rollgrid(pipe, "trajectories", "rewards", "judged", "--json"))
    assert [line["group_id"] for line in read] == [first, second]
    assert len(rollgrid(pipe, "trajectories", "rewards", "judged").stdout.splitlines()) == 2
    output = tmp_path / "judged.parquet"
    assert rollgrid(pipe, "trajectories", "export", "judged", "-o", str(output)).returncode == 0
    rows = {(row["group_id"], row["index"]): row for row in pq.read_table(output).to_pylist()}
    assert [reward["value"] for reward in rows[(first, 1)]["posted_rewards"]] == [0.5]
    assert rows[(first, 0)]["posted_rewards"] == []
    turns = rows[(second, 0)]["posted_rewards"][0]["turns"]
    assert turns == [{"value": 2.0, "start": 0, "end": len(rows[(second, 0)]["token_ids"])}]


def test_a_killed_tail_resumes_from_its_file(pipe: Stack, prompts: str, tmp_path: Path) -> None:
    submit(pipe, prompts, "--run", "tailed")
    arguments = ["trajectories", "tail", "tailed", "--cursor-file", str(tmp_path / "cursor"), "--json"]
    env = {**os.environ, "ROLLGRID_URL": pipe.url}
    with subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, text=True, env=env) as tail:
        assert tail.stdout is not None
        before = [json.loads(tail.stdout.readline())["cursor"] for _ in range(7)]
        wait_until((tmp_path / "cursor").exists, 10, "a cursor is committed")
        tail.send_signal(signal.SIGKILL)
    submit(pipe, prompts, "--run", "tailed")
    after = [line["cursor"] for line in lines_of(rollgrid(pipe, *arguments, "--no-follow"))]
    everything = [line["cursor"] for line in lines_of(rollgrid(pipe, *arguments[:3], "--no-follow", "--json"))]
    assert sorted({*before, *after}) == everything
    assert len(everything) == 14


def test_an_interrupted_follow_exits_130(pipe: Stack) -> None:
    env = {**os.environ, "ROLLGRID_URL": pipe.url}
    arguments = ["trajectories", "tail", "nothing-yet", "--json"]
    with subprocess.Popen(
        [*PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=env,
        preexec_fn=_interruptible,  # noqa: PLW1509 - restores a signal and nothing else
    ) as tail:
        wait_until(lambda: b"connected" in _sockets(tail.pid), 20, "the command is waiting")
        tail.send_signal(signal.SIGINT)
        assert tail.wait(20) == 130


def _interruptible() -> None:
    """A test run in a shell's background inherits an ignored SIGINT, and would hand it on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _sockets(pid: int) -> bytes:
    """b"connected" once the process has a socket open."""
    try:
        links = [os.readlink(f"/proc/{pid}/fd/{name}") for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError:
        return b""
    return b"connected" if any(link.startswith("socket:") for link in links) else b""


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["rollouts", "submit", "absent.jsonl", "--max-tokens", "4"], 2, "absent.jsonl"),
        (["rollouts", "submit", "-", "--max-tokens", "4"], 2, "holds no task"),
        (["rollouts", "status", "bnobody"], 4, "not_found"),
        (["trajectories", "tail", "no.run", "--no-follow"], 4, "invalid_request"),
        (["trajectories", "tail", "x", "--cursor", "3", "--cursor-file", "f"], 2, "not both"),
        (["no-such-command"], 2, "no-such-command"),
    ],
)
def test_what_goes_wrong_has_its_code(pipe: Stack, arguments: list[str], code: int, says: str) -> None:
    done = rollgrid(pipe, *arguments)
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_a_refusal_is_an_object_for_machines(pipe: Stack, prompts: str) -> None:
    done = submit(pipe, prompts, "-n", "0", "--json")
    assert done.returncode == 4
    error = json.loads(done.stderr)["error"]
    assert (error["code"], error["field"], error["limit"]) == ("limit_exceeded", "n", "n>=1")
    assert done.stdout == ""


def test_without_a_server(tmp_path: Path) -> None:
    def run(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("ROLLGRID_")}
        return subprocess.run(
            [*PROGRAM, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            env={**clean, "ROLLGRID_HOME": str(tmp_path), **env},
        )

    nobody = run("rollouts", "status", "b1")
    assert nobody.returncode == 2
    assert "rollgrid up" in nobody.stderr
    silent = run("rollouts", "status", "b1", ROLLGRID_URL="http://127.0.0.1:9", ROLLGRID_PATIENCE_S="0.5")
    assert silent.returncode == 3


def test_help_says_what_there_is() -> None:
    for arguments in (["--help"], ["rollouts", "--help"], ["rollouts", "submit", "--help"], ["trajectories", "--help"]):
        done = rollgrid(None, *arguments)
        assert done.returncode == 0
        assert "Usage" in done.stdout
    everything: Sequence[str] = ("up", "down", "status", "doctor", "models", "demo", "rollouts", "trajectories")
    top = rollgrid(None, "--help").stdout
    assert all(name in top for name in everything)


def test_help_imports_nothing_heavy() -> None:
    """What makes `rollgrid --help` answer at once: neither HTTP nor numbers nor tables are loaded."""
    program = (
        "import sys; sys.argv = ['rollgrid', 'rollouts', '--help']\n"
        "from rollgrid.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'numpy', 'httpx2', 'pyarrow', 'torch', 'transformers', 'matplotlib', 'asyncio'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
