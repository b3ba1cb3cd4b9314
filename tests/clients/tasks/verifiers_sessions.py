"""Plays verifiers episodes at once, each through the session URL it is given; runs in verifiers' environment.

Its argument: {"model": …, "max_turns": 4, "sampling": {…}, "episodes": [{"task": 0, "base_url": …}, …]}; the last line of stdout: what
came of each.
"""

import asyncio
import json
import sys

import verifiers.v1 as vf
from adder_v1 import AdderConfig, AdderTaskset
from verifiers.v1.agent import Agent
from verifiers.v1.clients import EvalClientConfig


async def play(task, base_url, asked):
    config = vf.AgentConfig(
        model=asked["model"],
        client=EvalClientConfig(base_url=base_url, api_key_var="ROLLGRID_API_KEY"),
        harness={"id": "null"},
        runtime={"type": "subprocess"},
        sampling=asked["sampling"],
        max_turns=asked["max_turns"],
    )
    trace = await Agent(config).run(task)
    return {
        "ok": trace.ok,
        "errors": [str(error) for error in trace.errors],
        "reward": trace.rewards["right"].score if trace.rewards.get("right") else None,
        "stopped": trace.stop_condition,
        "roles": [node.message.role for node in trace.nodes],
        "answers": [node.message.content for node in trace.nodes if node.sampled],
        "tools": [node.message.content for node in trace.nodes if node.message.role == "tool"],
    }


async def main():
    asked = json.loads(sys.argv[1])
    tasks = list(AdderTaskset(AdderConfig(id="adder_v1")).load())
    episodes = asked["episodes"]
    played = await asyncio.gather(*(play(tasks[e["task"]], e["base_url"], asked) for e in episodes))
    print(json.dumps(played))


if __name__ == "__main__":
    asyncio.run(main())
