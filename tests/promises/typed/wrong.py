"""Uses that a type checker refuses: every line that ends in "# wrong", and no other."""

import torch
from torch import nn
from torch.optim import SGD

import mpinit


def uses(model: nn.Linear, optimizer: SGD, loss: torch.Tensor) -> None:
    mpinit.initialize(3, 4)  # wrong
    mpinit.initialize(model, optimizer, opt_levle="O2")  # wrong
    mpinit.initialize(model, optimizer, opt_level=2)  # wrong
    mpinit.initialize(model, optimizer, master_weights="splitt")  # wrong
    mpinit.initialize(model, optimizer, patch_torch_functions="thread")  # wrong
    mpinit.initialize(model, optimizer, enabled="False")  # wrong
    mpinit.initialize(model, optimizer, growth_interval=100)  # wrong
    mpinit.DynamicLossScale(init="dynamic")  # wrong
    mpinit.initialize(model, optimizer, optimizer_state="int4")  # wrong
    mpinit.initialize(model, optimizer, config=3)  # wrong
    mpinit.initialize(optimizer, model)  # wrong
    mpinit.initialize(model.parameters(), optimizer)  # wrong
    mpinit.initialize(model, model.parameters())  # wrong
    mpinit.initialize(model, optimizer, loss_scale=[128.0])  # wrong
    mpinit.initialize(model, optimizer, cast_model_type="int4")  # wrong
    mpinit.initialize(model, optimizer, "O2", True)  # wrong
    mpinit.initialize(model, optimizer)[0].backward()  # wrong
    mpinit.initialize(model).step()  # wrong
    mpinit.add_optimizers(model)  # wrong
    mpinit.undo(3)  # wrong
    mpinit.scale_loss(loss)  # wrong
    mpinit.scale_loss(optimizer, loss)  # wrong
    mpinit.GradScaler(optimizer, init_scale=2.0**10)  # wrong
    mpinit.loss_scale(optimizer).item()  # wrong
