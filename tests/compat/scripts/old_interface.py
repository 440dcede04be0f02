"""Scripts of the first generation: amp.init and its handle."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

for name in ("opt_properties", "loss_scalers"):
    assert not hasattr(amp._amp_state, name), "how scripts ask whether amp was initialised"

assert not amp.init(enabled=False).is_active()
with amp.init(enabled=False).scale_loss(torch.ones(()), None) as same:
    assert same == 1.0

handle = amp.init(loss_scale=128.0)
assert handle.is_active() and handle.has_cache
assert amp._amp_state.handle is handle

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
x = torch.randn(16, 4)
assert model(x).dtype == torch.float16, "functions cast wherever they are called"
assert F.softmax(model(x), dim=1).dtype == torch.float32
with amp.disable_casts():
    assert model(x).dtype == torch.float32
try:
    F.binary_cross_entropy(torch.ones(2).half() * 0.5, torch.ones(2).half())
except NotImplementedError:
    pass
else:
    raise AssertionError("banned in float16")

optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for call in (
    lambda: handle.scale_loss(torch.ones(()), optimizer),
    lambda: handle.wrap_optimizer(optimizer, num_loss=2),
):
    try:
        call()
    except RuntimeError as error:
        assert "amp.initialize(model, optimizer, opt_level='O1'" in str(error)
    else:
        raise AssertionError("losses are for amp.initialize")
handle._clear_cache()

handle._deactivate()
assert not handle.is_active()
assert model(x).dtype == torch.float32

handle = amp.init(allow_banned=True)
assert torch.isfinite(F.binary_cross_entropy(torch.ones(2).half() * 0.5, torch.ones(2).half()))
handle._deactivate()
print("passed")
