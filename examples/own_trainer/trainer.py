"""The loop: submit → read the samples → advantages → loss → optimizer step → publish → submit …

`Trainer` owns model and optimizer.  Synchronous (`max_staleness` 0): it trains on samples of the very
weights it has.  Asynchronous: `ahead` batches are being sampled while it trains on one; no token is more
than `max_staleness` versions older than the weights that learn from it, for the fleet paces the run.
Nothing is thrown away for being too old.

Every step also computes the logprobs of all sampled tokens with the weights that sampled them, according
to the record, and compares.  A version label that lies, stale weights or a stale KV cache show up there.
"""

from __future__ import annotations

import collections
import hashlib
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from . import losses
from .fleet import Arrays, Request, Sampler, State, usable
from .history import Exam, History, Step
from .model import Policy
from .settings import Settings
from .tasks import TaskStream, examination

TOLERANCE = 1e-4
"""|Δlogprob| between the fleet and the trainer beyond which a step is refused (float32)."""
SEED_SPAN = 1 << 20
DECOUPLED = ("grpo", "dr_grpo", "ppo")
"""Losses that clip per token, so that stale tokens can be weighed by themselves."""


class LogprobsDiffer(RuntimeError):
    """The fleet's logprobs are not those of the weights it says it used."""


class Trainer:
    """One run; `train` does all of it, `step` one step."""

    def __init__(self, settings: Settings, policy: Policy, optimizer: Any, sampler: Sampler) -> None:
        self.settings, self.policy, self.sampler = settings, policy, sampler
        self.optimizer = optimizer
        for group in optimizer.param_groups:
            group["lr"] = settings.lr
        self.history = History(settings)
        self.versions: list[int] = []
        """Version of each step's weights: `versions[k]` is what step k trains."""
        self._states: dict[int, State] = {}
        self._tasks = TaskStream(1 + settings.seed)
        self._flying: collections.deque[Any] = collections.deque()
        self._submitted = 0
        self._exam = examination(settings.exam_tasks)

    def train(self, tell: Callable[[str], None] = lambda _: None, save: Callable[[], None] = lambda: None) -> History:
        """All steps that are left; `save` is called after each examination."""
        if not self.versions:
            self.start()
        while len(self.history.steps) < self.settings.steps:
            done = self.step()
            exam = self.history.exams[-1]
            if exam.step == len(self.history.steps):
                save()
            tell(
                f"step {done.step:3}  reward {done.reward:.3f}  held out {exam.reward:.3f} (at {exam.step})  staleness "
                f"{done.staleness_max}  |dlogprob| {done.difference:.1e}  {done.tokens / done.seconds:5.0f} tokens/s"
            )
        return self.history

    def start(self) -> None:
        self._publish(0)
        self.history.exams.append(self.examine(0))

    def go_on(self, history: History, versions: list[int]) -> None:
        """Continue a run whose last version is that of the weights the model has now."""
        self.history, self.versions = history, versions
        self._submitted = len(history.steps)
        self._tasks.take(self._submitted * self.settings.tasks)
        self._states[versions[-1]] = self._snapshot()

    def step(self) -> Step:
        """One optimizer step on one batch, and the publication of what came out."""
        began, settings, step = time.monotonic(), self.settings, len(self.versions) - 1
        while self._submitted <= min(step + settings.depth, settings.steps - 1):
            self._submit()
        arrays = self.sampler.collect(self._flying.popleft())
        sampled = time.monotonic()
        age = self._age(arrays, step)
        difference = self._difference(arrays)
        useful = usable(arrays, age, settings.max_staleness)
        loss = self._learn(arrays, useful)
        trained = time.monotonic()
        self._publish(step + 1)
        ended = time.monotonic()
        done = Step(
            step=step, version=self.versions[step], ids=_digest(arrays), reward=_mean(arrays["rewards"][useful]), loss=loss,
            difference=difference, staleness_max=int(age.max()), staleness_mean=float(age.mean()), samples=len(age),
            useful=int(useful.sum()), tokens=int(arrays["mask"].sum()), seconds=ended - began,
            rollout_s=sampled - began, train_s=trained - sampled, publish_s=ended - trained,
            published_bytes=self.sampler.published_bytes,
        )  # fmt: skip
        self.history.steps.append(done)
        if (step + 1) % settings.exam_every == 0 or step + 1 == settings.steps:
            self.history.exams.append(self.examine(step + 1))
        return done

    def examine(self, step: int) -> Exam:
        """Reward on the held-out questions by the newest weights: sampled as in training, and greedy."""
        rewards = []
        for name, temperature in (("sampled", self.settings.temperature), ("greedy", 0.0)):
            request = Request(
                key=f"exam-{step}-{name}", prompts=[self.policy.encode(task) for task in self._exam], tasks=self._exam,
                samples=1, seeds=range(len(self._exam)), min_version=self.versions[-1], max_staleness=None,
                sampling={"max_tokens": self.settings.max_tokens, "temperature": temperature},
                deadline_s=self.settings.deadline_s,
            )  # fmt: skip
            found = self.sampler.collect(self.sampler.submit(request))["rewards"]
            rewards.append(_mean(found[~np.isnan(found)]))
        return Exam(step=step, reward=rewards[0], greedy=rewards[1])

    # -- sampling -----------------------------------------------------------------------------

    def _submit(self) -> None:
        """Ask for the batch that step `_submitted` will train on."""
        settings, step = self.settings, self._submitted
        tasks = self._tasks.take(settings.tasks)
        first = (settings.seed * SEED_SPAN + step) * SEED_SPAN
        request = Request(
            key=f"step-{step}", prompts=[self.policy.encode(task) for task in tasks], tasks=tasks,
            samples=settings.samples, seeds=range(first, first + len(tasks)),
            sampling={"max_tokens": settings.max_tokens, "temperature": settings.temperature},
            min_version=self.versions[max(0, step - settings.max_staleness)], max_staleness=settings.max_staleness,
            deadline_s=settings.deadline_s,
        )  # fmt: skip
        self._flying.append(self.sampler.submit(request))
        self._submitted += 1

    def _publish(self, step: int) -> None:
        state = self._snapshot()
        version = self.sampler.publish(state, step)
        self.versions.append(version)
        self._states[version] = state
        for old in self.versions[: -2 - self.settings.max_staleness]:
            self._states.pop(old, None)

    def _snapshot(self) -> State:
        return {name: tensor.detach().clone() for name, tensor in self.policy.model.state_dict().items()}

    def _age(self, arrays: Arrays, step: int) -> Any:
        """How many versions the oldest token of each row lies behind the weights that learn from it."""
        position = {version: index for index, version in enumerate(self.versions)}
        ages = np.zeros(len(arrays["ok"]), dtype=np.int64)
        for version in np.unique(arrays["versions"][arrays["mask"]]):
            if version not in position:
                raise LogprobsDiffer(f"tokens of version {version}, which this trainer did not publish")
            rows = ((arrays["versions"] == version) & arrays["mask"]).any(1)
            ages[rows] = np.maximum(ages[rows], step - position[int(version)])
        return ages

    # -- learning -----------------------------------------------------------------------------

    def _forward(self, arrays: Arrays, state: State | None = None) -> Any:
        """Logprobs (R, T) of the sampled tokens at the training temperature, by `state` or the model as it is."""
        ids = torch.tensor(np.concatenate([arrays["prompt_ids"], arrays["completion_ids"]], axis=1))
        seen = torch.tensor(np.concatenate([arrays["prompt_mask"], arrays["mask"]], axis=1))
        inputs = {"attention_mask": seen.long(), "position_ids": (seen.long().cumsum(1) - 1).clamp(min=0)}
        model = self.policy.model
        output = model(ids, **inputs) if state is None else functional_call(model, dict(state), (ids,), inputs)
        width = arrays["prompt_ids"].shape[1]
        logits = output.logits[:, width - 1 : -1] / self.settings.temperature
        return torch.log_softmax(logits, -1).gather(-1, ids[:, width:, None])[..., 0]

    @torch.no_grad()
    def _difference(self, arrays: Arrays) -> float:
        """Largest |Δlogprob| between the record and the weights that it names.  Raises LogprobsDiffer."""
        largest = 0.0
        for version in np.unique(arrays["versions"][arrays["mask"]]):
            if version not in self._states:  # sampled before this process began, for the one it goes on for
                continue
            own = self._forward(arrays, self._states[int(version)]).numpy()
            tokens = arrays["mask"] & (arrays["versions"] == version)
            largest = max(largest, float(np.abs(own - arrays["logprobs"])[tokens].max()))
        if largest >= TOLERANCE:
            raise LogprobsDiffer(f"logprobs of step {len(self.versions) - 1} differ by {largest:.2e}")
        return largest

    def _learn(self, arrays: Arrays, useful: Any) -> float:
        """`passes` optimizer steps on the useful rows; the mean loss."""
        if not useful.any():
            return 0.0
        rows = {name: torch.tensor(values[useful]) for name, values in arrays.items()}
        kept = {name: values[useful] for name, values in arrays.items()}
        self._decouple(kept, rows)
        total = 0.0
        for _ in range(self.settings.passes):
            loss = self._loss(self._forward(kept), rows)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.policy.model.parameters(), self.settings.grad_norm)
            self.optimizer.step()
            total += loss.item()
        if not math.isfinite(total):
            raise FloatingPointError("the loss is not finite")
        return total / self.settings.passes

    @torch.no_grad()
    def _decouple(self, kept: Arrays, rows: dict[str, Any]) -> None:
        """Stale samples: clip around the weights as they are now, and weigh each token for those that sampled it."""
        rows["weight"] = None
        if self.settings.loss in DECOUPLED and (kept["versions"][kept["mask"]] != self.versions[-1]).any():
            now = self._forward(kept)
            rows["weight"] = losses.behaviour_weight(now, rows["logprobs"], rows["mask"])
            rows["logprobs"] = now

    def _loss(self, logprobs: Any, rows: dict[str, Any]) -> Any:
        old, mask, groups = rows["logprobs"], rows["mask"], rows["group_index"]
        rewards, settings = rows["rewards"].float(), self.settings
        clip: dict[str, Any] = {"clip_low": settings.clip_low, "clip_high": settings.clip_high}
        clip["weight"] = rows["weight"]
        match settings.loss:
            case "grpo":
                return losses.grpo(logprobs, old, rewards, groups, mask, **clip)
            case "dr_grpo":
                return losses.dr_grpo(logprobs, old, rewards, groups, mask, length=settings.max_tokens, **clip)
            case "ppo":  # no critic: what a sample is worth is measured against all samples of the step
                centred = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
                return losses.ppo_clip(logprobs, old, centred, mask, **clip)
            case "gspo":
                return losses.gspo(logprobs, old, rewards, groups, mask)  # its bounds are its own, and narrow
        returns = losses.discounted_returns(losses.final_rewards(rewards, mask), mask)
        return losses.reinforce(logprobs, returns, rewards.mean(), mask)


def _mean(values: Any) -> float:
    return float(values.mean()) if len(values) else 0.0


def _digest(arrays: Arrays) -> str:
    """Equal for equal tokens in equal rows."""
    sampled = np.where(arrays["mask"], arrays["completion_ids"], -1).astype("<i8")
    return hashlib.sha256(repr(sampled.shape).encode() + sampled.tobytes()).hexdigest()[:16]
