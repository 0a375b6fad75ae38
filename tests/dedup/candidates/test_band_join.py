"""Band join: what is in memory while the digests of bands are partitioned."""

import numpy as np

from dedup.candidates import band_join
from dedup.candidates.band_join import LshOptions


def test_many_bands_are_partitioned_in_blocks_that_fit_the_memory(monkeypatch) -> None:
    bands, memory = 128, 1 << 20
    batches = [(np.arange(100, dtype=np.uint64), np.zeros((bands, 100), np.uint64))] * 20
    monkeypatch.setattr(band_join, "iter_band_digests", lambda *_: iter(batches))
    blocks = list(band_join._iter_blocks([], [], LshOptions(1, bands), memory))
    assert sum(len(documents) for documents, _ in blocks) == 2000 and len(blocks) > 1
    assert max(digests.nbytes for _, digests in blocks) <= memory // 2 + batches[0][1].nbytes
