"""The example trainer on the whole stack with real vLLM: it learns, its tokens are a colocated engine's (A02, A20, A21).

Stated: within LEARNS steps the reward on held-out questions rises by MARGIN, and at every step the fleet's logprobs
equal those of the trainer's own forward pass within 1e-4.  Published as deltas, its weights are what the fleet runs.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollgrid import Client
from rollgrid.results import Sample

from tests.support.stack import POLICY, Stack, stack, vllm

torch = pytest.importorskip("torch")

from examples.own_trainer.fleet import Fleet  # noqa: E402
from examples.own_trainer.history import History  # noqa: E402
from examples.own_trainer.model import Policy, new_policy, warm_start  # noqa: E402
from examples.own_trainer.settings import Settings  # noqa: E402
from examples.own_trainer.tasks import TaskStream  # noqa: E402
from examples.own_trainer.trainer import Trainer  # noqa: E402

ROOT = Path(__file__).parents[2]
LEARNS, MARGIN, LOCKSTEP = 12, 0.08, 2
ANSWER = 12
"""Tokens of a greedy answer."""
SETTINGS = Settings(steps=LEARNS, exam_every=LEARNS, exam_tasks=256)

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(400)]


def start() -> tuple[Policy, Any]:
    torch.set_num_threads(SETTINGS.threads)
    policy = new_policy(SETTINGS.seed, SETTINGS.hidden, SETTINGS.layers)
    return policy, warm_start(policy, TaskStream(SETTINGS.seed), until=SETTINGS.warm_until, lr=SETTINGS.warm_lr)


@pytest.fixture(scope="module")
def colocated(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the tokens that the same trainer gets of an engine in its own process."""
    out = tmp_path_factory.mktemp("colocated") / "figures.json"
    command = [sys.executable, "-m", "examples.own_trainer.baseline", "--out", str(out)]
    command += ["--steps", str(LOCKSTEP), "--exam-every", str(LOCKSTEP), "--exam-tasks", "8"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return [step["ids"] for step in json.loads(out.read_text())["steps"]]


@pytest.fixture(scope="module")
def fleet(colocated: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A stack that serves the trainer's model, started after the other engine has ended."""
    folder = tmp_path_factory.mktemp("learner")
    start()[0].save(folder)
    served = {
        "ROLLGRID_SAMPLER_MODEL": str(folder),
        "ROLLGRID_CHECKPOINT_SYNC_MODELS": json.dumps([{"name": POLICY, "path": str(folder), "dtype": "float32"}]),
        "ROLLGRID_SAMPLER_BLOCK_SIZE": "32",
    }
    with stack(vllm(slots=32, env=served)) as pipe:
        yield pipe


def train(pipe: Stack, run: str, settings: Settings) -> History:
    policy, optimizer = start()
    with Client(pipe.url) as client:
        fleet = Fleet(client, POLICY, run, wait_live=settings.max_staleness == 0)
        return Trainer(settings, policy, optimizer, fleet).train(tell=print)


def test_it_learns_and_its_first_tokens_are_those_of_a_colocated_engine(fleet: Stack, colocated: list[str]) -> None:
    history = train(fleet, "learns", SETTINGS)
    assert history.rise >= MARGIN, history.exams
    assert max(step.difference for step in history.steps) < 1e-4
    assert all(step.staleness_max == 0 and step.useful == step.samples == 256 for step in history.steps)
    assert [step.ids for step in history.steps[:LOCKSTEP]] == colocated


def test_asynchronous_steps_keep_their_bound_and_lose_nothing(fleet: Stack) -> None:
    settings = dataclasses.replace(SETTINGS, steps=5, exam_every=5, exam_tasks=8, max_staleness=2, ahead=2)
    history = train(fleet, "asynchronous", settings)
    assert 1 <= max(step.staleness_max for step in history.steps) <= 2
    assert all(step.useful == step.samples == 256 for step in history.steps)
    assert max(step.difference for step in history.steps) < 1e-4


def test_A18_what_is_published_as_deltas_is_what_the_fleet_runs(fleet: Stack) -> None:
    """A43: a chain of deltas on a full version: greedy answers and fingerprints are those of the same weights sent whole."""
    policy, optimizer = start()
    prints: dict[int, str | None] = {}
    with Client(fleet.url) as client:
        for kind in ("full", "delta", "delta", "delta", "full"):
            if kind == "delta":
                step(policy, optimizer, 1e-6 if len(prints) == 1 else 1e-2)
            # auto makes a full version where this client has published nothing, and remembers it
            named = kind if prints else "auto"
            version = (
                client.weights.publish(POLICY, policy.model.state_dict(), kind=named).wait_live(timeout=120).version
            )
            assert client.weights.version(POLICY, version).kind == kind
            far, prints[version] = greedy(client, policy, version)
            print(f"version {version}, {kind}: largest |Δlogprob| {far:.1e}")
            assert far <= 1e-4
    *chain, last, whole = prints.values()
    assert whole == last, "the state the deltas lead to, and the same sent whole"
    assert len({*chain, last}) == len(chain) + 1


def step(policy: Policy, optimizer: Any, lr: float) -> None:
    """One step of AdamW on the model's own text; at a small rate most elements stay as they are in fewer bits."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    ids = torch.tensor([policy.encode(task) for task in TaskStream(1).take(8)])
    policy.model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def greedy(client: Client, policy: Policy, version: int) -> tuple[float, str | None]:
    """How far the fleet is from the trainer's greedy answers and their logprobs, and the fingerprint it answers with."""
    prompts = [policy.encode(task) for task in TaskStream(2).take(4)]
    sampling = {"temperature": 0.0, "max_tokens": ANSWER, "ignore_eos": True}
    tasks = [{"prompt_token_ids": prompt} for prompt in prompts]
    batch = client.submit(tasks, sampling=sampling, policy=POLICY, weights={"exact_version": version}, deadline_s=120)
    groups = sorted(batch.groups(), key=lambda group: group.position)
    samples = [group.samples[0] for group in groups]
    assert len(samples) == len(prompts)
    assert {sample.versions for sample in samples} == {(version,)}
    (fingerprint,) = {sample.fingerprint for sample in samples}
    assert fingerprint
    return max(off(policy, *pair) for pair in zip(prompts, samples, strict=True)), fingerprint


def off(policy: Policy, prompt: list[int], sample: Sample) -> float:
    answer = torch.tensor(sample.token_ids.astype("int64"))
    with torch.no_grad():
        logits = policy.model(torch.tensor([prompt + answer.tolist()])).logits[0, len(prompt) - 1 : -1]
    best, own = logits.log_softmax(-1).max(-1).values, logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
    assert len(answer) == ANSWER
    return max(float((own - torch.tensor(sample.logprobs)).abs().max()), float((best - own).max()))
