"""The server gives out no part before the weights that it is to be computed with."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from benchmarks.bench_replicas import free_port
from training.experimental.server.messages import Link, connect
from training.experimental.server.part_queue import PartQueue
from training.experimental.server.server import GradientServer, NoWorkersError, StoppedError
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.fixture
def serve(weight: nn.Parameter) -> Iterator[Callable[..., tuple[GradientServer, int]]]:
    """Start a server of one weight, with a time that it waits; returns it and its port."""
    started = list[GradientServer]()

    def start(
        seconds: float, say: Callable[[str], None] = lambda _: None, parts: int = 1
    ) -> tuple[GradientServer, int]:
        param = ShardedParameter("weight", weight, weight, ShardSpec.whole((3,)), True)
        started.append(GradientServer([param], PartQueue(2, parts, 0), {"seed": 1}, say, seconds))
        port = free_port()
        started[-1].open("127.0.0.1", port)
        return started[-1], port

    yield start
    for server in started:
        server.close()


def test_a_part_comes_with_the_weights_of_the_update_before(weight: nn.Parameter, serve: Callable) -> None:
    server, port = serve(20.0)
    received = torch.zeros(3)
    with connect("127.0.0.1", port, 10.0) as link, ThreadPoolExecutor(1) as thread:
        link.send({"identity": {"seed": 1}})
        collecting = thread.submit(server.collect)
        assert link.receive(received)["part"] == [0, 0] and received.tolist() == [1, 1, 1]
        link.send({"loss": 0.5}, torch.full((3,), 2.0))
        assert collecting.result() == 0.5 and weight.grad is not None and weight.grad.tolist() == [2, 2, 2]
        assert not has_message(link, 0.3)  # the update is not made yet
        with torch.no_grad():
            weight -= weight.grad
        collecting = thread.submit(server.collect)
        assert link.receive(received)["part"] == [1, 0] and received.tolist() == [-1, -1, -1]
        link.send({"loss": 0.25}, torch.zeros(3))
        assert collecting.result() == 0.25
        assert link.receive()["done"]


def test_a_worker_gets_weights_that_changed_and_sends_a_gradient_a_part(
    weight: nn.Parameter, serve: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, send = list[int](), Link.send

    def counted(self: Link, header: dict, values: torch.Tensor | None = None) -> None:
        sent.append(0 if values is None else values.nbytes)
        send(self, header, values)

    server, port = serve(20.0, parts=2)
    with connect("127.0.0.1", port, 10.0) as link, ThreadPoolExecutor(1) as thread:
        link.send({"identity": {"seed": 1}})
        monkeypatch.setattr(Link, "send", counted)
        for _ in range(2):  # steps
            collecting = thread.submit(server.collect)
            for _ in range(2):  # their parts
                assert "part" in link.receive(torch.zeros(3))
                link.send({"loss": 0.5}, torch.ones(3))
            collecting.result()
    weights = gradient = 4 * weight.numel()
    assert [n for n in sent if n] == [weights, gradient, gradient] * 2


def test_a_silent_worker_leaves_its_part_to_another(serve: Callable) -> None:
    said = list[str]()
    server, port = serve(1.0, said.append)
    with connect("127.0.0.1", port, 10.0) as silent, connect("127.0.0.1", port, 10.0) as link:
        silent.send({"identity": {"seed": 1}})
        with ThreadPoolExecutor(1) as thread:
            collecting = thread.submit(server.collect)
            assert silent.receive(torch.zeros(3))["part"] == [0, 0]  # and no word of it any more
            link.send({"identity": {"seed": 1}})
            assert link.receive(torch.zeros(3))["part"] == [0, 0]
            link.send({"loss": 0.5}, torch.full((3,), 2.0))
            assert collecting.result() == 0.5
    assert "worker 1 has stopped: part 0 of step 1 goes to another; 1 worker active" in said


@pytest.mark.parametrize("sent", [b"[1]", b"no JSON", b"[" * 60_000, b'{"identity": 1}'])
def test_what_is_no_message_joins_nothing(serve: Callable, sent: bytes) -> None:
    said = list[str]()
    _, port = serve(5.0, said.append)
    with connect("127.0.0.1", port, 10.0) as link:
        link._connection.send_bytes(sent)
        with pytest.raises((EOFError, OSError)):
            link.receive()
    assert said == []


def has_message(link: Link, seconds: float) -> bool:
    """Whether a message comes, but those that say that the server is there."""
    while link._connection.poll(seconds):
        if "alive" not in json.loads(link._connection.recv_bytes()):
            return True
        seconds /= 2
    return False


def test_a_slow_worker_keeps_its_part(serve: Callable) -> None:
    said = list[str]()
    server, port = serve(2.0, said.append)
    with connect("127.0.0.1", port, 10.0) as slow, ThreadPoolExecutor(1) as thread:
        slow.send({"identity": {"seed": 1}})
        collecting = thread.submit(server.collect)
        assert slow.receive(torch.zeros(3))["part"] == [0, 0]
        with slow.alive():
            time.sleep(2.5)
        slow.send({"loss": 0.5}, torch.full((3,), 2.0))
        assert collecting.result() == 0.5 and said == ["worker 1 joined: 1 worker active"]


def test_a_worker_that_waits_hears_of_its_server(serve: Callable) -> None:
    server, port = serve(20.0)
    with connect("127.0.0.1", port, 2.0) as link, ThreadPoolExecutor(2) as threads:
        link.send({"identity": {"seed": 1}})
        received = threads.submit(link.receive, torch.zeros(3))
        time.sleep(2.5)  # there are no weights yet
        collecting = threads.submit(server.collect)
        assert received.result()["part"] == [0, 0]
        link.send({"loss": 0.5}, torch.full((3,), 2.0))
        assert collecting.result() == 0.5


def test_a_silent_server_is_noticed() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)), connect("127.0.0.1", port, 1.0) as link, pytest.raises(OSError):
        link.receive()


def test_a_server_stops_while_it_waits_and_says_so(serve: Callable) -> None:
    server, port = serve(20.0)
    with connect("127.0.0.1", port, 20.0) as link, ThreadPoolExecutor(1) as thread:
        link.send({"identity": {"seed": 1}})
        with pytest.raises(StoppedError):
            server.collect(lambda: True)
        closing = thread.submit(server.close)
        assert link.receive(torch.zeros(3)).get("part", [0, 0]) == [0, 0]
        link.send({"loss": 0.5}, torch.zeros(3))
        closing.result()
        assert link.receive(torch.zeros(3))["done"] is False


def test_workers_that_do_not_come_are_missed(serve: Callable) -> None:
    server, port = serve(1.0)
    server._expected = 2
    with connect("127.0.0.1", port, 20.0) as link:
        link.send({"identity": {"seed": 1}})
        with pytest.raises(NoWorkersError, match="only 1 of 2 workers joined within 1 s; start some"):
            server.collect()
