"""What the law asks for and is not so yet, in issue 10's words; the list shrinks to nothing."""

from __future__ import annotations

import functools
import os

from law_world import Setup

# (the beginning of a kind of action's or of a look's name, "split", "full", "none" or "any" masters): what is wrong.
OPEN: dict[tuple[str, str], str] = {
    ("see:groups", "split"): "whoever iterates over param_groups, split masters included",
    ("see:master after forward", "full"): "a write to either side is seen by the other before the next forward",
    ("stray", "any"): "scaled gradients never reach a step",
    ("joins_late", "any"): "scaled gradients never reach a step, whatever was done to the groups",
    ("gradient:conflict", "full"): "assigning a 16-bit gradient by hand raises",
    ("gradient:conflict", "split"): "both changed differently is a RuntimeError that names the parameter",
    ("gradient:replace:weight", "full"): "assigning a 16-bit gradient by hand raises",
    ("gradient:replace:weight", "split"): "any floating dtype may be assigned by hand",
    ("gradient:replace:group", "full"): "p.grad = ... over param_groups ignored or summed stale",
    ("gradient:replace:group", "split"): "p.grad = ... over param_groups ignored",
    ("gradient:none:group", "full"): "p.grad = None over param_groups ignored",
    ("gradient:none:group", "split"): "p.grad = None over param_groups ignored",
    ("gradient:edit:group", "split"): "whoever iterates over param_groups, split masters included",
    ("clip:groups", "split"): "clip_grad_norm_ over param_groups clips nothing (split)",
    ("write:group", "full"): "optimizer with its own parameter list, master.data.fill_() don't reach the model",
    ("write:weight:numpy", "full"): "a write is seen however it was made (numpy view)",
    ("write:weight:numpy", "split"): "a write is seen however it was made (numpy view)",
    ("write:weight:in_forward", "split"): "what was not changed keeps its low bits, at small-block grain",
    ("write:weight:copy", "split"): "what was not changed keeps its low bits, at small-block grain",
    ("write:weight:element", "split"): "what was not changed keeps its low bits, at small-block grain",
    ("write:weight:foreach", "split"): "what was not changed keeps its low bits, at small-block grain",
    ("nothing:mul_1", "split"): "in-place no-op wipes split remainders",
    ("nothing:copy", "split"): "in-place no-op wipes split remainders",
    ("hook:before:weight", "full"): "step pre/post hooks' writes lost",
    ("hook:after:weight", "full"): "step pre/post hooks' writes lost",
    ("hook:before", "split"): "step pre/post hooks' writes lost; split fires step hooks once a bucket",
    ("hook:after", "split"): "step pre/post hooks' writes lost; split fires step hooks once a bucket",
    ("groups:put_back", "full"): "membership is read from param_groups at every step",
    ("groups:put_back", "split"): "membership is read from param_groups at every step",
    ("groups:put_all", "full"): 'group["params"] = list(model.parameters()) never moves',
    ("groups:put_all", "split"): 'group["params"] = list(model.parameters()) never moves',
    ("groups:replace", "any"): 'group["params"][i] = new (O1: gradient stays scaled; O2: never moves)',
    ("groups:add", "full"): "one weight in two optimizers",
    ("groups:add", "split"): "one weight in two optimizers",
    ("groups:remove", "full"): "undo at any time: weights are float32",
    ("groups:remove", "split"): "undo at any time: weights are float32",
    ("freeze:group", "full"): "freezing through groups ignored",
    ("freeze:group", "split"): "freezing through groups ignored",
}


def masters_of(setup: Setup) -> str:
    """ "split", "full" or "none"."""
    return "split" if setup.splits else ("full" if setup.has_masters else "none")


@functools.cache
def is_open(kind: str, setup: Setup) -> bool:
    """Whether this kind of action, or look, is known to go wrong with this set-up."""
    if os.environ.get("LAW_OPEN"):
        return False
    return any(kind.startswith(name) and where in ("any", masters_of(setup)) for name, where in OPEN)
