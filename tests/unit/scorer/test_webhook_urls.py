"""Where a webhook may be sent to: the operator's allow-list, and the addresses behind its names (no SSRF)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rollgrid_runtime.settings import WebhookSettings
from rollgrid_runtime.webhooks import AllowList, parse_allowed, parse_url
from rollgrid_scorer.addresses import AddressRefused, checked

ALLOWED = AllowList(
    [
        "https://scores.example.com/rollgrid",
        "https://scores.example.com/rollgrid/gold tenant=acme",
        "http://127.0.0.1:9000 private",
        "https://[2001:db8::1]:8443/x",
    ]
)


@pytest.mark.parametrize(
    "url",
    [
        "https://scores.example.com/rollgrid",
        "https://scores.example.com/rollgrid/v1?task=2",
        "https://scores.example.com:443/rollgrid",
        "https://SCORES.example.com/rollgrid",
        "HTTPS://scores.example.com/rollgrid",
        "http://127.0.0.1:9000",
        "http://127.0.0.1:9000/anything",
        "https://[2001:DB8::1]:8443/x/y",
    ],
)
def test_urls_of_the_list(url: str) -> None:
    location, _ = ALLOWED.find(url, "other")
    assert location.target.startswith("/")


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://scores.example.com/rollgrid", "not on the operator's allow-list"),
        ("https://scores.example.com:8443/rollgrid", "not on the operator's allow-list"),
        ("https://scores.example.com/", "not on the operator's allow-list"),
        ("https://scores.example.com/rollgridx", "not on the operator's allow-list"),
        ("https://scores.example.com.evil.org/rollgrid", "not on the operator's allow-list"),
        ("https://evil.org/https://scores.example.com/rollgrid", "not on the operator's allow-list"),
        ("http://127.1:9000/", "not on the operator's allow-list"),
        ("http://2130706433:9000/", "not on the operator's allow-list"),
        ("https://scores.example.com./rollgrid", "not on the operator's allow-list"),
        ("https://scores.example.com/rollgrid/../admin", "relative or encoded"),
        ("https://scores.example.com/rollgrid/%2e%2e/admin", "relative or encoded"),
        ("https://scores.example.com/rollgrid%2Fx", "relative or encoded"),
        ("https://user:secret@scores.example.com/rollgrid", "credentials"),
        ("https://scores.example.com@evil.org/rollgrid", "credentials"),
        ("https://evil.org\\@scores.example.com/rollgrid", "characters"),
        ("https://scores.example.com/rollgrid#x", "fragment"),
        ("https://scores.example.com/roll grid", "characters"),
        ("https://scores.example.com/rollgrid\n", "characters"),
        ("https://scores.exämple.com/rollgrid", "characters"),
        ("file:///etc/passwd", "neither http"),
        ("//scores.example.com/rollgrid", "neither http"),
        ("https:///rollgrid", "no host"),
        ("https://scores.example.com:99999/rollgrid", "[Pp]ort"),
        ("https://scores.example.com:0/rollgrid", "port 0"),
        ("https://scores.example.com/" + "x" * 3000, "2048 characters"),
    ],
)
def test_urls_beside_the_list(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ALLOWED.find(url, "other")


def test_the_longest_prefix_of_the_tenant_counts() -> None:
    url = "https://scores.example.com/rollgrid/gold/1"
    assert ALLOWED.find(url, "acme")[1].tenant == "acme"
    assert ALLOWED.find(url, "other")[1].tenant is None
    with pytest.raises(ValueError, match="allow-list"):
        AllowList(["https://a.org tenant=acme"]).find("https://a.org/", "other")
    with pytest.raises(ValueError, match="allow-list"):
        AllowList().find("https://a.org/", "acme")


@pytest.mark.parametrize("text", ["https://a.org/?x=1", "https://a.org publicly", "a.org", "", "https://u@a.org"])
def test_malformed_entries_end_the_start(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each has its own words
        parse_allowed(text)
    if text:
        monkeypatch.setenv("ROLLGRID_WEBHOOK_ALLOW", f"https://good.org,{text}")
        with pytest.raises(ValueError, match="allow"):
            WebhookSettings()


def test_the_list_comes_from_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLGRID_WEBHOOK_ALLOW", "https://a.org/x , http://127.0.0.1:9 private tenant=acme")
    entries = AllowList(WebhookSettings().allow).entries
    assert [(entry.text, entry.private, entry.tenant) for entry in entries] == [
        ("https://a.org/x", False, None),
        ("http://127.0.0.1:9", True, "acme"),
    ]


@given(path=st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=30))
def test_whatever_is_accepted_stays_under_its_prefix(path: str) -> None:
    try:
        location, entry = ALLOWED.find(f"https://scores.example.com/rollgrid/{path}", "other")
    except ValueError:
        return
    assert entry.text == "https://scores.example.com/rollgrid"
    assert (location.host, location.port) == ("scores.example.com", 443)
    assert location.path.startswith("/rollgrid/")
    assert ".." not in location.path.split("/")


@given(text=st.text(max_size=40) | st.from_regex(r"https?://[a-z0-9.:@\[\]%/\\?#]{0,20}", fullmatch=True))
def test_any_text_is_a_place_or_a_value_error(text: str) -> None:
    try:
        location = parse_url(text)
    except ValueError:
        return
    assert parse_url(location.origin + location.target) == location


PUBLIC = ["93.184.216.34", "2606:2800:220:1::1"]
NEVER = [
    "169.254.169.254", "fe80::1", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "240.0.0.1",
    "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "fe80::1%eth0", "no address",
]  # fmt: skip
PRIVATE = [
    "127.0.0.1", "::1", "10.1.2.3", "192.168.0.1", "172.16.0.1", "fd00::1", "100.64.0.1", "::ffff:10.0.0.1",
    "64:ff9b::7f00:1", "2002:0a00:0001::1",
]  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses(address: str) -> None:
    assert checked([address], private=False) == [address]


@pytest.mark.parametrize("address", PRIVATE)
def test_private_addresses_only_where_the_entry_says_so(address: str) -> None:
    assert checked([address], private=True) == [address]
    with pytest.raises(AddressRefused, match="not one a webhook may be sent to"):
        checked([address], private=False)


@pytest.mark.parametrize("address", NEVER)
def test_addresses_that_are_never_called(address: str) -> None:
    with pytest.raises(AddressRefused):
        checked([address], private=True)


def test_one_bad_address_spoils_the_name() -> None:
    with pytest.raises(AddressRefused):
        checked([*PUBLIC, "10.0.0.1"], private=False)
    with pytest.raises(AddressRefused, match="no address"):
        checked([], private=True)
