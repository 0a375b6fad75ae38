"""ShardVerifier: checks the checksums of token shards in a thread, while the model trains on them."""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from gristmill.io.token_shards import verify_checksums
from training.data.sequences import TokenSequences

_WAIT_SECONDS = 1.0  # of one rank for its shards, between two messages to the others: below every timeout


class ShardVerifier:
    """Reads a rank's share of the shards, every `ranks`-th one, and compares them with their manifests."""

    def __init__(self, data: Sequence[TokenSequences], rank: int, ranks: int) -> None:
        self._thread, self._finished = ThreadPoolExecutor(1, "shard verifier"), not data
        shards = [(sequences.folder, record) for sequences in data for record in sequences.manifest.shards]
        self._reads: deque[Future[None]] = deque(
            self._thread.submit(verify_checksums, *shard) for shard in shards[rank::ranks]
        )

    def done(self, seconds: float = 0.0) -> bool:
        """Wait for the shard being read, at most so long. True once all are verified.

        Raises InputError that names a damaged shard.
        """
        wait([*self._reads][:1], seconds)
        while self._reads and self._reads[0].done():
            self._reads.popleft().result()
        return not self._reads

    def finish(self, gather: Callable[[Callable[[], bool]], list[bool]], say: Callable[[str], None]) -> None:
        """Wait until all ranks have verified their shares; every rank calls it. `gather` has the results of all ranks.

        Raises InputError that names a damaged shard.
        """
        if self._finished:
            return
        if not all(gather(self.done)):
            say("the first checkpoint waits for the token shards' checksums (--data.verify)")
        while not self._finished:
            self._finished = all(gather(lambda: self.done(_WAIT_SECONDS)))

    def close(self) -> None:
        """Stop the thread after the shard that it reads."""
        self._thread.shutdown(cancel_futures=True)
