"""Reasoning, tool calls and content out of generated ids, by vLLM's own parsers.

What is released while a sample runs is a function of its ids alone, and a beginning of the final
parse: text from a tool call's start marker on is held back until the end, where the call is known
whole, and so is white space that the parser may still strip.  Output that no parser understands is
`malformed`, never an error.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rollgrid_contracts import ids
from rollgrid_contracts.failures import ErrorCode
from rollgrid_contracts.jobs import ParsingSpec, SampleGroup, SamplingParams
from rollgrid_contracts.samples import FinishReason, Parsed
from rollgrid_runtime.logging import get_logger

from .engines.base import Generated, RequestFailed
from .streaming import Read
from .transcript import Transcript

log = get_logger(__name__)
LONG_TOKENS = 256
"""Outputs longer than this are parsed in a thread: the event loop must not wait for them."""
RANDOM_ID = "chatcmpl-tool-"
"""How vLLM's random call ids begin; they are replaced by ones that every worker gives alike."""
MARKERS = (
    "tool_calls_start_token",
    "tool_call_start_token",
    "bot_token",
    "bot_string",
    "tc_start",
    "TOOL_CALLS_PREFIX",
)
ENGINE_MARKERS = ("TOOL_START", "FUNC_PREFIX")
AUTO, REQUIRED = "auto", "required"


class ParserDesk:
    """Parsers for the jobs of one engine; `tokenizer` is the engine's own, if it has one."""

    def __init__(self, tokenizer: Callable[[], Any], model: Path | None, *, optional: bool) -> None:
        self._tokenizer, self._model, self._optional = tokenizer, model, optional
        self._loaded: Any = None
        self._has_vllm = importlib.util.find_spec("vllm") is not None

    async def open(self, job: SampleGroup) -> Reading | None:
        """How to read this job's samples; None where nothing is to be parsed.

        Raises RequestFailed naming the field.
        """
        spec = job.parsing
        if spec is None or not (spec.reasoning_parser or (spec.tools and (spec.tool_parser or spec.tool_choice))):
            return None
        if not self._has_vllm or (self._tokenizer() is None and self._model is None):
            if self._optional:
                return None
            raise RequestFailed("parsing needs vLLM and a model folder", ErrorCode.UNSUPPORTED, field="parsing")
        return await asyncio.to_thread(self._open, job, spec)

    def _open(self, job: SampleGroup, spec: ParsingSpec) -> Reading:
        tokenizer = self._tokenizer() or self._load()
        try:
            return Reading(job, spec, tokenizer)
        except RequestFailed:
            raise
        except Exception as error:
            raise RequestFailed(
                f"the parsers cannot be used: {error}", ErrorCode.INVALID_REQUEST, field="parsing"
            ) from error

    def _load(self) -> Any:
        if self._loaded is None:
            from vllm.tokenizers import get_tokenizer

            self._loaded = get_tokenizer(str(self._model))
        return self._loaded


class Reading:
    """How the samples of one job are read."""

    def __init__(self, job: SampleGroup, spec: ParsingSpec, tokenizer: Any) -> None:
        self.job, self.spec, self.tokenizer = job, spec, tokenizer
        choice = spec.tool_choice or AUTO
        self.forced = choice if spec.tools and choice != AUTO else None
        """`required` or a function's name: the grammar made the call, as JSON."""
        self.whole = self.forced is not None or (
            job.sampling.structured_output is not None and spec.reasoning_parser is not None
        )
        """A grammar holds from the first token on: without an end of the reasoning there is none."""
        tool_parser = spec.tool_parser if spec.tools and self.forced is None else None
        self._class = parser_class(tool_parser, spec.reasoning_parser)
        self.request = chat_request(spec, tool_parser is not None)
        self.prompt = job.prompt_token_ids.tolist()
        self.marks = frozenset(tokenizer.get_added_vocab().values())
        """Ids by which parsers change their state; most are markers of reasoning and calls."""
        self.sampling = msgspec.structs.replace(job.sampling, skip_special_tokens=self._skips_special())

    def make(self) -> Any:
        """A parser that has read nothing; None where none is named."""
        if self._class is None:
            return None
        return self._class(self.tokenizer, self.request.tools, chat_template_kwargs=dict(self.spec.template_kwargs))

    def _skips_special(self) -> bool:
        """Parsers whose markers are special tokens must see them."""
        parser, own = self.make(), self.job.sampling.skip_special_tokens
        if parser is None or not own:
            return own
        asked = self.request.model_copy(deep=True)
        for part in (parser.reasoning_parser, parser.tool_parser):
            if part is not None:
                asked = part.adjust_request(asked)
        return bool(asked.skip_special_tokens)

    def transcript(self) -> Transcript:
        skip = self.sampling.skip_special_tokens
        return Transcript(lambda ids: str(self.tokenizer.decode(list(ids), skip_special_tokens=skip)), self.sampling)

    async def parsed(self, index: int, result: Generated) -> Parsed:
        """The final parse of a whole sample."""
        token_ids = without_terminator(result, self.sampling)
        if len(token_ids) > LONG_TOKENS:
            return await asyncio.to_thread(self._parsed, index, token_ids)
        return self._parsed(index, token_ids)

    def _parsed(self, index: int, token_ids: list[int]) -> Parsed:
        transcript = self.transcript()
        transcript.push(token_ids)
        transcript.finish()
        found = self.parse(transcript.text, token_ids)
        calls = tuple(self._named(index, number, call) for number, call in enumerate(found.tool_calls))
        return msgspec.structs.replace(found, tool_calls=calls)

    def _named(self, index: int, number: int, call: dict[str, Any]) -> dict[str, Any]:
        """With an id that any worker would give, unless the model itself wrote one."""
        if call["id"] and not call["id"].startswith(RANDOM_ID):
            return call
        turn = self.job.session.turn if self.job.session is not None else 0
        name = f"{ids.turn_id(self.job.group_id, index, turn)}.{number}"
        return {**call, "id": f"call_{hashlib.sha256(name.encode()).hexdigest()[:24]}"}

    def parse(self, text: str, token_ids: list[int]) -> Parsed:
        """Text as the parsers read it at its end."""
        reasoning: str | None = None
        content: str | None = text
        parser, calls = self.make(), None
        try:
            if parser is not None:
                parser.set_prompt_token_ids(self.prompt)
                reasoning, content, calls = parser.parse(
                    text, self.request, enable_auto_tools=True, model_output_token_ids=token_ids
                )
        except Exception as error:  # noqa: BLE001 - whatever a parser stumbles over, the sample stands
            log.warning("output_not_parsed", group=self.job.group_id, error=repr(error))
            return Parsed(content=text, parse_status="malformed")
        if self.whole and not calls and not (content or "").strip():
            reasoning, content = None, text
        if content and strips(parser):
            content = content.lstrip() or None
        if self.forced is not None:
            return forced_call(self.forced, reasoning, content)
        found = tuple(
            {"id": call.id or "", "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls or ()
        )
        rest = text.partition(reasoning)[2] if reasoning else text
        malformed = any(rest.count(marker) > len(found) for marker in markers(parser)) if parser is not None else False
        status = "malformed" if malformed else "ok" if found or reasoning is not None else "none"
        return Parsed(content=content, reasoning=reasoning, tool_calls=found, parse_status=status)

    def reader(self) -> StreamReader:
        return StreamReader(self)


class StreamReader:
    """One streamed sample as its ids come.  See `streaming.Reader`."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._transcript = reading.transcript()
        self._parser = None if reading.whole else reading.make()
        self._ids: list[int] = []
        self._strips = strips(self._parser)
        self._silent = reading.whole
        self._found = {"content": "", "reasoning": ""}
        self._shown = {"content": "", "reasoning": ""}

    def fresh(self) -> StreamReader:
        return StreamReader(self._reading)

    async def push(self, token_ids: list[int]) -> Read:
        if len(token_ids) > LONG_TOKENS or len(self._ids) > LONG_TOKENS:
            await asyncio.to_thread(self._push, token_ids)
        else:
            self._push(token_ids)
        return Read(content=self._release("content"), reasoning=self._release("reasoning"))

    def _push(self, token_ids: list[int]) -> None:
        """One id at a time: what is found must not depend on how the ids came."""
        for token in token_ids:
            if self._silent:
                return
            text = self._transcript.push([token])
            self._ids.append(token)
            try:
                self._step(token, text)
            except Exception as error:  # noqa: BLE001 - the final parse decides
                log.warning("stream_not_parsed", group=self._reading.job.group_id, error=repr(error))
                self._silent = True

    def _step(self, token: int, text: str) -> None:
        if self._parser is None:
            self._found["content"] += text
            return
        message = self._parser.parse_delta(text, [token], self._reading.request, self._reading.prompt, finished=False)
        begun = False
        for channel in ("reasoning", "content"):
            added = getattr(message, channel, None) or ""
            if self._strips and channel == "content" and not self._found[channel]:
                added = added.lstrip()
            begun = begun or bool(added.strip() and not self._found[channel].strip())
            self._found[channel] += added
        if begun or token in self._reading.marks:
            self._compare()
        if message is not None and message.tool_calls:
            self._silent = True

    def _compare(self) -> None:
        """Where vLLM's two parsers part, nothing more is shown: the final one decides at the end."""
        parsed = self._reading.parse(self._transcript.text, self._ids)
        for channel, found in self._found.items():
            final, shown = getattr(parsed, channel) or "", found.rstrip()
            if not final.startswith(shown):
                self._found[channel] = os.path.commonprefix([final, shown])  # noqa: RUF071 - texts, not paths
                self._silent = True

    def _release(self, channel: str) -> str:
        """All but the white space at the end, which the final parse may strip."""
        new = self._found[channel].rstrip()[len(self._shown[channel]) :]
        self._shown[channel] += new
        return new

    def settle(self, parsed: Parsed) -> tuple[Read, Parsed]:
        rest, changed = {}, {}
        for channel in ("content", "reasoning"):
            final, shown = getattr(parsed, channel) or "", self._shown[channel]
            if final.startswith(shown):
                rest[channel] = final[len(shown) :]
            else:  # two parsers of vLLM contradict each other: what was shown stands
                log.warning("parse_contradicts_stream", group=self._reading.job.group_id, channel=channel)
                rest[channel], changed[channel] = "", shown
        if changed:
            parsed = msgspec.structs.replace(parsed, **changed)
        return Read(content=rest["content"], reasoning=rest["reasoning"], tool_calls=parsed.tool_calls), parsed


@functools.cache
def parser_class(tool_parser: str | None, reasoning_parser: str | None) -> Any:
    """vLLM's combined parser class; None when neither is named.  Raises RequestFailed naming the field."""
    from vllm.parser import ParserManager
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for package in ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser"):
        logging.getLogger(package).setLevel(logging.CRITICAL)  # they log a traceback for each malformed output
    for name, field, known in (
        (tool_parser, "parsing.tool_parser", ToolParserManager.list_registered()),
        (reasoning_parser, "parsing.reasoning_parser", ReasoningParserManager.list_registered()),
    ):
        if name is not None and name not in known:
            raise RequestFailed(
                f"{field.partition('.')[2]} {name!r} is not one of vLLM's: {', '.join(known)}",
                ErrorCode.INVALID_REQUEST,
                field=field,
            )
    try:
        return ParserManager.get_parser(tool_parser, reasoning_parser, enable_auto_tools=True)
    except Exception as error:
        raise RequestFailed(f"parsers not usable: {error}", ErrorCode.INVALID_REQUEST, field="parsing") from error


def chat_request(spec: ParsingSpec, tools: bool) -> Any:
    """The request that vLLM's parsers look into."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    offered = {"tools": list(spec.tools), "tool_choice": AUTO} if tools else {}
    try:
        return ChatCompletionRequest(messages=[], model="", **offered)
    except ValueError as error:
        raise RequestFailed(f"the tools are not usable: {error}", ErrorCode.INVALID_REQUEST, field="tools") from error


def markers(parser: Any) -> set[str]:
    """Texts by which the tool parser knows a call's beginning, as far as it names them."""
    tool_parser = parser.tool_parser
    if tool_parser is None:
        return set()
    engine = getattr(tool_parser, "_parser_engine", None)
    if engine is not None:
        terminals = engine.parser_engine_config.terminals
        return {terminals[name] for name in ENGINE_MARKERS if isinstance(terminals.get(name), str)}
    found = (getattr(tool_parser, name, None) for name in MARKERS)
    return {marker for marker in found if isinstance(marker, str) and marker}


def strips(parser: Any) -> bool:
    """Whether the tool parser strips content once there is a call, but not before: white space at its beginning
    then never counts, so that a stream need not know what is to come."""
    engine = getattr(parser and parser.tool_parser, "_parser_engine", None)
    return bool(engine is not None and engine.parser_engine_config.strip_content_whitespace_with_tools)


class RequiredCall(msgspec.Struct):
    """An element of the array that `tool_choice: required` makes the model write."""

    name: str
    parameters: dict[str, Any] | None = None


def forced_call(choice: str, reasoning: str | None, content: str | None) -> Parsed:
    """The call that a grammar made the model write: the arguments alone, or an array of calls."""
    text = (content or "").strip()
    try:
        if choice == REQUIRED:
            calls = msgspec.json.decode(text, type=list[RequiredCall])
            pairs = [(call.name, json.dumps(call.parameters, ensure_ascii=False)) for call in calls]
        else:
            msgspec.json.decode(text, type=dict[str, Any])
            pairs = [(choice, text)]
    except (msgspec.DecodeError, RecursionError):
        return Parsed(content=content, reasoning=reasoning, parse_status="malformed")
    found = tuple(
        {"id": "", "type": "function", "function": {"name": name, "arguments": arguments}} for name, arguments in pairs
    )
    return Parsed(reasoning=reasoning, tool_calls=found, parse_status="ok" if found else "malformed")


def without_terminator(result: Generated, sampling: SamplingParams) -> list[int]:
    """The ids without the EOS or stop token that ended them."""
    ended_by_token = result.finish_reason is FinishReason.STOP and not isinstance(result.stop_reason, str)
    if ended_by_token and not sampling.include_stop_str_in_output:
        return result.token_ids[:-1]
    return result.token_ids
