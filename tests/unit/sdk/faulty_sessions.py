"""The session routes beside those of `faulty`: they remember what was played, and fail as a test tells them to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from rollgrid_contracts import codec
from rollgrid_contracts.ids import session_id
from starlette.requests import Request
from starlette.responses import Response

from tests.unit.sdk.build import closed, entry, failed_entry
from tests.unit.sdk.faulty import FaultyIngest, refuse, reply


class FaultySessions(FaultyIngest):
    """A turn samples one token, its own number + 10; a group closes when each of its sessions has."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: dict[str, dict[str, Any]] = {}
        self.turns: dict[str, list[dict[str, Any]]] = {}
        self.by_key: dict[str, dict[str, Any]] = {}
        self.forks: list[dict[str, Any]] = []
        self.closes: dict[str, dict[str, Any]] = {}
        self.refused_labels: set[str] = set()

    def more_gets(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {"/v1/groups/{group}": self.group}

    def more_posts(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {
            "/v1/sessions": self.open,
            "/s/{address}/v1/chat/completions": self.turn,
            "/s/{address}/v1/completions": self.turn,
            "/v1/sessions/{session}/fork": self.fork,
            "/v1/sessions/{session}/close": self.close,
        }

    def more_deletes(self) -> dict[str, Callable[[Request], Awaitable[Response]]]:
        return {"/v1/sessions/{session}": self.cancel_session}

    async def open(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        if body["group"] in self.refused_labels:
            return await refuse(400, "limit_exceeded", retryable=False)(request) or Response(status_code=500)
        group = f"g-{body['group']}"
        session = session_id(group, body["index"])
        known = {"session": session, "run": body["run"], "group_id": group, "index": body["index"], "n": body["n"]}
        self.opened.setdefault(session, {**body, **known})
        played = self.turns.setdefault(session, [])
        status = self.closes[session]["outcome"] if session in self.closes else "open"
        return reply({**known, "status": status, "turns": len(played), "cursor": len(self.groups)}, 201)

    async def group(self, request: Request) -> Response:
        for cursor, known in self.groups:
            if known.group_id == request.path_params["group"]:
                return reply({"cursor": cursor, "group": msgspec.Raw(codec.encode(known))})
        return reply({"n": 1, "done": []}, 202)

    async def turn(self, request: Request) -> Response:
        session, _, branch = request.path_params["address"].partition("~")
        key = request.headers["idempotency-key"]
        if key not in self.by_key:
            played = self.turns[session]
            played.append(msgspec.json.decode(await request.body()))
            self.by_key[key] = self.answer(session, branch or "main", len(played) - 1, request.url.path)
        return Response(msgspec.json.encode(self.by_key[key]), media_type="application/json")

    def answer(self, session: str, branch: str, number: int, path: str) -> dict[str, Any]:
        choice: dict[str, Any] = {"token_ids": [number + 10], "finish_reason": "stop", "prompt_token_ids": [1, 2]}
        choice["weight_versions"] = [{"version": 3, "start": 0, "end": 1}]
        place = {"session": session, "turn": number, "branch": branch, "parent": number - 1 if number else None}
        if path.endswith("/chat/completions"):
            message = {"role": "assistant", "content": f"t{number}", "reasoning_content": None}
            choice |= {"message": message, "logprobs": {"content": [{"token": "x", "logprob": -0.5, "bytes": []}]}}
        else:
            choice |= {"text": f"t{number}", "logprobs": {"token_logprobs": [-0.5], "tokens": ["x"]}}
        return {"id": "c", "choices": [choice], "session": place}

    async def fork(self, request: Request) -> Response:
        body = msgspec.json.decode(await request.body())
        self.forks.append(body)
        answer = {"session": request.path_params["session"], "branch": f"b{len(self.forks)}", "reason": body["reason"]}
        return reply({**answer, "parent": body.get("from_turn", 7)}, 201)

    async def close(self, request: Request) -> Response:
        return self._end(request.path_params["session"], msgspec.json.decode(await request.body()))

    async def cancel_session(self, request: Request) -> Response:
        return self._end(request.path_params["session"], {"outcome": "failed", **request.query_params})

    def _end(self, session: str, asked: dict[str, Any]) -> Response:
        body = self.closes.setdefault(session, asked)
        self._close_group(self.opened[session])
        known = {"session": session, "group_id": self.opened[session]["group_id"], "outcome": body["outcome"]}
        return reply({**known, "reward": body.get("reward")})

    def _close_group(self, opened: dict[str, Any]) -> None:
        group, n = opened["group_id"], opened["n"]
        ends = [self.closes.get(session_id(group, index)) for index in range(n)]
        if None in ends or group in [known.group_id for _, known in self.groups]:
            return
        entries = [
            entry(index, reward=end.get("reward")) if end["outcome"] == "closed" else failed_entry(index)
            for index, end in enumerate(ends)
            if end is not None
        ]
        self.groups.append((len(self.groups) + 1, closed(entries, group_id=group, label=opened["group"])))
