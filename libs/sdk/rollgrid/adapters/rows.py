"""One good sample for each row of a trainer's batch, from one version: what synchronous trainers ask a sampler for.

Trainers repeat a prompt once for every completion they want; neighbours that are equal make one group.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rollgrid.errors import RollgridError

if TYPE_CHECKING:
    from rollgrid.client import Batch, Client
    from rollgrid.results import Sample


class RolloutsFailed(RollgridError):
    """Rows are still without a sample after all attempts, or one failed in a way that another attempt cannot change."""

    def __init__(self, missing: int, rows: int, failed: Sequence[Sample]) -> None:
        reasons = {f"{s.error.code}: {s.error.message}" if s.error else str(s) for s in failed}
        super().__init__(f"{missing} of {rows} samples are missing: {'; '.join(sorted(reasons)[:5])}")
        self.missing, self.rows, self.failed = missing, rows, tuple(failed)


class RowSampling(NamedTuple):
    """How rows are sampled: the terms of their batches, and in how many batches failed samples are asked for."""

    client: Client
    policy: str
    run: str
    deadline_s: float
    attempts: int

    def sample(self, prompts: Sequence[Sequence[int]], version: int, sampling: Mapping[str, Any]) -> list[Sample]:
        """The sample of each row of token ids: succeeded, not empty, from `version` alone.

        Raises:
            RolloutsFailed: not for every row.
        """
        found: dict[int, Sample] = {}
        failed: list[Sample] = []
        for _ in range(self.attempts):
            missing = [row for row in range(len(prompts)) if row not in found]
            groups = [list(rows) for _, rows in itertools.groupby(missing, key=lambda row: list(prompts[row]))]
            failed = self._fill(found, groups, prompts, version, sampling)
            if len(found) == len(prompts):
                return [found[row] for row in range(len(prompts))]
            if any(sample.error is not None and not sample.error.retryable for sample in failed):
                break
        raise RolloutsFailed(len(prompts) - len(found), len(prompts), failed)

    def _fill(
        self,
        found: dict[int, Sample],
        groups: Sequence[Sequence[int]],
        prompts: Sequence[Sequence[int]],
        version: int,
        sampling: Mapping[str, Any],
    ) -> list[Sample]:
        """Sample `groups` of rows once; returns what failed."""
        batch = self.client.submit(
            [{"prompt_token_ids": list(prompts[rows[0]]), "n": len(rows)} for rows in groups],
            sampling=sampling,
            run=self.run,
            policy=self.policy,
            weights={"exact_version": version},
            deadline_s=self.deadline_s,
        )
        failed = []
        with contextlib.ExitStack() as unless_read:
            unless_read.callback(_cancel, batch)
            for group in batch.groups():
                for sample in group.samples:
                    if sample.ok and sample.versions == (version,):
                        found[groups[group.position][sample.index]] = sample
                    else:
                        failed.append(sample)
            unless_read.pop_all()
        return failed


def _cancel(batch: Batch) -> None:
    """Nobody will read it: the fleet need not go on."""
    with contextlib.suppress(RollgridError):
        batch.cancel()
