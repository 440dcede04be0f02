"""Recipes of what scripts reach into and of the unusual calls that apex lets pass. `recipes.py` runs them."""

import gc

import torch
import torch.nn as nn
from apex import amp
from recipe_setup import DYNAMIC, EPS, LEVEL, MASTERS, backward, batches, loss_of, make_model, refused, start, started


def live_state():
    model, optimizer = started(verbosity=0)
    state = amp._amp_state
    scaler = state.loss_scalers[0]
    assert state.opt_properties.opt_level == LEVEL == state.opt_properties.options["opt_level"]
    assert state.opt_properties.enabled and state.verbosity == 0
    assert state.opt_properties.patch_torch_functions == (LEVEL == "O1")
    assert (scaler._scale_seq_len, scaler.dynamic) == (2000, DYNAMIC)
    scaler._loss_scale = 4.0
    assert scaler.loss_scale() == state.loss_scalers[0]._loss_scale == 4.0
    assert amp.state_dict()["loss_scaler0"]["loss_scale"] == 4.0
    batch = next(batches(1))
    loss = loss_of(model, batch)
    context = amp.scale_loss(loss, optimizer)
    scaled = context.__enter__()  # by hand, as trainers do
    scaled.backward()
    context.__exit__(None, None, None)
    assert scaled.item() == loss.item() * 4.0, "also where the level would not scale"
    if DYNAMIC:
        assert scaler._unskipped == 1
        assert scaler.update_scale() is False and scaler._unskipped == 2
        state.loss_scalers[0]._has_overflow = True
        assert scaler._has_overflow and scaler.update_scale() is True and scaler._loss_scale == 2.0
        optimizer.zero_grad()
    optimizer.step()


def stash():
    model, optimizer = started()
    optimizer._lazy_init_maybe_master_weights()
    optimizer._amp_lazy_init()
    assert optimizer._amp_stash.lazy_init_called
    try:
        _ = optimizer._amp_stash.all_fp16_params
    except AttributeError as error:
        assert "amp.master_params(optimizer)" in str(error)
    if MASTERS:
        with torch.no_grad():
            next(iter(amp.master_params(optimizer))).fill_(0.5)
        optimizer._master_params_to_model_params()
        assert torch.equal(model[0].weight, torch.full((8, 4), 0.5).half())
    optimizer._amp_stash.params_have_scaled_gradients = True


def tolerance():
    student, optimizer = started(seed=6)
    teacher = amp.initialize(make_model(seed=5), opt_level=LEVEL)
    assert isinstance(teacher, nn.Module)
    expected = 128.0 if DYNAMIC else 1.0
    assert amp._amp_state.loss_scalers[0].loss_scale() == expected, "the student's, not the teacher's"
    x, _ = next(batches(1))
    with torch.no_grad():
        wanted = teacher(x).float()
    backward(loss_of(student, (x, wanted)), optimizer)
    optimizer.step()

    before = {name: value.clone() for name, value in student.state_dict().items()}
    second = torch.optim.Adam(student.parameters(), lr=0.01, eps=EPS)  # fine-tuning, in the same process
    student, second = start(student, second)
    assert LEVEL == "O3" or all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    backward(loss_of(student, (x, wanted)), second)
    second.step()
    assert not torch.equal(student.state_dict()["0.weight"], before["0.weight"])
    with refused((RuntimeError, ValueError), "initialised already"):
        amp.initialize(student, second, opt_level=LEVEL)

    alone = make_model()
    assert amp.initialize(alone, [], opt_level=LEVEL) == (alone, [])
    amp.initialize(make_model(), opt_level=LEVEL, cast_model_type=False)
    amp._amp_state.allow_incoming_model_not_fp32 = True
    incoming = make_model().half()
    start(incoming, torch.optim.SGD(incoming.parameters(), lr=0.1))
    amp._amp_state.allow_incoming_model_not_fp32 = False
    for level in ("00", "o1", 1, "O9"):
        with refused(RuntimeError, "letter O"):
            amp.initialize(make_model(), opt_level=level)
    # apex's positional order
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, True, "O2", None, None, "True", None, "128.0")
    assert model[1].weight.dtype == torch.float32 and amp._amp_state.loss_scalers[0].loss_scale() == 128.0


def disabled():
    gc.collect()  # sessions of the other recipes, which amp.state_dict() would return
    model, optimizer = started(enabled=False)
    loss = loss_of(model, next(batches(1)))
    with amp.scale_loss(loss, optimizer) as scaled:
        assert scaled is loss
        scaled.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
    optimizer.step()
    assert amp.state_dict() == {} and not amp._amp_state.opt_properties.enabled
    amp.load_state_dict({})
    assert model[0].weight.dtype == torch.float32
