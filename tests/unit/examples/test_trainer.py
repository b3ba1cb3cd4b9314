"""The example trainer's loop against a sampler in plain torch: bounds, checks, learning, resuming (A02, A20, A21)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from examples.own_trainer import checkpoint  # noqa: E402
from examples.own_trainer.model import Policy, new_policy  # noqa: E402
from examples.own_trainer.settings import LOSSES, Settings  # noqa: E402
from examples.own_trainer.trainer import LogprobsDiffer, Trainer  # noqa: E402
from tests.unit.examples.torch_sampler import TorchSampler  # noqa: E402

SMALL = {"steps": 4, "tasks": 4, "samples": 4, "exam_tasks": 8, "exam_every": 4, "hidden": 32, "layers": 1}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """More of them only wait for each other on models this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def new_trainer(sampling: dict[str, Any] | None = None, **changes: Any) -> tuple[Trainer, TorchSampler]:
    settings = Settings(**{**SMALL, **changes})
    policy = new_policy(settings.seed, settings.hidden, settings.layers)
    sampler = TorchSampler(policy, **(sampling or {}))
    return Trainer(settings, policy, new_optimizer(policy), sampler), sampler


def new_optimizer(policy: Policy) -> Any:
    return torch.optim.AdamW(policy.model.parameters(), weight_decay=0.0)


def weights(trainer: Trainer) -> Any:
    return torch.cat([parameter.detach().flatten() for parameter in trainer.policy.model.parameters()])


def test_synchronous_steps_train_on_samples_of_the_weights_they_have() -> None:
    trainer, sampler = new_trainer()
    history = trainer.train()
    assert [step.staleness_max for step in history.steps] == [0] * 4
    assert [step.version for step in history.steps] == [1, 2, 3, 4]
    assert all(step.difference < 1e-4 and step.useful == step.samples == 16 for step in history.steps)
    assert [exam.step for exam in history.exams] == [0, 4]
    assert sampler.most_in_flight == 1


def test_asynchronous_steps_keep_batches_in_flight_and_the_bound() -> None:
    trainer, sampler = new_trainer({"lag": 9}, steps=6, max_staleness=2, ahead=2)
    history = trainer.train()
    # the sampler lags as far as each request lets it
    assert [step.staleness_max for step in history.steps] == [0, 1, 2, 2, 2, 2]
    assert all(step.useful == step.samples and step.difference < 1e-4 for step in history.steps)
    assert sampler.most_in_flight == 3  # one in hand, two ahead


def test_ahead_is_not_the_bound() -> None:
    trainer, sampler = new_trainer({"lag": 1}, steps=5, max_staleness=4, ahead=1)
    assert max(step.staleness_max for step in trainer.train().steps) == 1
    assert sampler.most_in_flight == 2
    with pytest.raises(ValueError, match="ahead"):
        Settings(max_staleness=1, ahead=2)


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_makes_rewarded_answers_likelier(loss: str) -> None:
    trainer, _ = new_trainer(loss=loss, steps=1, exam_every=1)
    before = weights(trainer)
    trainer.start()
    rows = {name: torch.tensor(value) for name, value in _rewarded(trainer).items()}
    old = rows["logprobs"]
    trainer._learn({name: tensor.numpy() for name, tensor in rows.items()}, rows["ok"].numpy())
    new = trainer._forward({name: tensor.numpy() for name, tensor in rows.items()}).detach()
    rewarded = rows["rewards"] == 1
    gain = ((new - old) * rows["mask"]).sum(1)
    assert gain[rewarded].mean() > gain[~rewarded].mean()
    assert not torch.equal(before, weights(trainer))


def _rewarded(trainer: Trainer) -> dict[str, Any]:
    """Real samples of the model, every second one rewarded."""
    trainer._submit()
    arrays = trainer.sampler.collect(trainer._flying.popleft())
    arrays["rewards"] = (arrays["sample_index"] % 2 == 0).astype(float)
    return arrays


def test_weights_other_than_the_record_names_are_found_out() -> None:
    trainer, _ = new_trainer({"lies": True})
    trainer.sampler.publish(trainer._snapshot(), -1)  # so that there is a version to lie about
    with pytest.raises(LogprobsDiffer, match="differ by"):
        trainer.train()


def test_a_version_of_somebody_else_is_found_out() -> None:
    trainer, sampler = new_trainer()
    trainer.start()
    sampler.publish(trainer._snapshot(), 99)
    with pytest.raises(LogprobsDiffer, match="did not publish"):
        trainer.step()


def test_a_resumed_run_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    straight, _ = new_trainer()
    straight.train()
    first, sampler = new_trainer()
    first.start()
    for _ in range(2):
        first.step()
    checkpoint.save(first, tmp_path)
    policy = new_policy(77, SMALL["hidden"], SMALL["layers"])
    second = checkpoint.resume(tmp_path, policy, new_optimizer(policy), sampler)
    assert len(second.history.steps) == 2
    history = second.train()
    assert [step.step for step in history.steps] == [0, 1, 2, 3]
    assert torch.equal(weights(second), weights(straight))
    assert history.exams == straight.history.exams
    checkpoint.save(second, tmp_path)
    assert sorted(file.name for file in tmp_path.glob("*.safetensors")) == [
        "4-model.safetensors",
        "4-optimizer.safetensors",
    ]
