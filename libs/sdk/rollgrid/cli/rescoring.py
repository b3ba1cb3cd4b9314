"""Stored groups through `python -m rollgrid_scorer.rerun`: which scorers, by whose code, and the pipe between."""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING

import msgspec
from rollgrid_contracts import codec
from rollgrid_contracts.scoring import SamplesScored, ScorerKind, ScorerSpec

from .output import parse_json_object, usage_error

if TYPE_CHECKING:
    from rollgrid.results import Group

_HEAD = 4


class Choice:
    """One `--scorer`: a recorded scorer by name or type, `name=module:attr` for other code, or a whole spec as JSON."""

    def __init__(self, text: str, number: int) -> None:
        self.spec: ScorerSpec | None = None
        self.verifier: str | None = None
        if text.lstrip().startswith("{"):
            try:
                self.spec = msgspec.convert({"name": "", **parse_json_object(text, "--scorer")}, ScorerSpec)
            except msgspec.ValidationError as error:
                raise usage_error(str(error), "--scorer") from error
            self.name = self.spec.name or self.spec.type
            self.spec = msgspec.structs.replace(self.spec, name=self.name, kind=ScorerKind.VERIFIER)
            return
        self.name, separator, target = text.partition("=")
        if separator:
            module, colon, attr = target.partition(":")
            if not (self.name and module and colon and attr):
                raise usage_error(f"{text!r} is neither a name nor name=module:attr", "--scorer")
            self.type = f"rerun-{number}"
            self.verifier = f"{self.type}={target}"

    def specs(self, recorded: Sequence[ScorerSpec]) -> list[ScorerSpec]:
        """What to run for a group with these scorers; a scorer that was not recorded runs without parameters."""
        if self.spec is not None:
            return [self.spec]
        verifiers = [spec for spec in recorded if spec.kind is ScorerKind.VERIFIER]
        found = [spec for spec in verifiers if spec.name == self.name]
        found = found or [spec for spec in verifiers if spec.type == self.name]
        found = found or [ScorerSpec(name=self.name, type=self.name)]
        return found if self.verifier is None else [msgspec.structs.replace(spec, type=self.type) for spec in found]


def chosen_specs(choices: Sequence[Choice], recorded: Sequence[ScorerSpec]) -> tuple[ScorerSpec, ...]:
    """What to run for one group: all its verifiers when nothing was chosen."""
    if not choices:
        return tuple(spec for spec in recorded if spec.kind is ScorerKind.VERIFIER)
    specs = {spec.name: spec for choice in choices for spec in choice.specs(recorded)}
    return tuple(specs.values())


def rescored(groups: Iterable[Group], choices: Sequence[Choice]) -> Iterator[tuple[Group, SamplesScored]]:
    """Each group with its new verdicts, as they come.  Raises what reading `groups` raises, and usage errors."""
    if importlib.util.find_spec("rollgrid_scorer") is None:
        raise usage_error("scoring again needs the scorer: pip install rollgrid-scorer")
    command = [sys.executable, "-m", "rollgrid_scorer.rerun"]
    for choice in choices:
        command += ["--verifier", choice.verifier] if choice.verifier is not None else []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        feeder = _Feeder(groups, choices, process.stdin)
        feeder.start()
        try:
            while (scored := _read(process.stdout)) is not None:
                yield feeder.take(scored.finished_seq), scored
        finally:
            feeder.stop()
            process.stdout.close()
            code = process.wait()
            feeder.join()
        if feeder.error is not None:
            raise feeder.error
        if code:
            raise usage_error(f"the scorer's process ended with code {code}; its message is above")


class _Feeder(threading.Thread):
    """Writes the groups; keeps those whose verdicts are awaited."""

    def __init__(self, groups: Iterable[Group], choices: Sequence[Choice], sink: IO[bytes]) -> None:
        super().__init__(daemon=True, name="rerun-feeder")
        self._groups, self._choices, self._sink = groups, choices, sink
        self._pending: dict[int, Group] = {}
        self._stopping = threading.Event()
        self.error: BaseException | None = None

    def take(self, position: int) -> Group:
        return self._pending.pop(position)

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            for position, group in enumerate(self._groups):
                if self._stopping.is_set():
                    break
                specs = chosen_specs(self._choices, group.closed.scorers)
                self._pending[position] = group
                body = codec.encode(msgspec.structs.replace(group.closed, scorers=specs))
                self._sink.write(len(body).to_bytes(_HEAD, "little") + body)
                self._sink.flush()
        except BrokenPipeError:
            pass  # the process has ended: its exit code says why
        except Exception as error:  # noqa: BLE001 - raised again by the reader
            self.error = error
        finally:
            with contextlib.suppress(BrokenPipeError):
                self._sink.close()


def _read(source: IO[bytes]) -> SamplesScored | None:
    head = source.read(_HEAD)
    if len(head) < _HEAD:
        return None
    size = int.from_bytes(head, "little")
    body = source.read(size)
    return codec.decode(body, SamplesScored) if len(body) == size else None
