"""Every part is done once, within the bound, whoever comes and goes."""

import random

import pytest

from training.experimental.server.part_queue import PartQueue


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_every_part_is_done_once_and_nobody_is_further_ahead(staleness: int) -> None:
    queue, chance = PartQueue(12, 3, staleness), random.Random(staleness)
    held: dict[int, tuple[int, int]] = {}
    done: list[tuple[int, int]] = []
    while len(done) < 36:
        worker = chance.randrange(5)
        if worker in held and chance.random() < 0.1:
            assert queue.drop(worker) == [held.pop(worker)]
        elif worker in held:
            done.append(held[worker])
            queue.give(worker, held.pop(worker))
            queue.updates = len(done) // 3
        elif (part := queue.take(worker)) is not None:
            held[worker] = part
            unfinished = {(step, n) for step in range(12) for n in range(3)} - set(done)
            assert part[0] <= min(unfinished)[0] + staleness and part[0] <= queue.updates + staleness
        if len(done) % 3 == 0 and chance.random() < 0.1:  # resumed: nobody holds anything
            found = PartQueue(12, 3, staleness)
            found.resume(len(done) // 3, queue.done_ahead())
            queue, held = found, {}
    assert len(set(done)) == 36 and queue.oldest == 12
    if staleness == 0:
        assert [step for step, _ in done] == sorted(step for step, _ in done)


def test_a_worker_waits_for_the_slowest() -> None:
    queue = PartQueue(9, 2, 1)
    assert queue.take(0) == (0, 0) and queue.take(1) == (0, 1)
    queue.give(1, (0, 1))
    assert queue.take(1) == (1, 0)
    queue.give(1, (1, 0))
    queue.updates = 1
    assert queue.take(1) == (1, 1)
    queue.give(1, (1, 1))
    assert queue.take(1) is None  # part (0, 0) is not done
    queue.give(0, (0, 0))
    assert queue.take(1) == (2, 0)
    with pytest.raises(AssertionError, match="which it had not taken"):
        queue.give(0, (2, 0))
