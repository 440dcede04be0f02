"""Two processes: DistributedDataParallel with apex's arguments, groups of SyncBatchNorm. Under torchrun, over gloo."""

import apex
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from apex.parallel import convert_syncbn_model

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
assert world == 2

torch.manual_seed(rank)
local = torch.randn(8, 4)
everything = [torch.zeros(8, 4) for _ in range(world)]
dist.all_gather(everything, local)


def make(batchnorm=False):
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4), *([nn.BatchNorm1d(4)] if batchnorm else []), nn.Tanh(), nn.Linear(4, 1)]
    return nn.Sequential(*layers)


def wanted():
    model = make()
    for x in everything:
        (F.mse_loss(model(x), x.sum(1, keepdim=True)) / world).backward()
    return [p.grad for p in model.parameters()]


for options in (
    {},
    {"delay_allreduce": True, "num_allreduce_streams": 2},
    {"allreduce_always_fp32": True, "gradient_predivide_factor": 2.0},
    {"message_size": 1},
):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
    model = DDP(model, **options)
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    with amp.scale_loss(F.mse_loss(model(local), local.sum(1, keepdim=True)), optimizer) as scaled:
        scaled.backward()
    for p, grad in zip(amp.master_params(optimizer), wanted(), strict=True):
        torch.testing.assert_close(p.grad, grad, rtol=2e-2, atol=5e-3)
    optimizer.step()
    total = torch.cat([p.detach().flatten() for p in amp.master_params(optimizer)])
    same = [torch.zeros_like(total) for _ in range(world)]
    dist.all_gather(same, total)
    assert torch.equal(same[0], same[1]), "both ranks hold the same masters"
    assert all(name.startswith("module.") for name in model.state_dict())

model.disable_allreduce()
optimizer.zero_grad()
with amp.scale_loss(F.mse_loss(model(local), local.sum(1, keepdim=True)), optimizer) as scaled:
    scaled.backward()
gathered = [torch.zeros(4, 4) for _ in range(world)]
dist.all_gather(gathered, next(amp.master_params(optimizer)).grad.contiguous())
assert not torch.equal(gathered[0], gathered[1])
model.enable_allreduce()

try:
    DDP(make(), gradient_average=False)
except ValueError as error:
    assert "multiply the loss" in str(error)
else:
    raise AssertionError("a sum of gradients is refused")

model = make()
with torch.no_grad():
    model[0].weight.add_(rank)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale=64.0, verbosity=0)
reducer = apex.parallel.Reducer(model)
with amp.scale_loss(F.mse_loss(model(local), local.sum(1, keepdim=True)), optimizer) as scaled:
    scaled.backward()
reducer.reduce()
for p, grad in zip(amp.master_params(optimizer), wanted(), strict=True):
    torch.testing.assert_close(p.grad, grad, rtol=2e-2, atol=5e-3)
values = [torch.full((2,), float(rank))]
apex.parallel.Reducer(values).reduce()
assert values[0].tolist() == [0.5, 0.5]

group = apex.parallel.create_syncbn_process_group(1)
assert dist.get_world_size(group) == 1 and apex.parallel.create_syncbn_process_group(0) is None
converted = convert_syncbn_model(make(batchnorm=True), process_group=group)
assert isinstance(converted[1], apex.parallel.SyncBatchNorm) and converted[1].process_group is group

dist.destroy_process_group()
print(f"passed {rank}")
