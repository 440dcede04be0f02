"""The recipes of apex's documentation, as scripts wrote them. Run as: mpinit run recipes.py --opt_level O2 recipe ...

Each function is one recipe and raises where the contract is broken. The name of each that passes is printed.
Those of checkpoints and of internals are in the modules beside this one.
"""

import sys
import traceback
from dataclasses import dataclass

import recipe_setup as common
import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp
from recipes_checkpoints import checkpointing, resuming_as_language_models_do  # noqa: F401
from recipes_internals import disabled, live_state, stash, tolerance  # noqa: F401


def basic():
    model = common.make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    given = model, optimizer
    model, optimizer = common.start(model, optimizer)
    assert (model, optimizer) == given, "the same objects come back"
    losses = []
    x, y = next(common.batches(1))
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses


def return_value_ignored():
    model = common.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=common.EPS)
    amp.initialize(model, optimizer, opt_level=common.LEVEL)
    optimizer.zero_grad()
    optimizer.step()  # before training, as scripts do that build a scheduler
    common.quiet_scale()
    common.backward(common.loss_of(model, next(common.batches(1))), optimizer)
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def clipping():
    def in_double(model):
        x, y = next(common.batches(1))
        F.mse_loss(model(x.double()), y.double()).backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    expected = common.reference_gradients(in_double)
    model = common.make_model(batchnorm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(list(amp.master_params(optimizer))) == 4, "before initialize too"
    model, optimizer = common.start(model, optimizer)
    assert len(list(amp.master_params(optimizer))) == 4, "before the first backward"
    common.backward(common.loss_of(model, next(common.batches(1))), optimizer)
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    for got, want in zip(amp.master_params(optimizer), expected, strict=True):
        assert common.LEVEL == "O3" or got.dtype == torch.float32
        torch.testing.assert_close(got.grad.float(), want, rtol=common.TOLERANCE, atol=common.TOLERANCE * 0.01)


def accumulation():
    def in_double(model):
        for x, y in common.batches(4):
            (F.mse_loss(model(x.double()), y.double()) / 4).backward()

    expected = common.reference_gradients(in_double)
    for delay in (False, True):
        model, optimizer = common.started(batchnorm=False)
        for index, batch in enumerate(common.batches(4)):
            common.backward(common.loss_of(model, batch) / 4, optimizer, delay_unscale=delay and index < 3)
        for got, want in zip(amp.master_params(optimizer), expected, strict=True):
            torch.testing.assert_close(got.grad.float(), want, rtol=common.TOLERANCE, atol=common.TOLERANCE * 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def gan_with_three_losses():
    net_d, net_g = common.make_model(seed=1), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=0.01, eps=common.EPS)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.01, eps=common.EPS)
    [net_d, net_g], [optimizer_d, optimizer_g] = common.start([net_d, net_g], [optimizer_d, optimizer_g], num_losses=3)
    criterion = nn.BCEWithLogitsLoss()
    before = [p.detach().clone() for net in (net_d, net_g) for p in net.parameters()]
    for x, _ in common.batches(3):
        net_d.zero_grad()
        common.backward(criterion(net_d(x).float(), torch.ones(16, 1)), optimizer_d, loss_id=0)
        fake = net_g(torch.randn(16, 2))
        common.backward(criterion(net_d(fake.detach()).float(), torch.zeros(16, 1)), optimizer_d, loss_id=1)
        optimizer_d.step()
        net_g.zero_grad()
        common.backward(criterion(net_d(fake).float(), torch.ones(16, 1)), optimizer_g, loss_id=2)
        optimizer_g.step()
    after = [p for net in (net_d, net_g) for p in net.parameters()]
    moved = sum(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert moved >= len(after) - 1, "only the bias before BatchNorm may stand still"
    assert len(amp.state_dict()) == 3
    if common.DYNAMIC:
        assert [s._unskipped for s in amp._amp_state.loss_scalers] == [3, 3, 3]


def several_losses_and_optimizers():
    model0, model1 = common.make_model(False, 0), common.make_model(False, 1)
    optimizer0 = torch.optim.SGD([{"params": model0.parameters(), "lr": 0.25}], lr=0.1, momentum=0.125)
    optimizer1 = torch.optim.SGD([{"params": model1.parameters(), "lr": 0.5}], lr=0.1, momentum=0.25)
    models, optimizers = common.start([model0, model1], [optimizer0, optimizer1], num_losses=3)
    assert isinstance(models, list) and isinstance(optimizers, list)
    x, y = next(common.batches(1))
    loss0 = F.mse_loss(model0(x).float() + model1(x).float(), y)
    loss1 = common.loss_of(model0, (x, y))
    with amp.scale_loss(loss0, [optimizer0, optimizer1], loss_id=0) as scaled:
        scaled.backward(retain_graph=True)
    common.backward(loss1, optimizer0, 1)  # positional loss_id
    if common.DYNAMIC:
        before = model0[0].weight.detach().clone(), model1[0].weight.detach().clone()
        common.backward(common.loss_of(model1, (x, y)) * float("inf"), optimizer1, loss_id=2)
        optimizer0.step()
        optimizer1.step()
        assert not torch.equal(model0[0].weight, before[0])
        assert torch.equal(model1[0].weight, before[1]), "only the optimizer of the bad loss skips"
        assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [128.0, 128.0, 64.0]


@dataclass
class CustomBatch:
    x: torch.Tensor


def custom_batches():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = common.make_model()

        def forward(self, batch, extra, scale=1):
            dtypes.append((batch.x.dtype, extra["y"][0].dtype, extra["index"].dtype))
            return self.inner(batch.x) * scale

    dtypes = []
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = common.start(model, optimizer)
    x, y = next(common.batches(1))
    output = model(CustomBatch(x), {"y": [y], "index": torch.arange(3)}, scale=2)
    expected = torch.float16 if common.LEVEL in ("O2", "O3") else torch.float32
    assert dtypes == [(expected, expected, torch.int64)], dtypes
    if common.LEVEL != "O1":
        assert output.dtype == torch.float32
    common.backward(F.mse_loss(output.float(), y), optimizer)
    optimizer.step()


@amp.half_function
def my_half(a):
    return a.dtype


@amp.float_function
def my_float(a):
    return a.dtype


@amp.promote_function
def my_promote(a, b):
    return a.dtype, b.dtype


class Library:
    @staticmethod
    def fused(a):
        return a.dtype

    @staticmethod
    def precise(a):
        return a.dtype


def custom_functions():
    amp.register_half_function(Library, "fused")
    amp.register_float_function(Library, "precise")
    common.started()
    single, half = torch.ones(2), torch.ones(2).half()
    if common.LEVEL == "O1":
        assert my_half(single) == Library.fused(single) == torch.float16
        assert my_float(half) == Library.precise(half) == torch.float32
        assert my_promote(single, half) == (torch.float32, torch.float32)
        with amp.disable_casts():
            assert my_half(single) == torch.float32
        with common.refused(NotImplementedError):  # in-place functions of the float32 list take no 16-bit tensors
            torch.ones(2).half().exp_()
        assert F.gelu(half).dtype == torch.float32, "the stricter policy"
    else:
        assert my_half(single) == Library.fused(single) == torch.float32
        assert my_float(half) == Library.precise(half) == torch.float16
    with common.refused(ValueError):
        amp.register_half_function(Library, "nothing")


def fused_optimizers_and_norms():
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam, FusedSGD

    for kind in (FusedAdam, FusedSGD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), FusedLayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = kind(model.parameters(), lr=0.05)
        model, optimizer = common.start(model, optimizer)
        losses = []
        for _ in range(12):
            loss = common.loss_of(model, next(common.batches(1)))
            common.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0], (kind, losses)


if __name__ == "__main__":
    failed = 0
    for recipe in common.args.recipes:
        try:
            globals()[recipe]()
        except Exception:
            failed += 1
            print(f"--- {recipe}\n{traceback.format_exc()}", file=sys.stderr)
        else:
            print("passed", recipe)
    sys.exit(failed)
