"""TRL's GRPOTrainer on rollouts of the fleet: a tiny Llama learns to write digits, in a minute on two cores.

    rollgrid up --model tiny --dtype float32 --detach           in rollgrid's environment
    python examples/trl_grpo.py                                 in the trainer's: pip install 'rollgrid[trl]' datasets

The trainer takes its base model from the folder that `rollgrid up` serves (`rollgrid models prepare --model tiny`), or from
the one given.  New weights are published before every step.  Exits non-zero unless the reward rises by MARGIN;
stops at the first step whose logprobs differ from the trainer's own forward pass by more than TOLERANCE.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TRL_EXPERIMENTAL_SILENCE="1")

import torch
from datasets import Dataset
from rollgrid import Client
from rollgrid.adapters.trl import FleetRollouts
from rollgrid.models.catalog import recipe
from trl import GRPOConfig, GRPOTrainer

STEPS, COMPLETIONS, N, TOKENS, MARGIN, TOLERANCE = 25, 32, 8, 12, 0.4, 1e-4


def digits(completions: list[list[dict[str, str]]], **_: object) -> list[float]:
    """Reward: how many digits were written, of the most that fit."""
    return [min(1.0, sum(map(str.isdigit, message["content"])) / TOKENS) for (message,) in completions]


def new_trainer(model: Path, rollouts: FleetRollouts, scratch: str, steps: int = STEPS, **more: Any) -> GRPOTrainer:
    tasks = [{"prompt": [{"role": "user", "content": f"Count from {i} on."}]} for i in range(256)]
    settings = GRPOConfig(
        output_dir=scratch, use_cpu=True, bf16=False, seed=0, max_steps=steps, report_to=[], save_strategy="no",
        per_device_train_batch_size=COMPLETIONS, num_generations=N, max_completion_length=TOKENS, temperature=1.0,
        learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=1, disable_tqdm=True,
        model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    data = Dataset.from_list(tasks)
    return GRPOTrainer(str(model), digits, args=settings, train_dataset=data, rollout_func=rollouts, **more)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=recipe("tiny").folder("float32"), help="the base model's folder")
    parser.add_argument("--report", type=Path, help="where to write what was measured, as JSON")
    parser.add_argument("--scratch", default="out/trl", help="TRL's output folder")
    return parser.parse_args()


def main(asked: argparse.Namespace) -> None:
    torch.set_num_threads(1)  # the engine has the other core
    with Client() as client:
        rollouts = FleetRollouts(client, run="trl", max_logprob_difference=TOLERANCE)
        trainer = new_trainer(asked.model, rollouts, asked.scratch)
        trainer.train()
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    differences = [rollouts.logprob_differences[step] for step in range(STEPS)]
    versions = [rollouts.versions[step] for step in range(STEPS)]
    before, after = rewards[0], sum(rewards[-3:]) / 3
    print(f"reward {before:.3f} -> {after:.3f} in {STEPS} steps, max |dlogprob| {max(differences):.1e}")
    print(f"versions {versions[0]} to {versions[-1]}")
    if asked.report:
        asked.report.write_text(json.dumps({"rewards": rewards, "differences": differences, "versions": versions}))
    if after - before < MARGIN:
        raise SystemExit(f"the reward did not rise by {MARGIN}")


if __name__ == "__main__":
    main(arguments())
