"""Recipes of saving and resuming. `recipes.py` runs them."""

import io

import torch
from apex import amp
from recipe_setup import EPS, LEVEL, backward, batches, loss_of, make_model, refused, start


def checkpointing():
    def fresh():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return amp.initialize(model, optimizer, opt_level=LEVEL)

    def train(model, optimizer, data):
        for batch in data:
            optimizer.zero_grad()
            backward(loss_of(model, batch), optimizer)
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
    with refused(TypeError):  # on which callers rely
        amp.load_state_dict(checkpoint["amp"], strict=False)
    destination = {"own": 1}
    assert amp.state_dict(destination) is destination and len(destination) == 2
    with refused(RuntimeError, "own"):
        amp.load_state_dict(destination)


def resuming_as_language_models_do():
    """Saves the masters beside the model and copies them back by hand."""

    def fresh():
        model = make_model(batchnorm=False)
        return model, torch.optim.Adam(model.parameters(), lr=0.01, eps=EPS)

    def train(model, optimizer, data):
        for batch in data:
            backward(loss_of(model, batch), optimizer, delay_overflow_check=False)
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
