"""A verifiers taskset as `vf-init` scaffolds one; its reward is the share of letters in the answer."""

import verifiers.v1 as vf


class LettersTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def letters(self, trace: vf.Trace) -> float:
        reply = trace.last_reply or ""
        return sum(character.isalpha() for character in reply) / max(1, len(reply))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply or ""))


class LettersConfig(vf.TasksetConfig):
    num_tasks: int = 3


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[LettersTask]:
        return [
            LettersTask(vf.TaskData(prompt=f"Write {i} letters."), self.config.task)
            for i in range(1, self.config.num_tasks + 1)
        ]


__all__ = ["LettersTaskset"]
