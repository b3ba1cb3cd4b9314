"""The yardstick: the same loop with vLLM inside the trainer's own process, as colocated trainers have it.

Same engine settings, same seeds per sample, same order of rows: in float32 the first steps give the very
tokens that the fleet gives.  There is no queue, no record and no version but a counter.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollgrid_contracts.ids import sample_seed

from .fleet import Arrays, Request, State
from .model import new_policy, warm_start
from .settings import add_options, from_options
from .tasks import TaskStream, score
from .trainer import Trainer

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCHDYNAMO_DISABLE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
SLOTS, KV_BYTES, BLOCK_TOKENS, BATCHED_TOKENS = 32, 64 << 20, 32, 2048
"""As `rollgrid up` sets its samplers, so that both engines do the same sums in the same order."""


class Colocated:
    """An engine that answers when it is asked; `publish` loads the trainer's tensors into it."""

    def __init__(self, folder: Path) -> None:
        os.environ.update(ENVIRONMENT)  # vLLM reads it when it is imported
        from vllm import LLM

        self._llm: Any = LLM(
            str(folder), dtype="float32", enforce_eager=True, max_num_seqs=SLOTS, block_size=BLOCK_TOKENS,
            kv_cache_memory_bytes=KV_BYTES, max_num_batched_tokens=BATCHED_TOKENS, enable_chunked_prefill=False,
            enable_prefix_caching=True, logprobs_mode="processed_logprobs", generation_config="vllm",
        )  # fmt: skip
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._version = 0
        self.published_bytes = 0  # the tensors are handed over in memory

    def publish(self, state: State, step: int) -> int:
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": list(state.items())})
        self._llm.reset_prefix_cache()
        self._version += 1
        return self._version

    def submit(self, request: Request) -> Request:
        return request

    def collect(self, ticket: Request) -> Arrays:
        """Generate now: nothing else runs meanwhile."""
        from vllm import SamplingParams

        rows = [(group, index) for group in range(len(ticket.prompts)) for index in range(ticket.samples)]
        sampling = [
            SamplingParams(
                **ticket.sampling, seed=sample_seed(ticket.seeds[group], index), logprobs=0, detokenize=False
            )
            for group, index in rows
        ]
        prompts = [{"prompt_token_ids": ticket.prompts[group]} for group, _ in rows]
        outputs = [answer.outputs[0] for answer in self._llm.generate(prompts, sampling, use_tqdm=False)]
        return self._arrays(ticket, rows, outputs)

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def _arrays(self, ticket: Request, rows: list[tuple[int, int]], outputs: list[Any]) -> Arrays:
        count, width = len(rows), max(len(output.token_ids) for output in outputs)
        longest = max(map(len, ticket.prompts))
        arrays: Arrays = {
            "prompt_ids": np.zeros((count, longest), dtype=np.int64),
            "prompt_mask": np.zeros((count, longest), dtype=bool),
            "completion_ids": np.zeros((count, width), dtype=np.int64),
            "mask": np.zeros((count, width), dtype=bool),
            "logprobs": np.zeros((count, width), dtype=np.float32),
            "rewards": np.zeros(count),
            "ok": np.ones(count, dtype=bool),
            "group_index": np.array([group for group, _ in rows]),
            "sample_index": np.array([index for _, index in rows]),
        }
        for row, ((group, _), output) in enumerate(zip(rows, outputs, strict=True)):
            prompt, ids = ticket.prompts[group], list(output.token_ids)
            arrays["prompt_ids"][row, -len(prompt) :], arrays["prompt_mask"][row, -len(prompt) :] = prompt, True
            arrays["completion_ids"][row, : len(ids)], arrays["mask"][row, : len(ids)] = ids, True
            arrays["logprobs"][row, : len(ids)] = [
                chosen[token].logprob for token, chosen in zip(ids, output.logprobs, strict=True)
            ]
            text = self._tokenizer.decode(ids, skip_special_tokens=True)
            arrays["rewards"][row] = score(text, ticket.tasks[group])
        arrays["versions"] = np.where(arrays["mask"], self._version, -1)
        return arrays


def main() -> None:
    """`python -m examples.own_trainer.baseline --out FILE …`: the trainer's options, without a fleet."""
    parser = argparse.ArgumentParser(prog="baseline", description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True, help="where the figures go, as JSON")
    add_options(parser)
    options = parser.parse_args()
    settings = from_options(options)
    torch.set_num_threads(settings.threads)
    policy = new_policy(settings.seed, settings.hidden, settings.layers)
    optimizer = warm_start(policy, TaskStream(settings.seed), until=settings.warm_until, lr=settings.warm_lr)
    with tempfile.TemporaryDirectory(prefix="rollgrid-base-") as folder:
        policy.save(Path(folder))
        engine = Colocated(Path(folder))
        history = Trainer(settings, policy, optimizer, engine).train(tell=print)
        engine.close()
    options.out.write_text(json.dumps(history.to_dict(), indent=1))


if __name__ == "__main__":
    main()
