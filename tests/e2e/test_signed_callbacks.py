"""Callbacks of a real server: signed so that receivers can believe them, and never sent where they may not go."""

from __future__ import annotations

import json
import socket
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

import pytest
from contract import FAR, Asker, ended
from real_server import RealReceiver, RealServer

from duetime.client import SignatureError, verify
from duetime.http.messages import Request, Response
from duetime.signing import new_secret

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def fired(api: Asker, receiver: RealReceiver, namespace: str, timer_id: str) -> Request:
    """The callback of a timer that is due now."""
    before = len(receiver.requests)
    payload = {"text": "grün", "n": 1.0}
    await api.ok(
        "timers/create", namespace=namespace, timerId=timer_id, delay="0s", callbackUrl=receiver.url, payload=payload
    )
    await receiver.received(before + 1)
    return receiver.requests[before]


def is_good(request: Request, *secrets: str) -> bool:
    try:
        verify(request.body, request.headers, secrets)
    except SignatureError:
        return False
    return True


async def test_a_callback_verifies_with_the_secret_of_its_namespace(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    secret = new_secret()
    await api.ok("namespaces/update", namespace=namespace, signingSecrets=[secret])
    request = await fired(api, receiver, namespace, "a")
    callback = verify(request.body, request.headers, secret)
    assert (callback.namespace, callback.timer_id, callback.attempt) == (namespace, "a", 1)
    assert callback.payload == {"text": "grün", "n": 1.0}
    assert callback.id == request.header(b"webhook-id") == request.header(b"idempotency-key")
    assert not is_good(request, new_secret())
    for name in (b"webhook-timestamp", b"traceparent", b"duetime-fence"):
        assert request.header(name)


async def test_a_callback_that_was_tampered_with_is_refused(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    secret = new_secret()
    await api.ok("namespaces/update", namespace=namespace, signingSecrets=[secret])
    request = await fired(api, receiver, namespace, "a")
    assert is_good(request, secret)
    assert b"1.0" in request.body
    with pytest.raises(SignatureError):
        verify(request.body.replace(b"1.0", b"2.0"), request.headers, secret)
    with pytest.raises(SignatureError):
        verify(request.body + b" ", request.headers, secret)
    for name, value in (("webhook-id", "another"), ("webhook-timestamp", "1"), ("webhook-signature", "v1,Zm9yZ2Vk")):
        with pytest.raises(SignatureError):
            verify(request.body, {**request.headers, name: value}, secret)
    without = {name: value for name, value in request.headers.items() if name != "webhook-signature"}
    with pytest.raises(SignatureError):
        verify(request.body, without, secret)


async def test_a_namespace_without_secrets_signs_nothing(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    request = await fired(api, receiver, namespace, "a")
    assert request.header(b"webhook-signature") is None
    assert request.header(b"webhook-id")


async def test_during_a_rotation_both_secrets_verify_and_after_it_only_the_new_one(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    old, new = new_secret(), new_secret()
    answer = await api.ok("namespaces/update", namespace=namespace, signingSecrets=[old])
    request = await fired(api, receiver, namespace, "before")
    assert (is_good(request, old), is_good(request, new)) == (True, False)

    shown = answer["namespace"]["signingSecrets"]
    answer = await api.ok("namespaces/update", namespace=namespace, signingSecrets=[new, *shown])
    request = await fired(api, receiver, namespace, "during")
    assert (is_good(request, old), is_good(request, new), is_good(request, new, old)) == (True, True, True)
    assert len((request.header(b"webhook-signature") or "").split(" ")) == 2

    await api.ok("namespaces/update", namespace=namespace, signingSecrets=answer["namespace"]["signingSecrets"][:1])
    request = await fired(api, receiver, namespace, "after")
    assert (is_good(request, old), is_good(request, new)) == (False, True)


async def test_a_retry_has_the_id_of_the_first_attempt_and_a_signature_of_its_own(
    api: Asker, namespace: str, receiver: RealReceiver
) -> None:
    secret = new_secret()
    await api.ok("namespaces/update", namespace=namespace, signingSecrets=[secret])
    receiver.answers.append(Response(500))
    policy = {"initialInterval": "1ms", "maxInterval": "1ms"}
    await api.ok(
        "timers/create", namespace=namespace, timerId="a", delay="0s", callbackUrl=receiver.url, retryPolicy=policy
    )
    await receiver.received(2)
    first, second = receiver.requests
    assert first.header(b"webhook-id") == second.header(b"webhook-id")
    assert [verify(r.body, r.headers, secret).attempt for r in (first, second)] == [1, 2]
    assert first.header(b"webhook-signature") != second.header(b"webhook-signature")


async def test_secrets_survive_a_restart(tmp_path: Path, receiver: RealReceiver) -> None:
    secret = new_secret()
    server = RealServer(tmp_path)
    try:
        await server.start()
        api = Asker(server)
        await api.ok("namespaces/create", namespace="shop", numShards=2, signingSecrets=[secret])
        assert await server.stop() == 0
        await server.start()
        assert is_good(await fired(api, receiver, "shop", "a"), secret)
        assert secret not in server.log.read_text()
    finally:
        await server.close()


# --- where callbacks may go ----------------------------------------------------------------------

FORBIDDEN = [
    "10.0.0.1",
    "10.255.255.255:8080",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "169.254.169.254",
    "169.254.1.1",
    "100.64.0.1",
    "100.100.100.200",
    "168.63.129.16",
    "192.0.0.192",
    "0.0.0.0",
    "255.255.255.255",
    "224.0.0.1",
    "240.0.0.1",
    "198.18.0.1",
    "[::]",
    "[fe80::1]",
    "[fc00::1]",
    "[fd00:ec2::254]",
    "[fec0::1]",
    "[ff02::1]",
    "[::ffff:10.0.0.1]",
    "[::ffff:a9fe:a9fe]",
    "[64:ff9b::a00:1]",
    "[2002:a00:1::1]",
    "[2001:0:a00:1::1]",
    "0xa9fea9fe",
    "2852039166",
    "0xa9.0xfe.0xa9.0xfe",
    "0251.0376.0251.0376",
    "169.254.43518",
    "10.1",
    "169.254.169.254.",
]


@pytest.mark.parametrize("host", FORBIDDEN)
async def test_a_callback_into_a_private_network_is_refused_at_create(api: Asker, namespace: str, host: str) -> None:
    refusal = (400, "invalid_field", "callbackUrl")
    for url in (f"http://{host}/latest/meta-data", f"https://{host}"):
        timer = {"namespace": namespace, "timerId": "a", "executeAt": FAR, "callbackUrl": url}
        assert await api.refused("timers/create", **timer) == refusal
        _, answer = await api.ask("timers/createMany", {"timers": [timer]})
        assert answer["results"][0]["error"]["field"] == "callbackUrl"
        assert await api.refused("namespaces/update", namespace=namespace, callbackUrl=url) == refusal
    assert (await api.refused("timers/get", namespace=namespace, timerId="a"))[0] == 404
    good = {"namespace": namespace, "timerId": "kept"}
    made = await api.timer("timers/create", **good, executeAt=FAR, callbackUrl="http://127.0.0.1:9/")
    assert await api.refused("timers/update", **good, callbackUrl=f"http://{host}/") == refusal
    assert await api.timer(**good) == made


@pytest.mark.parametrize(
    "url",
    [
        "http://user@127.0.0.1/",
        "http://127.0.0.1@10.0.0.1/",
        "http://127.0.0.1#@10.0.0.1/",
        "http://127.0.0.1\\@10.0.0.1/",
        "http://127.0.0.1:99999/",
        "http:///path",
        "http://ex ample.com/",
        "http://127.0.0.1/\r\nhost: evil",
        "//127.0.0.1/",
        "file:///etc/passwd",
        "gopher://127.0.0.1/",
        "http://[::1%25eth0]/",
        "http://пример.example/",
        "http://example.com/" + "x" * 2_048,
        "",
    ],
)
async def test_a_url_that_two_could_read_differently_is_refused(api: Asker, namespace: str, url: str) -> None:
    timer = {"namespace": namespace, "timerId": "a", "executeAt": FAR, "callbackUrl": url}
    assert await api.refused("timers/create", **timer) == (400, "invalid_field", "callbackUrl")
    assert (await api.refused("timers/get", namespace=namespace, timerId="a"))[0] == 404


async def test_a_redirect_is_not_followed(api: Asker, namespace: str, receiver: RealReceiver) -> None:
    receiver.answers.append(Response(307, headers=(("location", receiver.url + "/elsewhere"),)))
    await fired(api, receiver, namespace, "a")
    timer = await ended(api, namespace=namespace, timerId="a")
    assert (timer["state"], timer["lastError"]) == ("failed", "HTTP 307")
    assert [request.path for request in receiver.requests] == ["/hook"]


async def test_a_server_others_can_reach_does_not_call_its_own_machine(tmp_path: Path, receiver: RealReceiver) -> None:
    tokens = json.dumps([{"name": "root", "sha256": sha256(b"dt_root").hexdigest()}])
    server = RealServer(tmp_path, token="dt_root", DUETIME_AUTH_TOKENS=tokens)
    server.settings["DUETIME_SERVER_LISTEN"] = f"0.0.0.0:{server.port}"
    try:
        await server.start()
        api = Asker(server)
        for host in ("127.0.0.1", "localhost", "LOCALHOST.", "a.localhost", "[::1]", "127.1", "0x7f.1", "2130706433"):
            timer = {"timerId": "a", "executeAt": FAR, "callbackUrl": f"http://{host}:{receiver.url.split(':')[2]}"}
            assert await api.refused("timers/create", **timer) == (400, "invalid_field", "callbackUrl"), host
        await _refused_by_what_it_resolves_to(api)
    finally:
        await server.close()
    assert not receiver.bodies


async def _refused_by_what_it_resolves_to(api: Asker) -> None:
    """A name is accepted at create, and judged by its addresses when it is called: this machine's own name."""
    name = socket.gethostname()
    try:
        addresses = {ip_address(found[4][0]) for found in socket.getaddrinfo(name, 80)}
    except OSError:
        return
    if not all(address.is_private for address in addresses):
        return
    await api.ok("timers/create", timerId="by name", delay="0s", callbackUrl=f"http://{name}:{api.server.port}/")
    timer = await ended(api, timerId="by name")
    assert (timer["state"], timer["attempts"]) == ("failed", 1)
    assert "delivery.allow_networks" in timer["lastError"]


async def test_a_network_the_operator_allows_may_be_called(tmp_path: Path) -> None:
    server = RealServer(tmp_path, DUETIME_DELIVERY_ALLOW_NETWORKS='["10.1.0.0/16"]')
    try:
        await server.start()
        api = Asker(server)
        await api.ok("timers/create", timerId="a", executeAt=FAR, callbackUrl="http://10.1.2.3/")
        refused = await api.refused("timers/create", timerId="b", executeAt=FAR, callbackUrl="http://10.2.0.1/")
        assert refused == (400, "invalid_field", "callbackUrl")
    finally:
        await server.close()
