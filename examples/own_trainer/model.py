"""The policy: a small Llama with a byte-level BPE tokenizer of its own, and its warm start.

Reinforcement learning needs some right answers to begin with.  A real trainer starts from a
pretrained model; here a few supervised steps on training tasks take its place, stopped early
(`until`), so that most of what can be learned is left to the rewards.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from .tasks import PHRASES, Task, TaskStream, instructions

PAD, EOS = "<|pad|>", "<|end|>"
CONTEXT = 32
WARM_BATCH = 128
IGNORED = -100
"""torch's label for a position that is not learned from."""


class Policy(NamedTuple):
    model: Any
    tokenizer: Any

    def encode(self, task: Task) -> list[int]:
        return list(self.tokenizer.encode(task.prompt, add_special_tokens=False))

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def save(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def new_policy(seed: int, hidden: int = 128, layers: int = 2) -> Policy:
    """A model with random weights.  Its head is not tied to its embedding, as in most larger models."""
    tokenizer = _tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 32, head_dim=32, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        initializer_range=0.05, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(seed)
    return Policy(LlamaForCausalLM(config), tokenizer)


def _tokenizer() -> Any:
    """Byte-level BPE without merges: a digit is a token, and so is each phrase that all questions or answers have."""
    alphabet = [PAD, EOS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_tokens([AddedToken(phrase, normalized=False) for phrase in (*PHRASES, instructions())])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=PAD, eos_token=EOS)


def warm_start(policy: Policy, tasks: TaskStream, *, until: float, lr: float, max_steps: int = 2000) -> Any:
    """Supervised steps until a sample is the right answer with probability `until`, on average over tasks.

    Returns the optimizer, with which the rollouts go on.  Its running averages are worth keeping: AdamW without them
    takes its first steps blindly, and on rewards as rare as these they undo what was learned.
    """
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=lr, weight_decay=0.0)
    for _ in range(max_steps):
        ids, labels = _supervised(policy, tasks.take(WARM_BATCH))
        logits = policy.model(ids).logits[:, :-1]
        wanted = labels[:, 1:]
        losses = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), wanted, reduction="none", ignore_index=IGNORED
        )
        if torch.exp(-losses.sum(1)).mean().item() >= until:
            return optimizer
        (losses.sum() / (wanted != IGNORED).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    raise RuntimeError(f"the warm start did not reach {until} within {max_steps} steps")


def _supervised(policy: Policy, tasks: list[Task]) -> tuple[Any, Any]:
    """Padded ids and labels of prompt and answer; only the answer is learned from."""
    pairs = [
        (policy.encode(task), [*policy.tokenizer.encode(task.answer), policy.tokenizer.eos_token_id]) for task in tasks
    ]
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    ids = torch.full((len(pairs), width), policy.tokenizer.pad_token_id)
    labels = torch.full((len(pairs), width), IGNORED)
    for row, (prompt, answer) in enumerate(pairs):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return ids, labels
