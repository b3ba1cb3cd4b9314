"""GRPO in a sixty-line loop (`rollouts` and `train`): the trainer is here, rollgrid only samples.

    python examples/grpo_minimal.py

A tiny Llama learns to sort four digits: a few dozen supervised steps, then GRPO on rollouts from the
fleet, with the new weights published after every step.  Needs `make setup` and a few minutes on two
cores.  It starts `rollgrid up` on the model it makes, unless $ROLLGRID_URL names a stack that was
started on such a model.  Exits non-zero unless the share of rightly sorted samples rises by MARGIN
and, at every step, the fleet's logprobs match the trainer's own forward pass within TOLERANCE and
every token was sampled from the newest weights.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rollgrid import Client, group_advantages, to_arrays
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STEPS, TASKS, N, EPOCHS, MARGIN, TOLERANCE = 30, 32, 8, 2, 0.3, 1e-4
ROLLGRID = shutil.which("rollgrid") or Path(sys.executable).with_name("rollgrid")
Task = tuple[list[int], list[int]]
Arrays = dict[str, np.ndarray]
PAD, BOS, EOS, SORTED = range(10, 14)  # 0-9 are the digits


def new_task() -> Task:
    """(prompt ids, wanted ids): four digits, and the same in order."""
    digits = [random.randrange(10) for _ in range(4)]
    return [BOS, *digits, SORTED], [*sorted(digits), EOS]


def new_model(folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        max_position_embeddings=128, initializer_range=0.05, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    words = [*"0123456789", "<pad>", "<bos>", "<eos>", "="] + [f"<{i}>" for i in range(14, 64)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return LlamaForCausalLM(config)


def warm_start(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Supervised steps until the likeliest answer is right in two cases of five."""
    for step in range(1, 1000):
        x = torch.tensor([prompt + wanted for prompt, wanted in (new_task() for _ in range(64))])
        output = model(x, labels=torch.where(torch.arange(x.shape[1]) < 6, -100, x))
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (output.logits[:, 5:-1].argmax(-1) == x[:, 6:]).all(1).float().mean() >= 0.4:
            return step
    raise SystemExit("the warm start did not converge")


def reward(ids: list[int], wanted: list[int]) -> float:
    """Share of ids that are right, and 1 more if all are."""
    return sum(a == b for a, b in zip(ids, wanted, strict=False)) / len(wanted) + (ids == wanted)


def rollouts(client: Client, tasks: list[Task], n: int) -> tuple[Arrays, np.ndarray]:
    """Sample `tasks`, n times each: the SDK's arrays, and the rewards that this trainer gives."""
    sampling = {"max_tokens": 5, "temperature": 1.0}
    batch = client.submit([prompt for prompt, _ in tasks], n=n, sampling=sampling, run="grpo", deadline_s=120)
    groups = list(batch.groups())
    arrays = to_arrays(groups)
    assert arrays["ok"].all(), "a sample failed"
    return arrays, np.array([reward(s.token_ids.tolist(), tasks[g.position][1]) for g in groups for s in g.samples])


def train(client: Client, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, folder: Path) -> float:
    policy = client.policies()[0].policy

    def publish(step: int) -> int:
        save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
        return client.weights.publish(policy, folder, step=step).wait_live(timeout=60).version

    exam = [new_task() for _ in range(256)]
    version = publish(0)
    before = (rollouts(client, exam, 1)[1] == 2).mean()
    for step in range(1, STEPS + 1):
        arrays, rewards = rollouts(client, [new_task() for _ in range(TASKS)], N)
        assert (arrays["versions"][arrays["mask"]] == version).all(), f"step {step}: not all from version {version}"
        advantage = torch.tensor(group_advantages(rewards, arrays["group_index"]), dtype=torch.float32)[:, None]
        prompt, sampled, mask, theirs = (
            torch.tensor(arrays[name]) for name in ("prompt_ids", "completion_ids", "mask", "logprobs")
        )
        difference = 0.0
        for epoch in range(EPOCHS):
            logits = model(torch.cat([prompt, sampled], 1)).logits[:, prompt.shape[1] - 1 : -1]
            logprobs = torch.log_softmax(logits, -1).gather(-1, sampled[..., None])[..., 0]
            if epoch == 0:  # the weights that sampled: both forward passes must agree
                difference = ((logprobs - theirs).abs() * mask).max().item()
                assert difference < TOLERANCE, f"step {step}: logprobs differ by {difference}"
            ratio = torch.exp(logprobs - theirs)
            gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
            (-(gain * mask).sum() / mask.sum()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        version = publish(step)
        if step % 5 == 0:
            print(f"step {step:3}  version {version}  reward {rewards.mean():.3f}  max |dlogprob| {difference:.1e}")
    after = (rollouts(client, exam, 1)[1] == 2).mean()
    print(f"right samples {before:.3f} -> {after:.3f} after {STEPS} steps of {TASKS} tasks x {N} samples")
    return float(after - before)


def main() -> None:
    started, own_stack = time.time(), "ROLLGRID_URL" not in os.environ
    random.seed(0), torch.manual_seed(0), torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="rollgrid-grpo-") as scratch:
        base, published = Path(scratch) / "base", Path(scratch) / "published"
        model = new_model(base)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        print(f"warm start: {warm_start(model, optimizer)} supervised steps")
        optimizer.param_groups[0]["lr"] = 5e-4
        model.save_pretrained(base)
        published.mkdir()
        if own_stack:
            os.environ["ROLLGRID_HOME"] = f"{scratch}/home"
            subprocess.run(
                [ROLLGRID, "up", "--model", base, "--policy", "sorter", "--dtype", "float32", "--detach"], check=True
            )
        try:
            with Client() as client:
                margin = train(client, model, optimizer, published)
        finally:
            if own_stack:
                subprocess.run([ROLLGRID, "down"], check=False)
    print(f"{time.time() - started:.0f} s")
    raise SystemExit(margin < MARGIN)


if __name__ == "__main__":
    main()
