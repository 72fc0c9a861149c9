"""The synchronous client: the same methods, from any thread."""

from __future__ import annotations

import multiprocessing
import threading
from typing import Any

import pytest
from scripted_server import Answer, Peer, batch_rule, problem, timer_json

from duetime.client import (
    AsyncClient,
    Client,
    NotFound,
)


def test_the_sync_client_has_every_method_of_the_async_one() -> None:
    hidden = {"pages", "flow_pages"}
    public = {name for name in vars(AsyncClient) if not name.startswith("_")} - hidden
    assert public <= set(vars(Client))
    namespaces = {name for name in vars(AsyncClient("http://x").namespaces.__class__) if not name.startswith("_")}
    assert namespaces <= set(dir(Client("http://x").namespaces))


def test_the_sync_client_works_from_many_threads(peer: Peer) -> None:
    peer.rule = batch_rule
    with Client(peer.url, coalesce=True) as client:
        found: list[str] = []

        def work(number: int) -> None:
            found.extend(client.create(f"{number}.{i}", delay=1).timer.timer_id for i in range(20))

        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted(f"{n}.{i}" for n in range(8) for i in range(20))


def test_the_sync_client_lists_raises_and_closes(peer: Peer) -> None:
    peer.script = [
        Answer({"timers": [timer_json("a")], "nextCursor": "1"}),
        Answer({"timers": [timer_json("b")], "nextCursor": None}),
        Answer(problem(404, "timer_not_found"), 404),
    ]
    client = Client(peer.url)
    assert [timer.timer_id for timer in client.list(tag="x")] == ["a", "b"]
    with pytest.raises(NotFound):
        client.get("c")
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="closed"):
        client.get("a")


def _in_the_child(client: Client, results: Any) -> None:
    results.put(client.get("from-the-child").timer_id)


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_after_a_fork_parent_and_child_can_both_use_the_client(peer: Peer) -> None:
    peer.rule = lambda path, body: Answer({"timer": timer_json(body["timerId"])})
    forking = multiprocessing.get_context("fork")
    results = forking.Queue()
    with Client(peer.url) as client:
        assert client.get("before").timer_id == "before"
        child = forking.Process(target=_in_the_child, args=(client, results))
        child.start()
        assert results.get(timeout=20) == "from-the-child"
        child.join()
        assert child.exitcode == 0
        assert client.get("after").timer_id == "after"
