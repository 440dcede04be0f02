"""What the recipes share: the command line's level, a small model, its data, a start without overflow."""

import argparse
import contextlib

import torch
import torch.nn as nn
import torch.nn.functional as F
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", default="O1")
parser.add_argument("recipes", nargs="+")
args = parser.parse_args()
LEVEL = args.opt_level
MASTERS = LEVEL == "O2"
EPS = 1e-4 if LEVEL == "O3" else 1e-8  # at O3 Adam's own eps is 0 in its float16
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
    if DYNAMIC and amp._amp_state.opt_properties.enabled:
        amp._amp_state.loss_scalers[optimizer_index]._loss_scale = 128.0


def start(model, optimizer, **more):
    result = amp.initialize(model, optimizer, opt_level=LEVEL, **more)
    for index in range(more.get("num_losses", 1)):
        quiet_scale(index)
    return result


def started(batchnorm=True, seed=0, **more):
    model = make_model(batchnorm, seed)
    return start(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)


def loss_of(model, batch):
    return F.mse_loss(model(batch[0]).float(), batch[1])


def backward(loss, optimizers, *loss_id, **options):
    with amp.scale_loss(loss, optimizers, *loss_id, **options) as scaled_loss:
        scaled_loss.backward()


@contextlib.contextmanager
def refused(kind, words=""):
    try:
        yield
    except kind as error:
        assert words in str(error)
    else:
        raise AssertionError(f"a {kind} was expected")


def reference_gradients(wanted):
    model = make_model(batchnorm=False).double()
    wanted(model)
    return [p.grad.float() for p in model.parameters()]
