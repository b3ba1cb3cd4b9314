"""Going back, and the command line: publish, list, show, rollback, with the exit codes of all commands (A21, A44)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rollgrid import AsyncClient, Client, VersionRolledBack
from rollgrid.errors import VersionUnavailable
from safetensors.numpy import save_file

from tests.integration.sdk.test_cli import lines_of, rollgrid
from tests.support.stack import POLICY, Stack

from .conftest import Fleet

NORM = "model.norm.weight"


def folder(path: Path, tensors: dict[str, Any], name: str = "model.safetensors") -> str:
    path.mkdir(exist_ok=True)
    save_file(tensors, str(path / name))
    return str(path)


def test_A44_a_rollback_holds_until_something_newer_comes(
    client: Client, fleet: Fleet, tensors: dict[str, Any]
) -> None:
    old, digest = fleet.version, fleet.digest
    newer = client.weights.publish(POLICY, {**tensors, NORM: tensors[NORM] - 1}).wait_live(timeout=60)
    client.weights.rollback(POLICY, old).wait_live(timeout=60)
    with pytest.raises(VersionRolledBack, match="somebody went back"):
        newer.wait_live(timeout=60)
    fleet.version, fleet.digest = old, digest
    fleet.assert_truthful()
    assert client.weights.version(POLICY, newer.version).status == "rolled_back"
    with pytest.raises(VersionUnavailable):
        client.weights.rollback(POLICY, newer.version + 100)
    assert fleet.publish({**tensors, NORM: tensors[NORM] - 2}) == newer.version + 1
    fleet.assert_truthful()


async def test_the_async_client_sees_a_version_go_live_and_back(
    pipe: Stack, fleet: Fleet, tensors: dict[str, Any]
) -> None:
    async with AsyncClient(pipe.url) as client:
        publishing = await client.weights.publish(POLICY, {**tensors, NORM: tensors[NORM] - 3}, block=False)
        version = await publishing.live(timeout=60, min_workers=1)
        await version.live(timeout=60)
        await (await client.weights.rollback(POLICY, fleet.version)).live(timeout=60)
        with pytest.raises(VersionRolledBack):
            await version.live(timeout=60)
        assert (await client.weights.version(POLICY, version.version)).status == "rolled_back"
        assert version.version in {one.version for one in (await client.weights.versions(POLICY)).data}
    fleet.assert_truthful()


def test_the_command_line_publishes_lists_shows_and_goes_back(
    pipe: Stack, client: Client, fleet: Fleet, tensors: dict[str, Any], tmp_path: Path
) -> None:
    source = folder(tmp_path / "good", {**tensors, NORM: tensors[NORM] - 4})
    done = rollgrid(pipe, "weights", "publish", POLICY, source, "--step", "3", "--json", "--timeout", "60")
    assert done.returncode == 0, done.stderr
    committed, live = lines_of(done)
    version = committed["version"]
    assert (committed["event"], live["event"], live["version"]) == ("committed", "live", version)
    listed = {one["version"]: one for one in lines_of(rollgrid(pipe, "weights", "list", POLICY, "--json"))}
    assert (listed[version]["status"], listed[version]["step"], listed[version]["workers"]) == ("desired", 3, 2)
    back = rollgrid(pipe, "weights", "rollback", POLICY, str(fleet.version), "--json", "--timeout", "60")
    assert [line["event"] for line in lines_of(back)] == ["rolled_back", "live"]
    shown = rollgrid(pipe, "weights", "show", POLICY, str(version))
    assert shown.stdout.startswith(f"{POLICY}@{version}  rolled_back")
    fleet.assert_truthful()


def test_the_command_line_says_what_was_refused(
    pipe: Stack, fleet: Fleet, tensors: dict[str, Any], tmp_path: Path
) -> None:
    bad = folder(tmp_path / "bad", {**tensors, NORM: np.full_like(tensors[NORM], np.nan)})
    done = rollgrid(pipe, "weights", "publish", POLICY, bad, "--json", "--timeout", "60")
    assert done.returncode == 4
    error = json.loads(done.stderr)["error"]
    assert (error["type"], error["code"], error["field"]) == ("VersionRefused", "invalid_request", NORM)
    shown = rollgrid(pipe, "weights", "show", POLICY, str(error["version"]))
    assert "refused" in shown.stdout
    assert "not finite" in shown.stdout
    fleet.assert_truthful()
    people = rollgrid(pipe, "weights", "publish", POLICY, folder(tmp_path / "good", tensors), "--no-wait")
    assert people.returncode == 0, people.stderr
    assert "committed" in people.stdout
    table = rollgrid(pipe, "weights", "list", POLICY).stdout
    assert table.split()[:5] == ["version", "kind", "on", "status", "step"]
    assert f"\n{fleet.version:>7}  full" in table
