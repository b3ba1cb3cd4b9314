"""Imports packages so that they find matplotlib empty: two thirds of what reasoning_gym's import costs (0.9 s, measured),
for plots that a verifier never draws.  Whoever imports matplotlib itself afterwards gets the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

PLOTS = frozenset({"matplotlib", "mpl_toolkits"})


def _draws(module: str) -> bool:
    return module.partition(".")[0] in PLOTS


class _Empty(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if _draws(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextmanager
def plots_hidden() -> Iterator[None]:
    """While inside, matplotlib and whatever is below it are modules without anything in them."""
    if PLOTS & sys.modules.keys():  # nothing left to save
        yield
        return
    empty = _Empty()
    sys.meta_path.insert(0, empty)
    try:
        yield
    finally:
        sys.meta_path.remove(empty)
        for name in [name for name in sys.modules if _draws(name)]:
            del sys.modules[name]
