"""Recordings of a model's tensors: pieces make the whole tensor, and a wrong piece is named with what is wrong with it.

Ranks are played one after the other in this process: each records what it would have.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gristmill_parity.recording import (
    Box,
    Partial,
    Perturb,
    RankLayout,
    RecordingError,
    RecordOptions,
    Replicate,
    Shard,
    Verdict,
    compare,
    record,
)
from gristmill_parity.recording.compare import _share_of_rows
from gristmill_parity.recording.files import Key, Recording, Writer
from gristmill_parity.recording.perturb import reference_runs
from gristmill_parity.recording.placement import piece_of

SEQUENCES, TOKENS, WIDTH = 4, 6, 8
Change = Callable[[int, str, Tensor], Tensor]
"""What a rank makes of a tensor, by its name and kind."""


class Small(nn.Module):
    """An embedding, a linear layer on the residual stream and a head."""

    def __init__(self, seed: int = 0, vocabulary: int = 13) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + torch.tanh(self.linear(x)))


def batch(step: int) -> Tensor:
    return torch.randint(13, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int = 0) -> None:
    for step in range(first, first + 2):
        optimizer.zero_grad()
        model(batch(step)).square().sum().backward()
        optimizer.step()


def record_reference(folder: Path, seed: int = 0, first: int = 0, precision: str = "fp64") -> Path:
    for run in reference_runs(folder, precision, 2):  # type: ignore[arg-type]
        model = Small(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with record(model, run.folder, optimizer=optimizer, perturb=run.perturb):
            train(model, optimizer, first)
    return folder


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_reference(tmp_path_factory.mktemp("reference"))


def share_of_first(values: Tensor) -> Tensor:
    """The share that rank 0's term has of each element of a gradient."""
    return torch.rand(values.shape, generator=torch.Generator().manual_seed(7), dtype=values.dtype)


def cut(folder: Path, reference: Path, change: Change, ranks: int = 2, terms: bool = True) -> Path:
    """Write the recording of ranks that have the reference's tensors in pieces, with what `change` makes of them."""
    whole = Recording(reference / "base")
    for rank in range(ranks):
        axes = {"dp": (rank, ranks)}
        with Writer(folder, rank, ranks, axes) as writer:
            for key, held in whole.tensors.items():
                values = torch.from_numpy(np.asarray(held[0].values()))
                is_batch = key.kind.startswith(("input", "output")) and values.ndim > 1
                if is_batch:
                    own = values.chunk(ranks)[rank]
                    place: dict[str, Shard | Partial | Replicate] = {"dp": Shard(0)}
                elif key.kind == "own gradient" and terms:
                    own = values * (share_of_first(values) if rank == 0 else 1 - share_of_first(values))
                    place = {"dp": Partial()}
                else:
                    own = values
                    place = {"dp": Replicate()}
                own, piece = piece_of(change(rank, f"{key}|{key.step}", own), place, axes)
                writer.write(Key(key.step, key.name, key.kind), 0, own, piece, True)
    return folder


def test_pieces_of_a_right_run_are_the_reference(tmp_path: Path, reference: Path) -> None:
    verdict = compare(reference, cut(tmp_path, reference, lambda _rank, _key, value: value))
    assert verdict.is_clean and verdict.compared > 40
    assert str(verdict).startswith("No difference: ")


def doubled(key: str) -> Change:
    return lambda _rank, own, value: 2 * value if own == key else value


def own_only(key: str, share: float) -> Change:
    """Each rank has its own term where all are to have the sum."""

    def change(rank: int, own: str, value: Tensor) -> Tensor:
        return value * (share if rank == 0 else 1 - share) if own == key else value

    return change


def on_rank(rank: int, key: str, changed: Callable[[Tensor], Tensor]) -> Change:
    return lambda own_rank, own, value: changed(value) if (own_rank, own) == (rank, key) else value


def with_other_statistics(value: Tensor) -> Tensor:
    """Each token with a mean and a scale of its own."""
    tokens = torch.arange(TOKENS, dtype=value.dtype)[:, None]
    return value * (1 + tokens / TOKENS) + tokens.sin()


@pytest.mark.parametrize(
    ("change", "tensor", "kind", "words"),
    [
        (doubled("linear.weight gradient|1"), "linear.weight gradient", "factor", "It is 2 times what is right"),
        (own_only("linear.weight gradient|2", 0.5), "linear.weight gradient", "factor", "1/2 times what is right"),
        (
            lambda rank, own, value: value * (share_of_first(value) if rank == 0 else 1 - share_of_first(value))
            if own == "linear.bias gradient|1" else value,
            "linear.bias gradient", "not summed", "not summed over dp",
        ),
        (
            lambda _rank, own, value: value * (1 - share_of_first(value)) if own == "head.weight gradient|1" else value,
            "head.weight gradient", "missing term", "The term of dp 0 of 2 is missing",
        ),
        (
            lambda _rank, own, value: value.T.contiguous() if own == "linear.weight gradient|1" else value,
            "linear.weight gradient", "transposed", "Dimensions 0 and 1 are exchanged",
        ),
        (
            on_rank(1, "linear output|1", lambda value: value.roll(1, 1)),
            "linear output", "shifted", "Along dimension 1 it has the values that belong 1 earlier",
        ),
        (
            on_rank(1, "linear output|1", lambda value: value * (1 + torch.arange(TOKENS)[:, None] / TOKENS)),
            "linear output", "scaled rows", "right but for a factor of its own (1 to 1.83)",
        ),
        (
            on_rank(1, "linear output|1", with_other_statistics),
            "linear output", "scaled rows", "a norm's statistics",
        ),
        (
            lambda _rank, own, value: share_of_first(value) * value / 99 if own == "head.weight gradient|1" else value,
            "head.weight gradient", "missing term", "of it is left",
        ),
        (
            on_rank(1, "embed output|1", torch.zeros_like),
            "embed output", "zero", "Its values are zeros",
        ),
        (
            on_rank(1, "head input|1", lambda value: value + torch.randn(value.shape, dtype=value.dtype)),
            "head input", "other", "The values are others",
        ),
        (
            lambda _rank, own, value: value.float().double() if own == "linear output|1" else value,
            "linear output", "noise", "rounding in a lower precision",
        ),
        (
            lambda _rank, own, value: value * torch.nan if own == "linear output|1" else value,
            "linear output", "other", "not finite",
        ),
    ],
)  # fmt: skip
def test_the_first_wrong_tensor_and_its_pattern_are_named(
    tmp_path: Path, reference: Path, change: Change, tensor: str, kind: str, words: str
) -> None:
    verdict = compare(reference, cut(tmp_path, reference, change))
    assert (verdict.tensor, verdict.pattern.kind) == (tensor, kind), str(verdict)
    assert words in str(verdict) and verdict.pattern.axes[0] == "dp"
    assert 2 <= str(verdict).count(". ") + str(verdict).count(".\n") + 1 <= 6


def test_weights_that_were_not_updated_are_stale(tmp_path: Path, reference: Path) -> None:
    whole = Recording(reference / "base")
    before = torch.from_numpy(whole.tensors[Key(1, "linear.weight", "used weight")][0].values())

    def change(rank: int, own: str, value: Tensor) -> Tensor:
        return torch.cat([before[:4], value[4:]]) if own == "linear.weight used weight|2" and rank == 1 else value

    verdict = compare(reference, cut(tmp_path, reference, change))
    assert (verdict.tensor, verdict.step, verdict.rank) == ("linear.weight used weight", 2, 1)
    assert verdict.pattern.kind == "stale" and "dimension 0 at 0 to 3" in verdict.where


def test_gradients_that_the_run_does_not_have_are_said(tmp_path: Path, reference: Path) -> None:
    """Its weights stay as they were, which looks like an update that was not published."""
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: setattr(model.linear.weight, "grad", None))
    with record(model, tmp_path / "run", optimizer=optimizer):
        train(model, optimizer)
    verdict = compare(reference, tmp_path / "run")
    assert verdict.tensor.startswith("linear.weight"), str(verdict)
    assert " of the reference are not in the run, first linear.weight gradient in step 1: " in str(verdict)


def test_the_wrong_rank_and_its_slice_are_named(tmp_path: Path, reference: Path) -> None:
    def change(value: Tensor) -> Tensor:
        value = value.clone()
        value[1, 2:4] += 1
        return value

    verdict = compare(reference, cut(tmp_path, reference, on_rank(1, "linear output|1", change)))
    assert verdict.rank == 1
    assert verdict.where == "in dimension 0 at 3, dimension 1 at 2 to 3, of shape [4, 6, 8] (its dp 1 of 2)"


def test_a_16_bit_run_is_within_its_tolerance_and_a_fault_in_it_is_not(tmp_path: Path) -> None:
    reference = record_reference(tmp_path / "reference", precision="bf16")

    def rounded(_rank: int, own: str, value: Tensor) -> Tensor:
        is_weight = own.split(" ")[-1].startswith("weight|") and " used" not in own
        return value if is_weight or not value.is_floating_point() else value.bfloat16()

    assert compare(reference, cut(tmp_path / "right", reference, rounded)).is_clean

    def wrong(rank: int, own: str, value: Tensor) -> Tensor:
        return rounded(rank, own, value * 2 if own == "head.weight gradient|1" else value)

    verdict = compare(reference, cut(tmp_path / "wrong", reference, wrong))
    assert (verdict.tensor, verdict.pattern.kind) == ("head.weight gradient", "factor")


def noise_like(values: Tensor, size: float, seed: int) -> Tensor:
    """Random numbers of 2-norm `size`."""
    drawn = torch.randn(values.shape, generator=torch.Generator().manual_seed(seed), dtype=values.dtype)
    return drawn * (size / drawn.norm())


def test_a_pattern_is_seen_under_rounding_and_copies_that_differ_are(tmp_path: Path) -> None:
    """The reference is as precise as the run, and has noise of 16 bits: a factor 1.04 of a gradient is hardly more."""
    folder = record_reference(tmp_path / "reference", precision="bf16")
    key = Key(1, "head.weight", "gradient")
    base = torch.from_numpy(Recording(folder / "base").tensors[key][0].values())
    perturbed = [Recording(path).tensors[key][0].values() for path in folder.glob("perturbed-*")]
    spread = max(float(np.linalg.norm(other - base.numpy())) for other in perturbed)
    named = "head.weight gradient|1"

    def rounded(_rank: int, own: str, value: Tensor) -> Tensor:
        return value + noise_like(value, spread, 3) if own == named else value

    assert compare(folder, cut(tmp_path / "right", folder, rounded)).is_clean

    def scaled(rank: int, own: str, value: Tensor) -> Tensor:
        factor = 1 + 2.5 * spread / float(base.norm())
        return rounded(rank, own, value * factor if own == named else value)

    verdict = compare(folder, cut(tmp_path / "scaled", folder, scaled))
    assert (verdict.tensor, verdict.pattern.kind) == ("head.weight gradient", "factor"), str(verdict)

    def apart(rank: int, own: str, value: Tensor) -> Tensor:
        return value + noise_like(value, spread, rank) if own == named else value

    verdict = compare(folder, cut(tmp_path / "apart", folder, apart))
    assert (verdict.tensor, verdict.pattern.kind) == ("head.weight gradient", "copies differ"), str(verdict)


def test_one_row_of_a_hundred_may_be_off_in_16_bits() -> None:
    """As a token that chooses another expert; two rows may not."""
    off = np.full(150, 0.5)
    off[7] = 9.0
    assert _share_of_rows(off, np.ones(150)) == 0.5
    off[8] = 9.0
    assert _share_of_rows(off, np.ones(150)) == 9.0
    assert _share_of_rows(off[:50], np.ones(50)) == 9.0


def test_a_tensor_that_is_computed_again_otherwise_is_named(tmp_path: Path, reference: Path) -> None:
    class Forgetful(Small):
        calls = 0

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)

            def inner(x: Tensor) -> Tensor:
                self.calls += 1
                return self.linear(x if self.calls % 2 else 1.001 * x)

            return self.head(x + torch.tanh(checkpoint(inner, x, use_reentrant=False)))

    model = Forgetful()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with record(model, tmp_path, optimizer=optimizer):
        train(model, optimizer)
    verdict = compare(reference, tmp_path)
    assert verdict.pattern.kind == "computed again" and verdict.name == "linear", str(verdict)


def test_sketches_alone_find_the_tensor_and_say_what_to_keep(tmp_path: Path) -> None:
    for run in reference_runs(tmp_path / "reference", "fp64", 2):
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with record(model, run.folder, optimizer=optimizer, perturb=run.perturb, options=RecordOptions(keep="nothing")):
            train(model, optimizer)

    def run_of(folder: str, keep: object) -> Verdict:
        model = Small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.head.weight.register_hook(lambda grad: grad * 3)
        with record(model, tmp_path / folder, optimizer=optimizer, options=RecordOptions(keep=keep)):  # type: ignore[arg-type]
            train(model, optimizer)
        return compare(tmp_path / "reference", tmp_path / folder)

    verdict = run_of("sketches", "nothing")
    assert verdict.name == "head.weight" and 'keep=["head.weight' in str(verdict)
    sizes = [path.stat().st_size for path in (tmp_path / "sketches").glob("*.values")]
    assert sizes == [0]


# Optimizers


class Factored(torch.optim.Optimizer):
    """An optimizer of a user's own: its state has a row's and a column's means, a list, numbers, and more of no one."""

    def __init__(self, parameters: Iterable[nn.Parameter], forgets: bool = False) -> None:
        super().__init__(parameters, {})
        self.forgets = forgets

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            gradient = parameter.grad
            state["rows"] = state.get("rows", 0.0) * (not self.forgets) + gradient.square().sum(-1)
            state["past"] = [gradient.clone(), *state.get("past", [])][:2]
            state["steps"] = state.get("steps", torch.tensor(0)) + 1
            parameter -= 0.01 * gradient
        self.state["all"] = {"length": self.state.get("all", {}).get("length", torch.tensor(0.0).double()) + 1}


def record_factored(
    folder: Path, forgets: bool = False, seed: int | None = None, layout: RankLayout | None = None
) -> None:
    model = Small()
    optimizer = Factored(model.parameters(), forgets)
    perturb = None if seed is None else Perturb("fp64", seed)
    with record(model, folder, optimizer=optimizer, layout=layout, perturb=perturb):
        train(model, optimizer)


def test_what_any_optimizer_keeps_is_recorded_and_compared(tmp_path: Path) -> None:
    record_factored(tmp_path / "reference/base")
    record_factored(tmp_path / "reference/perturbed-1", seed=1)
    record_factored(tmp_path / "right")
    kinds = {str(key) for key in Recording(tmp_path / "right").tensors if key.kind.startswith("state")}
    assert {f"linear.weight state {name}" for name in ("rows", "past.0", "past.1", "steps")} <= kinds
    assert "optimizer state all.length" in kinds
    assert compare(tmp_path / "reference", tmp_path / "right").is_clean
    record_factored(tmp_path / "wrong", forgets=True)
    verdict = compare(tmp_path / "reference", tmp_path / "wrong")
    assert (verdict.tensor, verdict.step) == ("embed.weight state rows", 2)


def test_a_state_of_another_shape_is_left_out_where_ranks_divide_its_parameter(tmp_path: Path) -> None:
    """Where its part lies cannot be known from the parameter's placement."""
    layout = RankLayout({"tp": (0, 2)}, placements={"linear.weight *": {"tp": Shard(0)}}, rank=0, ranks=1)
    record_factored(tmp_path, layout=layout)
    kinds = {key.kind for key in Recording(tmp_path).tensors if key.name == "linear.weight"}
    assert "state past.0" in kinds and "state steps" in kinds and "state rows" not in kinds


# Bad input: one sentence each


def test_a_missing_rank_is_named(tmp_path: Path, reference: Path) -> None:
    cut(tmp_path, reference, lambda _rank, _key, value: value)
    (tmp_path / "rank-00001.json").unlink()
    with pytest.raises(RecordingError, match="has no recording of rank 1 of 2; a recording is complete when"):
        compare(reference, tmp_path)
    (tmp_path / "rank-00000.json").write_text("{")
    with pytest.raises(RecordingError, match=r"rank-00000.json is damaged .* record this rank again"):
        compare(reference, tmp_path)
    with pytest.raises(RecordingError, match=r"has no recording; expected files rank-00000.json"):
        compare(reference, tmp_path / "nowhere")


def test_a_name_of_one_side_is_shown_with_the_nearest(tmp_path: Path, reference: Path) -> None:
    model = Small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = RecordOptions(rename=lambda name: name.replace("linear", "linear_1"))
    with record(model, tmp_path, optimizer=optimizer, options=options):
        train(model, optimizer)
    with pytest.raises(RecordingError, match=r"has a parameter linear_1.bias .* the nearest name there is linear.bias"):
        compare(reference, tmp_path)


def test_pieces_that_do_not_cover_a_tensor_are_refused(tmp_path: Path, reference: Path) -> None:
    def shorter(_rank: int, own: str, value: Tensor) -> Tensor:
        return value[:1] if own == "linear output|1" else value

    with pytest.raises(RecordingError, match=r"linear output in .* make a tensor of \[2, 6, 8\], .* has \[4, 6, 8\]"):
        compare(reference, cut(tmp_path, reference, shorter))


def test_boxes_that_leave_something_out_are_refused(tmp_path: Path, reference: Path) -> None:
    cut(tmp_path, reference, lambda _rank, _key, value: value)
    for rank in range(2):
        axes = {"dp": (rank, 2)}
        with Writer(tmp_path, rank, 2, axes) as writer:
            values, piece = piece_of(torch.zeros(3, 8), Box((4 * rank, 0), (8, 8), {"dp": Shard(0)}), axes)
            writer.write(Key(0, "linear.weight", "initial weight"), 0, values, piece, True)
            for name in ("embed.weight", "linear.bias", "head.weight"):
                values, piece = piece_of(torch.zeros(3), {"dp": Replicate()}, axes)
                writer.write(Key(9, name, "weight"), 0, values, piece, True)
    with pytest.raises(RecordingError, match=r"pieces of linear.weight initial weight in .* cover 48 of 64 elements"):
        compare(reference, tmp_path)


def test_other_weights_and_other_data_are_refused(tmp_path: Path, reference: Path) -> None:
    other = record_reference(tmp_path / "weights", seed=1)
    with pytest.raises(RecordingError, match=r"starts from other weights .* 4 of 4 parameters differ, .* load the"):
        compare(reference, other / "base")
    other = record_reference(tmp_path / "data", first=5)
    with pytest.raises(RecordingError, match=r"had other data .* give both sides the same batch"):
        compare(reference, other / "base")


def test_a_reference_without_perturbed_runs_is_refused(tmp_path: Path, reference: Path) -> None:
    with pytest.raises(RecordingError, match="has no perturbed run of the reference"):
        compare(reference / "base", reference / "base")
    with pytest.raises(ValueError, match="precision is 'bf8'; expected one of fp64, fp32, bf16, fp16"):
        next(reference_runs(tmp_path, "bf8"))  # type: ignore[arg-type]


def test_a_placement_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    model = Small()
    layout = RankLayout(axes={"tp": (0, 2)}, placements={"head.weight *": {"tp": Shard(7)}}, ranks=2, rank=0)
    with (
        pytest.raises(RecordingError, match=r"head.weight initial weight has shape \(13, 8\) on rank 0"),
        record(model, tmp_path, layout=layout),
    ):
        pass
