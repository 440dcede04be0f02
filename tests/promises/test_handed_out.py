"""Float32 numbers that are handed out between steps, against numbers by hand (``support/handed_out.py``).

Entries of a state dict, masters, and parameters inside ``float32_weights``: a write through any of them counts, or is
refused by name; a kept one is live or refused; a weight whose memory was given another meaning is right or refused.
At the end sequences of the same are played at random (``support/handed_out_machine.py``): some in every run, 20,000 of
them over the four stores with

    pytest -n 2 -m nightly tests/promises/test_handed_out.py

``HANDED_OUT_RUNS`` sets another number.

Below the public face: the registry shows which session has a weight.
"""

import contextlib
import copy
import gc
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from handed_out import BF16, F32, KINDS, Net, Training, Weight, adamw, batch, loss_of, sgd
from handed_out_machine import HandedOut
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from torch import Tensor, nn

import mpinit
from mpinit import registry

# Gradients set by hand are stepped: the warning is right, and tested elsewhere.
pytestmark = pytest.mark.filterwarnings("ignore:.*did not come through mpinit.scale_loss")

# The four stores; in float16 a store is what it is in bfloat16, and some tests try it.
STORES = ["full", "split", "model", "O3"]
COPIES = [name for name in STORES if KINDS[name].copies]
MASTERS = [name for name, kind in KINDS.items() if kind.masters]

every_kind = pytest.mark.parametrize("kind", STORES)
float16_too = pytest.mark.parametrize("kind", KINDS)
kinds_with_copies = pytest.mark.parametrize("kind", COPIES)  # which are the 16-bit ones
kinds_with_masters = pytest.mark.parametrize("kind", MASTERS)


@pytest.fixture(autouse=True)
def _no_session_is_left() -> Iterator[None]:
    """A session that a failed test leaves in a state that is refused fails no test after it."""
    yield
    for session in reversed(registry.live()):
        with contextlib.suppress(RuntimeError):
            session.undo()
        session.is_live = False


def trained(kind: str, make: Any = sgd, **keywords: Any) -> Training:
    """A training after two iterations."""
    training = Training(kind, make, **keywords)
    training.iterate()
    training.iterate()
    return training


def clamp(tensor: Tensor) -> Tensor:
    """A write that 16 bits hold."""
    return tensor.clamp_(-0.25, 0.25)


def meanings(training: Training) -> dict[str, Tensor]:
    """Compute by hand what weights mean."""
    return {name: weight.meaning.clone() for name, weight in training.by_hand.weights.items()}


# -- ways of reading: each compares what it has read ------------------------------------------------------------------


def read_by_step(training: Training) -> None:
    """Step with gradients set by hand, so that no forward has read before."""
    training.zero_grad()
    for name in training.trained:
        weight = training.weight(name)
        weight.grad = torch.ones_like(weight, dtype=weight.grad_dtype or weight.dtype)
        training.by_hand.gradients[name] = torch.ones(weight.shape)
    with warnings.catch_warnings():
        # Where an earlier test has compiled a model, the step warns that no forward has used the writes.
        warnings.filterwarnings("ignore", ".*the forward pass has not used the new numbers")
        training.step()


def read_by_block(training: Training) -> None:
    def read() -> None:
        with mpinit.float32_weights(training.model):
            found.update({name: p.detach().clone() for name, p in training.model.named_parameters()})

    found: dict[str, Tensor] = {}
    training.read(read)
    for name, weight in training.by_hand.weights.items():
        weight.check(found[name], f"{name} inside")
        weight.follow()


def read_by_deepcopy(training: Training) -> None:
    copied = training.read(lambda: copy.deepcopy(training.model))
    for name, weight in training.by_hand.weights.items():
        weight.check(copied.get_parameter(name).float(), f"copied {name}")


def read_by_deepcopy_of_both(training: Training) -> None:
    copied, _ = training.read(lambda: copy.deepcopy((training.model, training.optimizer)))
    for name, weight in training.by_hand.weights.items():
        weight.check(copied.get_parameter(name).float(), f"copied {name}")


def read_by_undo(training: Training) -> None:
    check, training.check_weights = training.check_weights, lambda: None  # type: ignore[method-assign]
    training.read(lambda: mpinit.undo(training.model))
    training.check_weights = check  # type: ignore[method-assign]
    for name, weight in training.by_hand.weights.items():
        weight.check(training.weight(name), f"undone {name}")


def read_by_train_state(training: Training) -> None:
    state = mpinit.TrainState(training.model, training.optimizer)
    found = training.read(state.state_dict)["model"]
    for name, weight in training.by_hand.weights.items():
        weight.check(found[name], f"{name} of a TrainState")


def read_by_add_optimizers(training: Training) -> None:
    training.model.last.requires_grad_(True)
    optimizer = torch.optim.SGD(training.model.last.parameters(), lr=0.1)
    training.read(lambda: mpinit.add_optimizers(optimizer))


READS: dict[str, Callable[[Training], Any]] = {
    "forward": Training.forward,
    "step": read_by_step,
    "state_dict": Training.check,
    "master_params": Training.masters,
    "float32_weights": read_by_block,
    "deepcopy": read_by_deepcopy,
    "deepcopy of both": read_by_deepcopy_of_both,
    "undo": read_by_undo,
    "TrainState": read_by_train_state,
    "add_optimizers": read_by_add_optimizers,
}
every_read = pytest.mark.parametrize("read", READS)

WRITES: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda tensor: tensor.mul_(0.5),
    "clamp_": clamp,
    "copy_": lambda tensor: tensor.copy_(torch.full_like(tensor, -1.0)),
    "a slice": lambda tensor: tensor[1:2].fill_(0.5),
    "a view": lambda tensor: tensor.view(-1)[2:].mul_(2.0),
    "a transposed view": lambda tensor: tensor.t()[0].fill_(2.0),
    "out=": lambda tensor: torch.mul(tensor, 0.5, out=tensor),
    "foreach": lambda tensor: torch._foreach_mul_([tensor], 0.5),
    "zero_": lambda tensor: tensor.zero_(),
}
every_write = pytest.mark.parametrize("write", WRITES)


# -- a. entries of a state dict ---------------------------------------------------------------------------------------


@float16_too
@pytest.mark.parametrize("make", [sgd, adamw])
def test_entries_hold_the_meaning_after_steps_and_writes(kind: str, make: Any) -> None:
    training = Training(kind, make)
    training.check()
    for _ in range(3):
        training.iterate()
        training.check()
        training.write("norm.weight", lambda weight: weight.clamp_(-0.75, 0.75))
        training.write("first.weight", lambda weight: weight[1].mul_(0.5))
        training.check()


@float16_too
def test_tied_names_share_one_copy(kind: str) -> None:
    training = trained(kind)
    state = training.state_dict()
    assert state["tied.weight"].data_ptr() == state["first.weight"].data_ptr()
    with torch.no_grad():
        state["tied.weight"][0] = 0.5
    assert torch.equal(state["first.weight"], state["tied.weight"])
    after = training.model.state_dict()
    assert torch.equal(after["first.weight"], state["first.weight"])
    assert torch.equal(after["tied.weight"], state["first.weight"])


@every_kind
@every_read
def test_write_to_an_entry_counts_before_anything_reads(kind: str, read: str) -> None:
    training = trained(kind)
    state = training.state_dict(keep=True)
    with torch.no_grad():
        for name in ("first.weight", "norm.bias", "last.weight"):
            clamp(state[name])
            if not training.kind.copies:
                training.wrote(name)
    READS[read](training)


@float16_too
@every_write
@pytest.mark.parametrize("name", ["first.weight", "last.weight"])
def test_every_write_that_torch_counts_to_an_entry_counts(kind: str, write: str, name: str) -> None:
    training = trained(kind)
    state = training.state_dict(keep=True)
    with torch.no_grad():
        WRITES[write](state[name])
    if not training.kind.copies:
        training.wrote(name)
    training.check()
    training.iterate()
    training.check()


@every_kind
def test_entry_is_written_and_read_several_times(kind: str) -> None:
    """Write and read an entry several times: until the weight changes, it is equal to the weight."""
    training = trained(kind)
    state = training.state_dict(keep=True)
    for write in ("mul_", "a slice", "clamp_"):
        with torch.no_grad():
            WRITES[write](state["first.weight"])
        if not training.kind.copies:
            training.wrote("first.weight")
        training.forward()
        training.check()


@float16_too
def test_state_dict_clamped_in_every_iteration_trains_as_float32(kind: str) -> None:
    """Train a WGAN that clamps the entries of a new state dict in each iteration."""
    training = trained(kind, adamw)
    for _ in range(3):
        state = training.state_dict(keep=True)
        with torch.no_grad():
            for name in training.trained:
                clamp(state[name])
                if not training.kind.copies:
                    training.wrote(name)
        training.iterate()
    training.check()


def move_by_load(training: Training) -> None:
    new = {name: torch.full_like(value, 0.375) for name, value in training.model.state_dict().items()}
    training.model.load_state_dict(new)
    for name, weight in training.by_hand.weights.items():
        weight.assign(new[name])


def move_by_another_entry(training: Training) -> None:
    other = training.model.state_dict()
    with torch.no_grad():
        other["first.weight"].fill_(0.375)
    training.by_hand.weights["first.weight"].assign(other["first.weight"])
    training.model.state_dict()


def move_by_master(training: Training) -> None:
    master = training.masters()[0]
    with torch.no_grad():
        master.fill_(0.375)
    if training.kind.masters:
        training.by_hand.weights["first.weight"].assign(torch.full((4, 4), 0.375))
    else:
        training.wrote("first.weight")


MOVES: dict[str, Callable[[Training], Any]] = {
    "a step": Training.iterate,
    "load_state_dict": move_by_load,
    "a write": lambda training: training.write("first.weight", lambda weight: weight.mul_(0.5)),
    "a write to data": lambda training: training.write("first.weight", lambda weight: weight.data.mul_(0.5)),
    "another entry": move_by_another_entry,
    "a master": move_by_master,
}


@kinds_with_copies
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("read", ["forward", "step", "float32_weights"])
def test_write_to_an_entry_of_a_moved_weight_is_refused_by_name(kind: str, move: str, read: str) -> None:
    training = trained(kind)
    kept = training.model.state_dict()
    MOVES[move](training)
    training.check()
    with torch.no_grad():
        clamp(kept["first.weight"])
    expected = meanings(training)
    weights = {name: training.weight(name).detach().clone() for name in training.names}
    with pytest.raises(RuntimeError, match=r"(?s)(first|tied)\.weight.*state_dict\(\)"):
        READS[read](training)
    for name, weight in weights.items():
        assert torch.equal(training.weight(name), weight), "nothing has changed"
    after = training.model.state_dict()
    for name in training.names:
        assert torch.equal(after[name], expected[name]), "the entry is dropped"
    training.iterate()
    training.check()


@kinds_with_copies
def test_state_dict_kept_from_before_the_loop_is_refused_once_written(kind: str) -> None:
    training = Training(kind)
    state = training.model.state_dict()
    training.iterate()
    with torch.no_grad():
        for value in state.values():
            clamp(value)
    # The frozen weights have not moved: writes to these count, in whichever read.
    last = {name: state[name].clone() for name in ("last.weight", "last.bias")}
    for _ in range(10):
        try:
            training.model(batch(9))
        except RuntimeError as error:
            assert "state_dict()" in str(error)
        else:
            break
    else:
        raise AssertionError("the refusals do not end")
    for name, value in last.items():
        training.by_hand.weights[name].assign(value)
    training.check()
    training.iterate()
    training.check()


@kinds_with_copies
def test_writes_to_other_weights_count_after_a_refusal(kind: str) -> None:
    training = trained(kind)
    state = training.state_dict(keep=True)
    training.write("first.weight", lambda weight: weight.mul_(0.5))
    with torch.no_grad():
        clamp(state["first.weight"])
        clamp(state["norm.weight"])
    training.forward()
    assert torch.equal(training.model.state_dict()["norm.weight"], state["norm.weight"])
    training.check()


@kinds_with_copies
def test_entries_that_were_only_read_stay_as_they_were(kind: str) -> None:
    training = trained(kind)
    state = training.model.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    for _ in range(3):
        training.iterate()
    assert all(torch.equal(state[name], before[name]) for name in state)
    training.check()


def test_entries_are_the_parameters_where_these_are_float32() -> None:
    training = trained("model")
    state = training.model.state_dict()
    training.iterate()
    assert all(torch.equal(state[name], training.weight(name)) for name in training.names)


@kinds_with_copies
@every_read
def test_writes_to_two_state_dicts_are_merged(kind: str, read: str) -> None:
    training = trained(kind)
    one, other = training.state_dict(keep=True), training.state_dict(keep=True)
    with torch.no_grad():
        one["first.weight"][0] = 0.5
        one["norm.weight"][:] = -1.0
        other["first.weight"][1] = -1.0
        other["norm.weight"][:] = -1.0
        other["first.bias"].mul_(0.5)
    READS[read](training)


@kinds_with_copies
@pytest.mark.parametrize("read", ["forward", "state_dict", "float32_weights"])
def test_writes_to_one_element_of_two_state_dicts_are_refused(kind: str, read: str) -> None:
    training = trained(kind)
    one, other = training.state_dict(keep=True), training.state_dict(keep=True)
    with torch.no_grad():
        one["first.weight"][0] = 0.5
        other["first.weight"][:, 0] = -1.0
    READS[read](training)


@kinds_with_copies
def test_refusal_of_two_writes_to_one_element_names_the_weight(kind: str) -> None:
    training = trained(kind)
    one, other = training.model.state_dict(), training.model.state_dict()
    with torch.no_grad():
        one["first.weight"][0] = 0.5
        other["first.weight"][:, 0] = -1.0
    before = training.weight("first.weight").detach().clone()
    with pytest.raises(RuntimeError, match=r"(?s)(first|tied)\.weight.*state_dict\(\)"):
        training.model.state_dict()
    assert torch.equal(training.weight("first.weight"), before)


@every_kind
def test_state_dict_of_inference_mode_is_an_ordinary_one(kind: str) -> None:
    training = trained(kind)
    with torch.inference_mode():
        state = training.model.state_dict()
        whole = mpinit.TrainState(training.model, training.optimizer).state_dict()
    for name, weight in training.by_hand.weights.items():
        assert not state[name].is_inference()
        assert not whole["model"][name].is_inference()
        weight.check(state[name], name)
        weight.check(whole["model"][name], name)
    with torch.no_grad():
        clamp(state["norm.weight"])
    training.by_hand.weights["norm.weight"].assign(state["norm.weight"])
    training.check()


@every_kind
def test_write_inside_of_inference_mode_counts(kind: str) -> None:
    training = trained(kind)
    state = training.state_dict(keep=True)
    with torch.inference_mode():
        clamp(state["norm.weight"])
        if not training.kind.copies:
            training.wrote("norm.weight")
        training.forward()
    training.check()


# -- the meaning: what was written to a weight counts, and a look costs no bits ---------------------------------------


@float16_too
@every_write
@pytest.mark.parametrize("through", ["weight", "data"])
def test_write_to_a_weight_counts(kind: str, write: str, through: str) -> None:
    reach: dict[str, Any] = {"weight": lambda weight: weight, "data": lambda weight: weight.data}
    training = trained(kind)
    training.write("first.weight", lambda weight: WRITES[write](reach[through](weight)))
    training.check()
    training.write("last.weight", lambda weight: WRITES[write](reach[through](weight)))
    training.iterate()
    training.check()


@float16_too
@pytest.mark.parametrize("value", [0.0, -0.0, float("inf"), -float("inf")])
def test_written_zeros_and_infinities_mean_exactly_these(kind: str, value: float) -> None:
    training = trained(kind)
    training.write("first.weight", lambda weight: weight.fill_(value))
    assert torch.equal(training.model.state_dict()["first.weight"], torch.full((4, 4), value))
    with mpinit.float32_weights(training.model):
        assert torch.equal(training.weight("first.weight"), torch.full((4, 4), value))


@every_kind
@pytest.mark.parametrize("value", [0.0, -0.0, float("inf")])
@pytest.mark.parametrize("is_trained", [True, False])
def test_written_zeros_mean_exactly_these_after_a_train_state_was_read(
    is_trained: bool, value: float, kind: str
) -> None:
    """Make the optimizer's state by a step with a learning rate of 0, as torch's functions behind TrainState do."""
    training = trained(kind) if is_trained else Training(kind)
    training.write("first.weight", lambda weight: weight.fill_(value))
    for _ in range(2):
        mpinit.TrainState(training.model, training.optimizer).state_dict()
        assert torch.equal(training.model.state_dict()["first.weight"], torch.full((4, 4), value))
    READS["undo"](training)


@every_kind
def test_written_numbers_mean_these_to_half_a_unit(kind: str) -> None:
    """To the bit, but where the weight is split: there the low bits of before stay."""
    training = trained(kind)
    training.write("first.weight", lambda weight: weight.fill_(0.5))
    found = training.model.state_dict()["first.weight"]
    if kind == "split":
        assert torch.equal(found.to(BF16), torch.full((4, 4), 0.5, dtype=BF16))
    else:
        assert torch.equal(found, torch.full((4, 4), 0.5))


LOOKS = ["forward", "state_dict", "deepcopy", "TrainState"]


@float16_too
@pytest.mark.parametrize("looks", [[], *([each] for each in LOOKS), LOOKS])
@pytest.mark.parametrize("value", [0.0, 0.5])
def test_weights_exchanged_for_an_evaluation_keep_every_bit(kind: str, looks: list[str], value: float) -> None:
    training = trained(kind)
    before = meanings(training)
    backup = {name: training.weight(name).detach().clone() for name in training.names}
    for name in training.names:
        training.write(name, lambda weight: weight.fill_(value))
    for look in looks:
        READS[look](training)
    for name in training.names:
        training.write(name, lambda weight, name=name: weight.copy_(backup[name]))  # type: ignore[misc]
    after = training.model.state_dict()
    for name in training.names:
        assert torch.equal(after[name], before[name]), name
    training.iterate()
    training.check()


@kinds_with_masters
@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize("asks_for_masters", [False, True])
@pytest.mark.parametrize("look", LOOKS)
def test_data_exchanged_for_evaluations_keeps_every_bit(
    kind: str, is_wide: bool, asks_for_masters: bool, look: str
) -> None:
    """Evaluate an average, which for the most part rounds to the weights' own numbers, as is usual."""
    training = trained(kind)
    if asks_for_masters:
        list(mpinit.master_params(training.optimizer))
    before = {name: training.model.state_dict()[name].clone() for name in training.trained}
    for factor in (1.001, 1.5):
        backup = {name: training.weight(name).data for name in before}
        for name, values in before.items():
            shadow = values * factor
            training.weight(name).data = shadow if is_wide else shadow.to(backup[name].dtype)
        training.model(batch(5))
        found = training.model.state_dict()
        assert not is_wide or all(torch.equal(found[name], before[name] * factor) for name in before)
        for name, values in backup.items():
            training.weight(name).data = values
        READS[look](training)
        after = training.model.state_dict()
        assert all(torch.equal(after[name], before[name]) for name in before)
    training.iterate()
    training.check()


@every_kind
@pytest.mark.parametrize("look", [*LOOKS, "master_params", "float32_weights", "deepcopy of both"])
def test_reading_between_steps_changes_no_bit(kind: str, look: str) -> None:
    training = Training(kind, adamw)
    for _ in range(3):
        READS[look](training)
        training.iterate()
        training.write("norm.bias", clamp)
        READS[look](training)
    training.check()


# -- b. masters -------------------------------------------------------------------------------------------------------


@every_kind
def test_master_params_yields_the_same_objects(kind: str) -> None:
    training = Training(kind)
    kept = training.masters()
    for _ in range(3):
        training.iterate()
        assert all(one is other for one, other in zip(kept, mpinit.master_params(training.optimizer), strict=True))
    move_by_load(training)
    training.check()
    READS["float32_weights"](training)
    assert all(one is other for one, other in zip(kept, mpinit.master_params(training.optimizer), strict=True))


@float16_too
def test_kept_masters_have_the_weights_gradients_after_every_block(kind: str) -> None:
    training = Training(kind)
    kept = training.masters()
    for _ in range(3):
        training.zero_grad()
        training.backward()
        for name, master in zip(training.trained, kept, strict=True):
            assert master.grad is not None
            assert master.grad is training.weight(name).grad
        training.step()
        for name, master in zip(training.trained, kept, strict=True):
            weight = training.by_hand.weights[name]
            assert torch.equal(master, weight.meaning if training.kind.masters else weight.now)


WAYS_OF_CLIPPING: dict[str, Callable[[Training, list[Any]], Any]] = {
    "kept masters": lambda training, kept: torch.nn.utils.clip_grad_norm_(kept, 0.125),
    "masters": lambda training, kept: torch.nn.utils.clip_grad_norm_(mpinit.master_params(training.optimizer), 0.125),
    "mpinit": lambda training, kept: mpinit.clip_grad_norm_(training.optimizer, 0.125),
    "weights": lambda training, kept: torch.nn.utils.clip_grad_norm_(training.model.parameters(), 0.125),
    "kept masters' values": lambda training, kept: torch.nn.utils.clip_grad_value_(kept, 0.125),
}


@float16_too
@pytest.mark.parametrize("way", WAYS_OF_CLIPPING)
@pytest.mark.parametrize("is_plain", [False, True])
def test_clipping_counts_in_every_iteration(kind: str, way: str, is_plain: bool) -> None:
    """Check gradients after a backward pass without ``scale_loss``, at levels that do not need it."""
    if is_plain and (kind == "full16" or way.startswith("kept")):
        pytest.skip("gradients would be scaled; kept masters get theirs with the next query")
    training = Training(kind)
    kept = training.masters()
    for _ in range(4):
        training.zero_grad()
        training.backward(plainly=is_plain)
        by_hand = clipped_by_hand(training, way)
        WAYS_OF_CLIPPING[way](training, kept)
        for name, gradient in by_hand.items():
            assert torch.equal(training.weight(name).grad, gradient), name
        training.by_hand.gradients = {name: gradient.float() for name, gradient in by_hand.items()}
        training.step()
    training.check()


def clipped_by_hand(training: Training, way: str) -> dict[str, Tensor]:
    """The weights' gradients, clipped by torch on tensors of their own."""
    holders = {}
    for name in training.trained:
        gradient = training.weight(name).grad.detach().clone()
        holders[name] = nn.Parameter(torch.zeros_like(gradient))
        holders[name].grad = gradient
    if way.endswith("values"):
        torch.nn.utils.clip_grad_value_(holders.values(), 0.125)
    elif way == "mpinit":
        # In float32, whatever the gradients' dtype.
        norm = torch.nn.utils.get_total_norm([each.grad.float() for each in holders.values() if each.grad is not None])
        torch.nn.utils.clip_grads_with_norm_(holders.values(), 0.125, norm)
    else:
        torch.nn.utils.clip_grad_norm_(holders.values(), 0.125)
    return {name: holder.grad for name, holder in holders.items() if holder.grad is not None}


@every_kind
def test_kept_masters_have_the_gradients_of_plain_backward_passes_once_asked(kind: str) -> None:
    if kind == "full16":
        pytest.skip("gradients would not be unscaled")
    training = Training(kind)
    kept = training.masters()
    for _ in range(3):
        training.zero_grad()
        training.backward(plainly=True)
        list(mpinit.master_params(training.optimizer))
        for name, master in zip(training.trained, kept, strict=True):
            assert master.grad is training.weight(name).grad
        torch._foreach_mul_([master.grad for master in kept], 0.5)
        training.by_hand.gradients = {n: g * 0.5 for n, g in training.by_hand.gradients.items() if g is not None}
        training.step()
    training.check()


@pytest.mark.parametrize("kind", ["full", "split"])
@pytest.mark.parametrize("side", ["weight", "master"])
@pytest.mark.parametrize("how", ["replaced", "cleared", "in place", "in place by data"])
@pytest.mark.parametrize("read", ["step", "query", "forward", "clip"])
def test_gradient_changed_on_either_side_counts(kind: str, side: str, how: str, read: str) -> None:
    training = trained(kind)
    kept = training.masters()
    for _ in range(2):
        training.zero_grad()
        training.backward()
        name = "norm.weight"
        owner = training.weight(name) if side == "weight" else kept[training.trained.index(name)]
        if how == "replaced":
            owner.grad = torch.full_like(owner.grad, 0.5)
            training.by_hand.gradients[name] = torch.full(owner.shape, 0.5)
        elif how == "cleared":
            owner.grad = None
            training.by_hand.gradients[name] = None
        else:
            (owner.grad if how == "in place" else owner.grad.data).fill_(0.25)
            training.by_hand.gradients[name] = torch.full(owner.shape, 0.25)
        if read == "query":
            training.masters()
            training.check_gradients()
        elif read == "forward":
            training.forward()
            training.check_gradients()
        elif read == "clip":
            mpinit.clip_grad_norm_(training.optimizer, 1e6)
            training.check_gradients()
        training.step()
    training.check()


@every_kind
def test_gradients_cleared_through_kept_masters_are_cleared(kind: str) -> None:
    """Run the loop of apex's scripts: ``for p in masters: p.grad = None`` at the top of each iteration."""
    training = trained(kind)
    kept = training.masters()
    for _ in range(3):
        for master in kept:
            master.grad = None
        training.by_hand.gradients = dict.fromkeys(training.trained)
        training.backward()
        training.step()
    training.check()


@kinds_with_masters
def test_gradients_replaced_on_both_sides_are_refused_by_name(kind: str) -> None:
    training = trained(kind)
    kept = training.masters()
    training.zero_grad()
    training.backward()
    training.weight("first.bias").grad = torch.zeros(4)
    kept[training.trained.index("first.bias")].grad = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"first\.bias"):
        training.optimizer.step()


WRITES_TO_MASTERS = WRITES | {
    "below half a unit": lambda tensor: tensor.add_(2.0**-24),
    "data": lambda tensor: tensor.data.mul_(0.5),
    "a view of data": lambda tensor: tensor.data[1].fill_(0.5),
}


def kept_and_written(kind: str, write: str) -> Training:
    """A training whose masters were kept from before the first iteration, and written to after the second."""
    training = Training(kind)
    kept = training.masters()
    training.iterate()
    training.iterate()
    with torch.no_grad():
        WRITES_TO_MASTERS[write](kept[0])
    if not training.kind.masters:
        training.wrote("first.weight")
    return training


@every_kind
@pytest.mark.parametrize("write", WRITES_TO_MASTERS)
def test_every_write_to_a_kept_master_counts(kind: str, write: str) -> None:
    training = kept_and_written(kind, write)
    training.forward()
    training.check()


@every_kind
@pytest.mark.parametrize("write", ["clamp_", "data"])
@every_read
def test_write_to_a_kept_master_counts_before_anything_reads(kind: str, write: str, read: str) -> None:
    READS[read](kept_and_written(kind, write))


@every_kind
def test_kept_master_is_written_in_every_iteration(kind: str) -> None:
    training = Training(kind, adamw)
    kept = training.masters()
    for number in range(4):
        with torch.no_grad():
            (kept[0] if number % 2 else kept[0].data).mul_(0.5)
            kept[1].data.clamp_(-0.125, 0.125)
        if not training.kind.masters:
            training.wrote("first.weight")
            training.wrote("first.bias")
        training.iterate()
    training.check()


@pytest.mark.parametrize("to_master", ["op", "data"])
@pytest.mark.parametrize("to_weight", ["op", "data"])
@pytest.mark.parametrize("read", ["forward", "step", "state_dict", "master_params", "float32_weights"])
@pytest.mark.parametrize("iterations", [0, 2])
def test_weight_and_master_written_differently_are_refused_by_name(
    to_master: str, to_weight: str, read: str, iterations: int
) -> None:
    training = Training("full")
    kept = training.masters()
    for _ in range(iterations):
        training.iterate()
    weight, master = training.weight("first.weight"), kept[0]
    with torch.no_grad():
        (master.data if to_master == "data" else master)[0] = 0.5
        (weight.data if to_weight == "data" else weight)[0] = -1.0
    training.references.clear()  # their writes are judged here
    with pytest.raises(RuntimeError, match=r"(first|tied)\.weight"):
        READS[read](training)
    with torch.no_grad():
        master.copy_(weight)
    # Which has no low bits any more, unless the refused write is undone whole.
    by_hand = training.by_hand.weights["first.weight"]
    before = by_hand.beside
    by_hand.assign(weight.detach().float())
    by_hand.beside += before
    training.forward()
    training.check()
    training.iterate()


@kinds_with_masters
def test_weight_and_master_written_alike_are_the_master(kind: str) -> None:
    training = trained(kind)
    kept = training.masters()
    training.iterate()
    with torch.no_grad():
        kept[0][0] = 1.0001
        training.weight("first.weight").copy_(kept[0])
    expected = kept[0].detach().clone()
    training.by_hand.weights["first.weight"].assign(expected)
    training.check()
    training.iterate()
    training.check()


@kinds_with_masters
def test_weight_and_master_written_in_other_elements_both_count_or_are_refused(kind: str) -> None:
    training = trained(kind)
    kept = training.masters()
    training.iterate()
    with torch.no_grad():
        kept[0][0] = 1.0001
    training.write("first.weight", lambda weight: weight[1].fill_(0.5))
    training.check()
    training.iterate()
    training.check()


@float16_too
def test_kept_masters_work_after_a_skipped_step(kind: str) -> None:
    training = Training(kind, loss_scale=mpinit.DynamicLossScale(init=8.0))
    kept = training.masters()
    for overflows in (False, True, False, False):
        training.zero_grad()
        training.backward(overflows)
        if overflows:
            training.read(training.optimizer.step)
            assert mpinit.step_was_skipped(training.optimizer)
            continue
        torch.nn.utils.clip_grad_value_(kept, 0.0625)
        training.by_hand.gradients = {n: training.weight(n).grad.float() for n in training.trained}
        assert all(float(gradient.abs().max()) <= 0.0625 for gradient in training.by_hand.gradients.values())
        training.step()
    training.check()


def visible_state(owner: Any) -> dict[str, Any]:
    """The attributes of an object, and copies of the containers among them."""
    return {k: copy.copy(v) if isinstance(v, (dict, list)) else v for k, v in vars(owner).items()}


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_query_changes_neither_optimizer_nor_model(level: str) -> None:
    model = Net()
    optimizer = adamw(p for p in model.parameters() if p.requires_grad)
    mpinit.initialize(model, optimizer, opt_level=level)
    owners = [optimizer, *model.modules(), *model.parameters()]
    before = list(map(visible_state, owners))
    assert all(isinstance(master, nn.Parameter) for master in list(mpinit.master_params(optimizer)))
    assert list(map(visible_state, owners)) == before


@every_kind
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("writes", [False, True])
def test_query_changes_no_bit(kind: str, steps: int, writes: bool) -> None:
    training = Training(kind, adamw)
    for _ in range(steps):
        training.iterate()
    if writes:
        training.write("first.weight", clamp)
    own = copy.deepcopy(training.optimizer.state_dict())
    before = {name: value.clone() for name, value in training.model.state_dict().items()}
    groups = [id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]]
    weights = {name: training.weight(name).detach().clone() for name in training.names}
    for _ in range(2):
        list(mpinit.master_params(training.optimizer))
        mpinit.describe(training.model)
        mpinit.step_counts(training.optimizer)
    for name, weight in weights.items():
        assert torch.equal(training.weight(name), weight)
    assert groups == [id(parameter) for group in training.optimizer.param_groups for parameter in group["params"]]
    after = training.model.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert torch.equal(
        torch.tensor([len(each) for each in own["state"].values()]),
        torch.tensor([len(each) for each in training.optimizer.state_dict()["state"].values()]),
    )
    training.iterate()
    training.check()


# -- c. float32_weights -----------------------------------------------------------------------------------------------


def write_by_entry(training: Training) -> None:
    state = training.state_dict(keep=True)
    with torch.no_grad():
        clamp(state["first.weight"])
    if not training.kind.copies:
        training.wrote("first.weight")


def write_by_master(training: Training) -> None:
    kept = training.masters()
    with torch.no_grad():
        clamp(kept[0])
    if not training.kind.masters:
        training.wrote("first.weight")


BEFORE: dict[str, Callable[[Training], Any]] = {
    "nothing": lambda training: None,
    "op": lambda training: training.write("first.weight", clamp),
    "data": lambda training: training.write("first.weight", lambda weight: clamp(weight.data)),
    "zeros": lambda training: training.write("first.weight", lambda weight: weight.zero_()),
    "entry": write_by_entry,
    "master": write_by_master,
}


@every_kind
@pytest.mark.parametrize("before", BEFORE)
def test_block_holds_what_was_written_just_before(kind: str, before: str) -> None:
    training = trained(kind)
    BEFORE[before](training)
    read_by_block(training)
    training.check()
    training.iterate()
    training.check()


@every_kind
def test_groups_hold_the_float32_parameters_inside(kind: str) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model):
        inside = [p for p in training.model.parameters() if p.requires_grad]
        groups = [p for group in training.optimizer.param_groups for p in group["params"]]
        assert all(p.dtype is F32 for p in training.model.parameters())
        assert len(inside) == len(groups)
        assert all(one is other for one, other in zip(inside, groups, strict=True))
    groups = [p for group in training.optimizer.param_groups for p in group["params"]]
    assert all(training.weight(name) is p for name, p in zip(training.trained, groups, strict=True))
    training.iterate()
    training.check()


def put_parameter(training: Training, name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    old = training.weight(name)
    setattr(training.model.get_submodule(owner), attribute, nn.Parameter(torch.full_like(old, 0.5), old.requires_grad))


INSIDE: dict[str, Callable[[Training], Any]] = {
    "op": lambda training: training.weight("norm.weight").mul_(0.5),
    "data": lambda training: training.weight("norm.weight").data.mul_(0.5),
    "data =": lambda training: setattr(training.weight("norm.weight"), "data", torch.full((4,), 0.5)),
    "groups": lambda training: training.optimizer.param_groups[0]["params"][2].mul_(0.5),
    "a Parameter": lambda training: put_parameter(training, "norm.weight"),
    "load_state_dict": lambda training: training.model.norm.load_state_dict(
        {"weight": torch.full((4,), 0.5), "bias": torch.full((4,), 0.25)}
    ),
    "entry": lambda training: clamp(training.model.state_dict()["norm.weight"]),
    "tied": lambda training: training.model.tied.weight.mul_(0.5),
    "frozen": lambda training: training.weight("last.weight").fill_(0.5),
}


@float16_too
@pytest.mark.parametrize("how", INSIDE)
@pytest.mark.parametrize("raises", [False, True])
def test_values_written_inside_are_carried_back(kind: str, how: str, raises: bool) -> None:
    if kind == "model" and how == "a Parameter":
        pytest.skip("parameters are float32 anyway: another one is another one, as in torch")
    training = trained(kind, adamw)
    own = {name: training.weight(name) for name in training.names}
    try:
        with mpinit.float32_weights(training.model):
            with torch.no_grad():
                INSIDE[how](training)
            found = {name: p.detach().clone() for name, p in training.model.named_parameters()}
            if raises:
                raise KeyError
    except KeyError:
        pass
    for name, weight in training.by_hand.weights.items():
        assert training.weight(name) is own[name]
        if not torch.equal(found[name], weight.meaning):
            weight.assign(found[name])
    training.check_weights()
    training.check()
    training.iterate()
    training.check()


@every_kind
@pytest.mark.parametrize("number", [1.0001, -0.3337])
def test_numbers_between_those_of_16_bits_are_carried_back(kind: str, number: float) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model), torch.no_grad():
        training.model.first.weight[0] = number
    values = training.by_hand.weights["first.weight"].meaning.clone()
    values[0] = number
    weight = training.by_hand.weights["first.weight"]
    weight.assign(weight.store.meaning(weight.store.weight_of(values), weight.store.beside(values)))
    training.check()
    training.iterate()
    training.check()


@float16_too
@pytest.mark.parametrize("how", ["as it was", "in place", "replaced", "cleared", "given"])
def test_gradients_are_carried_back(kind: str, how: str) -> None:
    training = trained(kind)
    training.zero_grad()
    if how != "given":
        training.backward()
    gradients = training.by_hand.gradients
    with mpinit.float32_weights(training.model):
        parameter = training.model.norm.weight
        if how != "given":
            assert torch.equal(parameter.grad, gradients["norm.weight"])
        if how == "in place":
            parameter.grad.mul_(0.5)
            gradients["norm.weight"] = gradients["norm.weight"] * 0.5  # type: ignore[operator]
        elif how in ("replaced", "given"):
            parameter.grad = torch.full((4,), 0.5)
            gradients["norm.weight"] = torch.full((4,), 0.5)
        elif how == "cleared":
            parameter.grad = None
            gradients["norm.weight"] = None
    training.check_gradients()
    training.step()
    training.check()


@every_kind
def test_backward_pass_inside_leaves_its_gradients(kind: str) -> None:
    """Run a forward and backward pass in float32, without ``scale_loss``."""
    if kind == "full16":
        pytest.skip("gradients would come unscaled while a scale is 8")
    training = trained(kind)
    training.zero_grad()
    with mpinit.float32_weights(training.model):
        training.model.norm.weight.sum().mul(0.5).backward()
    training.by_hand.gradients["norm.weight"] = torch.full((4,), 0.5)
    training.check_gradients()
    training.step()
    training.check()


@every_kind
def test_parameter_frozen_inside_is_frozen(kind: str) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model):
        training.model.norm.weight.requires_grad_(False)
    assert not training.weight("norm.weight").requires_grad
    before = training.model.state_dict()["norm.weight"].clone()
    training.optimizer.zero_grad()
    with mpinit.scale_loss(loss_of(training.model(batch(5))), training.optimizer) as loss:
        loss.backward()
    assert training.weight("norm.weight").grad is None
    training.optimizer.step()
    assert torch.equal(training.model.state_dict()["norm.weight"], before)


@every_kind
def test_parameter_thawed_inside_is_trained(kind: str) -> None:
    training = Training(kind)
    training.model.norm.weight.requires_grad_(False)
    training.optimizer.zero_grad()
    with mpinit.float32_weights(training.model):
        training.model.norm.weight.requires_grad_(True)
    assert training.weight("norm.weight").requires_grad
    training.iterate()
    training.check()


@every_kind
def test_tensor_hook_registered_inside_fires_after(kind: str) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model):
        handle = training.model.norm.weight.register_hook(lambda gradient: gradient * 0)
    training.optimizer.zero_grad()
    with mpinit.scale_loss(loss_of(training.model(batch(5))), training.optimizer) as loss:
        loss.backward()
    assert torch.equal(training.weight("norm.weight").grad.float(), torch.zeros(4))
    handle.remove()
    training.iterate()
    assert not torch.equal(training.weight("norm.weight").grad.float(), torch.zeros(4))
    training.check()


@every_kind
def test_hook_after_accumulation_registered_inside_fires_after(kind: str) -> None:
    training, seen = trained(kind), []
    with mpinit.float32_weights(training.model):
        handle = training.model.norm.weight.register_post_accumulate_grad_hook(seen.append)
    training.iterate()
    assert len(seen) == 1
    assert seen[0] is training.weight("norm.weight")
    handle.remove()
    training.iterate()
    assert len(seen) == 1
    training.check()


@every_kind
@pytest.mark.parametrize("kinds_of_hooks", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hook_registered_before_fires_once_after(kind: str, kinds_of_hooks: str) -> None:
    training, seen = trained(kind), []
    handle = getattr(training.model.norm.weight, kinds_of_hooks)(lambda _: seen.append(1))
    with mpinit.float32_weights(training.model):
        pass
    training.iterate()
    assert len(seen) == 1
    with mpinit.float32_weights(training.model):
        handle.remove()
    training.iterate()
    assert len(seen) == 1


@every_kind
def test_attributes_set_inside_stay(kind: str) -> None:
    training = trained(kind)
    training.model.norm.weight.mark = "before"
    training.model.norm.bias.mark = "before"
    with mpinit.float32_weights(training.model):
        assert training.model.norm.weight.mark == "before"
        training.model.norm.weight.mark = "inside"
        training.model.first.weight.group = [1, 2]
        del training.model.norm.bias.mark
    assert training.model.norm.weight.mark == "inside"
    assert training.model.first.weight.group == [1, 2]
    assert not hasattr(training.model.norm.bias, "mark")


@every_kind
@pytest.mark.parametrize("make", [sgd, adamw])
def test_group_added_inside_is_trained(kind: str, make: Any) -> None:
    training = trained(kind, make)
    with mpinit.float32_weights(training.model):
        training.model.last.requires_grad_(True)
        training.optimizer.add_param_group({"params": list(training.model.last.parameters()), "lr": 0.125})
        training.optimizer.param_groups[0]["lr"] = 0.03125
    names = ["last.weight", "last.bias"]
    assert len(training.optimizer.param_groups) == 2
    for name, parameter in zip(names, training.optimizer.param_groups[1]["params"], strict=True):
        assert parameter is training.weight(name)
        training.by_hand.train(name, lr=0.125)
    training.by_hand.optimizer.param_groups[0]["lr"] = 0.03125
    for _ in range(2):
        training.iterate()
    training.check()


@every_kind
def test_parameters_taken_out_of_groups_inside_stay_out(kind: str) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model):
        group = training.optimizer.param_groups[0]
        group["params"] = [p for p in group["params"] if p is not training.model.norm.weight]
    assert [id(p) for p in training.optimizer.param_groups[0]["params"]] == [
        id(training.weight(name)) for name in training.trained if name != "norm.weight"
    ]
    before = training.model.state_dict()["norm.weight"].clone()
    training.optimizer.zero_grad()
    with mpinit.scale_loss(loss_of(training.model(batch(5))), training.optimizer) as loss:
        loss.backward()
    training.optimizer.step()
    assert torch.equal(training.model.state_dict()["norm.weight"], before)


@every_kind
def test_optimizer_state_loaded_inside_counts(kind: str) -> None:
    training = trained(kind, adamw)
    saved, by_hand = (
        copy.deepcopy(training.optimizer.state_dict()),
        copy.deepcopy(training.by_hand.optimizer.state_dict()),
    )
    saved["param_groups"][0]["lr"] = by_hand["param_groups"][0]["lr"] = 0.03125
    training.iterate()
    with mpinit.float32_weights(training.model):
        training.optimizer.load_state_dict(saved)
    training.by_hand.optimizer.load_state_dict(by_hand)
    assert all(training.weight(name) in training.optimizer.state for name in training.trained)
    training.iterate()
    training.check()


@every_kind
def test_blocks_in_blocks_carry_back_once(kind: str) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model), torch.no_grad():
        training.model.norm.weight.mul_(0.5)
        with mpinit.float32_weights(training.optimizer):
            training.model.norm.weight.mul_(0.5)
        assert training.model.norm.weight.dtype is F32
        training.model.norm.weight.mul_(0.5)
        found = training.model.norm.weight.detach().clone()
    training.by_hand.weights["norm.weight"].assign(found)
    training.check()
    training.iterate()
    training.check()


@every_kind
@pytest.mark.parametrize("steps", [0, 1])
def test_parameter_kept_from_inside_is_live_or_shows_that_it_is_not(kind: str, steps: int) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model):
        kept = training.model.norm.weight
    for _ in range(steps):
        training.iterate()
    try:
        values = kept.detach().clone()
    except RuntimeError:
        assert kind != "full"
        return
    if bool(values.isnan().all()):
        assert not training.kind.masters, "there it is the master"
        return
    weight = training.by_hand.weights["norm.weight"]
    assert torch.equal(values.float(), weight.meaning), "numbers of before"
    with torch.no_grad():
        kept.mul_(0.5)
    weight.assign(kept.detach().float())
    training.forward()
    training.check()
    training.iterate()
    training.check()
    assert torch.equal(kept.detach().float(), weight.meaning)


@every_kind
def test_blind_write_to_a_parameter_kept_from_inside_is_not_ignored(kind: str) -> None:
    training = trained(kind)
    with mpinit.float32_weights(training.model):
        kept = training.model.norm.weight
    try:
        with torch.no_grad():
            kept.fill_(0.5)
        training.model(batch(5))
    except RuntimeError:
        return
    assert torch.equal(training.model.state_dict()["norm.weight"], torch.full((4,), 0.5))


@kinds_with_copies
@pytest.mark.parametrize("is_written_inside", [False, True])
def test_entry_written_inside_counts_or_is_refused(kind: str, is_written_inside: bool) -> None:
    training = trained(kind)
    state, expected = training.model.state_dict(), None
    try:
        with mpinit.float32_weights(training.model), torch.no_grad():
            state["norm.weight"].fill_(0.5)
            if is_written_inside:
                training.model.norm.weight.fill_(0.25)
        training.model(batch(5))
    except RuntimeError as error:
        assert "norm.weight" in str(error)
        expected = meanings(training)["norm.weight"] if not is_written_inside else torch.full((4,), 0.25)
    assert expected is not None or not is_written_inside, "one of two writes was lost"
    found = training.model.state_dict()["norm.weight"]
    assert torch.equal(found, torch.full((4,), 0.5) if expected is None else expected)


@kinds_with_masters
def test_kept_masters_are_the_parameters_inside(kind: str) -> None:
    training = Training(kind)
    kept = training.masters()
    training.iterate()
    with mpinit.float32_weights(training.model), torch.no_grad():
        for name, master in zip(training.trained, kept, strict=True):
            assert training.model.get_parameter(name) is master
        kept[0].mul_(0.5)
    training.by_hand.weights["first.weight"].assign(kept[0].detach())
    training.check()
    training.iterate()
    training.check()


@every_kind
def test_kept_masters_work_after_a_block(kind: str) -> None:
    training = Training(kind)
    kept = training.masters()
    training.iterate()
    read_by_block(training)
    for _ in range(2):
        training.zero_grad()
        training.backward()
        for name, master in zip(training.trained, kept, strict=True):
            assert master.grad is training.weight(name).grad
        training.step()
    with torch.no_grad():
        clamp(kept[0])
    if not training.kind.masters:
        training.wrote("first.weight")
    training.forward()
    training.check()


# -- d. a weight whose memory has got another meaning -----------------------------------------------------------------


@float16_too
@pytest.mark.parametrize(("make", "is_large"), [(sgd, False), (adamw, False), (sgd, True)])
@pytest.mark.parametrize("looks", [False, True])
def test_transposed_square_weight_trains_as_float32(kind: str, make: Any, looks: bool, is_large: bool) -> None:
    """Set ``weight.data = weight.data.t()``: the same memory with other strides.

    Low bits may stay at their places, as the law of masters has it, or move along.
    """
    training = trained(kind, make, model=Transposable(68 if is_large else 4))
    name, parameter = "square.weight", training.model.square.weight
    weight = training.by_hand.weights[name]
    old = weight.meaning
    parameter.data = parameter.data.t()
    weight.write(parameter)
    weight.beside.append(weight.store.beside(old.t().contiguous()))
    if looks:
        training.check()
    training.zero_grad()
    training.backward()
    carried = copy.deepcopy(training.by_hand)
    carried.weights[name].beside.reverse()
    training.optimizer.step()
    for by_hand in (training.by_hand, carried):
        by_hand.step()
    found = training.model.state_dict()
    for each in training.names:
        one, other = training.by_hand.weights[each].meaning, carried.weights[each].meaning
        assert bool(((found[each] == one) | (found[each] == other)).all()), each
        training.by_hand.weights[each].assign(found[each])
    for _ in range(2):
        training.iterate()
    training.check()


class Transposable(nn.Module):
    """A square Linear between two others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(4, width), nn.Linear(width, 4)
        self.square = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.after(self.square(self.before(x)))
        return out


@every_kind
@pytest.mark.parametrize("read", ["forward", "step"])
def test_memory_shared_after_initialize_is_refused_by_both_names(kind: str, read: str) -> None:
    training = Training(kind, model=Net(frozen=False))
    training.iterate()
    training.zero_grad()
    training.backward()
    training.model.last.weight.data = training.model.first.weight.data
    try:
        if read == "forward":
            training.model(batch(5))
        else:
            training.optimizer.step()
    except RuntimeError as error:
        assert "last.weight" in str(error)
        assert "first.weight" in str(error) or "tied.weight" in str(error)
    else:
        # Without masters there is one set of numbers, which both step, as in plain torch.
        assert kind in ("model", "O3"), "half of the update is lost"
        assert torch.equal(training.weight("last.weight"), training.weight("first.weight"))
    finally:
        training.model.last.weight.data = training.model.last.weight.data.clone()


def test_float32_data_of_a_weight_without_a_master_gets_its_dtype_back() -> None:
    training, untouched = trained("O3"), trained("O3")
    parameter = training.weight("first.weight")
    parameter.data = parameter.data.float()
    assert torch.equal(training.model(batch(5)), untouched.model(batch(5)))
    assert parameter.dtype is torch.bfloat16
    training.iterate()
    untouched.iterate()
    assert torch.equal(parameter, untouched.weight("first.weight"))


@kinds_with_masters
@pytest.mark.parametrize("read", ["forward", "step"])
@pytest.mark.parametrize("numbers", ["own", "others"])
def test_float32_data_of_a_weight_counts_exactly(kind: str, read: str, numbers: str) -> None:
    training = trained(kind)
    training.zero_grad()
    training.backward()
    name = "first.weight"
    weight, parameter = training.by_hand.weights[name], training.weight(name)
    parameter.data = parameter.data.float() if numbers == "own" else torch.randn(4, 4)
    values = parameter.detach().clone()
    if numbers == "own":  # which are the rounding of the master, too
        weight.write(weight.now)
        weight.beside += [weight.store.beside(values)]
    else:
        weight.assign(values)
    if read == "forward":
        training.forward()
        assert training.weight(name).dtype is weight.store.dtype
        training.check()
        training.step()
    else:
        carried = copy.deepcopy(training.by_hand)
        carried.weights[name].beside.reverse()
        training.optimizer.step()
        assert training.weight(name).dtype is weight.store.dtype
        training.by_hand.step()
        carried.step()
        found = training.model.state_dict()[name]
        assert bool(((found == weight.meaning) | (found == carried.weights[name].meaning)).all())
        weight.assign(found)
    training.iterate()
    training.check()


class Embedded(nn.Module):
    """An embedding, whose rows are added to what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(torch.tensor([1, 3])) + x)
        return out


@every_kind
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("looks", [False, True])
def test_table_resized_before_the_first_step_trains_as_float32(kind: str, make: Any, looks: bool) -> None:
    """Call transformers' ``resize_token_embeddings``: the parameter's ``data`` gets another shape."""
    training = Training(kind, make, model=Embedded())
    if looks:
        training.check()
        training.forward()
    table = training.model.table
    new = nn.Embedding(8, 4, dtype=table.weight.dtype)
    new.weight.data[:5] = table.weight.data
    table.weight.data, table.num_embeddings = new.weight.data, 8
    weight = training.by_hand.weights["table.weight"]
    rounded, old = table.weight.detach().clone(), weight.meaning
    # Old rows may keep their low bits, or be the 16-bit numbers that the user has written.
    weight.assign(rounded.float())
    kept = rounded.float()
    kept[:5] = old
    weight.beside.append(weight.store.beside(kept))
    weight.now = rounded
    training.forward()
    training.check()
    for _ in range(3):
        training.iterate()
    training.check()


class Convolution(nn.Module):
    """A convolution over two channels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, (1, 2))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x.view(2, 2, 1, 2)).flatten(1)
        return out


@every_kind
@pytest.mark.parametrize("make", [sgd, adamw])
@pytest.mark.parametrize("looks", [False, True])
def test_channels_last_keeps_every_bit(kind: str, make: Any, looks: bool) -> None:
    training = trained(kind, make, model=Convolution())
    training.model.to(memory_format=torch.channels_last)
    assert not training.model.conv.weight.is_contiguous()
    if looks:
        training.check()
    for _ in range(2):
        training.zero_grad()
        with mpinit.scale_loss(loss_of(training.model(batch(5))), training.optimizer) as loss:
            loss.backward()
        training.by_hand.gradients = {n: training.weight(n).grad.float().clone() for n in training.trained}
        training.step()
        training.check()


@every_kind
def test_forward_of_a_shallow_copy_is_refused(kind: str) -> None:
    training = trained(kind)
    copied = copy.copy(training.model)
    with pytest.raises(RuntimeError, match="deepcopy"):
        copied(batch(5))
    training.iterate()
    training.check()


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@every_kind
@pytest.mark.parametrize("has_masters_kept", [False, True])
@pytest.mark.usefixtures("_without_collector")
def test_replaced_parameter_is_freed_and_the_new_one_trains(kind: str, has_masters_kept: bool) -> None:
    training = trained(kind, adamw)
    if has_masters_kept:
        list(mpinit.master_params(training.optimizer))
    old = training.model.norm.weight
    new = nn.Parameter(torch.full_like(old, 0.5))
    training.model.norm.weight = new
    group = training.optimizer.param_groups[0]
    group["params"] = [new if p is old else p for p in group["params"]]
    training.optimizer.state.pop(old, None)
    by_hand = training.by_hand
    by_hand.weights["norm.weight"] = Weight(training.kind.trained, torch.full((4,), 0.5))
    by_hand.optimizer.state.pop(by_hand.parameters["norm.weight"], None)
    dead = weakref.ref(old)
    del old
    training.iterate()
    training.check()
    # Without a master undo keeps it: its 16-bit numbers, and what they were.
    assert dead() is None or kind == "O3", "a parameter that nobody has is kept"
    training.iterate()
    training.check()


@every_kind
def test_gradient_cleared_on_the_master_after_it_was_replaced_on_the_weight_is_cleared(kind: str) -> None:
    training = trained(kind)
    kept = training.masters()
    training.zero_grad()
    weight, master = training.weight("first.weight"), kept[training.trained.index("first.weight")]
    weight.grad = torch.full_like(weight, 0.5, dtype=weight.grad_dtype or weight.dtype).detach()
    training.forward()
    assert master.grad is weight.grad
    master.grad = None
    training.masters()
    assert weight.grad is None


@every_kind
@pytest.mark.usefixtures("_without_collector")
def test_kept_masters_keep_no_gradients_alive_in_the_next_forward(kind: str) -> None:
    training = trained(kind)
    kept = training.masters()
    training.backward()
    gradients = [weakref.ref(master.grad) for master in kept]
    training.zero_grad()
    training.forward()
    assert [each() for each in gradients] == [None] * len(kept)


@pytest.mark.parametrize("way", ["entry", "master"])
def test_write_that_a_compiled_forward_has_not_used_is_warned_of(way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, opt_level="O5")
    compiled = torch.compile(model, backend="eager")
    compiled(torch.ones(1, 4))
    state = model.state_dict()
    written = state["0.weight"] if way == "entry" else next(mpinit.master_params(optimizer))
    with torch.no_grad():
        written.mul_(2.0)
    loss = compiled(torch.ones(1, 4)).sum()
    with pytest.warns(UserWarning, match="has not used the new numbers"), mpinit.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    expected = written.detach() if way == "master" else state["0.weight"] - 0.1
    torch.testing.assert_close(model.state_dict()["0.weight"], expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("way", ["entry", "master"])
@pytest.mark.parametrize("level", ["O5", "O2"])
def test_plain_backward_after_a_compiled_forward_warns_of_the_write(level: str, way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mpinit.initialize(model, optimizer, opt_level=level, loss_scale=1.0)
    compiled = torch.compile(model, backend="eager")
    state, masters = model.state_dict(), list(mpinit.master_params(optimizer))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            compiled(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        # Written before the step of an iteration whose forward ran eagerly: that is what the loop asks for.
        model(torch.ones(1, 4)).sum().backward()
        with torch.no_grad():
            masters[0].mul_(0.5)
        optimizer.step()
    with torch.no_grad():
        (model.state_dict() if way == "entry" else dict(zip(state, masters, strict=True)))["0.weight"].clamp_(-0.1, 0.1)
    optimizer.zero_grad()
    compiled(torch.ones(1, 4)).sum().backward()
    with pytest.warns(UserWarning, match="has not used the new numbers"):
        optimizer.step()


# -- sequences at random ----------------------------------------------------------------------------------------------

RUNS = int(os.environ.get("HANDED_OUT_RUNS", 20_000))
PARTS = 4
COMMON: dict[str, Any] = {
    "deadline": None,
    "database": None,
    "report_multiple_bugs": False,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.generate, Phase.shrink),
}


@pytest.mark.parametrize("kind", STORES)
def test_random_sequences_equal_the_oracle(kind: str) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: HandedOut(kind), settings=settings(max_examples=15, stateful_step_count=12, derandomize=True, **COMMON)
    )


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", STORES)
def test_20000_random_sequences_equal_the_oracle(kind: str, part: int) -> None:
    """Run parts of the sequences, which workers run in parallel; each draws its own."""
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        lambda: HandedOut(kind),
        settings=settings(max_examples=RUNS // PARTS // len(STORES), stateful_step_count=16, **COMMON),
    )


@pytest.mark.parametrize("is_read", [True, False])
@pytest.mark.parametrize("way", ["copy_", "data"])
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_weight_written_in_another_optimizers_step_keeps_the_number(level: str, way: str, is_read: bool) -> None:
    """Clamp a critic's weight in a hook of the generator's step, and write to its master after that."""
    generator, critic = nn.Linear(3, 3), nn.Linear(3, 1, bias=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic)]
    mpinit.initialize([generator, critic], optimizers, level, loss_scale=16.0)
    (master,) = mpinit.master_params(optimizers[1])

    def clamp(*_: Any) -> None:
        if way == "data":
            critic.weight.data[0, 2] = 0.5
        else:
            with torch.no_grad():
                critic.weight[0, 2].copy_(torch.tensor(0.5))

    handle = optimizers[0].register_step_pre_hook(clamp)
    with mpinit.scale_loss(generator(torch.ones(2, 3)).sum(), optimizers[0]) as loss:
        loss.backward()
    optimizers[0].step()
    handle.remove()
    assert critic.weight[0, 2] == 0.5
    if is_read:
        (again,) = mpinit.master_params(optimizers[1])
        assert again is master and master[0, 2] == 0.5
    with torch.no_grad():
        master[0, 0] = 0.25
    mpinit.undo(critic)
    assert critic.weight[0, ::2].tolist() == [0.25, 0.5]
