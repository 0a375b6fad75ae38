"""Groups of small files: few tasks for many of them, and a new file changes only those near it."""

from pathlib import Path

from gristmill.engine.slices import SMALL_BYTES, SliceGroup, group_slices
from gristmill.io.documents import Slice


def groups_of(names: list[str], size: int = 100) -> list[SliceGroup]:
    return group_slices(Slice(Path("corpus", name), name, size=size) for name in sorted(names))


def test_ten_thousand_small_files_make_few_tasks_in_order_and_of_one_source() -> None:
    names = [f"{source}/{number:05}.jsonl" for source in ("book", "c4") for number in range(5_000)]
    groups = groups_of(names)
    assert len(groups) < 100
    assert [part.name for group in groups for part in group] == names
    assert all(len({part.source for part in group}) == 1 for group in groups)


def test_large_files_stay_alone() -> None:
    assert len(groups_of([f"book/{number}.jsonl" for number in range(9)], size=SMALL_BYTES)) == 9


def test_a_new_file_changes_its_own_group() -> None:
    names = [f"book/{number:05}.jsonl" for number in range(10_000)]
    before, after = set(groups_of(names)), set(groups_of([*names, "book/05000b.jsonl"]))
    assert len(after - before) <= 3
