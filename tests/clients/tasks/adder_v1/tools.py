"""The tool, served over MCP by a process that verifiers starts."""

import verifiers.v1 as vf


class AdderToolset(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = None

    @vf.tool
    def add(self, a: int, b: int) -> int:
        """The sum of two numbers."""
        return a + b


if __name__ == "__main__":
    AdderToolset.run()
