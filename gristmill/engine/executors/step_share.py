"""StepShare: which tasks of a posted step a process takes next: its own, then open ones, then those of the dead."""

import time
from collections import deque
from collections.abc import Iterator
from random import Random

from gristmill.engine.executors.board import Board, Posting
from gristmill.engine.options import Shard

_LOOKING = 10  # pauses last so many times as long as a look: the more files, the fewer looks


class StepShare:
    """What a process knows of a step. Each look lists the step's folder once; nothing else grows with the tasks.

    Attributes:
        ended: Positions of the tasks that are done or failed, as far as is known.
        mine: Positions of those that this process runs.
    """

    def __init__(self, board: Board, posting: Posting, shard: Shard, poll: float) -> None:
        self.board, self.posting, self.poll = board, posting, poll
        self.ended: set[int] = set()
        self.mine: set[int] = set()
        self._open = deque(_in_order(posting.tasks, shard, Random(board.name)))
        self._taken: dict[int, int] = {}  # by others: how often each was taken over
        self._left: Iterator[tuple[int, int]] = iter(())  # by processes that have died
        self._holders: dict[tuple[int, int], str] = {}
        self._due, self._started, self._own_done = float("-inf"), time.monotonic(), 0

    @property
    def is_over(self) -> bool:
        """Whether no task is left to run."""
        return len(self.ended) == self.posting.tasks

    @property
    def is_due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() >= self._due

    @property
    def speed(self) -> float:
        """Tasks that this process has run, a second."""
        return self._own_done / max(time.monotonic() - self._started, 1e-3)

    def look(self) -> tuple[list[int], list[int]]:
        """Tasks that are done, and those that have failed, since the last look, in other processes."""
        started = time.monotonic()
        taken, done, failed = self.board.look(self.posting)
        new, broken = sorted(done - self.ended - self.mine), sorted(failed - self.ended - self.mine)
        self.ended.update(new, broken)
        self._taken = {at: times for at, times in taken.items() if at not in self.ended and at not in self.mine}
        self._left = self._find_left(list(self._taken.items()))
        self._due = time.monotonic() + max(self.poll, _LOOKING * (time.monotonic() - started))
        return new, broken

    def next(self) -> int | None:
        """Take the next task; None if there is none to take now. Raises FileNotFoundError if the step is over."""
        while self._open:
            position = self._open.popleft()
            if position in self.ended or position in self._taken:
                continue
            if self._take(position, 0):
                return position
        for position, times in self._left:
            if position not in self.ended and self._take(position, times + 1):
                return position
        return None

    def end(self, position: int) -> bool:
        """Count a task of this process as ended; False if it was another process's, too, which was faster."""
        self.mine.discard(position)
        self._own_done += 1
        is_first = position not in self.ended
        self.ended.add(position)
        return is_first

    def _take(self, position: int, times: int) -> bool:
        if self.board.take(self.posting, position, times):
            self.mine.add(position)
            return True
        self._taken[position] = times
        return False

    def _find_left(self, taken: list[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        for position, times in taken:
            if (position, times) not in self._holders:
                self._holders[position, times] = self.board.holder(self.posting, position, times)
            if not self.board.processes.is_alive(self._holders[position, times]):
                yield position, times


def _in_order(tasks: int, shard: Shard, chance: Random) -> list[int]:
    """Positions of tasks, this shard's own first, then the others', in another order in each process."""
    own = range(shard.index, tasks, shard.count)
    others = [position for position in range(tasks) if position % shard.count != shard.index]
    chance.shuffle(others)
    return [*own, *others]
