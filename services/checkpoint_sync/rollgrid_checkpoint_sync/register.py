"""From a model folder to a policy: digests, the tokenizer in S3, the state in `rg_policies`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rollgrid_contracts import ids
from rollgrid_contracts.checkpoints import PolicyState, TensorInfo, policy_root
from rollgrid_contracts.failures import Boundary, ErrorCode
from rollgrid_rendering.files import folder_digest, tokenizer_files
from rollgrid_runtime.blobs import Blobs
from rollgrid_runtime.errors import Conflict, RollgridError
from rollgrid_runtime.kv import Table
from rollgrid_runtime.logging import get_logger
from rollgrid_weights.errors import WeightsError
from rollgrid_weights.manifest import folder_tensors, weight_files, weights_digest

from . import plan
from .settings import ModelSetting

log = get_logger(__name__)


class BadModel(RollgridError):
    """The folder of a policy cannot be served; the message says what it lacks."""

    def __init__(self, setting: ModelSetting, why: str, code: ErrorCode = ErrorCode.INVALID_REQUEST) -> None:
        super().__init__(
            code, f"model {setting.name} in {setting.path}: {why}", boundary=Boundary.WEIGHTS, field="models"
        )


class LocalModel(NamedTuple):
    """A folder as read: the state it gives, its tensors by name, whether its head is tied."""

    key: str
    state: PolicyState
    tensors: dict[str, TensorInfo]
    tied: bool
    folder: Path


def read_model(setting: ModelSetting, device: str, region: str) -> LocalModel:
    """Read and digest a folder (about 1 s per GB; blocks).  Raises BadModel."""
    folder = setting.path.expanduser()
    try:
        config = _json(folder / "config.json")
        generation = _json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
        tensors = folder_tensors(weight_files(folder))
        tokenizer_digest = folder_digest(folder)
        has_tokenizer = {"tokenizer.json", "tokenizer.model", "vocab.json"} & tokenizer_files(folder).keys()
        eos = tuple(dict.fromkeys(_eos_ids(folder, config, generation)))
    except WeightsError as error:
        raise BadModel(setting, error.message, error.code) from error
    except (OSError, ValueError) as error:
        raise BadModel(setting, str(error)) from error
    if not has_tokenizer:
        raise BadModel(setting, "it has no tokenizer")
    text = config.get("text_config", config)
    state = PolicyState(
        tenant=setting.tenant,
        policy=setting.name,
        pool=ids.pool_id(setting.key, setting.dtype, device, region),
        base=str(folder),
        base_digest=weights_digest(tensors),
        tokenizer_prefix=f"tokenizers/{tokenizer_digest}/",
        tokenizer_digest=tokenizer_digest,
        max_model_len=_context(setting, text),
        vocab_size=_positive(setting, text, "vocab_size"),
        dtype=setting.dtype,
        eos_token_ids=eos,
        aliases=setting.aliases,
        tool_parser=setting.tool_parser,
        reasoning_parser=setting.reasoning_parser,
    )
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    return LocalModel(setting.key, state, {tensor.name: tensor for tensor in tensors}, tied, folder)


async def upload_tokenizer(blobs: Blobs, model: LocalModel) -> None:
    """Put the tokenizer's files below their digest, those that are not there yet.  Raises StorageError."""
    prefix = model.state.tokenizer_prefix
    present = set(await blobs.keys(prefix))
    for name, path in tokenizer_files(model.folder).items():
        if prefix + name not in present:
            await blobs.upload(path, prefix + name)


async def register(table: Table[PolicyState], blobs: Blobs, model: LocalModel) -> PolicyState:
    """Create or renew the policy's state by compare-and-set; what is stored afterwards.

    Raises BaseChanged, BusError, StorageError.
    """
    await upload_tokenizer(blobs, model)
    state = model.state
    while True:
        found = await table.get(model.key)
        existing = found.value if found is not None else None
        versions_exist = False
        if existing is not None and existing.base_digest != state.base_digest:
            keys = await blobs.keys(policy_root(state.tenant, state.policy))
            versions_exist = bool(plan.stored(state.tenant, state.policy, keys).published)
        wanted = plan.merge(existing, state, versions_exist=versions_exist)
        if wanted == existing:
            return wanted
        try:
            if found is None:
                await table.create(model.key, wanted)
            else:
                await table.update(model.key, wanted, found.revision)
        except Conflict:
            continue
        if existing is not None and existing.base_digest != wanted.base_digest:
            log.warning(
                "policy_starts_over", policy=model.key, old_base=existing.base_digest, new_base=wanted.base_digest
            )
        log.info("policy_registered", policy=model.key, pool=wanted.pool, base=wanted.base, desired=wanted.desired)
        return wanted


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except RecursionError:
        found = None
    except ValueError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return found


def _eos_ids(folder: Path, config: dict[str, Any], generation: dict[str, Any]) -> Iterator[int]:
    """Every id that ends a text: of the tokenizer, the generation settings and the model."""
    yield from _tokenizer_eos(folder)
    for source in (generation, config, config.get("text_config", {})):
        given = source.get("eos_token_id")
        for value in given if isinstance(given, list) else [given]:
            if isinstance(value, int) and not isinstance(value, bool):
                yield value


def _tokenizer_eos(folder: Path) -> Iterator[int]:
    if not ((folder / "tokenizer_config.json").is_file() and (folder / "tokenizer.json").is_file()):
        return
    given = _json(folder / "tokenizer_config.json").get("eos_token")
    text = given.get("content") if isinstance(given, dict) else given
    for token in _json(folder / "tokenizer.json").get("added_tokens") or []:
        if isinstance(token, dict) and token.get("content") == text and isinstance(token.get("id"), int):
            yield token["id"]


def _positive(setting: ModelSetting, config: dict[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value <= 0:
        raise BadModel(setting, f"config.json has no {field}")
    return value


def _context(setting: ModelSetting, config: dict[str, Any]) -> int:
    own = config.get("max_position_embeddings")
    if not isinstance(own, int) or own <= 0:
        if setting.max_model_len is None:
            raise BadModel(setting, "config.json has no max_position_embeddings: set max_model_len")
        return setting.max_model_len
    if setting.max_model_len is not None and setting.max_model_len > own:
        raise BadModel(setting, f"max_model_len {setting.max_model_len} is over the model's {own}")
    return setting.max_model_len or own
