"""GRPO in sixty lines: this program owns the model, the optimizer and the reward; rollgrid samples.

    python examples/grpo_minimal.py

A tiny Llama learns two-digit addition: a short supervised warm start, then GRPO on rollouts from the
fleet, with the new weights published after every step.  Needs `make setup` and about two minutes on
two cores.  It starts `rollgrid up` on the model it makes, unless $ROLLGRID_URL names a stack that was
started on such a model.  Exits non-zero unless greedy accuracy rises by 0.25 and, at every step, the
fleet's logprobs match the trainer's own forward pass within 1e-4 on the newest weights.
"""

import os
import random
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from rollgrid import Client, group_advantages, to_arrays
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

STEPS, TASKS, N, MARGIN, TOLERANCE = 50, 32, 8, 0.25, 1e-4
Task = tuple[list[int], list[int]]
Arrays = dict[str, np.ndarray]
PAD, BOS, EOS, EQUALS, PLUS = range(10, 15)  # 0-9 are the digits


def new_task() -> Task:
    """(prompt ids, wanted ids) of a + b; the sum is written least digit first."""
    a, b = random.randrange(50), random.randrange(50)
    prompt = [BOS, a // 10, a % 10, PLUS, b // 10, b % 10, EQUALS]
    return prompt, [(a + b) % 10, (a + b) // 10, EOS]


def new_model(folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, head_dim=32,
        max_position_embeddings=128, initializer_range=0.05, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    words = [*"0123456789", "<pad>", "<bos>", "<eos>", "=", "+"] + [f"<{i}>" for i in range(15, 64)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return LlamaForCausalLM(config)


def warm_start(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> int:
    """Supervised steps until the model gets two in five sums right."""
    for step in range(1, 2000):
        tasks = [new_task() for _ in range(64)]
        x = torch.tensor([prompt + wanted for prompt, wanted in tasks])
        loss = model(x, labels=torch.where(torch.arange(x.shape[1]) < 7, -100, x)).loss
        loss.backward(), optimizer.step(), optimizer.zero_grad()
        if step % 10 == 0 and (model(x).logits[:, 6:-1].argmax(-1) == x[:, 7:]).all(1).float().mean() >= 0.4:
            return step
    raise SystemExit("the warm start did not converge")


def rollouts(client: Client, tasks: list[Task], n: int, temperature: float) -> tuple[Arrays, np.ndarray]:
    """Sample `tasks`; arrays of the SDK, and the reward this trainer gives: share of right ids, +1 if all are."""
    sampling = {"max_tokens": 3, "temperature": temperature}
    batch = client.submit([prompt for prompt, _ in tasks], n=n, sampling=sampling, run="grpo", deadline_s=120)
    arrays = to_arrays(sorted(batch.groups(), key=lambda group: group.position), pad_id=PAD, pad_to_multiple=3)
    assert arrays["ok"].all(), "a sample failed"
    wanted = np.array([tasks[group][1] for group in arrays["group_index"]])
    right = (arrays["completion_ids"] == wanted) & arrays["mask"]
    return arrays, right.mean(axis=1) + right.all(axis=1)


def train(client: Client, model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, folder: Path) -> float:
    policy = client.policies()[0].policy

    def publish(step: int) -> int:
        model.save_pretrained(folder)
        return client.weights.publish(policy, folder / "model.safetensors", step=step).wait_live(timeout=60).version

    exam = [new_task() for _ in range(256)]
    version = publish(0)
    before = (rollouts(client, exam, 1, 0.0)[1] == 2).mean()
    for step in range(1, STEPS + 1):
        arrays, rewards = rollouts(client, [new_task() for _ in range(TASKS)], N, 1.0)
        advantage = torch.tensor(group_advantages(rewards, arrays["group_index"]), dtype=torch.float32)[:, None]
        mask, sampled = torch.tensor(arrays["mask"]), torch.tensor(arrays["completion_ids"])
        x = torch.cat([torch.tensor(arrays["prompt_ids"]), sampled], 1)
        logits = model(x).logits[:, arrays["prompt_ids"].shape[1] - 1 : -1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, sampled[..., None])[..., 0]
        theirs = torch.tensor(arrays["logprobs"])
        difference = ((logprobs - theirs).abs() * mask).max().item()
        assert difference < TOLERANCE, f"step {step}: logprobs differ by {difference}"
        assert (arrays["versions"][arrays["mask"]] == version).all(), f"step {step}: not all from version {version}"
        ratio = torch.exp(logprobs - theirs)
        gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss = -(gain * mask).sum() / mask.sum()
        loss.backward(), torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(), optimizer.zero_grad()
        version = publish(step)
        if step % 5 == 0:
            print(f"step {step:3}  version {version}  reward {rewards.mean():.3f}  max |dlogprob| {difference:.1e}")
    after = (rollouts(client, exam, 1, 0.0)[1] == 2).mean()
    print(f"greedy accuracy {before:.3f} -> {after:.3f} after {STEPS} steps of {TASKS} tasks x {N} samples")
    return float(after - before)


def main() -> None:
    started, own_stack = time.time(), "ROLLGRID_URL" not in os.environ
    random.seed(0), torch.manual_seed(0), torch.set_num_threads(1)
    folder = Path(tempfile.gettempdir()) / "rollgrid-grpo" / "policy"
    model = new_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=0.0)
    print(f"warm start: {warm_start(model, optimizer)} steps")
    model.save_pretrained(folder)
    os.environ.setdefault("ROLLGRID_HOME", str(folder.parent / "home"))  # a stack of this example's own
    if own_stack:
        subprocess.run(["rollgrid", "up", "--model", str(folder), "--dtype", "float32", "--detach"], check=True)
    try:
        with Client() as client:
            margin = train(client, model, optimizer, folder)
    finally:
        if own_stack:
            subprocess.run(["rollgrid", "down"], check=False)
    print(f"{time.time() - started:.0f} s")
    raise SystemExit(margin < MARGIN)


if __name__ == "__main__":
    main()
