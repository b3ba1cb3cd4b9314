"""A sampler in plain torch behind the example trainer's `Sampler`: no fleet, no engine.

`lag` serves every request with weights so many versions old, where the request allows it.  `lies` says
version v and uses the one before.  The reward is 1 for every answer of even length, so that a random model earns some.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from rollgrid_contracts.ids import sample_seed

from examples.own_trainer.fleet import Arrays, Request, State
from examples.own_trainer.model import Policy, new_policy


class TorchSampler:
    def __init__(self, policy: Policy, *, lag: int = 0, lies: bool = False) -> None:
        self.policy = new_policy(0, policy.model.config.hidden_size, policy.model.config.num_hidden_layers)
        self.states: list[State] = []
        self.lag, self.lies = lag, lies
        self.asked: list[Request] = []
        self.in_flight = self.most_in_flight = self.published_bytes = 0

    def publish(self, state: State, step: int) -> int:
        self.states.append(state)
        return len(self.states)  # versions count from 1

    def submit(self, request: Request) -> Request:
        assert request.min_version <= len(self.states)
        self.asked.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        return request

    def collect(self, ticket: Request) -> Arrays:
        self.in_flight -= 1
        version = max(ticket.min_version, len(self.states) - self.lag)
        self.policy.model.load_state_dict(self.states[version - 1 - self.lies])
        prompts = [prompt for prompt in ticket.prompts for _ in range(ticket.samples)]
        greedy = ticket.sampling["temperature"] == 0
        seed = sample_seed(ticket.seeds[0], 0)
        return self._rows(ticket, prompts, version, None if greedy else torch.Generator().manual_seed(seed))

    @torch.no_grad()
    def _rows(self, ticket: Request, prompts: list[list[int]], version: int, generator: Any) -> Arrays:
        width, count, longest = max(map(len, prompts)), len(prompts), ticket.sampling["max_tokens"]
        ids = torch.full((count, width), self.policy.tokenizer.pad_token_id)
        seen = torch.zeros((count, width), dtype=torch.bool)
        for row, prompt in enumerate(prompts):
            ids[row, -len(prompt) :], seen[row, -len(prompt) :] = torch.tensor(prompt), True
        alive, logprobs = torch.ones(count, dtype=torch.bool), torch.zeros(count, 0)
        for _ in range(longest):
            positions = (seen.long().cumsum(1) - 1).clamp(min=0)
            logits = self.policy.model(ids, attention_mask=seen.long(), position_ids=positions).logits[:, -1]
            every = torch.log_softmax(logits, -1)
            token = (
                every.argmax(-1) if generator is None else torch.multinomial(every.exp(), 1, generator=generator)[:, 0]
            )
            ids, seen = torch.cat([ids, token[:, None]], 1), torch.cat([seen, alive[:, None]], 1)
            logprobs = torch.cat([logprobs, every.gather(1, token[:, None])], 1)
            alive = alive & (token != self.policy.tokenizer.eos_token_id)
        mask = seen[:, width:].numpy()
        texts = [
            self.policy.tokenizer.decode(row[keep], skip_special_tokens=True)
            for row, keep in zip(ids[:, width:], seen[:, width:], strict=True)
        ]
        return {
            "prompt_ids": ids[:, :width].numpy(),
            "prompt_mask": seen[:, :width].numpy(),
            "completion_ids": ids[:, width:].numpy(),
            "mask": mask,
            "logprobs": logprobs.numpy(),
            "versions": np.where(mask, version, -1),
            "rewards": np.array([float(len(text) % 2 == 0) for text in texts]),
            "ok": np.ones(count, dtype=bool),
            "group_index": np.arange(count) // ticket.samples,
            "sample_index": np.arange(count) % ticket.samples,
        }
