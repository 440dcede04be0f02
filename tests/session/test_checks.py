"""Refusals of initialize: models that others have wrapped, sessions that would share weights; and in which order.

Below the public face: the registry shows what is disabled.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import Parts, equal_tensors, quietly, sgd
from torch import nn

import mpinit
from mpinit import registry

F16, F32 = torch.float16, torch.float32


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.ReLU()))


class _FabricModule(Parts):
    """As Lightning Fabric's: forwards every attribute to the module inside."""

    def __init__(self, module: nn.Module) -> None:
        inside = {"_forward_module": module, "_original_module": module}
        super().__init__(lambda self, *args: self._forward_module(*args), **inside)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("_original_module"), name)


class DistributedDataParallel(Parts):
    """Stands for torch's, apex's and others' of the name, which need a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(lambda self, *args: self.module(*args), module=module)


def prepared(model: nn.Module) -> nn.Module:
    """As Accelerate's prepare does with mixed_precision="bf16"."""
    model._original_forward = model.forward  # type: ignore[assignment]
    forward = torch.autocast("cpu", torch.bfloat16)(model.forward)
    model.forward = lambda *args: forward(*args).float()  # type: ignore[method-assign]
    return model


WRAPPED: dict[str, tuple[Callable[[nn.Module], nn.Module], list[str]]] = {
    "fabric": (_FabricModule, ["Fabric", "fabric.setup"]),
    "accelerate": (prepared, ["Accelerate", "mixed_precision='no'"]),
    "ddp": (DistributedDataParallel, ["wrapped in DistributedDataParallel", "inside first"]),
    "a subclass of ddp": (type("Subclassed", (DistributedDataParallel,), {}), ["wrapped in DistributedDataParallel"]),
    "fsdp1": (
        type("FullyShardedDataParallel", (DistributedDataParallel,), {}),
        ["wrapped in FullyShardedDataParallel"],
    ),
    "dp": (nn.DataParallel, ["wrapped in DataParallel"]),
    "script": (torch.jit.script, ["ScriptModule", "torch.jit.trace"]),
    "a scripted part": (
        lambda model: nn.Sequential(nn.Linear(2, 2), torch.jit.script(model)),
        ["'1' is a torch.jit.ScriptModule", "torch.jit.trace"],
    ),
    "trace": (lambda model: torch.jit.trace(model, torch.ones(1, 2)), ["ScriptModule", "made from"]),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_wrapped_model_is_refused_with_the_way_out(kind: str, level: str) -> None:
    wrap, says = WRAPPED[kind]
    model = wrap(net())
    with pytest.raises(ValueError) as caught:
        quietly(model, level)
    assert all(part in str(caught.value) for part in says), str(caught.value)
    assert {p.dtype for p in model.parameters()} == {F32} and registry.of(model) is None


@pytest.mark.parametrize("kind", ["ddp", "a subclass of ddp"])
def test_wrapped_part_is_refused_where_weights_are_cast(kind: str) -> None:
    model = net()
    model[1] = WRAPPED[kind][0](model[1])
    for level in ("O2", "O3", "O5"):
        with pytest.raises(ValueError, match=r"'1' is wrapped in \w+DataParallel already.*afterwards"):
            quietly(model, level)
    quietly(model, "O1")(torch.ones(1, 2))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own, of what a part is given
@pytest.mark.parametrize("what", ["the model", "a part"])
def test_compiled_models_and_parts_work_as_they_are(what: str) -> None:
    plain, model = net(), net()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(4, 2)
    quietly(plain)
    expected = plain(x)
    torch._dynamo.reset()
    given: Any = model
    if what == "the model":
        given = torch.compile(model, backend="eager", fullgraph=True)
    else:
        model[1] = torch.compile(model[1], backend="eager", fullgraph=True)
    given(x)
    quietly(given)
    assert torch.equal(given(x), expected)
    assert torch.equal(model[1](x), plain[1](x))
    mpinit.undo(given)
    assert given(x).dtype is F32 and {p.dtype for p in model.parameters()} == {F32}


@contextlib.contextmanager
def refused(*parts: str) -> Iterator[None]:
    with pytest.raises(ValueError) as caught:
        yield
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(("one", "other"), [("O2", "O2"), ("O2", "O1"), ("O1", "O3"), ("O0", "O5"), ("O5", "O0")])
def test_sessions_that_share_a_cast_module_are_refused(one: str, other: str) -> None:
    shared = nn.Linear(2, 2)
    first, second = nn.Sequential(nn.Linear(2, 2), shared), nn.Sequential(nn.Sequential(shared), nn.Linear(2, 2))
    optimizer = sgd(first)
    mpinit.initialize(first, optimizer, one)
    before = {name: value.clone() for name, value in second.state_dict().items()}
    with refused("'0.0'", "Linear", f"({one}: Sequential; SGD)", "one call", "mpinit.undo"):
        quietly(second, other)
    assert registry.of(second) is None and "forward" not in vars(second)
    assert equal_tensors(before, second.state_dict())
    with refused("the Linear passed"):
        quietly(shared, other)
    mpinit.undo(first)
    quietly(second, other)


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("is_stepped_first", [True, False])
def test_optimizer_over_weights_of_two_sessions(is_stepped_first: bool, level: str) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*one.parameters(), *other.parameters()], 0.1)
    calls: list[tuple[nn.Module, list[torch.optim.Optimizer]]] = [(one, [optimizer]), (other, [])]
    (first, its_optimizers), (second, others) = calls if is_stepped_first else calls[::-1]
    mpinit.initialize(first, its_optimizers, level)
    with refused("this SGD steps weights of session", "one call", "an optimizer for the weights of each"):
        mpinit.initialize(second, others, level)
    assert second.weight.dtype is F32 and "forward" not in vars(second)


@pytest.mark.parametrize(
    "own", [{"opt_level": "O4"}, {"opt_level": "O5"}, {"opt_level": "O5", "master_weights": "split"}]
)
@pytest.mark.parametrize("masters", [True, "split"])
def test_weights_of_another_session_cannot_be_added_later(own: dict[str, Any], masters: Any) -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = [sgd(one), sgd(other)]
    mpinit.initialize(one, optimizers[0], **own)
    mpinit.initialize(other, optimizers[1], "O5", master_weights=masters)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    group = {"params": list(other.parameters())}
    optimizers[0].add_param_group(group)
    x = torch.ones(3, 2)
    (one(x) + other(x)).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"a weight of shape \(2, 2\) was added to this SGD.*one call"):
        optimizers[0].step()
    assert equal_tensors(before, other.state_dict())
    del optimizers[0].param_groups[1]
    optimizers[0].step()
    optimizers[1].step()
    assert not equal_tensors(before, other.state_dict())


def test_a_shared_parameter_in_modules_of_their_own() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    quietly(first)
    with refused("the Linear passed"):
        quietly(second)


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize(
    "bad",
    [{"loss_scale": -1}, {"num_losses": 0}, {"config": {"nonsense": 1}}, {"opt_level": "O9"}, {"entry_points": "x"}],
)
def test_bad_values_do_not_change_who_is_disabled(enabled: bool, bad: dict[str, Any]) -> None:
    model = net()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, enabled=not enabled)
    if not enabled:
        mpinit.undo(model)
    if not enabled and "entry_points" in bad:
        return  # which methods there are is asked where something is to be done
    with pytest.raises(ValueError):
        mpinit.initialize(model, optimizer, **{"opt_level": "O2", "enabled": enabled} | bad)
    assert (optimizer in registry.disabled) is enabled and (model in registry.disabled) is enabled
    assert "forward" not in vars(model)


def test_initialised_model_cannot_be_disabled_before_undo() -> None:
    model = quietly(net())
    with refused("initialised already", "undo"):
        mpinit.initialize(model, enabled=False)
    assert model not in registry.disabled
