"""Pre-training as BERT's scripts write it: FusedLAMB, two groups, accumulation, warm-up, FusedLayerNorm, O2."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.amp import _amp_state
from apex.normalization import FusedLayerNorm
from apex.optimizers import FusedLAMB


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 16)
        self.first = nn.Linear(16, 16)
        self.LayerNorm = FusedLayerNorm(16, eps=1e-5)
        self.bias = nn.Parameter(torch.zeros(20))

    def forward(self, tokens, labels):
        hidden = self.LayerNorm(F.gelu(self.first(self.words(tokens))))
        scores = F.linear(hidden, self.words.weight) + self.bias
        return F.cross_entropy(scores.float().view(-1, 20), labels.view(-1), ignore_index=-1)


torch.manual_seed(0)
model = Model()
named = list(model.named_parameters())
plain = ("bias", "gamma", "beta", "LayerNorm")
groups = [
    {"params": [p for n, p in named if not any(word in n for word in plain)], "weight_decay": 0.01},
    {"params": [p for n, p in named if any(word in n for word in plain)], "weight_decay": 0.0},
]
optimizer = FusedLAMB(groups, lr=6e-2)
model, optimizer = amp.initialize(
    model, optimizer, opt_level="O2", loss_scale="dynamic", cast_model_outputs=torch.float16
)
amp._amp_state.loss_scalers[0]._loss_scale = 1024.0

generator = torch.Generator().manual_seed(1)
tokens = torch.randint(20, (8, 6), generator=generator)
labels = tokens.clone()
labels[:, ::2] = -1
losses, accumulation = [], 2
for step in range(24):
    loss = model(tokens, labels) / accumulation
    last = step % accumulation == accumulation - 1
    with amp.scale_loss(loss.float(), optimizer, delay_overflow_check=not last) as scaled_loss:
        scaled_loss.backward()
    losses.append(loss.item() * accumulation)
    if last:
        for group in optimizer.param_groups:
            group["lr"] = 6e-2 * min(1.0, (step + 1) / 8)
        scaler = _amp_state.loss_scalers[0]
        had_overflow = scaler.update_scale()
        scaler._has_overflow = False
        assert not had_overflow
        optimizer.step()
        for param in model.parameters():
            param.grad = None
assert losses[-1] < 0.7 * losses[0], losses
steps = [group["step"] for group in optimizer.param_groups]
assert steps == [12, 12], steps
masters = list(amp.master_params(optimizer))
assert all(master.dtype == torch.float32 for master in masters)
torch.save({"optimizer": optimizer.state_dict(), "master params": masters}, __import__("io").BytesIO())
print("passed")
