"""What the state machine of the law does to parameter groups and ``requires_grad``; saving, loading and undoing."""

from __future__ import annotations

import torch
from law_gradients import join
from law_run import SIDES, Kind, Pick, Run
from law_world import read


def _freeze(run: Run, pick: Pick, side: str) -> None:
    """Switch ``requires_grad`` off, or on again where it was switched off on this side."""
    run.clear_all()
    frozen = [name for name, number in run.law.numbers.items() if number.frozen == side]
    name = pick.of(frozen or run.members() or [""])
    if not name or (len(run.members()) == 1 and not frozen):
        return
    number = run.number(name)
    run.side(name, side).requires_grad_(bool(frozen))
    number.frozen = None if frozen else side
    if frozen:
        # What a backward pass left meanwhile on the other side of what was frozen on this one.
        for owner in run.law.owners(name):
            run.entry(name, owner).grad = None
        run.world.weight(name).grad = None
        run.look()


def _calm(run: Run) -> None:
    """Groups are changed without gradients about, and with nothing frozen or unseen."""
    run.thaw()
    run.forward()


def put_back(run: Run, pick: Pick) -> None:
    """``group["params"][i] = weight``: the model's own parameter where its master stood."""
    index = pick.of(range(len(run.optimizers)))
    _calm(run)
    name = pick.of(run.law.members(index))
    for names, group in zip(run.law.groups[index], run.optimizers[index].param_groups, strict=True):
        if name in names:
            group["params"][names.index(name)] = run.world.weight(name)
    run.fresh_entries.add((name, index))


def put_all(run: Run, pick: Pick) -> None:
    """``group["params"] = list(model.parameters())``: those that no other group of the optimizer has."""
    index = pick.of(range(len(run.optimizers)))
    _calm(run)
    groups = run.law.groups[index]
    elsewhere = {name for group in groups[1:] for name in group}
    names = [name for name in run.law.numbers if name not in elsewhere]
    run.optimizers[index].param_groups[0]["params"] = [run.world.weight(name) for name in names]
    groups[0] = names
    for name in names:
        run.joined(name, index)


def replace(run: Run, pick: Pick) -> None:
    """``group["params"][i] = new``: a weight that the optimizer did not have, for one that it had."""
    index = pick.of(range(len(run.optimizers)))
    _calm(run)
    members = run.law.members(index)
    others = [name for name in run.law.numbers if name not in members]
    if not others:
        return
    old, new = pick.of(members), pick.of(others)
    group, place = _leave(run, old, index)
    run.optimizers[index].param_groups[group]["params"].insert(place, run.world.weight(new))
    run.law.groups[index][group].insert(place, new)
    run.joined(new, index)


def remove(run: Run, pick: Pick) -> None:
    """``del group["params"][i]``."""
    index = pick.of(range(len(run.optimizers)))
    _calm(run)
    if len(run.law.members(index)) > 1:
        _leave(run, pick.of(run.law.members(index)), index)


def _leave(run: Run, name: str, index: int) -> tuple[int, int]:
    number, optimizer = run.number(name), run.optimizers[index]
    optimizer.state.pop(run.entry(name, index), None)
    number.moments.pop(index, None)
    for group, names in enumerate(run.law.groups[index]):
        if name in names:
            place = names.index(name)
            del names[place], optimizer.param_groups[group]["params"][place]
            break
    run.fresh_entries.discard((name, index))
    return group, place


def add(run: Run, pick: Pick) -> None:
    """A weight joins an optimizer that does not have it, one that another has too."""
    index = pick.of(range(len(run.optimizers)))
    _calm(run)
    others = [name for name in run.law.numbers if name not in run.law.members(index)]
    if others:
        join(run, pick.of(others), index, added=pick.of((True, False)))


# -- saving and undoing -----------------------------------------------------------------------------------------


def forward(run: Run, pick: Pick) -> None:
    """A forward."""
    run.forward()


def save(run: Run, pick: Pick) -> None:
    """``model.state_dict()``, kept for later."""
    numbers = run.save()
    run.saved = {f"{name}.weight": torch.tensor(values).float().view(-1, 1) for name, values in numbers.items()}


def load(run: Run, pick: Pick) -> None:
    """``model.load_state_dict()`` of what was kept."""
    if run.saved is None:
        return
    run.model.load_state_dict(run.saved)
    for name, number in run.law.numbers.items():
        number.load(read(run.saved[f"{name}.weight"]))


def undo(run: Run, pick: Pick) -> None:
    """Undo, look at the weights, initialise again."""
    run.begin_again()


OTHER_KINDS: dict[str, Kind] = {
    "groups:put_back": put_back,
    "groups:put_all": put_all,
    "groups:replace": replace,
    "groups:remove": remove,
    "groups:add": add,
    "forward": forward,
    "save": save,
    "load": load,
    "undo": undo,
}
for _side in SIDES:
    OTHER_KINDS[f"freeze:{_side}"] = lambda run, pick, side=_side: _freeze(run, pick, side)
