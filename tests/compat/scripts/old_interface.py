"""A script of the first generation: amp.init, a handle that scales losses, and a wrapped optimizer."""

import torch
from apex import amp

for name in ("opt_properties", "loss_scalers"):
    assert not hasattr(amp._amp_state, name), "how scripts ask whether amp was initialised"

handle = amp.init(loss_scale=128.0)
model = torch.nn.Linear(4, 2)
optimizer = handle.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), num_loss=2)
before = model.weight.detach().clone()
for loss in (model(torch.ones(1, 4)).float().sum(), model(torch.ones(2, 4)).float().mean()):
    with optimizer.scale_loss(loss) as scaled_loss:
        scaled_loss.backward()
optimizer.step()
assert model(torch.ones(1, 4)).dtype == torch.float16
assert torch.allclose(before - model.weight.detach(), torch.full((2, 4), 0.1 * 1.5), atol=1e-3)
handle._deactivate()
assert model(torch.ones(1, 4)).dtype == torch.float32
print("passed")
