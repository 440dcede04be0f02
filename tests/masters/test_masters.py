"""The stores of masters: full and split, what they cost, and what becomes of weights that are written to."""

import pytest
import torch
from loops import adam, backward, batches, mlp, same, start
from session_device import placed
from torch import nn

import mpinit

pytestmark = pytest.mark.device


@pytest.mark.parametrize("hidden", [float("nan"), float("inf"), 0.0])
def test_trained_weights_beyond_float16_are_refused(hidden: float) -> None:
    model = mlp()
    with torch.no_grad():
        model[0].bias[0], model[3].bias[0] = hidden, 1e6
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r"^3\.bias would be infinite in float16.*keep_fp32=\['3\.bias'\].*\"O5\""):
        start(model, "O2", torch.float16)
    same(model.parameters(), before)
    start(model, "O2", torch.float16, keep_fp32=["3.bias"])
    assert model[3].bias.dtype is torch.float32
    same([model[0].bias.detach()[:1].float().cpu()], [torch.tensor([hidden])])


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
