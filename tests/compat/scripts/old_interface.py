"""Scripts of the first generation: amp.init is refused, with what takes its place."""

from apex import amp

for name in ("opt_properties", "loss_scalers"):
    assert not hasattr(amp._amp_state, name), "how scripts ask whether amp was initialised"

try:
    amp.init(loss_scale=128.0)
except AttributeError as error:
    assert "In its place, amp.initialize(model, optimizer, opt_level='O1'" in str(error)
else:
    raise AssertionError("losses are for amp.initialize")
print("passed")
