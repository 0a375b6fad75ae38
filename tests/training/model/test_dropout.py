import torch
from torch import Tensor

from training.model.dropout import Dropout


def dropped(x: Tensor, sample_ids: list[int], p: float = 0.3, name: str = "s") -> Tensor:
    return Dropout(p, name)(x, torch.tensor(sample_ids))


def test_a_fraction_p_is_dropped_and_the_mean_is_kept() -> None:
    for p in (0.1, 0.5, 0.9):
        y = dropped(torch.ones(50, 40, 100), list(range(50)), p)
        assert abs((y == 0).double().mean() - p) < 0.005
        assert abs(y.mean() - 1) < 0.02
        assert torch.unique(y).tolist() == torch.tensor([0.0, 1 / (1 - p)]).tolist()


def test_the_mask_depends_on_sequence_layer_and_element_only() -> None:
    x = torch.ones(3, 8, 16)
    one = dropped(x, [5, 6, 7])
    torch.manual_seed(9)
    assert torch.equal(one, dropped(x, [5, 6, 7]))
    assert torch.equal(one.flip(0), dropped(x, [7, 6, 5]))  # in any order, in any batch
    assert torch.equal(one[1:2], dropped(x[:1], [6]))
    assert not torch.equal(one[0], one[1])
    assert not torch.equal(one, dropped(x, [5, 6, 7], name="t"))


def test_no_dropout_in_evaluation_or_with_p_0() -> None:
    x = torch.randn(2, 3, 4)
    assert Dropout(0.5, "s").eval()(x, None) is x
    assert Dropout(0.0, "s")(x, None) is x


def test_gradients_pass_through_kept_elements_only() -> None:
    x = torch.ones(2, 6, 6, requires_grad=True)
    y = dropped(x, [1, 2])
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
