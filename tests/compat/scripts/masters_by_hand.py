"""A loop of 2018 with float32 masters of its own, by the helpers of apex.fp16_utils, and BatchNorm in float32."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex.fp16_utils import (
    master_params_to_model_params,
    model_grads_to_master_grads,
    network_to_half,
    prep_param_lists,
    to_python_float,
)

torch.manual_seed(0)
model = network_to_half(nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3)))
model_params, master_params = prep_param_lists(model)
optimizer = torch.optim.SGD(master_params, 0.2, momentum=0.9, weight_decay=1e-4)
static_loss_scale = 128.0
x, target = torch.randn(32, 6), torch.arange(32) % 3
losses = []
for _ in range(30):
    loss = F.cross_entropy(model(x).float(), target)
    losses.append(to_python_float(loss.data))
    model.zero_grad()
    (loss * static_loss_scale).backward()
    model_grads_to_master_grads(model_params, master_params)
    for param in master_params:
        param.grad.data = param.grad.data / static_loss_scale
    optimizer.step()
    master_params_to_model_params(model_params, master_params)
assert losses[-1] < 0.7 * losses[0], losses
for weight, master in zip(model_params, master_params, strict=True):
    assert master.dtype == torch.float32 and torch.equal(weight, master.to(weight.dtype))
print("passed")
