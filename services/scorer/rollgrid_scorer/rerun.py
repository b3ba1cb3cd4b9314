"""`python -m rollgrid_scorer.rerun [--verifier name=module:attr …]`: stored trajectories scored again, without sampling.

Reads `GroupClosed` records on stdin and writes one `SamplesScored` for each on stdout, in any order, as
msgpack behind four bytes of length.  A group is scored by its record's own `scorers`; `finished_seq` of
an answer is the position of its record in the input, from 0.  Verifiers run in isolated workers, as in
the service; nothing is connected to.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from typing import BinaryIO

import msgspec
from rollgrid_contracts import codec
from rollgrid_contracts.samples import Sample, SampleStatus, ScoringTask
from rollgrid_contracts.scoring import SampleScores, SamplesScored, Score, ScorerKind
from rollgrid_contracts.trajectories import GroupClosed
from rollgrid_runtime.errors import RollgridError
from rollgrid_runtime.logging import configure_logging

from .calls import HEAD_SIZE, frame, frame_length
from .isolation import Pool
from .registry import Registry
from .sessions import SessionTask, conversation, path_of
from .verifiers import Verifiers

AT_ONCE = 32
"""Groups in hand; the rest waits in the pipe."""
UNUSABLE = 2


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m rollgrid_scorer.rerun")
    parser.add_argument("--verifier", action="append", default=[], help="name=module:attr")
    parser.add_argument("--workers", type=int, default=max(2, os.cpu_count() or 2))
    parser.add_argument("--memory-mb", type=int, default=4096)
    parser.add_argument("--max-timeout-s", type=float, default=600.0)
    options = parser.parse_args(argv)
    configure_logging("rerun", "WARNING", "console")
    try:
        asyncio.run(_rerun(options, sys.stdin.buffer, sys.stdout.buffer))
    except BrokenPipeError:  # the reader has had enough
        return 0
    except (ValueError, msgspec.DecodeError, RollgridError) as error:
        sys.stderr.write(f"rerun: {error}\n")
        return UNUSABLE
    return 0


async def _rerun(options: argparse.Namespace, source: BinaryIO, sink: BinaryIO) -> None:
    registry = Registry(options.verifier)
    pool = Pool(options.workers, options.memory_mb, options.verifier)
    judge = Verifiers(pool, registry, options.max_timeout_s)
    slots, writing = asyncio.Semaphore(AT_ONCE), asyncio.Lock()
    try:
        async with asyncio.TaskGroup() as group:
            position = 0
            while (closed := await asyncio.to_thread(_read, source)) is not None:
                _check_types(closed, registry)
                if not position:
                    await pool.start()  # takes a second or two: not for an input without records
                await slots.acquire()
                group.create_task(_one(judge, position, closed, sink, slots, writing))
                position += 1
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from errors
    finally:
        await pool.close()


def _check_types(closed: GroupClosed, registry: Registry) -> None:
    """Raises ValueError: verdicts of code that is not here would be nulls that say nothing of the samples."""
    for spec in closed.scorers:
        if spec.kind is ScorerKind.VERIFIER and spec.type not in registry:
            raise ValueError(
                f"no verifier is named {spec.type!r} here; known: {', '.join(registry.names)}.  "
                f"--scorer {spec.name}=module:attr says where its code is"
            )


def _read(source: BinaryIO) -> GroupClosed | None:
    """The next record, None at the end; raises ValueError, DecodeError."""
    head = source.read(HEAD_SIZE)
    if not head:
        return None
    if len(head) < HEAD_SIZE:
        raise ValueError("the input ends within a record")
    size = frame_length(head)
    body = source.read(size)
    if len(body) < size:
        raise ValueError("the input ends within a record")
    return codec.decode(body, GroupClosed)


def _write(sink: BinaryIO, scored: SamplesScored) -> None:
    sink.write(frame(scored))
    sink.flush()


async def _one(judge: Verifiers, position: int, closed: GroupClosed, sink: BinaryIO, slots: asyncio.Semaphore,
               writing: asyncio.Lock) -> None:  # fmt: skip
    try:
        scored = await rescore(judge, position, closed)
        async with writing:  # a slow reader must not stop the loop that watches the verifiers
            await asyncio.to_thread(_write, sink, scored)
    finally:
        slots.release()


async def rescore(judge: Verifiers, position: int, closed: GroupClosed) -> SamplesScored:
    """Verdicts of the record's verifiers on its succeeded samples, a session's on its last answer."""
    task = ScoringTask(
        scorers=closed.scorers,
        prompt_text=closed.prompt_text,
        messages=closed.messages,
        task=closed.task,
        metadata=closed.metadata,
    )
    succeeded = [entry for entry in closed.entries if entry.sample.status is SampleStatus.SUCCEEDED]
    samples = [entry.sample for entry in succeeded if entry.session is None]
    scores = await _verdicts(judge, task, samples)
    for entry in succeeded:
        path = path_of(entry) if entry.session is not None else ()
        if path:
            own = SessionTask(
                scorers=task.scorers,
                messages=conversation(path),
                task=task.task,
                metadata=task.metadata,
                path=path,
            )
            samples.append(path[-1])
            scores += await _verdicts(judge, own, path[-1:])
    return SamplesScored(
        tenant=closed.tenant,
        run=closed.run,
        group_id=closed.group_id,
        job_seq=0,
        finished_seq=position,
        results=tuple(
            SampleScores(index=sample.index, turn=sample.turn, attempt=sample.attempt, scores=tuple(given))
            for sample, given in zip(samples, scores, strict=True)
        ),
    )


async def _verdicts(judge: Verifiers, task: ScoringTask, samples: Sequence[Sample]) -> list[list[Score]]:
    scores: list[list[Score]] = [[] for _ in samples]
    for spec in task.scorers:
        if spec.kind is ScorerKind.VERIFIER and samples:
            for given, score in zip(scores, await judge.scores(spec, task, samples), strict=True):
                given.append(score)
    return scores


if __name__ == "__main__":
    raise SystemExit(main())
