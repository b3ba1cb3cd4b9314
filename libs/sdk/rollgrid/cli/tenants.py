"""`rollgrid tenants`: who else may use the stack on this machine, by HTTP and by NATS."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from rollgrid.stack.home import Home, TenantFile, find_home

from .output import JsonOption, console, emit

app = typer.Typer(no_args_is_help=True, help="Tenants of the stack on this machine.")
Name = Annotated[str, typer.Argument(help="Lower case letters, digits and dashes.")]


@app.command("add")
def add(
    name: Name,
    follower: Annotated[
        list[str] | None, typer.Option("--follower", help="A further named reader of its trajectories; repeatable.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a tenant: API key, NATS user and durables.  Its secrets are printed once and kept in a 0600 file."""
    from rollgrid.stack.tenants import Tenants

    home = Home(find_home())
    tenant, new = Tenants(home).add(name, tuple(follower or ()))
    path = home.tenants / f"{name}.json"
    if as_json:
        shown = msgspec.structs.asdict(tenant) if new else _public(tenant)
        emit({**shown, "new": new, "file": str(path)})
        return
    out = console()
    if not new:
        out.print(f"{name} is there; followers: {', '.join(tenant.followers)}.  Its secrets: {path}", soft_wrap=True)
        return
    out.print(f"[bold]{name}[/]  (kept in {path})", soft_wrap=True)
    for title, value in (
        ("HTTP", tenant.url),
        ("API key", tenant.api_key),
        ("NATS", tenant.nats_url),
        ("user", tenant.nats_user),
        ("password", tenant.nats_password),
        ("followers", ", ".join(tenant.followers)),
    ):
        out.print(f"  {title:<10}{value}", markup=False, soft_wrap=True)


@app.command("list")
def list_command(as_json: JsonOption = False) -> None:
    """The tenants that were added, without their secrets."""
    from rollgrid.stack.tenants import Tenants

    for tenant in Tenants(Home(find_home())).all():
        if as_json:
            emit(_public(tenant))
        else:
            console().print(f"[bold]{tenant.tenant}[/]  followers: {', '.join(tenant.followers)}")


@app.command("remove")
def remove(name: Name, as_json: JsonOption = False) -> None:
    """End a tenant's key, NATS user and durables.  What it has sampled stays."""
    from rollgrid.stack.tenants import Tenants

    found = Tenants(Home(find_home())).remove(name)
    if as_json:
        emit({"tenant": name, "removed": found})
    else:
        console().print(f"{name} is removed" if found else f"there is no tenant {name}")


@app.command("render")
def render() -> None:
    """Print the accounts block for a NATS server of your own.  It holds passwords."""
    from rollgrid_contracts.accounts import accounts_block

    from rollgrid.stack.home import read_tenants

    home = Home(find_home())
    found = home.credentials()
    typer.echo(accounts_block(found.nats_user, found.nats_password, read_tenants(home)), nl=False)


def _public(tenant: TenantFile) -> dict[str, object]:
    return {"tenant": tenant.tenant, "url": tenant.url, "nats_url": tenant.nats_url, "followers": tenant.followers}
