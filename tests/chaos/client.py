"""The storm's client: it submits, asks, cancels and keeps a journal.  Plain HTTP, so that nothing is retried unseen.

Everything is sent under an idempotency key until the door has said yes or no, over any number of
dead connections: an outsider's view of "accepted".
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from rollgrid_contracts import ids
from rollgrid_contracts.arrays import Floats, TokenIds

from tests.support.stack import POLICY, TENANT

from .journal import Accepted, Attempted, CancelAsked, Journal, Posted, Refused, Replied, RepliedSample, now

GIVE_UP_S = 90.0
RETRIED = {429, 502, 503, 504}


class Load(NamedTuple):
    """What one storm asks for.  Times in seconds; `samples` is reached at least."""

    samples: int = 500
    over_s: float = 60.0
    deadline_s: float = 120.0
    max_tokens: int = 64
    ignore_eos: bool = False
    scored: float = 0.4
    interactive: float = 0.25
    cancelled: float = 0.15
    workers: int = 8
    episodes: int = 0
    """Groups of sessions beside them."""


class Answer(NamedTuple):
    status: int
    body: dict[str, Any]
    retry_after: float | None


class StormClient:
    """Thread-safe.  `run` is one run; every request has a key of its own."""

    def __init__(self, url: str, run: str, journal: Path, seed: int, load: Load) -> None:
        self.url, self.run, self.load, self.path = url, run, load, journal
        self._journal = Journal(journal)
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        # a read that times out would be a disconnect, and a disconnect cancels
        self._http = httpx2.Client(base_url=url, timeout=httpx2.Timeout(load.deadline_s + 60, connect=2))
        self.accepted_groups: dict[str, int] = {}
        self.unanswered: list[str] = []
        self.broken: list[str] = []

    # -- the journal ------------------------------------------------------------------------------------

    def note(self, line: Any) -> None:
        with self._lock:
            self._journal.write(line)
            if isinstance(line, Accepted):
                self.accepted_groups |= dict.fromkeys(line.group_ids, line.n)

    # -- one request, until there is a verdict ----------------------------------------------------------

    def send(self, path: str, body: dict[str, Any], key: str, give_up_s: float = GIVE_UP_S) -> Answer | None:
        """The door's verdict; None when it never came."""
        give_up = time.monotonic() + give_up_s
        while time.monotonic() < give_up:
            try:
                answer = self._http.post(path, json=body, headers={"idempotency-key": key, "x-rollgrid-run": self.run})
            except httpx2.HTTPError:
                time.sleep(0.1)
                continue
            retry_after = float(answer.headers["retry-after"]) if "retry-after" in answer.headers else None
            content = answer.json() if answer.headers.get("content-type", "").startswith("application/json") else {}
            if answer.status_code in RETRIED:
                code = str(content.get("error", {}).get("code", ""))
                self.note(Refused(at=now(), key=key, status=answer.status_code, code=code, retry_after=retry_after))
                if code == "expired":  # an interactive answer: the deadline passed, which is a verdict
                    return Answer(answer.status_code, content, retry_after)
                time.sleep(min(retry_after or 0.2, 1.0))
                continue
            return Answer(answer.status_code, content, retry_after)
        if give_up_s >= GIVE_UP_S:
            with self._lock:
                self.unanswered.append(key)
        return None

    def submit(
        self, key: str, groups: int, n: int, *, give_up_s: float = GIVE_UP_S, prompt: int = 4, **options: Any
    ) -> tuple[str, tuple[str, ...]] | None:
        """A batch through `/v1/rollouts`, `prompt` tokens each; its id and groups once accepted."""
        body: dict[str, Any] = {
            "run": self.run,
            "policy": POLICY,
            "n": n,
            "deadline_s": options.pop("deadline_s", self.load.deadline_s),
            "sampling": {"max_tokens": self.load.max_tokens, "ignore_eos": self.load.ignore_eos, "seed": 17},
            "tasks": [
                {
                    "prompt_token_ids": [5 + position % 200, *range(6, 5 + prompt)],
                    "task": {"answer": "42"},
                    "metadata": {"key": key},
                }
                for position in range(groups)
            ],
            **options,
        }
        self.note(Attempted(at=now(), tenant=TENANT, run=self.run, key=key, groups=groups, n=n))
        answer = self.send("/v1/rollouts", body, key, give_up_s)
        if answer is None:
            return None
        if answer.status not in (200, 202):
            code = str(answer.body.get("error", {}).get("code", ""))
            self.note(Refused(at=now(), key=key, status=answer.status, code=code))
            return None
        named = tuple(answer.body["group_ids"])
        accepted = Accepted(
            at=now(), tenant=TENANT, run=self.run, key=key, group_ids=named, n=n, deadline=answer.body["deadline"]
        )
        self.note(accepted)
        return answer.body["batch_id"], named

    def ask(self, key: str, n: int) -> None:
        """One call of the token door; the answer must equal the record."""
        body = {
            "model": POLICY,
            "token_ids": [9, 10, 11],
            "n": n,
            "deadline_s": self.load.deadline_s,
            "sampling_params": {
                "max_tokens": self.load.max_tokens,
                "ignore_eos": self.load.ignore_eos,
                "logprobs": 0,
            },
        }
        self.note(Attempted(at=now(), tenant=TENANT, run=self.run, key=key, groups=1, n=n))
        answer = self.send("/inference/v1/generate", body, key)
        if answer is None:
            return
        code = str(answer.body.get("error", {}).get("code", ""))
        if answer.status != 200 and code != "expired":
            self.note(Refused(at=now(), key=key, status=answer.status, code=code))
            return
        deadline = time.time() + self.load.deadline_s
        group = ids.group_id(TENANT, self.run, key, 0)
        self.note(Accepted(at=now(), tenant=TENANT, run=self.run, key=key, group_ids=(group,), n=n, deadline=deadline))
        if answer.status == 200:
            choices = answer.body["choices"]
            named = choices[0]["sample_id"].rsplit(".", 1)[0]
            self.note(Replied(at=now(), group_id=named, samples=tuple(map(_replied, choices))))
            self.reward(named, f"reward-{key}")

    def reward(self, group: str, key: str) -> None:
        """A reward onto a group that was answered, as soon as it has closed."""
        body = {"rewards": [{"index": 0, "value": 0.5, "detail": key}]}
        give_up = time.monotonic() + GIVE_UP_S
        while time.monotonic() < give_up:
            answer = self.send(f"/v1/groups/{group}/rewards", body, key)
            if answer is None:
                return
            if answer.status == 200:
                self.note(Posted(at=now(), key=key, group_id=group, cursor=answer.body["cursor"]))
                return
            if answer.status != 409:
                raise AssertionError(f"{answer.status}: {answer.body}")
            time.sleep(0.2)  # answered, and not closed yet

    def cancel(self, batch: str, groups: tuple[str, ...]) -> None:
        self.note(CancelAsked(at=now(), group_ids=groups))
        self.send(f"/v1/rollouts/{batch}/cancel", {}, f"cancel-{batch}")

    # -- the load ---------------------------------------------------------------------------------------

    def plan(self) -> list[tuple[float, str, int, int, dict[str, Any]]]:
        """(start, kind, groups, n, options) of every request, drawn from the seed before the storm."""
        requests: list[tuple[float, str, int, int, dict[str, Any]]] = []
        planned = 0
        while planned < self.load.samples:
            kind = "ask" if self._random.random() < self.load.interactive else "batch"
            groups, n = (1, self._random.randint(1, 4)) if kind == "ask" else (self._random.randint(1, 6), 4)
            options: dict[str, Any] = {}
            if kind == "batch":
                if self._random.random() < self.load.scored:
                    options["scorers"] = [{"type": "exact_match", "name": "exact"}]
                if self._random.random() < self.load.cancelled:
                    options["cancel_after_s"] = self._random.uniform(0.0, 2.0)
            requests.append((self._random.uniform(0, self.load.over_s), kind, groups, n, options))
            planned += groups * n
        return sorted(requests, key=lambda request: request[0])

    def play(self, name: str, stop: threading.Event) -> None:
        """Send the plan at its times; returns when every request has its verdict."""
        began = time.monotonic()
        with ThreadPoolExecutor(self.load.workers, thread_name_prefix="storm") as pool:
            for number, (at, kind, groups, n, options) in enumerate(self.plan()):
                if stop.wait(max(0.0, began + at - time.monotonic())):
                    break
                key = f"{name}-{number}"
                if kind == "ask":
                    pool.submit(self.guard, self.ask, key, n)
                else:
                    pool.submit(self.guard, self._batch, key, groups, n, options)

    def guard(self, call: Callable[..., None], key: str, *rest: Any) -> None:
        try:
            call(key, *rest)
        except Exception as error:
            with self._lock:
                self.broken.append(f"{key}: {error!r}")

    def _batch(self, key: str, groups: int, n: int, options: dict[str, Any]) -> None:
        cancel_after_s = options.pop("cancel_after_s", None)
        accepted = self.submit(key, groups, n, **options)
        if accepted is not None and cancel_after_s is not None:
            time.sleep(cancel_after_s)
            self.cancel(*accepted)

    def close(self) -> None:
        self._http.close()
        self._journal.close()


def _replied(choice: dict[str, Any]) -> RepliedSample:
    index = int(choice["sample_id"].rsplit(".", 1)[1])
    content = choice["logprobs"]["content"]
    return RepliedSample(
        index=index,
        token_ids=TokenIds.of(choice["token_ids"]),
        logprobs=Floats.of([entry["logprob"] for entry in content]),
        finish_reason=choice["finish_reason"],
    )
