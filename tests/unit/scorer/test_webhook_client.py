"""The webhook client against a real HTTP server: what it retries, what it refuses, where it connects to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from rollgrid_runtime.webhooks import AllowList
from rollgrid_scorer.webhook_client import CallFailed, Reply, WebhookClient
from rollgrid_scorer.webhook_wire import WrongShape, read_answer, secret_key, signed_headers

from tests.support.processes import free_port
from tests.support.webhook_server import SHAPES, WebhookServer, certificate_for, webhook_server

ASKED = [(0, 0), (1, 0)]
BODY = b'{"samples": [{"index": 0, "text": "good"}, {"index": 1, "text": "bad"}]}'


class Hosts:
    """A resolver whose answers the test decides; each look-up of a name takes the next of its lists."""

    def __init__(self, **names: list[list[str]]) -> None:
        self.names, self.asked = names, list[str]()

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        answers = self.names.get(host.partition(".")[0])
        if answers is None:
            raise OSError(f"{host} is unknown")
        return answers.pop(0) if len(answers) > 1 else answers[0]


HOSTS = Hosts(home=[["127.0.0.1"]], turncoat=[["127.0.0.1"], ["169.254.169.254"]], two=[["127.0.0.2", "127.0.0.1"]])


@pytest.fixture(scope="module")
def server() -> Iterator[WebhookServer]:
    with webhook_server() as made:
        yield made


@pytest.fixture
async def client() -> AsyncIterator[WebhookClient]:
    made = WebhookClient(attempts=3, max_bytes=1_000_000, find_addresses=HOSTS)
    yield made
    await made.close()


async def post(
    client: WebhookClient, url: str, *, timeout_s: float = 20.0, until: float = 0.0, entry: str = ""
) -> Reply:
    origin = "/".join(url.split("/")[:3])
    location, allowed = AllowList([entry or f"{origin} private"]).find(url, "acme")
    return await client.post(
        location, allowed, BODY, {"idempotency-key": "k", "accept-encoding": "identity"}, timeout_s, until
    )


async def failure(client: WebhookClient, url: str, **options: float | str) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await post(client, url, **options)  # type: ignore[arg-type]
    return caught.value


async def test_the_connection_goes_to_the_address_under_the_name(client: WebhookClient, server: WebhookServer) -> None:
    reply = await post(client, server.url("/score?x=1", host="home.example"))
    assert reply.attempt == 1
    scores, version = read_answer(reply.body, ASKED)
    assert ({key: score.value for key, score in scores.items()}, version) == ({(0, 0): 1.0, (1, 0): 0.0}, "rev-9")
    [received] = server.of("/score?x=1")
    assert received.headers["host"] == f"home.example:{server.port}"
    assert received.headers["idempotency-key"] == "k"


async def test_failures_of_the_infrastructure_are_tried_again(client: WebhookClient, server: WebhookServer) -> None:
    for path, attempt in (("/busy-then-good", 3), ("/broken-then-good", 2)):
        reply = await post(client, server.url(path, host="home.example"))
        assert (reply.attempt, len(server.of(path))) == (attempt, attempt)
        assert len({call.body for call in server.of(path)}) == 1
    down = await failure(client, server.url("/down", host="home.example"))
    assert (down.attempt, down.timed_out, len(server.of("/down"))) == (3, False, 3)
    assert "answered 503" in str(down)
    closed = await failure(client, f"http://home.example:{free_port()}/")
    assert (closed.attempt, closed.timed_out) == (3, False)
    assert "no connection to http://home.example" in str(closed)
    lost = await failure(client, "http://nowhere.example/")
    assert (lost.attempt, "cannot be resolved" in str(lost)) == (3, True)


async def test_no_attempt_begins_behind_the_deadline(client: WebhookClient, server: WebhookServer) -> None:
    before = len(server.of("/down"))
    late = await failure(client, server.url("/down", host="home.example"), until=time.time() + 0.01)
    assert (late.attempt, len(server.of("/down")) - before) == (1, 1)


async def test_redirects_are_not_followed(client: WebhookClient, server: WebhookServer) -> None:
    calls = len(server.of("/score"))
    for path in ("/redirect", "/redirect-home"):
        error = await failure(client, server.url(path, host="home.example"))
        assert "redirects are not followed" in str(error)
        assert error.attempt == 1
    assert len(server.of("/score")) == calls


@pytest.mark.parametrize(
    ("path", "why"),
    [("/refused", "answered 422"), ("/huge", "over 1000000 bytes"), ("/zipped", "compressed")],
)
async def test_answers_that_are_not_taken(client: WebhookClient, server: WebhookServer, path: str, why: str) -> None:
    error = await failure(client, server.url(path, host="home.example"))
    assert why in str(error)
    assert (error.attempt, error.timed_out, len(server.of(path))) == (1, False, 1)


@pytest.mark.parametrize("path", ["/drip", "/hold"])
async def test_slow_answers_end_at_the_deadline(client: WebhookClient, server: WebhookServer, path: str) -> None:
    error = await failure(client, server.url(path, host="home.example"), timeout_s=0.5)
    assert (error.timed_out, error.attempt, len(server.of(path))) == (True, 1, 1)


async def test_a_name_that_turns_inward_is_refused_when_it_does(client: WebhookClient, server: WebhookServer) -> None:
    """DNS rebinding: each attempt resolves once and connects to what it checked."""
    url = server.url("/score?turncoat", host="turncoat.example")
    assert (await post(client, url)).attempt == 1
    assert "169.254.169.254 is not one" in str(await failure(client, url))
    assert len(server.of("/score?turncoat")) == 1
    inward = await failure(client, server.url(host="home.example"), entry=server.url(host="home.example"))
    assert "127.0.0.1 is not one" in str(inward)  # the entry does not say private


async def test_the_next_address_of_a_name_is_tried(client: WebhookClient, server: WebhookServer) -> None:
    assert (await post(client, server.url("/score?two", host="two.example"))).attempt == 1


async def test_proxies_of_the_environment_are_not_used(server: WebhookServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    client = WebhookClient(attempts=1, max_bytes=1_000_000, find_addresses=HOSTS)
    assert (await post(client, server.url("/score?direct", host="home.example"))).attempt == 1
    await client.close()


async def test_a_cancelled_call_leaves_the_client_usable(client: WebhookClient, server: WebhookServer) -> None:
    call = asyncio.create_task(post(client, server.url("/hold?cancelled", host="home.example")))
    while not server.of("/hold?cancelled"):
        await asyncio.sleep(0.01)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert (await post(client, server.url("/score?after", host="home.example"))).attempt == 1


async def test_the_certificate_must_be_the_names_own(tmp_path: Path) -> None:
    """The connection goes to an address; what is verified is the name, also where a connection is open already."""
    hosts = Hosts(home=[["127.0.0.1"]], other=[["127.0.0.1"]])
    pem = certificate_for("home.example", tmp_path)
    with webhook_server(pem) as server:
        client = WebhookClient(attempts=1, max_bytes=1_000_000, ca_file=pem, find_addresses=hosts)
        home, other = (f"https://{name}.example:{server.port}/score" for name in ("home", "other"))
        assert (await post(client, home)).attempt == 1
        assert "certificate" in str(await failure(client, other)).lower()
        await client.close()
        strict = WebhookClient(attempts=1, max_bytes=1_000_000, find_addresses=hosts)
        assert "certificate" in str(await failure(strict, home)).lower()
        await strict.close()
        assert len(server.received) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_answers_of_a_wrong_shape_give_no_score(shape: str) -> None:
    with pytest.raises(WrongShape):
        read_answer(SHAPES[shape], ASKED)


def test_a_partial_answer_scores_what_it_holds() -> None:
    scores, _ = read_answer(b'{"scores": [{"index": 1, "value": null, "more": 1}], "other": {}}', ASKED)
    assert (list(scores), scores[1, 0].value) == ([(1, 0)], None)


def test_signatures_are_those_of_standard_webhooks() -> None:
    """The test vector of the reference libraries."""
    key = secret_key("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    headers = signed_headers("msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}', 1614265330, key)
    assert headers["webhook-signature"] == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="
    assert headers["webhook-timestamp"] == "1614265330"
    assert "webhook-signature" not in signed_headers("x", b"", 1, None)
    assert secret_key("plain") == b"plain"
    with pytest.raises(ValueError, match="base64"):
        secret_key("whsec_?")
