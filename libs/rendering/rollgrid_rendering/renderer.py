"""One tokenizer: text and messages to ids, ids to text.  Loaded from a local folder only."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from . import files
from .least import LeastTokens
from .messages import normalized
from .token_bytes import REPLACEMENT, own_bytes
from .without_torch import auto_tokenizer

_OWN_ARGUMENTS = frozenset(
    {
        "add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents", "max_length",
        "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize", "tokenizer_kwargs",
        "tools", "truncation",
    }
)  # fmt: skip
"""Arguments of the template call itself: a caller's variables may not take these names."""


class RenderingError(ValueError):
    """The tokenizer or its chat template refused the input; the message says why."""


class TooManyTokens(RenderingError):
    """The text has `least` tokens or more, which is over the bound: it was not tokenized."""

    def __init__(self, least: int) -> None:
        super().__init__(f"the text has {least} tokens or more")
        self.least = least


class TokenizerMismatch(RenderingError):
    """The folder's tokenizer is not the one that was asked for."""


class Renderer:
    """A loaded tokenizer.  Its methods block (0.1 ms for a short prompt, 6 ms for 3,000 words,
    measured) and may be called from several threads."""

    def __init__(self, tokenizer: Any, digest: str) -> None:
        self.digest = digest
        self._tokenizer = tokenizer
        self._pieces: dict[int, str] = {}
        # truncation and padding are state of the backend, off after any first call; then nothing changes it
        tokenizer("a")
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._least = LeastTokens.from_backend(self._backend)

    @classmethod
    def load(cls, folder: Path, digest: str | None = None) -> Renderer:
        """Load the tokenizer of `folder`, which must have `digest` when one is given.

        Raises:
            TokenizerMismatch: other files than those pinned.
            RenderingError: the folder holds no tokenizer that can be loaded.
        """
        found = files.folder_digest(folder)
        if digest is not None and found != digest:
            raise TokenizerMismatch(f"tokenizer in {folder} has digest {found}, wanted {digest}")
        try:
            tokenizer = auto_tokenizer().from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RenderingError(f"no tokenizer can be loaded from {folder}: {error}") from error
        return cls(tokenizer, found)

    @property
    def size(self) -> int:
        """Number of ids the tokenizer knows (a model's vocabulary may be padded beyond it)."""
        return len(self._tokenizer)

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, text: str, *, add_special_tokens: bool = True, at_most: int | None = None) -> list[int]:
        """Ids of `text`, special tokens in it included; what the tokenizer's own call gives (its wrapper costs
        twice the work on a short prompt).

        The backend's `encode` holds the GIL all the while (1 s for a million characters, measured); its batch
        call lets it go, and without offsets takes a third of the time.

        Raises TooManyTokens where it is certain beforehand that there are more than `at_most`."""
        if at_most is not None and (least := self._least.of(text)) > at_most:
            raise TooManyTokens(least)
        if self._backend is None:
            ids: list[int] = self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
            return ids
        found: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, str]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        options: Mapping[str, Any] | None = None,
        at_most: int | None = None,
    ) -> tuple[str, list[int]]:
        """The chat template's text for `messages`, and its ids.  `options` reach the template as variables.

        Raises RenderingError when there is no template or it refuses the messages, TooManyTokens as `encode`.
        """
        text = self.chat_text(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            options=options,
        )
        return text, self.encode(text, add_special_tokens=add_special_tokens, at_most=at_most)

    def chat_text(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        documents: Sequence[Mapping[str, str]] = (),
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """The text alone of `render`; raises RenderingError likewise."""
        if not self.has_chat_template:
            raise RenderingError("this model has no chat template: send prompt or prompt_token_ids")
        taken = sorted(_OWN_ARGUMENTS.intersection(options or {}))
        if taken:
            raise RenderingError(f"chat template variables may not be named {', '.join(taken)}")
        try:
            text: str = self._tokenizer.apply_chat_template(
                normalized(messages),
                tools=[dict(tool) for tool in tools] or None,
                documents=[dict(document) for document in documents] or None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **dict(options or {}),
            )
        except Exception as error:  # a template is a program: whatever it raises is about its input
            raise RenderingError(f"the chat template refused the messages: {error}") from error
        return text

    def exact_text(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included and no space tidied away."""
        size = self.size
        known = [token for token in ids if token < size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def retold(self, text: str) -> str:
        """`text` as its ids give it back: a tokenizer may normalize it, or put spaces behind its special tokens."""
        return self.exact_text(self.encode(text, add_special_tokens=False))

    @property
    def tokenizer(self) -> Any:
        """The loaded tokenizer itself, for bridges written elsewhere."""
        return self._tokenizer

    @cached_property
    def added_tokens(self) -> frozenset[str]:
        """Tokens that are no pieces of text: role marks, tags, ends of turns."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        return frozenset(str(entry.content) for entry in added.values())

    @cached_property
    def special_tokens(self) -> dict[int, str]:
        """Ids that stand for no text of a message, such as those that end a turn, with their names."""
        added = getattr(self._tokenizer, "added_tokens_decoder", {})
        found = {token: str(entry.content) for token, entry in added.items() if entry.special}
        names = zip(self._tokenizer.all_special_ids, self._tokenizer.all_special_tokens, strict=True)
        return found | {int(token): str(name) for token, name in names}

    def to_special_token(self, text: str) -> str:
        """`text` up to the end of the last special token in it, empty where there is none."""
        names = [name for name in self.special_tokens.values() if name in text]
        return text[: max((text.rfind(name) + len(name) for name in names), default=0)]

    @property
    def eos_id(self) -> int | None:
        found: int | None = self._tokenizer.eos_token_id
        return found

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; ids the tokenizer does not know give nothing."""
        known = [token for token in ids if token < self.size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """Each id decoded alone (remembered: at most one entry per id of the vocabulary)."""
        memory = self._pieces
        found: list[str] = []
        for token in ids:
            piece = memory.get(token)
            if piece is None:
                piece = memory[token] = self.decode([token], skip_special_tokens=False)
            found.append(piece)
        return found

    def piece_bytes(self, ids: Iterable[int]) -> list[bytes]:
        """The bytes each id stands for; those of pieces of a character have no text of their own."""
        ids = list(ids)
        return [
            own_bytes(str(self._tokenizer.convert_ids_to_tokens(token))) or piece.encode()
            if REPLACEMENT in piece
            else piece.encode()
            for token, piece in zip(ids, self.pieces(ids), strict=True)
        ]
