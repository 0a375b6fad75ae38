"""Blocks, MLPs and activations of the user's file: equal under every layout, with the values that they say."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.kill_training import metric_values
from gristmill.config import load_config
from gristmill.errors import UsageError
from gristmill_cli import generate
from tests.training.conftest import small_run
from training import own_code
from training.config import TrainConfig
from training.evaluate_config import EvaluateConfig
from training.evaluation import evaluate_checkpoint
from training.hugging_face.export_hf import export_hf
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.initialize import InitialValues
from training.parallel.parameter_shapes import stage_parameters
from training.sharding.shard_spec import ShardSpec
from training.train import train

PARTS = '''
"""My blocks, MLPs and activations."""

import torch
from torch import nn

from training.model.block import Block
from training.model.layers import Linear
from training.model.own_parts import OwnMLP, Weight


def squared_relu(features):
    return torch.relu(features).square()


def reglu(gate, features):
    return torch.relu(gate) * features


def mixing(features):
    return features - features.mean(-1, keepdim=True)


class ScaledMLP(OwnMLP):
    """Squared ReLU, with a scale of each feature and a gain of all of them."""

    weights = {
        "up.weight": Weight("colwise", "normal"),
        "scale": Weight("colwise"),
        "gain": Weight("partial", 0.5),
        "down.weight": Weight("rowwise", "residual"),
        "down.bias": Weight("replicated"),
    }
    last = "down"

    def __init__(self, config):
        super().__init__(config)
        self.up = Linear(config.width, config.ffn_width, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, config.ffn_width))
        self.gain = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(config.ffn_width, config.width)

    def forward(self, x):
        features = self.up(x)
        return self.down(torch.relu(features).square() * self.scale + self.gain * torch.tanh(features))


class SumMLP(OwnMLP):
    """Two products at its end, whose sum is a term on each rank."""

    weights = {name: Weight(place) for name, place in (
        ("up.weight", "colwise"), ("first.weight", "rowwise"), ("second.weight", "rowwise"),
    )}

    def __init__(self, config):
        super().__init__(config)
        self.up = nn.Linear(config.width, config.ffn_width, bias=False)
        self.first = nn.Linear(config.ffn_width, config.width, bias=False)
        self.second = nn.Linear(config.ffn_width, config.width, bias=False)

    def forward(self, x):
        features = self.up(x)
        return self.first(features.sigmoid()) + self.second(features.cos())


class WholeMLP(OwnMLP):
    """Not divided: every tensor-parallel rank computes it."""

    weights = {"matrix": Weight("replicated")}

    def __init__(self, config):
        super().__init__(config)
        self.matrix = nn.Parameter(torch.randn(config.width, config.width) / config.width)

    def forward(self, x):
        return torch.tanh(x @ self.matrix)


class ScaledBlock(Block):
    """A pre-norm block whose sublayers have learned scales, that of the MLP by layer."""

    weights = {
        "attention_scale": Weight("replicated", 0.5),
        "mlp_scale": Weight("replicated"),
        "attention.o.weight": Weight(initial="own"),
    }

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.attention_scale = nn.Parameter(torch.ones(config.width))
        self.mlp_scale = nn.Parameter(torch.full((config.width,), 0.1 * (layer + 1)))
        nn.init.normal_(self.attention.o.weight, std=0.01)

    def forward(self, x, table, sample_ids, padding=None):
        mixed = self.attention(self.attention_norm(x), table, sample_ids)
        x = x + self.attention_dropout(mixed * self.attention_scale, sample_ids)
        return x + self.mlp_dropout(self.apply_mlp(self.mlp_norm(x), padding) * self.mlp_scale, sample_ids)


class Leaking(Block):
    def forward(self, x, table, sample_ids, padding=None):
        x = super().forward(x, table, sample_ids, padding)
        return x - x.mean(1, keepdim=True)


class Silent(Block):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        nn.init.zeros_(self.attention.o.weight)


class Forgotten(Block):
    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.scale = nn.Parameter(torch.ones(config.width))


class Scalar(OwnMLP):
    weights = {"scale": Weight("replicated")}

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x):
        return x * self.scale


class Buffered(OwnMLP):
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("table", torch.ones(4))


class Odd(OwnMLP):
    weights = {"up.weight": Weight("colwise"), "down.weight": Weight("rowwise")}

    def __init__(self, config):
        super().__init__(config)
        self.up = nn.Linear(config.width, 33, bias=False)
        self.down = nn.Linear(33, config.width, bias=False)

    def forward(self, x):
        return self.down(self.up(x))


class Misplaced(ScaledMLP):
    weights = ScaledMLP.weights | {"gain": Weight("replicated")}


class Turned(SumMLP):
    weights = SumMLP.weights | {"second.weight": Weight("partial")}


class Mixer(WholeMLP):
    def forward(self, x):
        return x.mean(1, keepdim=True) @ self.matrix + x


class Failing(WholeMLP):
    def forward(self, x):
        return self.nothing(x)


class Unused(OwnMLP):
    weights = {"scale": Weight("replicated"), "other": Weight("replicated")}

    def __init__(self, config):
        super().__init__(config)
        self.scale = nn.Parameter(torch.ones(config.width))
        self.other = nn.Parameter(torch.ones(config.width))

    def forward(self, x):
        return x * self.scale
'''
QUIET = ["--metrics.tensorboard", "false", "--eval.sample_tokens", "0", "--metrics.log_every", "1"]
QUIET += ["--optim.warmup_steps", "2"]
LAYOUTS = {
    "dp 2": (2, []),
    "ZeRO-3": (2, ["--parallel.zero", "3"]),
    "tp 2": (2, ["--parallel.tp", "2"]),
    "tp 2, sequence parallel": (2, ["--parallel.tp", "2", "--parallel.sequence_parallel", "true"]),
    "pp 2": (2, ["--parallel.pp", "2"]),
    "tp 2 x ZeRO-3, recomputed": (4, "--parallel.tp 2 --parallel.zero 3 --memory.recompute full".split()),  # noqa: SIM905
}


@pytest.fixture
def parts(tmp_path: Path) -> Path:
    path = tmp_path / "my_parts.py"
    path.write_text(PARTS)
    return path


def options(corpus: Path, *more: str) -> list[str]:
    return [*small_run(corpus), *QUIET, "--precision", "fp64", "--optim.steps", "4", *more]


def losses(out_dir: Path) -> dict[int, float]:
    return dict(metric_values(out_dir, "step", "loss"))


ALONE = [
    ("squared_relu", ""), ("reglu", ""), ("ScaledMLP", ""), ("SumMLP", ""), ("WholeMLP", ""), ("", "ScaledBlock"),
]  # fmt: skip
DIVIDED = ["tp 2, sequence parallel"]  # a part's placements and terms are for it


@pytest.mark.parametrize(
    ("names", "layouts"),
    [
        *((names, DIVIDED) for names in ALONE),
        (("ScaledMLP", "ScaledBlock"), list(LAYOUTS)),
        *(pytest.param(names, list(LAYOUTS), marks=pytest.mark.thorough) for names in ALONE),
    ],
)
def test_own_parts_train_alike_under_every_layout(
    corpus: Path, tmp_path: Path, parts: Path, train_in_ranks: Callable[[int, Path, list[str]], None],
    names: tuple[str, str], layouts: list[str],
) -> None:  # fmt: skip
    mlp, block = names
    given = options(corpus, "--model.dropout", "0.1")
    given += ["--model.mlp", f"{parts}:{mlp}"] if mlp else []
    given += ["--model.block", f"{parts}:{block}"] if block else []
    train_in_ranks(1, tmp_path / "one", given)
    plain = losses(tmp_path / "one")
    assert len(plain) == 4
    for number, layout in enumerate(layouts):
        processes, words = LAYOUTS[layout]
        train_in_ranks(processes, out_dir := tmp_path / str(number), [*given, *words])
        assert losses(out_dir) == pytest.approx(plain, rel=1e-9), layout
    train_in_ranks(1, tmp_path / "ours", options(corpus, "--model.dropout", "0.1"))
    assert losses(tmp_path / "ours")[4] != pytest.approx(plain[4], rel=1e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--model.mlp PARTS:mixing", "mixing gives other values for some of the features than for all of them"),
        ("--model.mlp PARTS:Squared", r"has no class or function 'Squared'; did you mean squared_relu\?"),
        ("--model.mlp PARTS:ScaledBlock", r"no class that derives from OwnMLP; expected class ScaledBlock\(OwnMLP\)"),
        ("--model.mlp squared", "model.mlp is squared; .*swiglu.*, and FILE.py:NAME is one of yours"),
        (
            "--model.mlp PARTS:Scalar",
            r"scale of .*Scalar has the shape \(\), and replicated needs 1 or more dimensions",
        ),
        ("--model.mlp PARTS:Buffered", "has a buffer 'table', which no checkpoint has"),
        ("--model.mlp PARTS:Odd --parallel.tp 2", "colwise, and its 33 features are not divisible by parallel.tp 2"),
        ("--model.mlp PARTS:Unused", "blocks.0.mlp.other of .* has no gradient"),
        ("--model.mlp PARTS:Misplaced", "gain of .*Misplaced is replicated, and the gradients .* say it is partial"),
        (
            "--model.mlp PARTS:Turned",
            r"Turned, divided by its placements, fails: RuntimeError: .*my_parts.py, line \d+\)",
        ),
        ("--model.mlp PARTS:Mixer", "gives other features for a token with another one after it"),
        ("--model.mlp PARTS:Failing", r"Failing fails: AttributeError: .*'nothing'.*\(.*, line \d+\)"),
        ("--model.block PARTS:Leaking", "gives other features for a token with another one after it; .* sees no later"),
        ("--model.block PARTS:Silent", r'sets the values of attention.o.weight, .* Weight\(initial="own"\)'),
        ("--model.block PARTS:Forgotten", "has a parameter 'scale' without a placement in its weights; try weights"),
        ("--model.block PARTS:WholeMLP", "no class that derives from Block"),
        ("--model.block ours", "model.block is ours; expected FILE.py:CLASS"),
        ("--model.block PARTS:ScaledBlock --model.residual deepnorm", "with model.residual deepnorm"),
        ("--model.mlp PARTS:ScaledMLP --model.experts 4", "model.experts 4: experts are MLPs of ours"),
    ],
)
def test_what_is_refused_is_refused_in_one_sentence(
    corpus: Path, tmp_path: Path, parts: Path, given: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = given.replace("PARTS", str(parts)).split()
    if "parallel.tp" in given:
        monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=said) as refused:
        train(load_config(TrainConfig, ["--out_dir", str(tmp_path / "run"), *options(corpus), *words]))
    assert "\n" not in str(refused.value)


def test_values_are_those_that_a_part_says(parts: Path) -> None:
    own_code.allow_file(parts, "model.mlp")
    given = ModelConfig(mlp=f"{parts}:ScaledMLP", block=f"{parts}:ScaledBlock", layers=2, width=32, heads=4)
    decoder = meta_decoder(given.resolve(300, 16))
    shapes = {name: tuple(p.shape) for name, p in decoder.named_parameters()}

    def value(name: str, seed: int = 1, rows: int = 1, index: int = 0) -> torch.Tensor:
        spec = ShardSpec.whole(shapes[name]).shard(0, rows, index)
        values = torch.empty(spec.size)
        InitialValues(decoder, seed).fill(values, name, spec)
        return values

    inside = given.resolve(300, 16).ffn_width
    assert torch.equal(value("blocks.1.mlp.scale"), torch.linspace(0.5, 1.5, inside))
    assert value("blocks.0.mlp.gain").tolist() == [0.5]
    assert value("blocks.0.attention_scale").unique().tolist() == [0.5]
    assert value("blocks.1.mlp_scale").unique().tolist() == pytest.approx([0.2])
    assert value("blocks.0.mlp.up.weight").std().item() == pytest.approx(0.02, rel=0.1)
    assert value("blocks.0.mlp.down.weight").std().item() == pytest.approx(0.01, rel=0.1)
    output = value("blocks.0.attention.o.weight")
    assert output.std().item() == pytest.approx(0.01, rel=0.1)
    halves = [value("blocks.0.attention.o.weight", 1, 2, index) for index in range(2)]
    assert torch.equal(torch.cat(halves), output)
    assert not torch.equal(value("blocks.1.attention.o.weight"), output)
    assert not torch.equal(value("blocks.0.attention.o.weight", 2), output)
    assert value("blocks.0.attention.q.weight").std().item() == pytest.approx(0.02, rel=0.1)  # ours


def test_a_model_with_own_parts_resumes_writes_and_is_evaluated(
    corpus: Path, tmp_path: Path, parts: Path, train_in_ranks: Callable[[int, Path, list[str]], None],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = options(corpus, "--model.mlp", f"{parts}:ScaledMLP", "--model.block", f"{parts}:ScaledBlock")
    given += ["--optim.decay_steps", "4"]
    train_in_ranks(1, tmp_path / "whole", given)
    train_in_ranks(2, out_dir := tmp_path / "run", [*given, "--parallel.zero", "3", "--optim.steps", "2"])
    train_in_ranks(2, out_dir, [*given, "--parallel.tp", "2", "--optim.steps", "3"])
    train_in_ranks(2, out_dir, [*given, "--parallel.pp", "2"])
    assert losses(out_dir) == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)
    stored = json.loads((out_dir / "run.json").read_text())
    assert (stored["model.mlp"], stored["model.block"]) == ("my_parts.py:ScaledMLP", "my_parts.py:ScaledBlock")

    monkeypatch.setattr(own_code, "_files", {})  # as in a process of its own
    command = ["--tokens", "8", "--temperature", "0", "--device", "cpu"]
    refused = (
        r"which is not in the checkpoint, and code runs only where it is named; .* --code PATH/my_parts.py to other"
    )
    for refuse in (
        lambda: generate._generate(load_config(generate.GenerateConfig, [str(out_dir), "The mill", *command])),
        lambda: train(load_config(TrainConfig, ["--out_dir", str(tmp_path / "new"), *_from(corpus, out_dir)])),
    ):
        with pytest.raises(UsageError, match=refused) as error:
            refuse()
        assert "\n" not in str(error.value)
    written = []
    for code in (parts, parts, _changed(parts)):
        words = [str(out_dir), "The mill", *command, "--code", str(code)]
        generate._generate(load_config(generate.GenerateConfig, words))
        written.append(capsys.readouterr())
    assert written[0].out == written[1].out and written[0].out.startswith("The mill")
    assert "my_parts.py has changed since the checkpoint was written" in written[2].err
    assert "has changed" not in written[0].err
    tokens = corpus / "tokens/holdout"
    words = [
        str(out_dir),
        str(tokens),
        "--sequences",
        "0",
        "--code",
        str(parts),
        "--precision",
        "fp64",
        "--device",
        "cpu",
    ]
    found = evaluate_checkpoint(load_config(EvaluateConfig, words))[str(tokens)]
    last = json.loads((out_dir / "summary.json").read_text())["holdout_loss"]
    assert found.whole.loss == pytest.approx(last, rel=1e-9)
    with pytest.raises(UsageError, match="a part of yours, which no Hugging Face architecture has: not exported"):
        export_hf(out_dir, tmp_path / "hf")


def _from(corpus: Path, out_dir: Path) -> list[str]:
    return [*options(corpus), "--init_from", str(out_dir)]


def _changed(parts: Path) -> Path:
    other = parts.parent / "other/my_parts.py"
    other.parent.mkdir()
    other.write_text(parts.read_text() + "\n# changed\n")
    return other


@pytest.mark.parametrize("mlp", ["reglu", "squared_relu", "ScaledMLP"])
def test_the_planner_counts_the_parameters_of_own_parts(parts: Path, mlp: str) -> None:
    own_code.allow_file(parts, "model.mlp")
    given = ModelConfig(mlp=f"{parts}:{mlp}", block=f"{parts}:ScaledBlock", layers=3, width=32, heads=4)
    model = given.resolve(300, 16)
    expected = {name: tuple(p.shape) for name, p in meta_decoder(model).named_parameters()}
    found = {p.name: p.shape for p in stage_parameters(model, range(3), True, True)}
    assert found == expected
    divided = sum(p.numel for p in stage_parameters(model, range(3), True, True, tp=2))
    assert sum(map(math.prod, expected.values())) / 2 < divided < sum(map(math.prod, expected.values()))
