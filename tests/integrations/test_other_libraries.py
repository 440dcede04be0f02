"""Libraries without a recipe, and what they do to an initialised model: captum explains it, Pyro makes optimizers."""

import copy
import warnings
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, needs
from torch import nn

import mpinit


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)]
    last = [nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*first, *last).eval()


@pytest.mark.filterwarnings("ignore:Setting forward, backward hooks")
@pytest.mark.filterwarnings("ignore:Input Tensor 0 did not already require gradients")
@pytest.mark.parametrize("level", ["O1", "O2", "O4", "O5"])
def test_captum_in_float16_needs_an_eps_that_float16_has(level: str) -> None:
    let_torchvision_load()
    explain = needs("captum.attr").DeepLift
    model, images = convolutions(), torch.rand(5, 1, 8, 8)
    images[:, :, :4] = 0  # equal to captum's baseline
    expected = explain(copy.deepcopy(model)).attribute(images, target=1)
    half = copy.deepcopy(model).half()
    assert explain(half).attribute(images.half(), target=1).isnan().any(), "captum's own fault, in plain torch"
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level)
    assert explain(model).attribute(images, target=1).isnan().any() == (level in ("O1", "O2"))
    found = explain(model, eps=1e-4).attribute(images, target=1)
    assert (found - expected).abs().mean() < 0.05 * expected.abs().mean()
    block: Any = mpinit.disable_casts() if level in ("O1", "O4") else mpinit.float32_weights(model)
    with block:
        assert torch.equal(explain(model).attribute(images, target=1), expected)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad=True to a scalar")
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_pyro_optimizers_per_parameter_train_or_are_refused(level: str) -> None:
    let_torchvision_load()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pyro = needs("pyro")
        infer, normal = needs("pyro.infer"), needs("pyro.distributions").Normal
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(32, 4)
    y = x.sum(1)

    def model() -> None:
        pyro.module("net", net)
        mean = net(x).squeeze(-1)
        with pyro.plate("data", 32):
            pyro.sample("y", normal(mean, 0.1), obs=y)

    mpinit.initialize(net, opt_level=level, await_optimizers=True, loss_scale=1.0)
    inference = infer.SVI(model, lambda: None, pyro.optim.Adam({"lr": 1e-2}), infer.Trace_ELBO())
    if level == "O1":
        losses = [inference.step() for _ in range(20)]
        assert losses[-1] < 0.7 * losses[0]
        return
    with pytest.raises(RuntimeError, match=r"this Adam steps '0\.weight'.*call mpinit\.add_optimizers\(optimizer\)"):
        inference.step()
