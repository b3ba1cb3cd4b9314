"""What must stop TRL's trainer: weights that were not published, and samples that do not come.  One JSON line for each."""

import json
import sys
from pathlib import Path
from typing import Any

from rollgrid import Client
from rollgrid.adapters.rows import RolloutsFailed
from rollgrid.adapters.trl import FleetRollouts, OffPolicy
from trl_grpo import TOLERANCE, new_trainer


class PublishingOnce(FleetRollouts):
    """The fault: only the first step's weights reach the fleet."""

    def _publish(self, model: Any, weights: dict[str, Any], step: int) -> int:
        return self.versions[0] if self.versions else super()._publish(model, weights, step)


def unpublished(client: Client, model: Path, scratch: str) -> dict[str, Any]:
    rollouts = PublishingOnce(client, run="trl-unpublished", max_logprob_difference=TOLERANCE)
    trainer = new_trainer(model, rollouts, scratch, steps=4)
    try:
        trainer.train()
    except OffPolicy as error:
        found = {"error": type(error).__name__, "step": error.step, "difference": error.difference}
        return {**found, "before": rollouts.logprob_differences[0], "steps_taken": trainer.state.global_step}
    return {"error": None, "differences": rollouts.logprob_differences}


def late(client: Client, model: Path, scratch: str) -> dict[str, Any]:
    rollouts = FleetRollouts(client, run="trl-late", deadline_s=0.001, attempts=2)
    try:
        new_trainer(model, rollouts, scratch, steps=1).train()
    except RolloutsFailed as error:
        batches = {group.batch_id for group in client.trajectories("trl-late", follow=False)}
        return {"error": type(error).__name__, "missing": error.missing, "rows": error.rows, "batches": len(batches)}
    return {"error": None}


if __name__ == "__main__":
    with Client() as client:
        folder, scratch = Path(sys.argv[1]), sys.argv[2]
        print("\n".join(json.dumps(fault(client, folder, scratch)) for fault in (unpublished, late)))
