"""The cast lists, edited before initialize as scripts do."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.amp.lists import functional_overrides, tensor_overrides, torch_overrides

assert functional_overrides.MODULE is F and torch_overrides.MODULE is torch and tensor_overrides.MODULE is torch.Tensor
assert "linear" in functional_overrides.FP16_FUNCS and "layer_norm" in functional_overrides.FP32_FUNCS
assert "cat" in torch_overrides.SEQUENCE_CASTS and "addcmul" in torch_overrides.CASTS
assert "matmul" in tensor_overrides.FP16_FUNCS

amp.lists.functional_overrides.FP32_FUNCS.remove("softmax")  # moved
amp.lists.functional_overrides.FP16_FUNCS.append("softmax")
amp.lists.functional_overrides.FP32_FUNCS.append("sigmoid")  # added
torch_overrides.FP32_FUNCS.remove("cumsum")  # taken out
torch_overrides.FP16_FUNCS.append("no_such_function")  # of another version

half, single = torch.ones(3).half(), torch.ones(3)
model = nn.Linear(3, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
assert F.softmax(single, dim=0).dtype == torch.float32, "nothing before initialize"
amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
assert F.softmax(single, dim=0).dtype == torch.float16
assert F.sigmoid(half).dtype == torch.float32
assert torch.cumsum(half, 0).dtype == torch.float16
assert torch.cumsum(single, 0).dtype == torch.float32
assert torch.exp(half).dtype == torch.float32, "what was not edited stays"
print("passed")
