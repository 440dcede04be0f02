"""overflow_report and watch_overflow: the parameter, the module and the operation an overflow came from."""

import copy
from typing import Any

import pytest
import torch
from loops import backward, batches, iterate, mlp, mse, poison, start, started
from models import Parts
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mpinit

BATCH = batches(1)[0]


def steep() -> Parts:
    return Parts(lambda self, x: _Steep.apply(x))  # type: ignore[no-untyped-call]


class _Steep(torch.autograd.Function):
    """Identity going forward; coming back the gradient is multiplied by 2**30 in the gradient's own type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * 32768.0 * 32768.0


def deep(*parts: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *parts, nn.Linear(8, 3))


def backwards() -> Parts:
    """A model that uses its layers in another order than they are named in."""
    torch.manual_seed(0)
    parts = {"last": nn.Linear(8, 3), "steep": steep(), "first": nn.Linear(6, 8)}
    return Parts(lambda self, x: self.last(self.steep(self.first(x))), **parts)


def test_the_report_has_counts_names_types_scale_and_loss_id() -> None:
    model, optimizer = started(num_losses=2)
    loss = mse(model, BATCH)
    backward(poison(loss, model[3].bias), optimizer, loss_id=1)
    optimizer.step()
    report = mpinit.overflow_report(optimizer)
    assert (report.loss_id, report.scale, report.parameters) == (1, 1024.0, ("3.bias",))
    (row,) = report.gradients
    assert (row.infs, row.nans, row.elements, row.largest_finite) == (3, 0, 3, 0.0)
    assert report.loss == pytest.approx(loss.item(), rel=1e-3)
    assert "3.bias: 3 inf, 0 nan of 3" in str(report)


def test_order_is_that_of_backward_pass_and_not_of_names() -> None:
    model = backwards()
    optimizer = start(model)
    iterate(mse(model, BATCH), optimizer)
    optimizer.zero_grad()
    report = mpinit.overflow_report(optimizer)
    assert report.first_module == "first"
    assert set(report.parameters) == {"first.weight", "first.bias"}


def test_report_survives_zero_grad_and_good_steps_make_none() -> None:
    model, optimizer = started()
    iterate(mse(model, BATCH), optimizer)
    report = mpinit.overflow_report(optimizer)
    assert (report.loss_id, report.scale, report.parameters, report.gradients) == (None, None, (), ())
    assert str(report) == "no step of this optimizer has overflowed"
    iterate(poison(mse(model, BATCH), model[0].weight), optimizer)
    optimizer.zero_grad()
    assert mpinit.overflow_report(optimizer).parameters == ("0.weight",)


def test_too_many_skips_name_module_scale_and_way_out() -> None:
    model = backwards()
    optimizer = start(
        model, "O2", loss_scale=mpinit.DynamicLossScale(max_consecutive_skips=3, init=1.0), min_loss_scale=1.0
    )
    with pytest.raises(RuntimeError) as caught:
        for _ in range(3):
            iterate(mse(model, BATCH), optimizer)
    for part in ("loss scale of 1:", "'first'", "keep_fp32", "bfloat16", "learning rate"):
        assert part in str(caught.value)
    assert "keep_fp32=['first']" not in str(caught.value), "the culprit is 'steep', which has no parameter"


def test_bad_loss_is_reported() -> None:
    model, optimizer = started()
    iterate(model(torch.full((2, 6), float("nan"))).sum(), optimizer)
    assert "watch_overflow" in mpinit.overflow_report(optimizer).advice


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_a_forward_operation_is_named_with_its_inputs(level: str) -> None:
    model = deep(nn.ReLU(inplace=True))
    with torch.no_grad():
        model[2].weight.fill_(60000.0)
    mpinit.initialize(model, opt_level=level)
    with mpinit.watch_overflow(model) as watch:
        model(torch.ones(2, 6))
    assert (watch.first_module, watch.kind) == ("2", "forward")
    assert watch.first is not None and watch.first.dtype is torch.float16
    assert max(stats.largest for stats in watch.first.inputs) == 60000.0
    assert all(stats.nonfinite == 0 for stats in watch.first.inputs)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_backward_operation_is_named_by_the_module_of_its_node(checkpointed: bool) -> None:
    model: nn.Module = deep(steep(), nn.ReLU(inplace=True))
    if checkpointed:
        model = Parts(lambda self, x: checkpoint(self.inner, x, use_reentrant=False), inner=model)
    optimizer = start(model)
    with mpinit.watch_overflow(model) as watch:
        backward(mse(model, BATCH), optimizer)
    assert (watch.first_module, watch.kind) == ("inner.1" if checkpointed else "1", "backward")


@pytest.mark.parametrize(
    ("spoil", "kind", "module"),
    [
        (lambda model, x: x.fill_(float("nan")), "data", ""),
        (lambda model, x: model[0].weight.data.fill_(float("inf")), "weights", "0"),
    ],
)
def test_bad_data_and_weights_are_named(spoil: Any, kind: str, module: str) -> None:
    model, x = deep(), torch.ones(2, 6)
    spoil(model, x)
    with mpinit.watch_overflow(model) as watch:
        model(x)
    assert (watch.kind, watch.first_module) == (kind, module)


def test_a_loss_outside_of_the_model_and_float32() -> None:
    model = deep()
    with mpinit.watch_overflow(model) as watch:
        torch.log(model(torch.ones(2, 6)).square() * 0).sum().backward()
    assert (watch.kind, watch.first_module) == ("float32", None)
    assert "outside of the model" in str(watch) and "precision is not at fault" in str(watch)


def test_number_that_autograd_saved_can_be_read_in_the_block() -> None:
    """Torch shows it to modes as a Python number, which no kernel accepts: the test fails once it is a tensor there."""
    loss = torch.ones((), requires_grad=True) * 4.0
    with mpinit.watch_overflow(deep()):
        assert loss.grad_fn._saved_other.item() == 4.0  # type: ignore[union-attr]
    seen: list[Any] = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(args[0])
            return args[0]

    with Mode():
        loss.grad_fn._saved_other.item()  # type: ignore[union-attr]
    assert seen == [4.0] and not isinstance(seen[0], Tensor)


def test_masks_of_minus_infinity_are_no_fault() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    optimizer = start(model, "O2", loss_scale=mpinit.DynamicLossScale(init=8.0))
    mask = torch.triu(torch.full((5, 5), float("-inf")), 1)
    with mpinit.watch_overflow(model) as watch:
        backward(model(torch.randn(2, 5, 8), src_mask=mask).square().mean(), optimizer)
    assert watch.first is None and str(watch).startswith("no overflow in this batch: ")


class Masked(nn.Module):
    """Attention over a mask that is added to its scores, with a parameter before and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores: Tensor = self.first(x) + mask
        return self.last(torch.softmax(scores, -1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("lowest", [torch.finfo(torch.float32).min, -1e9])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
def test_watch_does_not_blame_its_own_operations(lowest: float, level: str) -> None:
    """Check that a mask of finfo(float32).min, whose sum is -inf, is not reported."""
    torch.manual_seed(0)
    model = Masked()
    mpinit.initialize(model, opt_level=level)
    mask = torch.zeros(4, 6).masked_fill(torch.arange(6) > 3, lowest)
    with mpinit.watch_overflow(model) as watch:
        model(torch.ones(4, 6), mask).square().sum().backward()
    assert watch.first is None, str(watch)


@pytest.mark.parametrize("level", ["O0", "O1", "O4", "O5"])
@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: x * x[:, :1].new_zeros(()) + torch.linalg.vector_norm(x * 0, dim=-1, keepdim=True),
        lambda x: nn.functional.normalize(torch.cat([x[:1] * 0, x[1:]]).float(), dim=-1, eps=1e-2),
        lambda x: torch.where(x.abs() > 1e9, x, 0).prod(-1, keepdim=True) + x,
    ],
)
def test_infinite_intermediate_of_a_backward_formula_is_no_fault(harmless: Any, level: str) -> None:
    """Check that the derivative of a norm at 0, which divides by 0 and masks the result, is not reported."""
    model = deep(Parts(lambda self, x: harmless(x).to(x.dtype)))
    optimizer = start(model, level)
    with mpinit.watch_overflow(model) as watch:
        backward(mse(model, BATCH), optimizer)
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())
    assert watch.first is None and str(watch).startswith("no overflow in this batch: ")


def test_a_batch_without_overflow_tells_of_a_lowered_scale() -> None:
    model, optimizer = started(loss_scale="dynamic")
    iterate(mse(model, BATCH), optimizer)
    with mpinit.watch_overflow(model) as watch:
        model(BATCH[0])
    assert "loss scale" not in str(watch)
    iterate(poison(mse(model, BATCH), model[0].weight), optimizer)
    with mpinit.watch_overflow(model) as watch:
        model(BATCH[0])
    assert "1 skipped step has lowered the loss scale, now 32768: at a larger one it may overflow again" in str(watch)


def test_culprit_is_named_and_not_an_earlier_harmless_infinity() -> None:
    """Check that the squares are named, not the mask, which becomes -inf in float16 and does no harm."""
    torch.manual_seed(0)
    parts = {"attention": Masked(), "norm": Parts(lambda self, x: (x * 1e3 - x.square() * 1e9) / 1e9)}
    model = Parts(lambda self, x, mask: self.norm(self.attention(x, mask)), **parts)
    mpinit.initialize(model, opt_level="O2", keep_inputs=["mask"])
    mask = torch.zeros(4, 6).masked_fill(torch.arange(6) > 3, -1e9)
    model.attention.register_forward_pre_hook(lambda module, given: (given[0], given[1].half()))
    with mpinit.watch_overflow(model) as watch:
        model(torch.ones(4, 6), mask).square().sum().backward()
    assert (watch.kind, watch.first_module) == ("forward", "norm"), str(watch)


def test_fault_in_part_that_loss_leaves_out_is_not_preferred() -> None:
    model = Parts(
        lambda self, x: (self.used(x), self.unused(x).float().exp()),
        **{"unused": Parts(lambda self, x: x * 0 + 200.0), "used": Parts(lambda self, x: x * 1e4 * 1e4)},
    )
    mpinit.initialize(model, opt_level="O2", keep_fp32=["unused"])
    with mpinit.watch_overflow(model) as watch:
        used, _ = model(torch.ones(2, 6, requires_grad=True))
        used.sum().backward()
    assert watch.first_module == "used"


HINTS: dict[str, tuple[Any, str]] = {
    "rsqrt of 0": (lambda x: x * (x.square() * 1e-12).rsqrt(), "raise the eps to 1e-5"),
    "division by 0": (lambda x: x / (x * 1e-12), "raise the eps to 1e-5"),
    "a negative power": (lambda x: x * (x.square() * 1e-12).pow(-0.25), "raise the eps to 1e-5"),
    "a power": (lambda x: x * (x * 200.0).square().reciprocal() * 4e4, "a power: divide before it"),
    "exponential": (lambda x: x / (x.abs() * 20).exp() * (x.abs() * 20).exp(), "subtract the largest number first"),
    "a constant": (lambda x: x * 70000.0 / 70000.0, "a factor of 70000 is too large here"),
    "a row that is masked whole": (
        lambda x: x + torch.softmax(torch.full_like(x, -60000.0) * 2.0, -1),
        "keep one position of each row unmasked",
    ),
    "a sum": (lambda x: x * (x.abs() * 9000).sum(), "divide before it is summed"),
    "a logarithm of 0": (lambda x: (x.square() * 1e-12).log() * 0 + x, "log_softmax"),
}


@pytest.mark.parametrize("name", HINTS)
def test_hint_fits_the_operation(name: str) -> None:
    function, words = HINTS[name]
    model = deep(Parts(lambda self, x: function(torch.full_like(x, 3.0) + x * 0)))
    mpinit.initialize(model, opt_level="O2")
    with mpinit.watch_overflow(model) as watch:
        model(torch.ones(2, 6)).sum().backward()
    assert watch.first_module == "1" and words in str(watch), str(watch)


def test_float32_behind_16_bit_is_not_said_to_be_innocent() -> None:
    """Check the logarithm of a number that becomes 0 in float16: it is -inf in float32 after the cast only."""
    model = deep(Parts(lambda self, x: (x.square() * 1e-9).float().log().to(x.dtype)))
    with mpinit.watch_overflow(model) as watch:
        model(torch.ones(2, 6))
    assert watch.first is None
    mpinit.initialize(model, opt_level="O2")
    with mpinit.watch_overflow(model) as watch:
        model(torch.ones(2, 6))
    assert (watch.kind, watch.first_module) == ("float32", "1")
    assert "precision is not at fault" not in str(watch) and "a run at O0 shows" in str(watch)


def test_results_are_same_bits_and_hooks_go_also_after_exception() -> None:
    model = mlp(batchnorm=True)
    hooks = [dict(vars(module)) for module in model.modules()]
    expected = mse(copy.deepcopy(model), BATCH)
    with mpinit.watch_overflow(model):
        assert torch.equal(mse(model, BATCH), expected)
    with pytest.raises(ZeroDivisionError), mpinit.watch_overflow(model) as watch:
        1 / 0  # noqa: B018
    with pytest.raises(RuntimeError), mpinit.watch_overflow(model):
        model(torch.ones(2, 7))
    assert watch.first is None
    assert [vars(module).keys() for module in model.modules()] == [before.keys() for before in hooks]
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._forward_hooks_always_called
        assert not module._forward_pre_hooks_with_kwargs
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_only_a_module_of_python_can_be_watched() -> None:
    for model in (3, torch.jit.script(nn.Linear(4, 4))):
        with pytest.raises(TypeError, match=f"needs a module, .* got {type(model).__name__}"):
            mpinit.watch_overflow(model)  # type: ignore[arg-type]
