"""A byte that changes on the wire is a failure: old messages lie in streams and archives for months."""

from __future__ import annotations

import importlib
import pkgutil
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec
import pytest
import rollgrid_contracts
from rollgrid_contracts import codec
from rollgrid_contracts.arrays import Floats, TokenIds

from tests.contract.messages import ALL, FULL, UNIONS
from tests.contract.write_golden import FOLDER, from_hex, path_of

NOT_ON_THE_WIRE = {"Stream", "Bucket", "Consumer"}
"""Structs of `topology`: they describe the server, they are not sent."""


def golden(name: str) -> bytes:
    return from_hex(path_of(name).read_text())


@pytest.mark.parametrize("name", ALL)
def test_the_bytes_are_what_they_were(name: str) -> None:
    assert codec.encode(ALL[name]).hex() == golden(name).hex()


@pytest.mark.parametrize("name", ALL)
def test_old_bytes_decode_to_the_same_message(name: str) -> None:
    assert codec.decode(golden(name), type(ALL[name])) == ALL[name]


@pytest.mark.parametrize("name", ALL)
def test_json_carries_the_same_message(name: str) -> None:
    text = codec.encode(ALL[name], codec.JSON)
    assert codec.decode(text, type(ALL[name]), codec.JSON) == ALL[name]
    assert msgspec.json.decode(text) == msgspec.json.decode(msgspec.json.encode(codec.to_builtins(ALL[name])))


@pytest.mark.parametrize("name", ALL)
def test_builtins_carry_the_same_message(name: str) -> None:
    assert codec.from_builtins(codec.to_builtins(ALL[name]), type(ALL[name])) == ALL[name]


@pytest.mark.parametrize("name", ALL)
def test_a_newer_senders_unknown_field_is_ignored(name: str) -> None:
    fields = msgspec.msgpack.decode(golden(name))
    newer = msgspec.msgpack.encode({**fields, "a_field_of_tomorrow": [1, {"x": b"y"}]})
    assert codec.decode(newer, type(ALL[name])) == ALL[name]


@pytest.mark.parametrize(("union", "names"), UNIONS)
def test_messages_of_one_subject_are_told_apart_by_their_tag(union: Any, names: tuple[str, ...]) -> None:
    for name in names:
        assert codec.decode(golden(name), union) == ALL[name]


def test_no_golden_file_is_without_its_example() -> None:
    assert {path.stem for path in FOLDER.glob("*.hex")} == set(ALL)


# -- every struct and field is covered --------------------------------------------------------------


def contract_structs() -> set[type]:
    found: set[type] = set()
    for module in pkgutil.iter_modules(rollgrid_contracts.__path__):
        members = vars(importlib.import_module(f"rollgrid_contracts.{module.name}")).values()
        found |= {
            member
            for member in members
            if isinstance(member, type)
            and issubclass(member, msgspec.Struct)
            and member.__module__.startswith("rollgrid_contracts")
        }
    return found


def parts(value: object) -> Iterator[object]:
    """The value and everything inside it."""
    yield value
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from parts(getattr(value, name))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from parts(item)


def test_every_struct_of_the_contracts_has_golden_bytes() -> None:
    seen = {type(part) for part in parts(tuple(ALL.values())) if isinstance(part, msgspec.Struct)}
    missing = {kind.__name__ for kind in contract_structs() - seen} - NOT_ON_THE_WIRE
    assert not missing, f"add examples to tests/contract/examples for {sorted(missing)}"


def test_every_field_is_set_in_the_full_examples() -> None:
    unset: dict[str, set[str]] = {}
    for part in parts(tuple(FULL.values())):
        if isinstance(part, msgspec.Struct):
            kind = type(part)
            defaults = {field.name: field.default for field in msgspec.structs.fields(kind)}
            at_default = {name for name in kind.__struct_fields__ if getattr(part, name) == defaults[name]}
            unset[kind.__name__] = unset.get(kind.__name__, at_default) & at_default
    # booleans that only ever say no, and defaults that are the only value there is
    allowed = {
        "ErrorInfo": {"retryable"},
        "GroupStatus": {"known"},
        "ArchiveManifest": {"schema"},
        "CheckpointManifest": {"schema"},
        "ScorerSpec": {"kind"},
        "SampleGroup": set(),
    }
    left = {kind: names - allowed.get(kind, set()) for kind, names in unset.items()}
    assert not {kind: names for kind, names in left.items() if names}


def test_structs_are_frozen_and_by_keyword() -> None:
    for kind in contract_structs():
        config = kind.__struct_config__  # type: ignore[attr-defined]
        assert config.frozen, kind
        assert not config.array_like, kind


def test_strings_of_enums_are_plain_tokens() -> None:
    for kind in contract_structs():
        for hint in typing.get_type_hints(kind).values():
            for enum in enums_of(hint):
                for member in enum:
                    assert isinstance(member.value, str)
                    assert member.value == member.value.lower()


def enums_of(hint: Any) -> Iterator[type[Enum]]:
    if isinstance(hint, type) and issubclass(hint, Enum) and not isinstance(hint, types.GenericAlias):
        yield hint
    for inner in typing.get_args(hint):
        yield from enums_of(inner)


# -- garbage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sample_group", "samples_finished", "group_closed"])
def test_a_truncated_message_is_a_decode_error(name: str) -> None:
    whole = golden(name)
    for end in range(0, len(whole), 7):
        with pytest.raises(msgspec.DecodeError):
            codec.decode(whole[:end], type(ALL[name]))


@pytest.mark.parametrize("values", [[-1], [2**32], [1.5], ["x"], [None], "abc", {"a": 1}, 7, [[1]]])
def test_json_token_ids_out_of_range_or_of_another_type_are_validation_errors(values: Any) -> None:
    body = msgspec.json.encode({"ids": values})
    kind = msgspec.defstruct("Holder", [("ids", TokenIds)])
    with pytest.raises(msgspec.ValidationError):
        codec.decode(body, kind, codec.JSON)


@pytest.mark.parametrize("values", [["x"], [None], "abc", 7, [[1]], [True, "x"]])
def test_json_floats_of_another_type_are_validation_errors(values: Any) -> None:
    body = msgspec.json.encode({"floats": values})
    kind = msgspec.defstruct("Holder", [("floats", Floats)])
    with pytest.raises(msgspec.ValidationError):
        codec.decode(body, kind, codec.JSON)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_packed_bytes_of_a_broken_length_are_validation_errors(size: int) -> None:
    kind = msgspec.defstruct("Holder", [("ids", TokenIds)])
    with pytest.raises(msgspec.ValidationError):
        codec.decode(msgspec.msgpack.encode({"ids": b"\x00" * size}), kind)
