"""The stores of masters: full and split, what they cost, and what becomes of weights that are written to."""

import pytest
import torch
from loops import adam, backward, batches, masters, mlp, same, start
from session_device import placed
from torch import nn

import mpinit

pytestmark = pytest.mark.device


def test_finite_weights_beyond_float16_are_clamped_with_one_warning_and_come_back() -> None:
    model = mlp()
    with torch.no_grad():
        model[0].weight[0, 0], model[0].weight[0, 1] = 1e6, float("inf")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.warns(UserWarning, match=r"0\.weight are beyond") as caught:
        start(model, "O2", torch.float16)
    assert len(caught) == 1
    assert model[0].weight[0, :2].tolist() == [65504.0, float("inf")]
    same(model.state_dict().values(), before)
    mpinit.undo(model)
    same(model.parameters(), before)


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 0.0])
def test_weight_beyond_float16_is_found_beside_nan_and_inf_of_others(hidden: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias[0], model[3].bias[0] = hidden, 1e6
    with pytest.warns(UserWarning, match=r"3\.bias are beyond") as caught:
        start(model, "O2", torch.float16)
    assert len(caught) == 1 and model[3].bias[0].item() == 65504.0
    same([model[0].bias.detach()[:1].float().cpu()], [torch.tensor([hidden])])


def growing(start: float) -> tuple[nn.Linear, torch.optim.Optimizer]:
    """One weight that a step makes larger by 1000, in float16."""
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[start, 1.0]]))
    optimizer = torch.optim.SGD(model.parameters(), lr=1000.0)
    mpinit.initialize(model, optimizer, "O2", loss_scale=mpinit.DynamicLossScale(init=2.0))
    return model, optimizer


def grow(model: nn.Linear, optimizer: torch.optim.Optimizer, square: bool) -> None:
    """One step of :func:`growing`; an infinite weight makes gradients nan where the loss has a square in it."""
    optimizer.zero_grad()
    output = model(torch.tensor([[1.0, 0.0]]))
    loss = -output.sum() + (0.0 * output.square().sum() if square else 0.0)
    backward(loss, optimizer)
    optimizer.step()


@pytest.mark.filterwarnings("ignore:finite values of weight")
def test_clamped_weights_stay_clamped() -> None:
    model, optimizer = growing(1e5)
    for _ in range(3):
        grow(model, optimizer, square=False)
    assert model.weight.tolist() == [[65504.0, 1.0]]
    assert masters(optimizer)[0].tolist() == [[103000.0, 1.0]]
    mpinit.undo(model)
    assert model.weight.tolist() == [[103000.0, 1.0]]


def test_a_group_added_later_is_split_too() -> None:
    model = mlp()
    optimizer = start(model, "O2", torch.bfloat16, adam, master_weights="split", loss_scale=1.0)
    extra = placed(nn.Linear(3, 2)).bfloat16()
    optimizer.add_param_group({"params": list(extra.parameters())})
    backward(extra(model(batches(1)[0][0]).bfloat16()).float().sum(), optimizer)
    before = extra.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(extra.weight, before)
    assert optimizer.state[extra.weight]["exp_avg"].dtype == torch.float32
    mpinit.undo(model)
    assert extra.weight.dtype == torch.float32
    assert not torch.equal(extra.weight, extra.weight.bfloat16().float()), "with its remainder"
