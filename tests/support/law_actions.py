"""What training loops do to gradients, weights, groups and checkpoints: to the real loop, and to the one by hand."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from law import LOSSES, RATE, SIZES, VALUES, Interrupted, Kind, Pick, Run, exact, same
from session_device import device
from torch.optim import SGD

import mpinit


def _scaled(run: Run, pick: Pick, overflows: bool = False, raises: str = "") -> None:
    """``scale_loss``, for some of the optimizers, with any loss."""
    names = run.trained() + [n for n in SIZES if not run.owners(n) and run.by_hand[n].requires_grad]
    if not run.trained():
        return
    gradients = run.gradients(pick, names)
    bad = pick.of(list(gradients)) if overflows and run.setup.loss_scale == "dynamic" else None
    loss_id = pick.of(range(LOSSES))
    owners = sorted({owner for name in gradients for owner in run.owners(name)}) or [0]
    if pick.of((True, True, False)):
        owners = pick.some(owners)  # a loss may reach parameters of optimizers that were not named
    run.begins(owners)
    real = [run.optimizers[index] for index in owners]
    loss = run.loss(gradients, bad)
    try:
        with mpinit.scale_loss(loss, real if len(real) > 1 else real[0], loss_id) as scaled:
            if raises == "before":
                raise Interrupted
            scaled.backward()
            if raises:
                raise Interrupted
    except Interrupted:
        pass
    if raises != "before":
        run.add(gradients, bad)
    run.checked(None if raises else loss_id)


def _plain(run: Run, pick: Pick) -> None:
    """A backward pass without ``scale_loss``."""
    run.calm()
    if run.trained():
        gradients = run.gradients(pick, run.trained())
        run.loss(gradients).backward()
        run.add(gradients)


def _inside(run: Run, pick: Pick) -> None:
    """Gradients are cleared or edited through the groups while a block is open."""
    run.calm()
    names = [name for name in run.trained() if run.by_hand[name].grad is not None]
    if not names:
        return
    name, factor = pick.of(names), pick.of((None, 0.0, -1.0))
    index = run.owners(name)[0]
    run.begins([index])
    with mpinit.scale_loss(torch.zeros((), device=device()), run.optimizers[index]):
        parameter, number = run.weight(name), run.by_hand[name]
        parameter.grad = None if factor is None else parameter.grad * factor
        number.grad = None if factor is None else number.grad * factor  # type: ignore[operator]
    run.checked(0)


def _grad_scaler(run: Run, pick: Pick, overflows: bool = False) -> None:
    """mpinit's GradScaler, for all optimizers."""
    run.clear_all()
    if not run.trained():
        return
    loss_id = pick.of(range(LOSSES))
    gradients = run.gradients(pick, run.trained())
    bad = pick.of(list(gradients)) if overflows and run.setup.loss_scale == "dynamic" else None
    scaler = mpinit.GradScaler(run.optimizers, loss_id)
    run.begins(range(len(run.optimizers)))
    scaler.scale(run.loss(gradients, bad)).backward()
    run.add(gradients, bad)
    unscales = pick.of((True, False))
    for index, optimizer in enumerate(run.optimizers):
        if not any(name in gradients for name in run.members(index)):
            list(mpinit.master_params(optimizer))  # which finds no gradients that could be scaled
            continue
        if unscales:
            scaler.unscale_(optimizer)
        if run.scalers[0].dynamic and run.infinite(run.members(index)):
            run.overflowed.add(index)
        scaler.step(optimizer)
        run.step_by_hand(index)
    scaler.update()
    run.scalers[loss_id].update(run.infinite(SIZES))
    run.clear_all()


def _given(run: Run, pick: Pick, how: str) -> tuple[str, Any] | None:
    """A weight whose gradient is to be changed, and what stands for it in the model, groups or master_params."""
    run.calm()
    if not run.trained():
        return None
    name = pick.of(run.trained())
    if how == "model":
        return name, run.weight(name)
    index = run.owners(name)[0]
    if how == "groups":
        given = [parameter for group in run.optimizers[index].param_groups for parameter in group["params"]]
    else:
        given = list(mpinit.master_params(run.optimizers[index]))
    return name, given[run.members(index).index(name)]


def _replace(run: Run, pick: Pick, how: str) -> None:
    found = _given(run, pick, how)
    if found is None:
        return
    name, parameter = found
    values = pick.of((None, *(run.pattern(name, value) for value in VALUES)))
    # None, of split masters, allows any dtype. Otherwise it is float32; or the weight's own, if the weight was added to
    # the groups since the last step.
    dtype = parameter.grad_dtype
    if dtype is None:
        dtype = run.setup.half if pick.of((False, True)) else torch.float32
    parameter.grad = None if values is None else values.to(dtype, copy=True)
    run.by_hand[name].grad = values
    if how == "master_params":
        list(mpinit.master_params(run.optimizers[run.owners(name)[0]]))


def _edit(run: Run, pick: Pick, how: str) -> None:
    found = _given(run, pick, how)
    factor = pick.of((-1.0, 2.0, 0.0))
    if found is None or run.by_hand[found[0]].grad is None:
        return
    number: Any = run.by_hand[found[0]]
    if exact(number.grad * factor):
        found[1].grad.mul_(factor)
        number.grad = number.grad * factor


def _clip(run: Run, pick: Pick, how: str) -> None:
    """The norm of an optimizer's gradients; what is left is rounded to what every type holds."""
    run.calm()
    index = pick.of(range(len(run.optimizers)))
    optimizer = run.optimizers[index]
    names = [name for name in dict.fromkeys(run.members(index)) if run.by_hand[name].grad is not None]
    grads: list[Any] = [run.by_hand[name].grad for name in names]
    norm = torch.stack([grad.norm() for grad in grads]).norm().item() if grads else 0.0
    if norm == 0.0 or not torch.isfinite(torch.tensor(norm)):
        return  # torch's own clipping of zeros in 16 bit divides 0 by 0
    if how == "mpinit":
        found = mpinit.clip_grad_norm_(optimizer, norm / 2)
    elif how == "master_params":
        found = torch.nn.utils.clip_grad_norm_(mpinit.master_params(optimizer), norm / 2)
    elif how == "groups":
        found = torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], norm / 2)
    else:
        found = torch.nn.utils.clip_grad_norm_([run.weight(name) for name in names], norm / 2)
    torch.testing.assert_close(float(found), norm, rtol=2.0**-6, atol=0.0)
    for name, before in zip(names, grads, strict=True):
        real = run.weight(name).grad
        torch.testing.assert_close(real.float(), before / 2, rtol=2.0**-6, atol=0.0)
        real.mul_(8).round_().div_(8)
        run.by_hand[name].grad = real.float().clone()


def _zero_grad(run: Run, pick: Pick, to_none: bool) -> None:
    index = pick.of((None, *range(len(run.optimizers))))
    owner, names = (run.model, list(SIZES)) if index is None else (run.optimizers[index], run.members(index))
    owner.zero_grad(set_to_none=to_none)
    for name in names:
        number = run.by_hand[name]
        if number.grad is not None:
            number.grad = None if to_none else torch.zeros_like(number.grad)
    run.calm()


def _changed(weight: Any, places: slice, value: float) -> Any:
    new = weight.detach().clone()
    new[places] = value
    return new


def _numpy(weight: Any, places: slice, value: float) -> None:
    bits = torch.int32 if weight.dtype is torch.float32 else torch.int16
    weight.detach().view(bits).numpy()[places] = torch.tensor(value, dtype=weight.dtype).view(bits).item()


def _vector(weight: Any, places: slice, value: float) -> None:
    new = torch.nn.utils.parameters_to_vector([weight])
    torch.nn.utils.vector_to_parameters(new.float().flip(0).to(new.dtype), [weight])


WRITES: dict[str, Callable[[Any, slice, float], Any]] = {
    "copy_": lambda weight, places, value: weight.copy_(_changed(weight, places, value)),
    "data": lambda weight, places, value: weight.data.__setitem__(places, value),
    "data =": lambda weight, places, value: setattr(weight, "data", _changed(weight, places, value)),
    "set_": lambda weight, places, value: weight.set_(_changed(weight, places, value)),
    "numpy": _numpy,
    "foreach": lambda weight, places, value: torch._foreach_copy_([weight], [_changed(weight, places, value)]),
    "view": lambda weight, places, value: weight.view(-1)[places].data.fill_(value),
    "vector": _vector,
    # Only their order changes: sums are what they were.
    "exchange": lambda weight, places, value: weight.view(-1).data.copy_(weight.view(-1).flip(0).clone()),
    "halve": lambda weight, places, value: weight.mul_(0.5),
    "nothing": lambda weight, places, value: weight.mul_(1),
}


def _place(run: Run, pick: Pick) -> tuple[str, slice, float] | None:
    # What is cast and has no master keeps its float32 numbers elsewhere.
    names = [name for name in SIZES if name in run.mastered or not run.casts(name)]
    if not names:
        return None
    name = pick.of(names)
    return name, pick.of((slice(0, 1), slice(1, 3), slice(-1, None))), pick.of((*VALUES, 0.0))


def _write(run: Run, pick: Pick, how: str) -> None:
    at = _place(run, pick)
    if at is not None:
        with torch.no_grad():
            WRITES[how](run.weight(at[0]), at[1], at[2])
        is_counted = how not in ("numpy", "view", "exchange")
        if how in ("data", "data =", "vector"):
            run.touched.add(at[0])
        run.written(at[0], is_counted)
        if not is_counted:
            run.uncounted.add(at[0])


def _write_master(run: Run, pick: Pick) -> None:
    """A master of ``master_params`` is written to, and looked at in one of the ways there are."""
    if not run.trained():
        return
    name = pick.of(run.trained())
    if name in run.uncounted:
        # torch has not counted a write to the weight: a block finds it by value, and a write to the master does not.
        with mpinit.float32_weights(run.model):
            run.uncounted.clear()
    index = run.owners(name)[0]
    given = list(mpinit.master_params(run.optimizers[index]))[run.members(index).index(name)]
    value = pick.of((1.0001, -0.3337))
    with torch.no_grad():
        given[:2] = value
        if given is run.weight(name):
            run.written(name)
        else:
            run.by_hand[name][:2] = value
    look = pick.of(("forward", "state_dict", "master_params", "step"))
    if look == "forward":
        run.model(torch.ones(1, 1, device=device()))
    elif look == "step":
        run.optimizers[index].step()
        run.step_by_hand(index)
    else:
        if look == "state_dict":
            run.model.state_dict()
        list(mpinit.master_params(run.optimizers[index]))


def _step(run: Run, pick: Pick) -> None:
    index = pick.of(range(len(run.optimizers)))
    run.optimizers[index].step()
    run.step_by_hand(index)


def _closure(run: Run, pick: Pick) -> None:
    index = pick.of(range(len(run.optimizers)))
    run.calm()
    names = [name for name in dict.fromkeys(run.members(index)) if run.by_hand[name].requires_grad]
    if not names:
        return
    gradients = run.gradients(pick, names)

    def closure() -> torch.Tensor:
        for optimizer in (run.optimizers[index], run.references[index]):
            optimizer.zero_grad()
        loss = run.loss(gradients)
        run.begins([index])
        with mpinit.scale_loss(loss, run.optimizers[index]) as scaled:
            scaled.backward()
        run.add(gradients)
        run.checked(0)
        return loss

    run.optimizers[index].step(closure)
    run.step_by_hand(index)


def _hook(run: Run, pick: Pick, when: str) -> None:
    """A step whose hook writes to a weight."""
    index, at = pick.of(range(len(run.optimizers))), _place(run, pick)
    if at is None:
        return
    optimizer = run.optimizers[index]
    register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
    run.look()
    if index in run.overflowed:
        run.clear_all()

    def hook(*_: Any) -> None:
        if when == "after":
            run.step_by_hand(index)
        run.weight(at[0]).data[at[1]] = at[2]
        run.touched.add(at[0])
        run.written(at[0])
        if when == "before":
            run.step_by_hand(index)

    handle = register(hook)
    try:
        optimizer.step()
    finally:
        handle.remove()


def _take_out(run: Run, index: int, group: int, name: str) -> None:
    for optimizer, parameter in ((run.optimizers[index], run.weight(name)), (run.references[index], run.by_hand[name])):
        members = optimizer.param_groups[group]["params"]
        del members[next(place for place, member in enumerate(members) if member is parameter)]
        optimizer.state.pop(parameter, None)
    run.groups[index][group].remove(name)


_WAYS_OF_GROUPING = ("add", "append", "remove", "remove group", "list")


def _grouped(run: Run, pick: Pick, how: str) -> None:
    """Groups are changed without gradients about, but for one that the newcomer has."""
    run.calm()
    index = pick.of(range(len(run.optimizers)))
    real, by_hand, groups = run.optimizers[index], run.references[index], run.groups[index]
    others = [name for name in SIZES if name not in run.members(index) and run.by_hand[name].requires_grad]
    if how in ("add", "append") and others:
        name = pick.of(others)
        if how == "add":
            real.add_param_group({"params": [run.weight(name)], "lr": 2 * RATE})
            by_hand.add_param_group({"params": [run.by_hand[name]], "lr": 2 * RATE})
            groups.append([name])
        else:
            real.param_groups[0]["params"].append(run.weight(name))
            by_hand.param_groups[0]["params"].append(run.by_hand[name])
            groups[0].append(name)
    elif how == "remove" and len(run.members(index)) > 1:
        name = pick.of(run.members(index))
        _take_out(run, index, next(place for place, names in enumerate(groups) if name in names), name)
    elif how == "remove group" and len(groups) > 1:
        place = pick.of(range(len(groups)))
        for name in list(groups[place]):
            _take_out(run, index, place, name)
        del groups[place], real.param_groups[place], by_hand.param_groups[place]
    elif how == "list":
        groups[0].reverse()
        real.param_groups[0]["params"] = [run.weight(name) for name in groups[0]]
        by_hand.param_groups[0]["params"] = [run.by_hand[name] for name in groups[0]]
    run.join()


def _freeze(run: Run, pick: Pick) -> None:
    run.calm()
    run.clear_all()
    name = pick.of(run.stepped() or list(SIZES))
    for parameter in (run.weight(name), run.by_hand[name]):
        parameter.requires_grad_(not parameter.requires_grad)
    run.join()


def _save(run: Run, pick: Pick) -> None:
    run.check(numbers=True)
    model = {name: value.clone() for name, value in run.model.state_dict().items()}
    shapes = [[len(names) for names in groups] for groups in run.groups]
    names = [list(map(tuple, groups)) for groups in run.groups]
    run.saved = model, [optimizer.state_dict() for optimizer in run.optimizers], shapes, names
    run.saved_by_hand = [optimizer.state_dict() for optimizer in run.references]  # type: ignore[attr-defined]


@torch.no_grad()
def _load(run: Run, pick: Pick) -> None:
    if run.saved is None or [list(map(tuple, groups)) for groups in run.groups] != run.saved[3]:
        return
    run.model.load_state_dict(run.saved[0])
    run.remainders = {}
    for name, number in run.by_hand.items():
        number.copy_(run.saved[0][f"{name}.weight"])
    crossed = pick.of((False, True))
    by_hand = run.saved_by_hand  # type: ignore[attr-defined]
    for index, (real, reference) in enumerate(zip(run.optimizers, run.references, strict=True)):
        real.load_state_dict(by_hand[index] if crossed else run.saved[1][index])
        reference.load_state_dict(run.saved[1][index] if crossed else by_hand[index])


def _read_by_others(run: Run, pick: Pick) -> None:
    """A plain float32 loop takes over what the checkpoint holds."""
    for index, optimizer in enumerate(run.optimizers):
        parameters = {name: torch.nn.Parameter(run.by_hand[name].detach().clone()) for name in run.members(index)}
        if not parameters:
            continue
        plain = SGD([{"params": [parameters[name] for name in names]} for names in run.groups[index]], lr=RATE)
        plain.load_state_dict(optimizer.state_dict())
        for name in run.members(index):
            mine = plain.state.get(parameters[name], {}).get("momentum_buffer")
            by_hand = run.references[index].state.get(run.by_hand[name], {}).get("momentum_buffer")
            same(mine, by_hand, f"loaded momentum of {name}")


def _again(run: Run, pick: Pick) -> None:
    run.undo()
    run.initialize()


def _deepcopy(run: Run, pick: Pick) -> None:
    run.copied()
    run.initialize()


KINDS: dict[str, Kind] = {
    "backward": _scaled,
    "step": _step,
    "overflow": functools.partial(_scaled, overflows=True),
    "raises before": functools.partial(_scaled, raises="before"),
    "raises after": functools.partial(_scaled, raises="after"),
    "plain backward": _plain,
    "inside": _inside,
    "grad_scaler": _grad_scaler,
    "grad_scaler overflow": functools.partial(_grad_scaler, overflows=True),
    **{f"replace {how}": functools.partial(_replace, how=how) for how in ("model", "groups", "master_params")},
    **{f"edit {how}": functools.partial(_edit, how=how) for how in ("model", "groups", "master_params")},
    **{f"clip {how}": functools.partial(_clip, how=how) for how in ("model", "groups", "master_params", "mpinit")},
    **{f"zero_grad {none}": functools.partial(_zero_grad, to_none=none) for none in (True, False)},
    **{f"write {how}": functools.partial(_write, how=how) for how in WRITES},
    "write master": _write_master,
    "closure": _closure,
    **{f"hook {when}": functools.partial(_hook, when=when) for when in ("before", "after")},
    **{f"group {how}": functools.partial(_grouped, how=how) for how in _WAYS_OF_GROUPING},
    "freeze": _freeze,
    "save": _save,
    "load": _load,
    "read by others": _read_by_others,
    "undo": _again,
    "deepcopy": _deepcopy,
}
