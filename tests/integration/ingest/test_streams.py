"""Streams against a worker of the test's own: loss, take-over, restart, silence, failure (A49, I2, I6)."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from rollgrid_contracts.failures import ErrorCode, ErrorInfo
from rollgrid_contracts.jobs import Reply
from rollgrid_contracts.samples import FinishReason, Parsed, SampleStatus

from tests.support.servers import SeaweedServer
from tests.support.tiny_models import TinyModel, tiny_model
from tests.support.waiting import wait_until

from .door import Door, door, policy_state
from .worker import Reader, Worker, data_of, streamed, words

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 9,
    "deadline_s": 20,
    "stream": True,
}
IDS = [1, 2, 3, 4, 5]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@pytest.fixture(scope="module")
def ingest(s3_server: SeaweedServer) -> Iterator[Door]:
    env = {"ROLLGRID_INGEST_KEEP_ALIVE_S": "0.4", "ROLLGRID_INGEST_REPLY_POLL_S": "5"}
    states = (
        policy_state(tiny_model(TinyModel())),
        policy_state(tiny_model(TinyModel()), "caller", aliases=(), tool_parser="hermes", reasoning_parser="qwen3"),
    )
    with door(s3_server, env, states) as running:
        yield running


def chunks(reader: Reader) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data_of(reader.lines) if line != "[DONE]"]


def ended(reader: Reader) -> bool:
    return reader.lines[-1] == "data: [DONE]"


def content(reader: Reader, index: int = 0) -> str:
    """A choice's content as a client puts it together."""
    found = [choice for chunk in chunks(reader) for choice in chunk.get("choices", ()) if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in found)


def play(ingest: Door, script: Any, headers: dict[str, str] | None = None, **fields: Any) -> Reader:
    return asyncio.run(streamed(ingest, "/v1/chat/completions", {**CHAT, **fields}, script, headers))


def test_frames_become_chunks_and_the_record_ends_them(ingest: Door) -> None:
    jobs = []

    async def script(worker: Worker, reader: Reader) -> None:
        jobs.append(worker.job)
        await worker.frame([1, 2])
        await reader.saw("one two")
        await worker.frame([3], 2, index=1)
        await worker.frame([3, 4], 2)
        await worker.finish(IDS)
        await reader.saw('"finish_reason":"stop"')
        assert not ended(reader), "a sample is missing"
        await worker.finish([7], 1)

    options = {"include_usage": True, "continuous_usage_stats": True}
    reader = play(ingest, script, n=2, logprobs=True, return_token_ids=True, stream_options=options)
    assert jobs[0].reply is Reply.STREAM
    found = chunks(reader)
    assert [chunk["choices"][0]["delta"] for chunk in found[:2]] == [{"role": "assistant", "content": ""}] * 2
    assert found[0]["prompt_token_ids"] == jobs[0].prompt_token_ids.tolist()
    assert content(reader) == words(IDS)
    of_first = [choice for chunk in found for choice in chunk["choices"] if choice["index"] == 0]
    assert [token for choice in of_first for token in choice.get("token_ids") or ()] == IDS
    entries = [entry for choice in of_first if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert [entry["logprob"] for entry in entries] == [-0.5, -0.75, -1.0, -1.25, -1.5]
    assert of_first[-1]["weight_versions"] == [{"version": 1, "start": 0, "end": 5}]
    prompt = len(jobs[0].prompt_token_ids)
    assert found[-1]["usage"] == {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert all("usage" in chunk for chunk in found)
    assert ended(reader)
    # index 1 was streamed up to a gap: its frame at 2 has no beginning, so everything came from the record
    assert content(reader, 1) == words([7])


def test_a_taking_over_worker_goes_on_behind_what_was_sent(ingest: Door) -> None:
    async def script(worker: Worker, reader: Reader) -> None:
        assert (await worker.what_was_sent()).sent == ()
        await worker.frame([1, 2], attempt=2)
        await reader.saw("one two")
        state = await worker.what_was_sent()
        (sent,) = state.sent
        assert (sent.index, sent.token_ids.tolist()) == (0, [1, 2])
        assert sent.logprobs.tolist() == [-0.5, -0.75]
        assert [(span.version, span.start, span.end) for span in sent.spans] == [(1, 0, 2)]
        await worker.frame([9], 2, attempt=2)
        await worker.frame([3, 4], 2, attempt=3)
        await worker.finish(IDS, attempt=3, resumed_from=2)

    reader = play(ingest, script)
    assert content(reader) == words(IDS)
    assert ended(reader)


@pytest.mark.parametrize("same", [True, False])
def test_a_restart_goes_on_or_ends_in_a_typed_error(ingest: Door, same: bool) -> None:
    async def script(worker: Worker, reader: Reader) -> None:
        await worker.frame([1, 2])
        await reader.saw("one two")
        await worker.frame([1, 2, 3] if same else [1, 8, 3], attempt=2)
        if same:
            await worker.finish(IDS)

    reader = play(ingest, script)
    if same:
        assert content(reader) == words(IDS)
        assert ended(reader)
        return
    error = chunks(reader)[-1]["error"]
    assert error["code"] == "engine_error"
    assert "restarted and differs" in error["message"]
    assert error["retryable"] is True
    assert not ended(reader)
    assert content(reader) == words([1, 2])


def test_a_record_that_differs_is_never_hidden(ingest: Door) -> None:
    async def script(worker: Worker, reader: Reader) -> None:
        await worker.frame([1, 2])
        await reader.saw("one two")
        await worker.finish([1, 3, 4])

    reader = play(ingest, script)
    assert chunks(reader)[-1]["error"]["code"] == "engine_error"
    assert not ended(reader)


def test_a_stream_that_ended_well_cancels_nothing(ingest: Door) -> None:
    async def script(worker: Worker, reader: Reader) -> None:
        await worker.finish(IDS)

    before = ingest.cancelled()
    for _ in range(5):
        assert ended(play(ingest, script))
    play(ingest, script)  # whatever the others had still to say lies before this one's job
    assert ingest.cancelled() == before


def test_silence_is_filled_and_a_later_failure_is_an_event(ingest: Door) -> None:
    async def script(worker: Worker, reader: Reader) -> None:
        await reader.saw(": keep-alive")
        await worker.frame([1])
        await reader.saw("one")
        error = ErrorInfo(code=ErrorCode.POISON, message="three starts")
        await worker.finish([], status=SampleStatus.FAILED, error=error)

    reader = play(ingest, script, n=2)
    error = chunks(reader)[-1]["error"]
    assert (error["code"], error["type"], error["message"]) == ("poison", "server_error", "three starts")
    assert not ended(reader)
    # the other sample of the unkeyed call is wanted by nobody any more
    wait_until(lambda: bool(ingest.cancelled()), 10, "the cancel")


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"status": SampleStatus.FAILED, "error": ErrorInfo(code=ErrorCode.INVALID_REQUEST, message="no grammar")}, 400, "invalid_request"),
        ({"status": SampleStatus.EXPIRED}, 504, "expired"),
        ({"token_ids": "none"}, 502, "empty_completion"),
    ],
)  # fmt: skip
def test_a_failure_before_the_first_byte_is_an_ordinary_error(
    ingest: Door, changes: dict[str, Any], status: int, code: str
) -> None:
    async def script(worker: Worker, _: Reader) -> None:
        await worker.finish([], **{name: value for name, value in changes.items() if name != "token_ids"})

    reader = play(ingest, script)
    assert (reader.status, json.loads(reader.body)["error"]["code"]) == (status, code)


def test_a_repeated_key_joins_the_stream_and_does_not_speak_for_it(ingest: Door) -> None:
    """The second client gets all of it from the record; workers are told what the first has."""
    joined: list[Reader] = []

    async def script(worker: Worker, reader: Reader) -> None:
        await worker.stand_in_for_the_ledger()
        await worker.frame([1, 2])
        await reader.saw("one two")
        second = Reader()
        joined.append(second)
        call = asyncio.create_task(
            asyncio.to_thread(second.read, ingest.url, "/v1/chat/completions", CHAT, {"idempotency-key": "joined"})
        )
        await second.saw(": keep-alive")
        (sent,) = (await worker.what_was_sent()).sent
        assert sent.token_ids.tolist() == [1, 2]
        await worker.frame([3], 2, attempt=2)
        await worker.finish(IDS)
        await call

    reader = play(ingest, script, {"idempotency-key": "joined"})
    assert content(reader) == words(IDS)
    (second,) = joined
    assert second.status == 200, second.body
    assert content(second) == words(IDS)
    assert ended(second)
    batches = {chunk["id"] for each in (reader, second) for chunk in chunks(each)}
    assert len(batches) == 1


def test_calls_and_reasoning_are_streamed_and_end_as_tool_calls(ingest: Door) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    jobs = []

    async def script(worker: Worker, _: Reader) -> None:
        jobs.append(worker.job)
        await worker.frame([1], text="", reasoning="think")
        await worker.frame([2], 1, text="", reasoning="", tool_calls=(call, {**call, "id": "call_2"}))
        parsed = Parsed(reasoning="think", tool_calls=(call, {**call, "id": "call_2"}), parse_status="ok")
        await worker.finish([1, 2], parsed=parsed)

    reader = play(ingest, script, model="caller", tools=TOOLS)
    spec = jobs[0].parsing
    assert spec is not None
    assert (spec.tool_parser, spec.reasoning_parser, spec.tool_choice) == ("hermes", "qwen3", "auto")
    assert spec.tools == tuple(TOOLS)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(reader)]
    assert {"reasoning": "think", "reasoning_content": "think"} in deltas
    found = [delta for each in deltas for delta in each.get("tool_calls", ())]
    assert [(delta["index"], delta["id"], delta["function"]["name"]) for delta in found] == [
        (0, "call_1", "add"),
        (1, "call_2", "add"),
    ]
    last = chunks(reader)[-1]["choices"][0]
    assert (last["finish_reason"], last["parse_status"]) == ("tool_calls", "ok")
    only = play(ingest, script, model="caller", tools=TOOLS, parallel_tool_calls=False)
    found = [d for chunk in chunks(only) for d in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert [delta["id"] for delta in found] == ["call_1"]


def test_whole_answers_carry_calls_reasoning_and_what_could_not_be_read(ingest: Door) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    answers = {
        "ok": Parsed(reasoning="hm", tool_calls=(call,), parse_status="ok"),
        "malformed": Parsed(content="<tool_call>{", parse_status="malformed"),
    }
    for status, parsed in answers.items():

        async def script(worker: Worker, _: Reader, parsed: Parsed = parsed) -> None:
            await worker.finish([1, 2], parsed=parsed)

        async def called(script: Any = script) -> dict[str, Any]:
            reader = Reader()
            await streamed_whole(ingest, {**CHAT, "stream": False, "model": "caller", "tools": TOOLS}, script, reader)
            found: dict[str, Any] = json.loads(reader.lines[0])
            return found

        (choice,) = asyncio.run(called())["choices"]
        assert choice["parse_status"] == status
        if status == "ok":
            assert choice["finish_reason"] == "tool_calls"
            assert choice["message"]["tool_calls"] == [call]
            assert choice["message"]["reasoning"] == choice["message"]["reasoning_content"] == "hm"
            assert choice["message"]["content"] is None
        else:
            assert choice["finish_reason"] == "stop"
            assert choice["message"]["content"] == "<tool_call>{"
            assert "tool_calls" not in choice["message"]


async def streamed_whole(ingest: Door, body: dict[str, Any], script: Any, reader: Reader) -> None:
    found = await streamed(ingest, "/v1/chat/completions", body, script)
    reader.lines, reader.status = found.lines, found.status


def test_a_slow_client_holds_little_and_gets_the_rest_from_the_record(ingest: Door) -> None:
    """Frames for a client that reads nothing are dropped at the bound; when it reads, it gets the whole record."""
    size = 400
    ids = [1 + at % 9 for at in range(size)]

    def dropped() -> float:
        found = re.search(r"^rollgrid_ingest_frames_dropped_total (\S+)", ingest.process.metrics(), re.M)
        return float(found[1]) if found else 0.0

    async def play_slowly() -> bytes:
        seen = {job.group_id for job in await ingest.stored_jobs()}
        before = await asyncio.to_thread(dropped)
        body = json.dumps({**CHAT, "max_tokens": 400, "logprobs": True, "top_logprobs": 0}).encode()
        with socket.socket() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(lazy, ("127.0.0.1", int(ingest.url.rpartition(":")[2])))
            head = f"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(lazy, head.encode() + body)
            async with ingest.connected() as bus:
                job = None
                while job is None:
                    job = next((job for job in await ingest.stored_jobs() if job.group_id not in seen), None)
                worker = Worker(bus, job)
                frames = 0
                while await asyncio.to_thread(dropped) == before:
                    for _ in range(20):
                        await worker.frame(ids, frames * size)
                        frames += 1
                await worker.finish(ids * frames)
                answer = b""
                while data := await loop.sock_recv(lazy, 2**20):
                    answer += data
                return answer

    async def bounded() -> bytes:
        async with asyncio.timeout(90):
            return await play_slowly()

    reader = Reader()
    reader.lines = [line for line in asyncio.run(bounded()).decode().splitlines() if line]
    found = content(reader)
    assert "data: [DONE]" in reader.lines
    assert len(found) % len(words(ids)) == 0
    assert found == words(ids) * (len(found) // len(words(ids)))


def test_generate_streams_ids_alone(ingest: Door) -> None:
    async def script(worker: Worker, reader: Reader) -> None:
        await worker.frame([1, 2])
        await reader.saw("token_id:2")
        await worker.finish(IDS, finish_reason=FinishReason.LENGTH)

    body = {"model": "tiny", "token_ids": [5, 6], "sampling_params": {"max_tokens": 5, "logprobs": 0}, "stream": True}
    reader = asyncio.run(streamed(ingest, "/inference/v1/generate", body, script))
    found = [choice for chunk in chunks(reader) for choice in chunk["choices"]]
    assert [token for choice in found for token in choice["token_ids"]] == IDS
    assert [entry["token"] for choice in found for entry in choice["logprobs"]["content"]] == [
        f"token_id:{token}" for token in IDS
    ]
    assert found[-1]["finish_reason"] == "length"
    assert ended(reader)
