"""The recipes of apex's documentation, as scripts wrote them. Run as: mpinit run recipes.py --opt_level O2 [recipe ...]

Each function is one recipe and raises where the contract is broken. The name of each that passes is printed.
"""

import argparse
import io
import sys
import traceback

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("recipes", nargs="*")
args = parser.parse_args()
LEVEL = args.opt_level
MASTERS = LEVEL == "O2"
DYNAMIC = LEVEL in ("O1", "O2")
TOLERANCE = {"O0": 1e-5, "O1": 2e-2, "O2": 2e-2, "O3": 5e-2}[LEVEL]


def make_model(batchnorm=True, seed=0):
    torch.manual_seed(seed)
    middle = [nn.BatchNorm1d(8)] if batchnorm else []
    return nn.Sequential(nn.Linear(4, 8), *middle, nn.Tanh(), nn.Linear(8, 1))


def batches(count, size=16):
    generator = torch.Generator().manual_seed(7)
    for _ in range(count):
        x = torch.randn(size, 4, generator=generator)
        yield x, x.sum(1, keepdim=True).tanh()


def quiet_scale(optimizer_index=0):
    """Small enough not to overflow, so that the first step counts."""
    if DYNAMIC:
        amp._amp_state.loss_scalers[optimizer_index]._loss_scale = 128.0


def start(model, optimizer, **more):
    result = amp.initialize(model, optimizer, opt_level=LEVEL, **more)
    for index in range(more.get("num_losses", 1)):
        quiet_scale(index)
    return result


def reference_gradients(batchnorm, wanted):
    """Gradients of plain float32 torch."""
    model = make_model(batchnorm).double()
    wanted(model)
    return [p.grad.float() for p in model.parameters()]


def basic():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    given = model, optimizer
    model, optimizer = start(model, optimizer)
    assert (model, optimizer) == given, "the same objects come back"
    losses = []
    x, y = next(batches(1))
    for _ in range(25):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).float(), y)
        with amp.scale_loss(loss, optimizer) as scaled_loss:
            scaled_loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0], losses


def return_value_ignored():
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    amp.initialize(model, optimizer, opt_level=LEVEL)
    optimizer.zero_grad()
    optimizer.step()  # before training, as scripts do that build a scheduler
    x, y = next(batches(1))
    quiet_scale()
    with amp.scale_loss(F.mse_loss(model(x).float(), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight, before)


def clipping():
    def in_double(model):
        x, y = next(batches(1))
        F.mse_loss(model(x.double()), y.double()).backward()
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)

    expected = reference_gradients(False, in_double)
    model = make_model(batchnorm=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert len(list(amp.master_params(optimizer))) == 4, "before initialize too"
    model, optimizer = start(model, optimizer)
    assert len(list(amp.master_params(optimizer))) == 4, "before the first backward"
    x, y = next(batches(1))
    with amp.scale_loss(F.mse_loss(model(x).float(), y), optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 0.01)
    for got, want in zip(amp.master_params(optimizer), expected, strict=True):
        assert LEVEL == "O3" or got.dtype == torch.float32
        torch.testing.assert_close(got.grad.float(), want, rtol=TOLERANCE, atol=TOLERANCE * 0.01)


def accumulation():
    def in_double(model):
        for x, y in batches(4):
            (F.mse_loss(model(x.double()), y.double()) / 4).backward()

    expected = reference_gradients(False, in_double)
    for delay in (False, True):
        model = make_model(batchnorm=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = start(model, optimizer)
        for index, (x, y) in enumerate(batches(4)):
            loss = F.mse_loss(model(x).float(), y) / 4
            with amp.scale_loss(loss, optimizer, delay_unscale=delay and index < 3) as scaled_loss:
                scaled_loss.backward()
        for got, want in zip(amp.master_params(optimizer), expected, strict=True):
            torch.testing.assert_close(got.grad.float(), want, rtol=TOLERANCE, atol=TOLERANCE * 0.05)
        optimizer.step()
        optimizer.zero_grad()
        assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def gan_with_three_losses():
    net_d, net_g = make_model(seed=1), nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer_d = torch.optim.Adam(net_d.parameters(), lr=0.01)
    optimizer_g = torch.optim.Adam(net_g.parameters(), lr=0.01)
    [net_d, net_g], [optimizer_d, optimizer_g] = start([net_d, net_g], [optimizer_d, optimizer_g], num_losses=3)
    criterion = nn.BCEWithLogitsLoss()
    before = [p.detach().clone() for net in (net_d, net_g) for p in net.parameters()]
    for x, _ in batches(3):
        net_d.zero_grad()
        err_d_real = criterion(net_d(x).float(), torch.ones(16, 1))
        with amp.scale_loss(err_d_real, optimizer_d, loss_id=0) as scaled:
            scaled.backward()
        fake = net_g(torch.randn(16, 2))
        err_d_fake = criterion(net_d(fake.detach()).float(), torch.zeros(16, 1))
        with amp.scale_loss(err_d_fake, optimizer_d, loss_id=1) as scaled:
            scaled.backward()
        optimizer_d.step()
        net_g.zero_grad()
        err_g = criterion(net_d(fake).float(), torch.ones(16, 1))
        with amp.scale_loss(err_g, optimizer_g, loss_id=2) as scaled:
            scaled.backward()
        optimizer_g.step()
    after = [p for net in (net_d, net_g) for p in net.parameters()]
    moved = sum(not torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert moved >= len(after) - 1, "only the bias before BatchNorm may stand still"
    assert len(amp.state_dict()) == 3
    if DYNAMIC:
        assert [s._unskipped for s in amp._amp_state.loss_scalers] == [3, 3, 3]


def several_losses_and_optimizers():
    model0, model1 = make_model(False, 0), make_model(False, 1)
    optimizer0 = torch.optim.SGD([{"params": model0.parameters(), "lr": 0.25}], lr=0.1, momentum=0.125)
    optimizer1 = torch.optim.SGD([{"params": model1.parameters(), "lr": 0.5}], lr=0.1, momentum=0.25)
    models, optimizers = start([model0, model1], [optimizer0, optimizer1], num_losses=3)
    assert isinstance(models, list) and isinstance(optimizers, list)
    x, y = next(batches(1))
    loss0 = F.mse_loss(model0(x).float() + model1(x).float(), y)
    loss1 = F.mse_loss(model0(x).float(), y)
    with amp.scale_loss(loss0, [optimizer0, optimizer1], loss_id=0) as scaled:
        scaled.backward(retain_graph=True)
    with amp.scale_loss(loss1, optimizer0, 1) as scaled:  # positional loss_id
        scaled.backward()
    if DYNAMIC:
        before = model0[0].weight.detach().clone(), model1[0].weight.detach().clone()
        bad = F.mse_loss(model1(x).float(), y) * float("inf")
        with amp.scale_loss(bad, optimizer1, loss_id=2) as scaled:
            scaled.backward()
        optimizer0.step()
        optimizer1.step()
        assert not torch.equal(model0[0].weight, before[0])
        assert torch.equal(model1[0].weight, before[1]), "only the optimizer of the bad loss skips"
        assert [s.loss_scale() for s in amp._amp_state.loss_scalers] == [128.0, 128.0, 64.0]


def checkpointing():
    def fresh():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return amp.initialize(model, optimizer, opt_level=LEVEL)

    def train(model, optimizer, data):
        for x, y in data:
            optimizer.zero_grad()
            with amp.scale_loss(F.mse_loss(model(x).float(), y), optimizer) as scaled:
                scaled.backward()
            optimizer.step()

    data = list(batches(8))
    model, optimizer = fresh()
    train(model, optimizer, data[:4])
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict()}, file)
    train(model, optimizer, data[4:])
    file.seek(0)
    checkpoint = torch.load(file)
    assert all(v.dtype == torch.float32 for k, v in checkpoint["model"].items() if "num_batches" not in k)
    assert list(checkpoint["amp"]) == ["loss_scaler0"]
    assert set(checkpoint["amp"]["loss_scaler0"]) == {"loss_scale", "unskipped"}
    other, resumed = fresh()
    other.load_state_dict(checkpoint["model"])
    resumed.load_state_dict(checkpoint["optimizer"])
    amp.load_state_dict(checkpoint["amp"])
    train(other, resumed, data[4:])
    for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    try:
        amp.load_state_dict(checkpoint["amp"], strict=False)
    except TypeError:
        pass
    else:
        raise AssertionError("callers rely on the TypeError")
    destination = {"own": 1}
    assert amp.state_dict(destination) is destination and len(destination) == 2
    try:
        amp.load_state_dict(destination)
    except RuntimeError as error:
        assert "own" in str(error)
    else:
        raise AssertionError("an unexpected key is a RuntimeError")


def resuming_as_language_models_do():
    """Saves the masters beside the model and copies them back by hand."""

    def fresh():
        model = make_model(batchnorm=False)
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def train(model, optimizer, data):
        for x, y in data:
            with amp.scale_loss(F.mse_loss(model(x).float(), y), optimizer, delay_overflow_check=False) as scaled:
                scaled.backward()
            optimizer.step()
            for param in model.parameters():
                param.grad = None

    data = list(batches(6))
    model, optimizer = start(*fresh())
    amp._amp_state.loss_scalers[0]._loss_scale = 2**6
    train(model, optimizer, data[:3])
    file = io.BytesIO()
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**saved, "master params": list(amp.master_params(optimizer))}, file)
    train(model, optimizer, data[3:])

    file.seek(0)
    checkpoint = torch.load(file, weights_only=False)
    other, resumed = fresh()
    other.load_state_dict(checkpoint["model"])
    other, resumed = amp.initialize(other, resumed, opt_level=LEVEL)
    amp._amp_state.loss_scalers[0]._loss_scale = 2**6
    resumed._lazy_init_maybe_master_weights()
    resumed._amp_stash.lazy_init_called = True
    resumed.load_state_dict(checkpoint["optimizer"])
    for param, saved_param in zip(amp.master_params(resumed), checkpoint["master params"], strict=True):
        param.data.copy_(saved_param.data)
    train(other, resumed, data[3:])
    for a, b in zip(amp.master_params(optimizer), amp.master_params(resumed), strict=True):
        assert torch.equal(a, b)


class CustomBatch:
    def __init__(self, x):
        self.x = x

    def to(self, *args, **kwargs):
        return CustomBatch(self.x.to(*args, **kwargs))


def custom_batches():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, batch, extra, scale=1):
            dtypes.append((batch.x.dtype, extra["y"][0].dtype, extra["index"].dtype))
            return self.inner(batch.x) * scale

    dtypes = []
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = start(model, optimizer)
    x, y = next(batches(1))
    output = model(CustomBatch(x), {"y": [y], "index": torch.arange(3)}, scale=2)
    expected = torch.float16 if LEVEL in ("O2", "O3") else torch.float32
    assert dtypes == [(expected, expected, torch.int64)], dtypes
    if LEVEL != "O1":
        assert output.dtype == torch.float32
    with amp.scale_loss(F.mse_loss(output.float(), y), optimizer) as scaled:
        scaled.backward()
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
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = start(model, optimizer)
    single, half = torch.ones(2), torch.ones(2).half()
    if LEVEL == "O1":
        assert my_half(single) == Library.fused(single) == torch.float16
        assert my_float(half) == Library.precise(half) == torch.float32
        assert my_promote(single, half) == (torch.float32, torch.float32)
        with amp.disable_casts():
            assert my_half(single) == torch.float32
        try:
            torch.ones(2).half().exp_()
        except NotImplementedError:
            pass
        else:
            raise AssertionError("in-place functions of the float32 list refuse 16-bit tensors")
        assert F.gelu(half).dtype == torch.float32, "the stricter policy"
    else:
        assert my_half(single) == Library.fused(single) == torch.float32
        assert my_float(half) == Library.precise(half) == torch.float16
    try:
        amp.register_half_function(Library, "nothing")
    except ValueError:
        pass
    else:
        raise AssertionError("an unknown name is a ValueError")


def live_state():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, opt_level=LEVEL, verbosity=0)
    state = amp._amp_state
    scaler = state.loss_scalers[0]
    assert state.opt_properties.opt_level == LEVEL == state.opt_properties.options["opt_level"]
    assert state.opt_properties.enabled and state.verbosity == 0
    assert state.opt_properties.patch_torch_functions == (LEVEL == "O1")
    assert state.handle.is_active() == (LEVEL == "O1")
    assert (scaler._scale_seq_len, scaler.dynamic) == (2000, DYNAMIC)
    scaler._loss_scale = 4.0
    assert scaler.loss_scale() == state.loss_scalers[0]._loss_scale == 4.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0
    x, y = next(batches(1))
    loss = F.mse_loss(model(x).float(), y)
    context = amp.scale_loss(loss, optimizer)
    scaled = context.__enter__()  # by hand, as trainers do
    scaled.backward()
    context.__exit__(None, None, None)
    assert scaled.item() == loss.item() * 4.0, "also where the level would not scale"
    if DYNAMIC:
        assert scaler._unskipped == 1
        assert scaler.update_scale() is False and scaler._unskipped == 2
        scaler._has_overflow = True
        assert scaler.update_scale() is True and scaler._loss_scale == 2.0
        scaler._min_loss_scale = 2.0
        with amp.scale_loss(loss.detach().requires_grad_() * float("inf"), optimizer, delay_overflow_check=True) as bad:
            model(x).float().sum().mul(bad).backward()
        assert scaler.update_scale() is True and scaler._loss_scale == 2.0, "an overflow at the lower limit is one"
        optimizer.zero_grad()
    optimizer.step()


def stash():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = start(model, optimizer)
    stash = optimizer._amp_stash
    assert not stash.lazy_init_called
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    assert stash.lazy_init_called
    counts = {"O0": (0, 0, 6), "O1": (0, 0, 6), "O2": (4, 4, 2), "O3": (6, 0, 0)}[LEVEL]
    names = ("all_fp16_params", "all_fp32_from_fp16_params", "all_fp32_from_fp32_params")
    assert tuple(len(getattr(stash, name)) for name in names) == counts
    if MASTERS:
        assert stash.all_fp16_params[0] is model[0].weight
        assert stash.all_fp32_from_fp16_params[0] is optimizer.param_groups[0]["params"][0]
        with torch.no_grad():
            stash.all_fp32_from_fp16_params[0].fill_(0.5)
        optimizer._master_params_to_model_params()
        assert torch.equal(model[0].weight, torch.full((8, 4), 0.5).half())
    stash.params_have_scaled_gradients = True
    scaler = amp._amp_state.loss_scalers[0]
    x, y = next(batches(1))
    optimizer._prepare_amp_backward()
    (F.mse_loss(model(x).float(), y).float() * scaler.loss_scale()).backward()
    optimizer._post_amp_backward(scaler)
    assert scaler.update_scale() is False
    by_hand = [p.grad.clone() for p in amp.master_params(optimizer)]
    optimizer.zero_grad()
    with amp.scale_loss(F.mse_loss(model(x).float(), y), optimizer) as scaled:
        scaled.backward()
    for p, grad in zip(amp.master_params(optimizer), by_hand, strict=True):
        torch.testing.assert_close(p.grad, grad)


def tolerance():
    teacher, student = make_model(seed=5), make_model(seed=6)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    student, optimizer = start(student, optimizer)
    teacher = amp.initialize(teacher, opt_level=LEVEL)
    assert isinstance(teacher, nn.Module)
    expected = 128.0 if DYNAMIC else 1.0
    assert amp._amp_state.loss_scalers[0].loss_scale() == expected, "the student's, not the teacher's"
    x, _ = next(batches(1))
    with torch.no_grad():
        wanted = teacher(x).float()
    with amp.scale_loss(F.mse_loss(student(x).float(), wanted), optimizer) as scaled:
        scaled.backward()
    optimizer.step()

    before = {name: value.clone() for name, value in student.state_dict().items()}
    second = torch.optim.Adam(student.parameters(), lr=0.01)  # fine-tuning, in the same process
    student, second = start(student, second)
    assert LEVEL == "O3" or all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    with amp.scale_loss(F.mse_loss(student(x).float(), wanted), second) as scaled:
        scaled.backward()
    second.step()
    assert not torch.equal(student.state_dict()["0.weight"], before["0.weight"])
    try:
        amp.initialize(student, second, opt_level=LEVEL)
    except (RuntimeError, ValueError) as error:
        assert "initialised already" in str(error)
    else:
        raise AssertionError("an optimizer goes through initialize once")

    alone = make_model()
    assert amp.initialize(alone, [], opt_level=LEVEL) == (alone, [])
    amp.initialize(make_model(), opt_level=LEVEL, cast_model_type=False)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    incoming = make_model().half()
    optimizer = torch.optim.SGD(incoming.parameters(), lr=0.1)
    incoming, optimizer = start(incoming, optimizer)
    amp._amp_state.allow_incoming_model_not_fp32 = False
    for level in ("00", "o1", 1, "O9"):
        try:
            amp.initialize(make_model(), opt_level=level)
        except RuntimeError as error:
            assert "letter O" in str(error)
        else:
            raise AssertionError("an unknown level is a RuntimeError")
    # apex's positional order
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, True, "O2", None, None, "True", None, "128.0")
    assert model[1].weight.dtype == torch.float32 and amp._amp_state.loss_scalers[0].loss_scale() == 128.0


def disabled():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = amp.initialize(model, optimizer, enabled=False, opt_level=LEVEL)
    x, y = next(batches(1))
    loss = F.mse_loss(model(x).float(), y)
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert amp.state_dict() == {} and not amp._amp_state.opt_properties.enabled
    amp.load_state_dict({})
    assert model[0].weight.dtype == torch.float32


def fused_optimizers_and_norms():
    from apex.normalization import FusedLayerNorm
    from apex.optimizers import FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD

    for kind in (FusedAdam, FusedLAMB, FusedNovoGrad, FusedSGD):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), FusedLayerNorm(8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = kind(model.parameters(), lr=0.05)
        model, optimizer = start(model, optimizer)
        losses = []
        x, y = next(batches(1))
        for _ in range(12):
            loss = F.mse_loss(model(x).float(), y)
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < 0.9 * losses[0], (kind, losses)


RECIPES = [
    basic,
    return_value_ignored,
    clipping,
    accumulation,
    gan_with_three_losses,
    several_losses_and_optimizers,
    checkpointing,
    resuming_as_language_models_do,
    custom_batches,
    custom_functions,
    live_state,
    stash,
    tolerance,
    fused_optimizers_and_norms,
    disabled,
]

if __name__ == "__main__":
    failed = 0
    for recipe in RECIPES:
        if args.recipes and recipe.__name__ not in args.recipes:
            continue
        try:
            recipe()
        except Exception:
            failed += 1
            print(f"--- {recipe.__name__}\n{traceback.format_exc()}", file=sys.stderr)
        else:
            print("passed", recipe.__name__)
    sys.exit(failed)
