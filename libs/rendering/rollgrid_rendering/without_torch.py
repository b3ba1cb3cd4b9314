"""Imports transformers so that it never imports torch, even where torch is installed.

With torch beside it the import takes five seconds and 300 MB more (measured), and nothing here
computes with tensors.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def torch_hidden() -> Iterator[None]:
    """While inside, `import torch` fails and `find_spec("torch")` finds nothing."""
    if "torch" in sys.modules:  # somebody computes with it already: nothing left to save
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules["torch"]


def auto_tokenizer() -> Any:
    """`transformers.AutoTokenizer`, imported without torch and without any download."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with torch_hidden():
        from transformers import AutoTokenizer

        return AutoTokenizer
