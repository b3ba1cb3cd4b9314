"""The storm's environments: groups of sessions over the doors, each call under a key until it has its verdict."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds
from rollgrid_ingest.session_openings import GROUP_KEY

from tests.support.stack import POLICY, TENANT

from .client import GIVE_UP_S, Answer, StormClient
from .journal import Accepted, Attempted, Refused, SessionClosed, Taken, TurnReplied, now

BUSY_S = 0.2
AT_ONCE = 12


class Environment(NamedTuple):
    """What one group of sessions will do, drawn before the storm.  `forks`: a second branch begins behind its first turn."""

    label: str
    n: int
    turns: int
    forks: bool
    scored: bool
    observation: int


def draw_environment(label: str, draw: random.Random) -> Environment:
    return Environment(
        label=label,
        n=draw.randint(1, 3),
        turns=draw.randint(2, 5),
        forks=draw.random() < 0.5,
        scored=draw.random() < 0.4,
        observation=draw.randint(1, 40),
    )


def play_sessions(client: StormClient, seed: int, stop: threading.Event) -> None:
    """All groups of sessions of the load, begun over its time, at most `AT_ONCE` sessions at a time."""
    draw = random.Random(seed)
    plans = [draw_environment(f"e{number}", draw) for number in range(client.load.episodes)]
    starts = sorted(draw.uniform(0, client.load.over_s * 0.8) for _ in plans)
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="session") as pool:
        for start, plan in zip(starts, plans, strict=True):
            if stop.wait(max(0.0, began + start - time.monotonic())):
                return
            for index in range(plan.n):
                pool.submit(
                    client.guard, lambda _, player: player.play(), plan.label, SessionPlayer(client, plan, index)
                )


class SessionPlayer:
    """Plays one sample of a group.  A turn that was asked for under a key is that turn, however often it is asked for."""

    def __init__(self, client: StormClient, plan: Environment, index: int) -> None:
        self._client, self._plan, self._index = client, plan, index
        self._key = f"{plan.label}-{index}"
        self.group = ids.group_id(TENANT, client.run, self.group_key, 0)
        self.session = ids.session_id(self.group, index)

    @property
    def group_key(self) -> str:
        return f"{GROUP_KEY}group:{self._plan.label}"

    def play(self) -> None:
        if not self._open():
            return
        branches, first = [""], 0
        for number in range(self._plan.turns):
            if number == 1 and self._plan.forks:
                body = {"from_turn": first, "reason": "explore", "name": "b"}
                if self._call(f"/v1/sessions/{self.session}/fork", body, f"{self._key}-fork", (201,)) is not None:
                    branches.append("~b")
            for branch in branches:
                turn = self._turn(number, branch)
                if turn is None:
                    return
                first = first if number else turn  # numbers are spent by turns that died with their ingest
        self._close()

    def _open(self) -> bool:
        plan, load = self._plan, self._client.load
        body: dict[str, Any] = {
            "run": self._client.run,
            "group": plan.label,
            "index": self._index,
            "n": plan.n,
            "policy": POLICY,
            "ttl_s": load.deadline_s,
            "deadline_s": load.deadline_s,
            "task": {"answer": "42"},
        }
        if plan.scored:
            body["scorers"] = [{"type": "exact_match", "name": "exact"}]
        who: dict[str, Any] = {"tenant": TENANT, "run": self._client.run, "key": self.group_key}
        self._client.note(Attempted(at=now(), **who, groups=1, n=plan.n))
        answer = self._call("/v1/sessions", body, f"{self._key}-open", (200, 201))
        if answer is None:
            return False
        assert answer.body["session"] == self.session
        deadline = answer.body["deadline"]
        self._client.note(Accepted(at=now(), **who, group_ids=(self.group,), n=plan.n, deadline=deadline))
        return True

    def _turn(self, number: int, branch: str) -> int | None:
        """The number it was played under."""
        load = self._client.load
        body = {
            "observation_token_ids": [7 + (number * 31 + place) % 200 for place in range(self._plan.observation)],
            "sampling_params": {"max_tokens": load.max_tokens, "ignore_eos": load.ignore_eos, "logprobs": 0, "seed": 5},
            "deadline_s": load.deadline_s,
        }
        key = f"{self._key}-{number}{branch}"
        answer = self._call(f"/s/{self.session}{branch}/inference/v1/generate", body, key, (200,))
        if answer is None:
            return None
        [choice] = answer.body["choices"]
        turn: int = answer.body["session"]["turn"]
        self._client.note(
            TurnReplied(
                at=now(),
                key=key,
                group_id=self.group,
                index=self._index,
                turn=turn,
                token_ids=TokenIds.of(choice["token_ids"]),
                logprobs=Floats.of([entry["logprob"] for entry in choice["logprobs"]["content"]]),
            )
        )
        return turn

    def _close(self) -> None:
        reward = self._index + 0.5
        answer = self._call(f"/v1/sessions/{self.session}/close", {"reward": reward}, f"{self._key}-close", (200,))
        if answer is not None:
            self._client.note(
                SessionClosed(
                    at=now(), key=f"{self._key}-close", group_id=self.group, index=self._index, reward=reward,
                    scored=self._plan.scored, turns=answer.body["turns"],
                )
            )  # fmt: skip

    def _call(self, path: str, body: dict[str, Any], key: str, good: tuple[int, ...]) -> Answer | None:
        """The verdict, None when it is no; busy is none."""
        give_up = time.monotonic() + GIVE_UP_S
        while True:
            answer = self._client.send(path, body, key)
            if answer is None:
                return None
            if answer.status in good:
                self._client.note(Taken(at=now(), key=key))
                return answer
            code = str(answer.body.get("error", {}).get("code", ""))
            self._client.note(Refused(at=now(), key=key, status=answer.status, code=code))
            if code != "session_busy" or time.monotonic() > give_up:
                return None
            time.sleep(BUSY_S)
