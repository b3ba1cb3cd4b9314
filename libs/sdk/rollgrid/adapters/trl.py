"""TRL's GRPOTrainer on rollouts of the fleet, with TRL's importance sampling on and new weights before every step.

    trainer = GRPOTrainer(..., rollout_func=FleetRollouts(client, run="my-run"))
    trainer.train()

Invariants: a step is sampled from the version published for it and from no other; as many completions come
back as prompts came in, none of them empty, EOS kept; every wait ends.

Needs TRL 1.16 with `use_vllm=False`.  TRL ignores the logprobs of a `rollout_func` unless it believes that
it runs vLLM, so it is made to, by attributes that another version may not have.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from transformers import TrainerCallback

from rollgrid.errors import ConfigurationError, RollgridError

from .rows import RowSampling

if TYPE_CHECKING:
    from rollgrid.client import Client

TRL = "1.16"
DIFFERENCE = "sampling/sampling_logp_difference/max"
"""TRL's metric: |its own forward pass - the returned logprobs|, the largest of all tokens and processes."""


class PublicationFailed(RollgridError):
    """The main process could not publish the weights, for the reason given."""


class OffPolicy(RollgridError):
    """The trainer's logprobs differ from the fleet's by more than the limit; the optimizer did not step."""

    def __init__(self, step: int, difference: float, limit: float) -> None:
        super().__init__(f"step {step}: logprobs differ by up to {difference:.2e}, max_logprob_difference={limit:g}")
        self.step, self.difference, self.limit = step, difference, limit


class FleetRollouts(TrainerCallback):
    """A `rollout_func`; one for each trainer.

    `versions` and `logprob_differences` say for each global step which version was published for it, and by how
    much at most the trainer's logprobs differed from the sampled ones (with TRL's importance sampling on).
    """

    def __init__(
        self,
        client: Client,
        *,
        policy: str | None = None,
        run: str = "trl",
        deadline_s: float = 600.0,
        publish_timeout_s: float = 600.0,
        attempts: int = 3,
        max_logprob_difference: float | None = None,
        dtype: str | None = None,
    ) -> None:
        """`policy` may be left out where one is served only.  What PEFT trains is published as LoRA, all else full.

        A batch of rollouts has `deadline_s`, failed samples are asked for in up to `attempts` batches; the upload
        of new weights and their way to every worker have `publish_timeout_s` each.  Beyond `max_logprob_difference` a step raises
        `OffPolicy`; in float32 and sampled by temperature alone, 1e-4 is far above what is met.  `dtype` ("bfloat16")
        is what weights are published in, where the fleet serves another one than is trained.
        """
        _check_trl()
        self._client = client
        self._policy = policy or _only_policy(client)
        self._rows = RowSampling(client, self._policy, run, deadline_s, attempts)
        self._publish_timeout_s = publish_timeout_s
        self._limit = max_logprob_difference
        self._dtype = dtype
        self._trainer: Any = None
        self._unread = 0  # generations whose difference was not looked at yet
        self.versions: dict[int, int] = {}
        self.logprob_differences: dict[int, float] = {}

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        """What TRL calls; `prompts` holds each prompt once for every completion that is wanted of it."""
        if trainer is not self._trainer:
            self._take(trainer)
        self.sync_weights()
        prompt_ids, images, _ = trainer._tokenize_prompts(prompts)
        if images:
            raise ConfigurationError("FleetRollouts samples text: a prompt holds images")
        version = self.versions[trainer.state.global_step]
        samples = self._rows.sample(prompt_ids, version, _sampling(trainer))
        self._unread += trainer.model.training
        return {
            "prompt_ids": prompt_ids,
            "completion_ids": [sample.token_ids.tolist() for sample in samples],
            "logprobs": [sample.logprobs.tolist() for sample in samples],
            # for reward functions: which weights, and where rewards can be posted to
            "weight_version": version,
            "group_id": [sample.group_id for sample in samples],
            "sample_index": [sample.index for sample in samples],
        }

    def sync_weights(self) -> None:
        """Publish the weights of this step, unless they are, and wait until the whole fleet runs them."""
        trainer = self._trainer
        step = trainer.state.global_step
        if step in self.versions:
            return
        weights = trainer.accelerator.get_state_dict(trainer.model_wrapped)  # every process: they may be sharded
        version, failure = 0, None
        if trainer.accelerator.is_main_process:
            try:
                version = self._publish(trainer.accelerator.unwrap_model(trainer.model), weights, step)
            except RollgridError as error:
                failure = error
        version, reason = broadcast_object_list([version, failure and str(failure)])
        if failure:
            raise failure
        if reason:
            raise PublicationFailed(reason)
        self.versions[step] = version

    def _publish(self, model: Any, weights: dict[str, Any], step: int) -> int:
        adapter = None
        if hasattr(model, "peft_config"):
            from peft import get_peft_model_state_dict

            adapter = model.peft_config[model.active_adapter]
            weights = get_peft_model_state_dict(model, state_dict=weights)
        if self._dtype is not None:
            import torch

            dtype = getattr(torch, self._dtype)
            weights = {
                name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in weights.items()
            }
        published = self._client.weights.publish(
            self._policy, weights, step=step, adapter_config=adapter, timeout=self._publish_timeout_s
        )
        return published.wait_live(self._publish_timeout_s).version

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read how far the trainer's forward pass was from the fleet's, one number for each generation."""
        fresh = self._trainer._metrics["train"].get(DIFFERENCE, [])[-self._unread :] if self._unread else []
        self._unread = 0
        if not fresh:
            return
        self.logprob_differences[state.global_step] = difference = max(fresh)
        if self._limit is not None and difference > self._limit:
            raise OffPolicy(state.global_step, difference, self._limit)

    def _take(self, trainer: Any) -> None:
        if trainer.args.use_vllm or trainer.tools or trainer.environment_factories:
            raise ConfigurationError("FleetRollouts needs use_vllm=False, no tools and no environment_factory")
        if self._limit is not None and not trainer.vllm_importance_sampling_correction:
            raise ConfigurationError("max_logprob_difference needs vllm_importance_sampling_correction=True")
        # TRL reads `logprobs` where use_vllm is set, and calls vllm_generation.sync_weights() before a step's rollouts.
        trainer.use_vllm, trainer.vllm_mode, trainer.vllm_generation = True, "server", self
        trainer._last_loaded_step = trainer.state.global_step
        trainer.add_callback(self)
        self._trainer = trainer


def _check_trl() -> None:
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    if not found.startswith(f"{TRL}."):
        raise ConfigurationError(f"this adapter drives TRL {TRL}, here is {found}: pip install 'trl=={TRL}.*'")


def _only_policy(client: Client) -> str:
    names = [policy.policy for policy in client.policies()]
    if len(names) != 1:
        raise ConfigurationError(f"policy: say which to train of {', '.join(names) or 'none that is served'}")
    return names[0]


def _sampling(trainer: Any) -> dict[str, Any]:
    """TRL's settings, under the names that rollgrid has for them as well."""
    return {
        "max_tokens": trainer.max_completion_length,
        "temperature": trainer.temperature,
        "top_p": trainer.top_p,
        "top_k": trainer.top_k or 0,
        "min_p": trainer.min_p or 0.0,
        "repetition_penalty": trainer.repetition_penalty,
        **(trainer.args.generation_kwargs or {}),
    }
