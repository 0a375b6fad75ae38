"""The server gives out no part before the weights that it is to be computed with."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from benchmarks.bench_replicas import free_port
from training.asynchronous.messages import Link, connect
from training.asynchronous.part_queue import PartQueue
from training.asynchronous.server import GradientServer
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.ones(3))


@pytest.fixture
def serve(weight: nn.Parameter) -> Iterator[Callable[..., tuple[GradientServer, int]]]:
    """Start a server of one weight, with a time that it waits; returns it and its port."""
    started = list[GradientServer]()

    def start(seconds: float, say: Callable[[str], None] = lambda _: None) -> tuple[GradientServer, int]:
        param = ShardedParameter("weight", weight, weight, ShardSpec.whole((3,)), True)
        started.append(GradientServer([param], PartQueue(2, 1, 0), {"seed": 1}, say, seconds))
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
    assert "worker 1 is gone: part 0 of step 1 is left to another; 1 work" in said


@pytest.mark.parametrize("sent", [b"[1]", b"no JSON", b'{"identity": 1}'])
def test_what_is_no_message_joins_nothing(serve: Callable, sent: bytes) -> None:
    said = list[str]()
    _, port = serve(5.0, said.append)
    with connect("127.0.0.1", port, 10.0) as link:
        link._connection.send_bytes(sent)
        with pytest.raises((EOFError, OSError)):
            link.receive()
    assert said == []


def has_message(link: Link, seconds: float) -> bool:
    return link._connection.poll(seconds)
