"""``amp.init``, apex's first interface: casts of functions, a handle that scales losses, and wrapped optimizers."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import mpinit
from mpinit.compat.apex import amp

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    yield
    amp._amp_state.handle._deactivate()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(count)]


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


HALF_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, torch.ones(4, 4, dtype=x.dtype)),
    "mm": lambda x: x.mm(x),
    "matmul": lambda x: x @ x,
    "conv1d": lambda x: F.conv1d(x[None], torch.ones(2, 4, 1, dtype=x.dtype)),
}
FLOAT_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: F.softmax(x, dim=0),
    "exp": lambda x: torch.exp(x),
    "pow": lambda x: x.pow(2),
    "sum": lambda x: torch.sum(x),
    "layer_norm": lambda x: F.layer_norm(x, (4,)),
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
}


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("name", HALF_FUNCTIONS)
def test_functions_in_float16(name: str, dtype: torch.dtype) -> None:
    amp.init()
    x = torch.ones(4, 4, dtype=dtype, requires_grad=True)
    y = HALF_FUNCTIONS[name](x)
    assert y.dtype == HALF
    y.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("name", FLOAT_FUNCTIONS)
def test_functions_in_float32(name: str, dtype: torch.dtype) -> None:
    amp.init()
    x = torch.ones(4, 4, dtype=dtype, requires_grad=True)
    y = FLOAT_FUNCTIONS[name](x)
    assert y.dtype == FLOAT
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype


@pytest.mark.parametrize("function", [torch.add, torch.mul, torch.atan2])
def test_functions_of_two_dtypes_promote(function: Any) -> None:
    amp.init()
    assert function(torch.ones(2, dtype=HALF), torch.ones(2)).dtype == FLOAT
    assert torch.cat([torch.ones(2, dtype=HALF), torch.ones(2)]).dtype == FLOAT


@pytest.mark.parametrize("join", [torch.cat, torch.stack, lambda parts: torch.cat(parts, dim=-1)])
def test_joining_takes_the_widest_dtype_of_the_parts(join: Any) -> None:
    amp.init()
    half = [torch.ones(2, dtype=HALF) for _ in range(3)]
    assert join(half).dtype == HALF
    joined = join([*half, torch.full((2,), 2.0**20, requires_grad=True)])
    assert joined.dtype == FLOAT and joined.max() == 2.0**20
    joined.sum().backward()


@pytest.mark.parametrize("dtypes", [(HALF, FLOAT), (FLOAT, HALF)])
def test_functions_in_place_keep_the_dtype_of_the_target(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    amp.init()
    target, other = (torch.ones(3, dtype=dtype) for dtype in dtypes)
    assert target.add_(other).dtype == dtypes[0] and target.mul_(other).tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("name", ["exp_", "pow_", "reciprocal_"])
def test_float32_functions_in_place_refuse_float16(name: str) -> None:
    amp.init()
    arguments = [2.0] if name == "pow_" else []
    assert getattr(torch.ones(2), name)(*arguments).dtype == FLOAT
    with pytest.raises(NotImplementedError):
        getattr(torch.ones(2, dtype=HALF), name)(*arguments)


@pytest.mark.parametrize("name", ["relu", "clone", "reshape", "max_pool1d"])
def test_other_functions_keep_the_dtype(name: str) -> None:
    amp.init()
    run: dict[str, Any] = {
        "relu": F.relu,
        "clone": torch.clone,
        "reshape": lambda x: x.reshape(-1),
        "max_pool1d": lambda x: F.max_pool1d(x, 2),
    }
    for dtype in (HALF, FLOAT):
        assert run[name](torch.ones(1, 2, 4, dtype=dtype)).dtype == dtype


def test_decorated_functions_follow_the_handle() -> None:
    half, wide, mixed = (
        decorate(lambda *args: [arg.dtype for arg in args])
        for decorate in (amp.half_function, amp.float_function, amp.promote_function)
    )
    x, y = torch.ones(2), torch.ones(2, dtype=HALF)
    for active in (True, False, True):
        handle = amp.init(enabled=active)
        assert half(x, y) == ([HALF, HALF] if active else [FLOAT, HALF])
        assert wide(x, y) == mixed(x, y) == ([FLOAT, FLOAT] if active else [FLOAT, HALF])
        with handle._disable_casts():
            assert half(x, y) == wide(x, y) == [FLOAT, HALF]
        handle._deactivate()
    assert half(x) == [FLOAT]


def test_a_function_registered_to_promote() -> None:
    from mpinit.autocast.installation import REGISTERED

    known = list(REGISTERED)
    amp.register_promote_function(torch, "lerp")
    try:
        amp.init()
        assert torch.lerp(torch.zeros(2, dtype=HALF), torch.ones(2), 0.5).dtype == FLOAT
    finally:
        amp._amp_state.handle._deactivate()
        REGISTERED[:] = known
    with pytest.raises(RuntimeError):
        torch.lerp(torch.zeros(2, dtype=HALF), torch.ones(2), 0.5)


def test_rocm_names_run_in_bfloat16() -> None:
    amp.init(patch_type=torch.bfloat16)
    dtype_of = amp.bfloat16_function(lambda x: x.dtype)
    assert dtype_of(torch.ones(2)) == (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert torch.exp(torch.ones(2, dtype=torch.bfloat16)).dtype == FLOAT
    assert torch.cat([torch.ones(2, dtype=torch.bfloat16), torch.ones(2)]).dtype == FLOAT
    with pytest.raises(NotImplementedError):
        torch.ones(2, dtype=torch.bfloat16).exp_()


def test_banned_functions_raise() -> None:
    amp.init()
    p = torch.full((4,), 0.5)
    assert F.binary_cross_entropy(p, p).dtype == FLOAT
    with pytest.raises(NotImplementedError, match="BCEWithLogitsLoss"):
        F.binary_cross_entropy(p.half(), p.half())


def test_banned_functions_that_are_allowed_run_in_float32() -> None:
    handle = amp.init(allow_banned=True)
    p = torch.tensor([0.25, 0.75])
    expected = F.binary_cross_entropy(p, p)
    assert torch.equal(F.binary_cross_entropy(p.half(), p.half()), expected)
    handle._deactivate()
    amp.init()
    with pytest.raises(NotImplementedError):
        F.binary_cross_entropy(p.half(), p.half())


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_cells_run_in_float16_and_train(kind: Any) -> None:
    torch.manual_seed(0)
    cell = kind(4, 4)
    x = torch.randn(2, 4)
    expected = cell(x)
    amp.init()
    found = cell(x)
    first, wide = (found[0], expected[0]) if kind is nn.LSTMCell else (found, expected)
    assert first.dtype == HALF
    torch.testing.assert_close(first.float(), wide, rtol=1e-2, atol=1e-2)
    first.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == FLOAT for p in cell.parameters())


@pytest.mark.parametrize("kind", [nn.RNN, nn.GRU, nn.LSTM])
def test_recurrent_layers_run_in_float16(kind: Any) -> None:
    layer = kind(4, 4, num_layers=2)
    amp.init()
    output, _ = layer(torch.randn(3, 2, 4))
    assert output.dtype == HALF
    output.float().sum().backward()
    assert all(p.grad is not None and p.grad.dtype == FLOAT for p in layer.parameters())


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_packed_sequences_run_in_float16(dtype: torch.dtype) -> None:
    layer = nn.RNN(4, 4, num_layers=2)
    x = torch.randn(5, 3, 4, dtype=dtype).requires_grad_()
    amp.init()
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 4, 2]))
    output, _ = layer(packed, torch.zeros(2, 3, 4, dtype=dtype))
    assert output.data.dtype == HALF
    output.data.float().sum().backward()
    assert x.grad is not None and x.grad.dtype == dtype and x.grad[:2].any()


@pytest.mark.parametrize("kind", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_a_loop_of_a_cell_has_the_gradients_of_float32(kind: Any) -> None:
    torch.manual_seed(0)
    cell, inputs = kind(4, 4), torch.randn(6, 2, 4)

    def gradients() -> list[Tensor]:
        hidden = None
        for x in inputs:
            hidden = cell(x, hidden)
        last = hidden[0] if kind is nn.LSTMCell else hidden
        return list(torch.autograd.grad(last.float().square().sum(), list(cell.parameters())))

    expected = gradients()
    amp.init()
    torch.testing.assert_close(gradients(), expected, rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_training_equals_a_scaled_loop_of_autocast(loss_scale: Any) -> None:
    model, by_hand = network(), network()
    optimizer, theirs = (SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, by_hand))
    scale = 2.0**16 if loss_scale == "dynamic" else loss_scale
    handle = amp.init(loss_scale=loss_scale)
    for batch in batches(4):
        optimizer.zero_grad()
        with handle.scale_loss(loss_of(model, batch), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    handle._deactivate()
    for batch in batches(4):
        theirs.zero_grad()
        with torch.autocast("cpu", HALF):
            output = by_hand(batch[0])
        (F.mse_loss(output.float(), batch[1]) * scale).backward()
        for p in by_hand.parameters():
            p.grad /= scale
        theirs.step()
    for ours, other in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-3, atol=1e-4)


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = amp.init()
    before = [p.detach().clone() for p in model.parameters()]
    with handle.scale_loss(loss_of(model, batches(1)[0]) * float("inf"), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), before))
    assert mpinit.loss_scale(optimizer) == 2.0**15
    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert not all(map(torch.equal, model.parameters(), before))


def test_two_optimizers_of_a_handle_share_the_scale() -> None:
    models = [network(), network()]
    optimizers = [SGD(model.parameters(), lr=0.1) for model in models]
    handle = amp.init()
    for k, factor in ((0, float("inf")), (1, 1.0)):
        with handle.scale_loss(loss_of(models[k], batches(1)[0]) * factor, optimizers[k]) as scaled:
            scaled.backward()
        optimizers[k].step()
    assert mpinit.loss_scale(optimizers[0]) == mpinit.loss_scale(optimizers[1]) == 2.0**15


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_a_wrapped_optimizer_steps_for_two_losses(bad: int | None) -> None:
    model, plain = network(), network()
    optimizer, theirs = (SGD(m.parameters(), lr=0.1) for m in (model, plain))
    handle = amp.init(loss_scale=64.0 if bad is None else "dynamic")
    wrapped = handle.wrap_optimizer(optimizer, num_loss=2)
    data = batches(2)
    for step in range(2):
        wrapped.zero_grad()
        for k, batch in enumerate(data):
            factor = float("inf") if k == bad and step == 0 else 1.0
            with wrapped.scale_loss(loss_of(model, batch) * factor) as scaled:
                scaled.backward()
        wrapped.step()
    handle._deactivate()
    for _ in range(2 if bad is None else 1):
        theirs.zero_grad()
        for batch in data:
            loss_of(plain, batch).backward()
        theirs.step()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-2, atol=2e-3)


def test_a_wrapped_optimizer_is_the_optimizer_otherwise() -> None:
    optimizer = SGD(network().parameters(), lr=0.1)
    wrapped = amp.init().wrap_optimizer(optimizer)
    assert wrapped.param_groups is optimizer.param_groups and wrapped.state is optimizer.state
    assert wrapped.state_dict().keys() == optimizer.state_dict().keys()
    wrapped.param_groups[0]["lr"] = 0.5
    assert optimizer.param_groups[0]["lr"] == 0.5 and repr(wrapped) == repr(optimizer)


def test_more_losses_than_the_optimizer_was_wrapped_for() -> None:
    model = network()
    wrapped = amp.init().wrap_optimizer(SGD(model.parameters(), lr=0.1))
    with wrapped.scale_loss(loss_of(model, batches(1)[0])) as scaled:
        scaled.backward()
    with pytest.raises(RuntimeError, match="num_loss=2"), wrapped.scale_loss(torch.ones(())):
        pass


def test_closures_are_refused() -> None:
    wrapped = amp.init().wrap_optimizer(SGD(network().parameters(), lr=0.1))
    with pytest.raises(NotImplementedError, match="closure"):
        wrapped.step(lambda: 0.0)


def test_the_handle_does_not_scale_once_an_optimizer_was_wrapped() -> None:
    optimizer = SGD(network().parameters(), lr=0.1)
    handle = amp.init()
    handle.wrap_optimizer(optimizer)
    with pytest.raises(RuntimeError, match=r"optimizer\.scale_loss"), handle.scale_loss(torch.ones(()), optimizer):
        pass


@pytest.mark.parametrize("caching", [True, False])
def test_casts_of_weights_follow_steps_and_evaluations(caching: bool) -> None:
    model = nn.Linear(4, 4, bias=False)
    optimizer = SGD(model.parameters(), lr=1.0)
    handle = amp.init(enable_caching=caching, loss_scale=1.0)
    assert handle.has_cache is caching
    x = torch.ones(2, 4)
    for _ in range(3):
        with torch.no_grad():
            model(x)
        optimizer.zero_grad()
        with handle.scale_loss((model(x) + model(x)).float().sum(), optimizer) as scaled:
            scaled.backward()
        assert torch.equal(model.weight.grad, torch.full((4, 4), 4.0))
        optimizer.step()
        assert torch.equal(model(x), x.half() @ model.weight.detach().half().t())


def test_casts_can_be_switched_off() -> None:
    handle = amp.init()
    x = torch.ones(2, 2)
    with handle._disable_casts():
        assert not handle.is_active() and (x @ x).dtype == FLOAT
        with handle.scale_loss(x.sum(), SGD([nn.Parameter(x)], lr=0.1)) as loss:
            assert loss.item() == 4.0
    assert handle.is_active() and (x @ x).dtype == HALF
    with amp.disable_casts():
        with amp.disable_casts():
            assert (x @ x).dtype == FLOAT
        assert (x @ x).dtype == FLOAT
    assert (x @ x).dtype == HALF
    with pytest.raises(KeyError), handle._disable_casts():
        raise KeyError
    assert handle.is_active() and (x @ x).dtype == HALF


def test_the_scale_grows_and_is_kept_between_iterations() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.0)
    handle = amp.init()
    for step in range(3):
        with handle.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 2.0**16, "unskipped": step + 1}}
    amp._amp_state.loss_scalers[0]._unskipped = 1999
    optimizer.zero_grad()
    with handle.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    assert mpinit.loss_scale(optimizer) == 2.0**17


def test_each_loss_of_a_wrapped_optimizer_has_a_scale() -> None:
    model = network()
    wrapped = amp.init().wrap_optimizer(SGD(model.parameters(), lr=0.1), num_loss=3)
    for k in range(3):
        with wrapped.scale_loss(loss_of(model, batches(1)[0]) * (float("inf") if k == 1 else 1.0)) as scaled:
            scaled.backward()
    wrapped.step()
    scales = [mpinit.loss_scale(wrapped, k) for k in range(3)]
    assert scales == [2.0**16, 2.0**15, 2.0**16]


def test_a_handle_that_is_not_enabled_does_nothing() -> None:
    handle = amp.init(enabled=False, verbose=True)
    assert amp._amp_state.handle is handle
    assert not handle.is_active() and not handle.has_cache
    model = network()
    wrapped = handle.wrap_optimizer(SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, batches(1)[0])
    with wrapped.scale_loss(loss) as scaled, handle.scale_loss(loss, wrapped) as other:
        assert scaled is other is loss
    scaled.backward()
    wrapped.step(lambda: 1.0)
    assert model[0](torch.ones(1, 6)).dtype == FLOAT


def test_deactivating_restores_functions_and_steps() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    functions = F.linear, torch.exp, torch.Tensor.pow, type(optimizer).step
    handle = amp.init(enable_caching=False)
    with handle.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
        scaled.backward()
    handle._deactivate()
    handle._deactivate()
    assert not handle.is_active()
    assert (F.linear, torch.exp, torch.Tensor.pow, type(optimizer).step) == functions
    assert "step" not in vars(optimizer) and "forward" not in vars(model)
    assert model(torch.ones(1, 6)).dtype == FLOAT and torch.is_autocast_cache_enabled()


def test_a_later_init_ends_the_earlier_one() -> None:
    first = amp.init()
    second = amp.init(loss_scale=8.0)
    assert not first.is_active() and second.is_active() and amp._amp_state.handle is second
    second._deactivate()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FLOAT


def test_functions_that_were_registered_before_are_cast() -> None:
    from mpinit.autocast.installation import REGISTERED

    known = list(REGISTERED)
    amp.register_float_function(torch, "sigmoid")
    amp.register_half_function(torch, "cumsum")
    try:
        amp.init()
        assert torch.sigmoid(torch.ones(2, dtype=HALF)).dtype == FLOAT
        assert torch.cumsum(torch.ones(2), 0).dtype == HALF
    finally:
        amp._amp_state.handle._deactivate()
        REGISTERED[:] = known


def test_the_handle_of_initialize_undoes_it() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    assert not amp._amp_state.handle.is_active()
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    handle = amp._amp_state.handle
    assert handle.is_active() and (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == HALF
    with handle.scale_loss(loss_of(model, batches(1)[0]), optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    handle._deactivate()
    assert not handle.is_active() and (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FLOAT
    assert "step" not in vars(optimizer) and "forward" not in vars(model)


@pytest.mark.parametrize("kept", ["nothing", "optimizer"])
def test_sessions_of_dropped_models_are_ended(kept: str) -> None:
    model = network()
    optimizer: Any = SGD(model.parameters(), lr=0.1)
    amp.initialize(model, optimizer, opt_level="O1", verbosity=0)
    session = mpinit.registry.live()[-1]
    handle = amp._amp_state.handle
    if kept == "nothing":
        del optimizer
    del model
    gc.collect()
    handle._deactivate()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FLOAT
    del session


def test_a_loss_scale_of_nonsense_is_refused_and_nothing_changed() -> None:
    model = network()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = amp.init(loss_scale=-1.0)
    with pytest.raises(ValueError, match="loss_scale"), handle.scale_loss(loss_of(model, batches(1)[0]), optimizer):
        pass
    assert "step" not in vars(optimizer)
