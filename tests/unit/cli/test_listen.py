"""`duetime listen`, as a process of its own."""

from __future__ import annotations

import json
import signal
import sys
import urllib.error
import urllib.request

import pytest
from command_line import Run, start
from threaded_server import free_port

from duetime.cli.listen import read_request
from duetime.cli.output import now_ms
from duetime.http.messages import Request
from duetime.signing import check_secret, new_secret, sign

CALLBACK = (
    b'{"namespace":"n","timerId":"t","attempt":1,"scheduledAt":"2027-01-01T09:00:00Z",'
    b'"executeAt":"2027-01-01T09:00:00Z","firedAt":"2027-01-01T09:00:00Z"}'
)


def test_listen_suggests_another_port_only_if_the_port_is_in_use(run: Run, server: str) -> None:
    port = server.rpartition(":")[2]
    assert run("listen", "--port", port)[::2] == (
        2,
        f"duetime: cannot listen on 127.0.0.1:{port}: the port is in use; --port 0 chooses a free port\n",
    )
    assert "--port" not in run("listen", "--host", "256.1.1.1")[2]


def test_listen_prints_callbacks_with_their_signature_and_exits_after_the_given_number(at: Run, server: str) -> None:
    secret = new_secret()
    port = free_port()
    at("namespace", "create", "listened", "--secret", secret)
    with start("listen", "--port", str(port), "--secret", secret, "--once", "1", "--json") as listener:
        # A first try may come before the listener listens: the retry policy is there for that.
        to = f"http://127.0.0.1:{port}/"
        at(
            "timer",
            "create",
            "x",
            "-n",
            "listened",
            "--in",
            "0s",
            "--to",
            to,
            "--payload",
            "[1]",
            "--retry-up-to",
            "1s",
        )
        assert at("timer", "watch", "x", "-n", "listened")[0] == 0
        out, err = listener.communicate(timeout=20)
    assert listener.returncode == 0, err
    what = json.loads(out)
    assert (what["callback"]["timerId"], what["callback"]["payload"], what["signature"]) == ("x", [1], "ok")


def test_listen_with_a_secret_refuses_callbacks_not_signed_with_it() -> None:
    with start("listen", "--port", "0", "--secret", new_secret()) as listener:
        assert listener.stdout is not None
        url = listener.stdout.readline().split()[2]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(urllib.request.Request(url, data=CALLBACK))
        refused.value.close()
        said = listener.stdout.readline()
        listener.terminate()
        listener.communicate(timeout=20)
    assert refused.value.code == 401
    assert "signature none, refused" in said


def test_listen_prints_the_correlation_id_if_there_is_one() -> None:
    with start("listen", "--port", "0") as listener:
        assert listener.stdout is not None
        url = listener.stdout.readline().split()[2]
        listener.stdout.readline()  # that signatures are not checked
        said = []
        for body in (CALLBACK, CALLBACK.replace(b"{", b'{"correlationId":"request-9f3",', 1)):
            urllib.request.urlopen(urllib.request.Request(url, data=body)).close()
            said.append(listener.stdout.readline())
        listener.terminate()
        listener.communicate(timeout=20)
    assert ["correlation id" in line for line in said] == [False, True]
    assert "correlation id request-9f3" in said[1]


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_ends_listen_without_output() -> None:
    with start("listen", "--port", "0") as listener:
        assert listener.stdout is not None
        assert "listening on" in listener.stdout.readline()
        listener.send_signal(signal.SIGINT)
        _, err = listener.communicate(timeout=20)
    assert (listener.returncode, err) == (0, "")


def test_a_forged_callback_has_a_bad_signature() -> None:
    body = CALLBACK
    secret, at_s = new_secret(), now_ms() // 1_000

    def request(key: str) -> Request:
        signature = sign("i", at_s, body, [check_secret(key)])
        headers = {
            b"webhook-id": b"i",
            b"webhook-timestamp": str(at_s).encode(),
            b"webhook-signature": signature.encode(),
        }
        return Request("POST", "/", headers=headers, body=body)

    unsigned = Request("POST", "/", headers={}, body=body)
    assert read_request(request(secret), [secret]).signature == "ok"
    forged = read_request(request(new_secret()), [secret])
    assert (forged.signature[:5], forged.refused) == ("bad: ", True)
    assert (read_request(request(secret), []).signature, read_request(unsigned, []).signature) == (
        "not checked",
        "none",
    )
    assert (read_request(request(secret), []).refused, read_request(unsigned, [secret]).refused) == (False, True)
