"""One whole stack on real vLLM for all clients, and their environments, made while it starts."""

from __future__ import annotations

import functools
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest

from tests.openai_suite.model import BASE, policy_environment, suite_model
from tests.support.stack import Stack, stack, vllm

from .environments import CLIENTS, environment, make_all

CLIENT_S = 240.0
MODEL_ID = "acme/models/tiny"
"""Clients ask for it under a path, as most real names look."""


class Door(NamedTuple):
    """The stack and the folder of its model's tokenizer."""

    stack: Stack
    model: Path

    @property
    def url(self) -> str:
        return self.stack.url

    def samples(self, run: str = "interactive") -> list[dict[str, Any]]:
        """Every sample of a run's closed groups, with its group's prompt: what rollgrid's records hold."""
        found: list[dict[str, Any]] = []
        with httpx2.Client(base_url=self.url, timeout=60) as http:
            cursor = 0
            while True:
                page = http.get(f"/v1/runs/{run}/trajectories", params={"cursor": cursor, "wait_s": 1}).json()
                if not page["groups"]:
                    return found
                for group in (item["group"] for item in page["groups"]):
                    prompt = group["prompt_token_ids"]
                    found += [{**entry["sample"], "prompt": prompt} for entry in group["entries"]]
                cursor = page["cursor"]


@pytest.fixture(scope="package")
def door(request: pytest.FixtureRequest) -> Iterator[Door]:
    tested = {item.path.stem.removeprefix("test_") for item in request.session.items}
    wanted = tested.intersection(CLIENTS)
    builder = threading.Thread(target=make_all, args=(wanted,))  # a failure comes up again where it is used
    builder.start()
    env = policy_environment([MODEL_ID]) | {"ROLLGRID_SAMPLER_MAX_LORAS": "1"}
    with stack(vllm(slots=64, model=BASE, env=env)) as pipe:
        builder.join()
        yield Door(pipe, suite_model())


def run_in(folder: Path, client: str, command: list[str], env: Mapping[str, str]) -> str:
    """Run a command of a client's environment in `folder`; its output, or the failure with its end."""
    made = environment(client)
    # pip has compiled nothing: unless the first process may keep what it compiles, each does all of it again
    dropped = ("ROLLGRID_", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    clean |= {"PATH": f"{made / 'bin'}:{os.environ['PATH']}", **env}
    done = subprocess.run(
        [str(made / "bin" / command[0]), *command[1:]],
        env=clean, cwd=folder, capture_output=True, text=True, timeout=CLIENT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture
def run_client(tmp_path: Path) -> Callable[..., str]:
    """`run_in` an empty folder."""
    return functools.partial(run_in, tmp_path)
