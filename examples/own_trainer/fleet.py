"""The trainer's side of rollgrid: what it submits, what it reads, what it publishes.  Only the SDK is used.

`Sampler` is what the loop needs of whoever samples; `Fleet` is rollgrid, `baseline.Colocated` an engine
inside the trainer's own process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from rollgrid import Batch, Client, to_arrays

from .tasks import SCORER, Task

Arrays = dict[str, npt.NDArray[Any]]
State = Mapping[str, Any]
"""A model's state_dict."""
LIVE_TIMEOUT_S = 120.0


class Request(NamedTuple):
    """Samples that the trainer wants: `samples` of each prompt, by weights of `min_version` or later.

    `max_staleness` None: for no step of the training (an examination).  `seeds` has one number per prompt; the
    samples of a group derive theirs from it.  `key` names the request for good: sent again by a restarted
    trainer it is the same batch.
    """

    key: str
    prompts: Sequence[list[int]]
    tasks: Sequence[Task]
    samples: int
    seeds: Sequence[int]
    sampling: Mapping[str, Any]
    min_version: int
    max_staleness: int | None
    deadline_s: float


class Sampler(Protocol):
    """Whoever samples for the trainer."""

    published_bytes: int
    """What the last publication sent."""

    def publish(self, state: State, step: int) -> int:
        """New weights for what is sampled from now on; the number of their version."""
        ...

    def submit(self, request: Request) -> Any:
        """Ask for samples; what comes back is for `collect`."""
        ...

    def collect(self, ticket: Any) -> Arrays:
        """The samples as `rollgrid.to_arrays` gives them, in the order of prompts and indexes."""
        ...


class Fleet:
    """rollgrid."""

    def __init__(
        self, client: Client, policy: str, run: str, *, wait_live: bool = True, publish_as: str = "full"
    ) -> None:
        """`wait_live`: `publish` returns when all samplers run the version; an asynchronous trainer needs no wait."""
        self.client, self.policy, self.run = client, policy, run
        self._wait_live, self._publish_as = wait_live, publish_as
        self._kind = "full" if publish_as == "full" else "auto"  # the first has nothing to go on from
        self.published_bytes = 0

    def publish(self, state: State, step: int) -> int:
        sizes: dict[str, int] = {}
        published = self.client.weights.publish(
            self.policy, dict(state), kind=self._kind, step=step,
            upload=f"{self.run}-{step}", sent=lambda file, sent, size: sizes.update({file: size}),
        )  # fmt: skip
        self.published_bytes = sum(sizes.values())
        self._kind = self._publish_as
        if self._wait_live:
            published.wait_live(timeout=LIVE_TIMEOUT_S)
        return int(published.version)

    def submit(self, request: Request) -> Batch:
        """Batches to train on are paced by the server: none is sampled too early, so none is thrown away as too old."""
        terms: dict[str, Any] = {"run": f"{self.run}-exam", "weights": {"min_version": request.min_version}}
        if request.max_staleness is not None:
            terms = {
                "run": self.run,
                "pace": {"batch": len(request.prompts), "max_staleness": request.max_staleness},
            }
        return self.client.submit(
            [
                {"prompt_token_ids": prompt, "task": task.payload, "sampling": {"seed": seed}}
                for prompt, task, seed in zip(request.prompts, request.tasks, request.seeds, strict=True)
            ],
            n=request.samples, sampling=request.sampling, scorers=[SCORER], policy=self.policy,
            deadline_s=request.deadline_s, idempotency_key=f"{self.run}-{request.key}", **terms,
        )  # fmt: skip

    def collect(self, ticket: Batch) -> Arrays:
        groups = sorted(ticket.groups(), key=lambda group: group.position)
        return to_arrays(groups)


class OwnStack(NamedTuple):
    """A stack that was started for this program alone."""

    client: Client
    policy: str
    home: Path


@contextlib.contextmanager
def own_stack(model: Path, *, samplers: int = 1, policy: str = "learner") -> Iterator[OwnStack]:
    """`rollgrid up` on the model in this folder, float32, with data of its own; stopped at the end.

    Its samplers load no version a second time to check it cold: the trainer compares every token itself.
    """
    rollgrid = shutil.which("rollgrid") or str(Path(sys.executable).with_name("rollgrid"))
    with tempfile.TemporaryDirectory(prefix="rollgrid-trainer-") as home:
        env = {**os.environ, "ROLLGRID_HOME": home, "ROLLGRID_LOG_LEVEL": "WARNING"}
        env["ROLLGRID_SAMPLER_COLD_CHECK_EVERY"] = "0"
        up = [rollgrid, "up", "--model", str(model), "--policy", policy, "--dtype", "float32"]
        subprocess.run([*up, "--samplers", str(samplers), "--detach"], env=env, check=True, stdout=sys.stderr)
        try:
            with client_of(Path(home)) as client:
                yield OwnStack(client, policy, Path(home))
        finally:
            subprocess.run([rollgrid, "down"], env=env, check=False, stdout=sys.stderr)


def client_of(home: Path) -> Client:
    """A client of the stack whose state is in `home`."""
    from rollgrid.stack.home import Home

    state = Home(home).read_state()
    if state is None:
        raise RuntimeError(f"no stack runs in {home}")
    return Client(state.url, state.api_key)


def usable(arrays: Arrays, oldest: npt.NDArray[np.int64], bound: int) -> npt.NDArray[np.bool_]:
    """Which rows are useful samples: succeeded, with tokens and a reward, and within the staleness bound."""
    found: npt.NDArray[np.bool_] = (
        arrays["ok"] & arrays["mask"].any(1) & ~np.isnan(arrays["rewards"]) & (oldest <= bound)
    )
    return found
