"""The server gives out no part before the weights that it is to be computed with."""

import socket
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from training.asynchronous.messages import Link, connect
from training.asynchronous.part_queue import PartQueue
from training.asynchronous.server import GradientServer
from training.sharding.shard_spec import ShardSpec
from training.sharding.sharded_parameter import ShardedParameter


def test_a_part_comes_with_the_weights_of_the_update_before() -> None:
    weight = nn.Parameter(torch.ones(3))
    param = ShardedParameter("weight", weight, weight, ShardSpec.whole((3,)), True)
    server = GradientServer([param], PartQueue(2, 1, 0), {"seed": 1}, lambda _: None, 20.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server.open("127.0.0.1", port)
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
    server.close()


def has_message(link: Link, seconds: float) -> bool:
    return link._connection.poll(seconds)
