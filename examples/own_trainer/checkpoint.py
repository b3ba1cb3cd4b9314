"""A trainer's whole state in a folder, and back: settings, weights, optimizer, measurements; safetensors and JSON.

What was in flight needs no saving: the requests have names, so a resumed trainer that submits them again gets the
very batches it had submitted before, sampled meanwhile.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from .fleet import Sampler
from .history import History
from .model import Policy
from .settings import Settings
from .trainer import Trainer

SETTINGS, WEIGHTS, OPTIMIZER, PROGRESS = "settings.json", "model.safetensors", "optimizer.safetensors", "progress.json"


def save(trainer: Trainer, folder: Path) -> None:
    """Write the state after the last finished step; the progress last, by a rename."""
    folder.mkdir(parents=True, exist_ok=True)
    step = len(trainer.history.steps)
    (folder / SETTINGS).write_text(trainer.settings.to_json())
    save_file(dict(trainer.policy.model.state_dict()), folder / f"{step}-{WEIGHTS}")
    moments = {
        f"{number}.{name}": value
        for number, state in trainer.optimizer.state_dict()["state"].items()
        for name, value in state.items()
    }
    save_file(moments, folder / f"{step}-{OPTIMIZER}")
    progress = {"step": step, "versions": trainer.versions, **trainer.history.to_dict()}
    unfinished = folder / f".{PROGRESS}"
    unfinished.write_text(json.dumps(progress))
    unfinished.rename(folder / PROGRESS)
    for old in folder.glob("*.safetensors"):
        if not old.name.startswith(f"{step}-"):
            old.unlink()


def resume(folder: Path, policy: Policy, optimizer: Any, sampler: Sampler) -> Trainer:
    """The trainer as it was; `policy` and `optimizer` are of the same shape and are overwritten."""
    settings = Settings.read(folder / SETTINGS)
    progress = json.loads((folder / PROGRESS).read_text())
    step = int(progress["step"])
    policy.model.load_state_dict(load_file(folder / f"{step}-{WEIGHTS}"))
    state: dict[int, dict[str, Any]] = {}
    for name, value in load_file(folder / f"{step}-{OPTIMIZER}").items():
        number, _, field = name.partition(".")
        state.setdefault(int(number), {})[field] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    trainer = Trainer(settings, policy, optimizer, sampler)
    trainer.go_on(History.from_dict(settings, progress), progress["versions"])
    return trainer
