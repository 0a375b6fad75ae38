import resource
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from tests.training.data.conftest import OpenSequences
from training.data.sequences import TokenSequences


def test_sequences_are_windows_over_the_concatenated_shards(open_sequences: OpenSequences) -> None:
    data = open_sequences(101, 10, [7, 7, 33, 34, 90])  # one of the shards is empty
    assert len(data) == 10
    for i in range(10):
        assert data[i].tolist() == list(range(10 * i, 10 * i + 11))
    assert data.batch([9, 0]).shape == (2, 11) and data.batch([9, 0])[0, 0] == 90


@pytest.mark.parametrize(("tokens", "length", "sequences"), [(21, 10, 2), (20, 10, 1), (11, 10, 1)])
def test_the_last_target_needs_a_token_too(
    open_sequences: OpenSequences, tokens: int, length: int, sequences: int
) -> None:
    assert len(open_sequences(tokens, length)) == sequences


def test_less_than_one_sequence_is_an_error(open_sequences: OpenSequences) -> None:
    with pytest.raises(UsageError, match=r"10 tokens.*needs 11.*--data.seq_len"):
        open_sequences(10, 10)


def test_a_missing_manifest_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make them with gristmill run, or gristmill tokenize"):
        TokenSequences(tmp_path, 10)


def test_more_shards_than_a_process_may_open_files(
    open_sequences: OpenSequences, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.data.sequences._MAPPED", 8)
    opened, limit = len(list(Path("/proc/self/fd").iterdir())), resource.getrlimit(resource.RLIMIT_NOFILE)
    folder = open_sequences(121, 3, list(range(2, 121, 2))).folder
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 28, limit[1]))
    try:
        data = TokenSequences(folder, 3)
        assert data.batch(range(len(data)))[:, 0].tolist() == list(range(0, 120, 3))
        assert data.read(5, 117).tolist() == list(range(5, 117))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
