"""The workflow of ROCm's README, and its levels and keywords: save, restore, go on. Run with --opt_level."""

import argparse
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O5")
opt_level = parser.parse_args().opt_level
functions = {"O1": torch.float16, "O4": torch.bfloat16}.get(opt_level)


def start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    return amp.initialize(model, optimizer, opt_level=opt_level, patch_torch_functions_type=functions, verbosity=0)


def train(model, optimizer, seeds):
    for seed in seeds:
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        loss = F.mse_loss(model(data).float(), data[:, :2])
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()


model, optimizer = start()
properties = amp._amp_state.opt_properties
assert properties.patch_torch_functions_type == functions or functions is None
assert properties.loss_scale == ("dynamic" if opt_level in ("O1", "O2") else 1.0)
train(model, optimizer, range(4))
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}
assert all(set(value) == {"loss_scale", "unskipped"} for value in checkpoint["amp"].values())
assert not any(value.dtype in (torch.float16, torch.bfloat16) for value in checkpoint["model"].values())
path = os.path.join(tempfile.mkdtemp(), "amp_checkpoint.pt")
torch.save(checkpoint, path)
train(model, optimizer, range(4, 8))

restored, again = start()
checkpoint = torch.load(path)
restored.load_state_dict(checkpoint["model"])
again.load_state_dict(checkpoint["optimizer"])
amp.load_state_dict(checkpoint["amp"])
assert amp.state_dict() == checkpoint["amp"]
train(restored, again, range(4, 8))
for (name, a), b in zip(model.state_dict().items(), restored.state_dict().values(), strict=True):
    assert torch.equal(a, b), name

# A file as NVIDIA's or ROCm's apex writes it: 16-bit weights in float32, and scales of another number of losses.
dtype = next(model.parameters()).dtype
rounded = {name: value.to(dtype).to(value.dtype) for name, value in checkpoint["model"].items()}
restored.load_state_dict(rounded)
amp.load_state_dict({"loss_scaler0": {"loss_scale": 256.0, "unskipped": 7}})
if opt_level in ("O1", "O2"):
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 256.0, "unskipped": 7}
train(restored, again, range(2))
print("passed")
