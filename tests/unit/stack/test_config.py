"""Options become parts: names, ports, cores, and which settings reach which process."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from rollgrid.errors import ConfigurationError
from rollgrid.models.prepare import prepare
from rollgrid.stack.config import StackConfig, core_sets, policy_name
from rollgrid.stack.home import Home
from rollgrid.stack.parts import Part
from rollgrid.stack.services import Ports, build_parts


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("ROLLGRID_MODELS", str(tmp_path / "models"))
    return str(prepare("tiny").path)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    found = Home(tmp_path / "home")
    found.create()
    return found


def parts_of(home: Home, config: StackConfig, env: dict[str, str]) -> dict[str, Part]:
    return {part.name: part for part in build_parts(home, config, home.credentials(), Ports(home), env, "abcdef0123")}


@pytest.mark.parametrize(
    ("samplers", "cores", "expected"),
    [
        (0, [0, 1], []),
        (1, [0, 1], ["auto"]),
        (2, [0, 1], ["0", "1"]),
        (2, [0, 1, 2, 3, 4], ["0,1", "2,3"]),
        (3, [4, 5], ["4", "4", "5"]),
    ],
)
def test_engines_do_not_share_cores_while_there_are_enough(
    samplers: int, cores: list[int], expected: list[str]
) -> None:
    assert core_sets(samplers, cores) == expected


def test_a_policy_is_named_after_its_folder() -> None:
    assert policy_name(Path("/models/My Model v1.2")) == "My-Model-v1-2"
    assert policy_name(Path("/")) == "default"


def test_settings_reach_the_right_process_and_secrets_no_command_line(home: Home, model: str) -> None:
    config = StackConfig(
        model=model, policy="tiny", engine="scripted", samplers=2, max_model_len=512, tool_parser="hermes"
    )
    env = {"PATH": "/usr/bin", "AWS_SECRET_ACCESS_KEY": "mine", "ROLLGRID_SAMPLER_SLOTS": "7", "ROLLGRID_DRAIN_S": "3"}
    parts = parts_of(home, config, env)
    sampler = parts["sampler-1"].env
    assert sampler["ROLLGRID_SAMPLER_INSTANCE"] == "sampler-1"
    assert sampler["ROLLGRID_SAMPLER_SLOTS"] == "7"
    assert sampler["ROLLGRID_SAMPLER_DRAIN_S"] == "3"
    assert sampler["ROLLGRID_NATS_URL"] == parts["nats"].url
    assert "AWS_SECRET_ACCESS_KEY" not in sampler
    assert json.loads(parts["checkpoint-sync"].env["ROLLGRID_CHECKPOINT_SYNC_MODELS"]) == [
        {"name": "tiny", "path": model, "dtype": "float32", "max_model_len": 512, "tool_parser": "hermes"}
    ]
    secrets = home.credentials()
    words = " ".join(word for part in parts.values() for word in part.argv)
    assert not [s for s in (secrets.nats_password, secrets.redis_password, secrets.s3_secret_key) if s in words]
    assert [part.stage for part in parts.values()] == [0, 0, 0, 1, 2, 3, 4, 4, 5]


def test_ports_stay_the_same_and_move_when_taken(home: Home, model: str) -> None:
    config = StackConfig(model=model, policy="tiny", engine="scripted")
    first = parts_of(home, config, {})
    second = parts_of(home, config, {})
    assert {name: part.url for name, part in first.items()} == {name: part.url for name, part in second.items()}
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", int(first["nats"].url.rpartition(":")[2])))
        thief.listen()
        assert parts_of(home, config, {})["nats"].url != first["nats"].url


def test_a_port_asked_for_and_taken_is_refused(home: Home, model: str) -> None:
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", 0))
        thief.listen()
        port = thief.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} is taken"):
            parts_of(home, StackConfig(model=model, policy="tiny", engine="scripted", port=port), {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine": "magic"}, "magic"),
        ({"policy": "a.b"}, "policy name"),
        ({"model": "/nowhere"}, "not a model folder"),
        ({"engine": "openai_http"}, "--openai-url"),
        ({"samplers": -1}, "samplers"),
        ({"reasoning_parser": "a b"}, "parser name 'a b'"),
    ],
)
def test_bad_options_are_named(model: str, changes: dict[str, object], message: str) -> None:
    options: dict[str, object] = {"model": model, "policy": "tiny", "engine": "scripted"}
    with pytest.raises(ConfigurationError, match=message):
        StackConfig(**(options | changes)).check()  # type: ignore[arg-type]
