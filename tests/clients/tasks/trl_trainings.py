"""`examples/trl_grpo.py` as it stands, three trainings that must stop, and one of LoRA: a JSON line says how they did.

One process, since importing TRL takes longer than the steps.
"""

import json
from pathlib import Path
from typing import Any

import trl_grpo
from peft import LoraConfig
from rollgrid import Client, VersionRefused
from rollgrid.adapters.rows import RolloutsFailed
from rollgrid.adapters.trl import FleetRollouts, OffPolicy


class PublishingOnce(FleetRollouts):
    """The fault: only the first step's weights reach the fleet."""

    def _publish(self, model: Any, weights: dict[str, Any], step: int) -> int:
        return self.versions[0] if self.versions else super()._publish(model, weights, step)


def unpublished(client: Client, model: Path) -> dict[str, Any]:
    rollouts = PublishingOnce(client, run="trl-unpublished", max_logprob_difference=trl_grpo.TOLERANCE)
    trainer = trl_grpo.new_trainer(model, rollouts, "unpublished", steps=4)
    try:
        trainer.train()
    except OffPolicy as error:
        found = {"error": type(error).__name__, "step": error.step, "difference": error.difference}
        return {**found, "before": rollouts.logprob_differences[0], "steps_taken": trainer.state.global_step}
    return {"error": None, "differences": rollouts.logprob_differences}


def refused(client: Client, model: Path) -> dict[str, Any]:
    rollouts = FleetRollouts(client, run="trl-refused", dtype="bfloat16")
    try:
        trl_grpo.new_trainer(model, rollouts, "refused", steps=1).train()
    except VersionRefused as error:
        return {"error": type(error).__name__, "field": error.field, "said": str(error)}
    return {"error": None}


def late(client: Client, model: Path) -> dict[str, Any]:
    rollouts = FleetRollouts(client, run="trl-late", deadline_s=0.001, attempts=2)
    try:
        trl_grpo.new_trainer(model, rollouts, "late", steps=1).train()
    except RolloutsFailed as error:
        batches = {group.batch_id for group in client.trajectories("trl-late", follow=False)}
        return {"error": type(error).__name__, "missing": error.missing, "rows": error.rows, "batches": len(batches)}
    return {"error": None}


def lora(client: Client, model: Path) -> dict[str, Any]:
    policy = client.policies()[0].policy
    base = client.weights.publish(policy, model).wait_live(timeout=60).version  # what the adapters are trained on
    rollouts = FleetRollouts(client, run="trl-lora", max_logprob_difference=trl_grpo.TOLERANCE)
    config = LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    trl_grpo.new_trainer(model, rollouts, "lora", steps=4, peft_config=config).train()
    kept = [client.weights.version(policy, version) for version in rollouts.versions.values()]
    differences = list(rollouts.logprob_differences.values())
    return {"base": base, "kinds": [(one.kind, one.base_version, one.step) for one in kept], "differences": differences}


if __name__ == "__main__":
    arguments = trl_grpo.arguments()
    trl_grpo.main(arguments)
    with Client() as client:
        more = (unpublished, refused, late, lora)
        measured = {training.__name__: training(client, arguments.model) for training in more}
    print(json.dumps(measured))
