"""An import-linter contract type: a package that may import nothing but a named few.

import-linter can forbid what is listed; for the wire contracts the rule is the other way round, so
that a new dependency has to be allowed here instead of being found out later.
"""

import sys
from typing import Any

from importlinter import Contract, ContractCheck, fields, output


class OnlyImports(Contract):
    """Forbid every import from `source_modules` except their own, the standard library's and `allowed`."""

    source_modules = fields.ListField(subfield=fields.ModuleField())
    allowed = fields.ListField(subfield=fields.StringField())

    def check(self, graph: Any, verbose: bool) -> ContractCheck:
        """Compare each direct import with the list."""
        sources = {source.name for source in self.source_modules}  # type: ignore[attr-defined]
        permitted = sources | set(self.allowed) | sys.stdlib_module_names  # type: ignore[call-overload]
        found = [
            f"{module} -> {imported}"
            for source in sorted(sources)
            for module in sorted({source} | graph.find_descendants(source))
            for imported in sorted(graph.find_modules_directly_imported_by(module))
            if imported.partition(".")[0] not in permitted
        ]
        return ContractCheck(kept=not found, metadata={"found": found})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Name each import that is not allowed."""
        for line in check.metadata["found"]:
            output.print_error(line)
