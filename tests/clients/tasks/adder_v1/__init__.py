"""A verifiers taskset with a tool, as `vf-init` scaffolds one: find a sum; the reward is whether the last answer says it."""

import verifiers.v1 as vf

from adder_v1.tools import AdderToolset


class AdderData(vf.TaskData):
    total: int


class AdderTaskConfig(vf.TaskConfig):
    tools: vf.ToolsetConfig = vf.ToolsetConfig()


class AdderTask(vf.Task[AdderData, vf.State, AdderTaskConfig]):
    @classmethod
    def toolsets(cls, config: AdderTaskConfig) -> list[vf.Toolset]:
        return [AdderToolset(config.tools)]

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.total) in (trace.last_reply or ""))


class AdderConfig(vf.TasksetConfig):
    task: AdderTaskConfig = AdderTaskConfig()


class AdderTaskset(vf.Taskset[AdderTask, AdderConfig]):
    def load(self) -> list[AdderTask]:
        return [
            AdderTask(AdderData(prompt=f"What is {a} + {b}?", total=a + b), self.config.task)
            for a, b in ((1, 2), (2, 2))
        ]


__all__ = ["AdderTaskset"]
