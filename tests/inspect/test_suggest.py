"""suggest: what it refuses, levels, keywords, several culprits, and what it prints."""

from typing import Any

import pytest
import torch
from loops import backward, batches, mlp, mse, start
from models import Parts
from planted_faults import Plant, normed
from torch import nn

import mpinit


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-3)


def step(model: Any, optimizer: Any) -> torch.Tensor:
    return mse(model, batches(1)[0])


def faulty(*sizes: float) -> nn.Sequential:
    torch.manual_seed(0)
    parts = [part for size in sizes for part in (nn.Linear(8, 8), Plant(normed, size))]
    return nn.Sequential(nn.Linear(6, 8), *parts, nn.Linear(8, 3))


def test_several_culprits_are_all_kept_and_no_more() -> None:
    model = faulty(3000.0, 1.0, 3000.0)
    found = mpinit.suggest(model, adam(model), step)
    assert (found.level, sorted(found.keep_fp32)) == ("O2", ["2", "6"])
    assert len(found.runs) == 3


def test_a_value_that_leaves_the_range_on_its_way_out_needs_the_block_around_it() -> None:
    torch.manual_seed(0)
    block = Parts(lambda self, x: self.down(self.up(x)), up=nn.Linear(8, 8), down=nn.Linear(8, 8))
    block.up.weight.data.mul_(1e5)
    block.down.weight.data.mul_(1e-5)
    model = nn.Sequential(nn.Linear(6, 8), block, nn.Linear(8, 3))
    found = mpinit.suggest(model, adam(model), step)
    assert (found.level, found.keep_fp32) == ("O2", ["1"]), str(found)
    assert len(found.runs) == 3


@pytest.mark.parametrize("level", ["O2", "O5"])
@pytest.mark.parametrize("place", [1, 3, 5])
def test_where_digits_are_lost_the_module_that_the_loss_depends_on_most_is_kept(place: int, level: str) -> None:
    torch.manual_seed(0)
    parts = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]
    # Adds a large number and takes it off again: all of it is in range, and 16 bits lose the digits.
    parts.insert(place, Parts(lambda self, x: (x + 3000.0) - 3000.0))
    model = nn.Sequential(*parts)
    found = mpinit.suggest(model, adam(model), step, levels=(level,))
    assert (found.level, found.keep_fp32) == (level, [str(place)]), str(found)
    assert found.finding is not None and (found.finding.kind, found.finding.where) == ("precision", str(place))
    assert len(found.runs) == 3


def test_the_sensitivity_is_the_first_order_change_of_the_loss_by_hand() -> None:
    from mpinit.inspect.overflow import OverflowWatch

    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(nn.Linear(6, 4), nn.Sigmoid()), batches(1)[0]
    y = torch.rand(len(x), 4)
    with OverflowWatch(model, (torch.float16,)) as watch:
        (model(x) - y).square().sum().backward()
    hidden = torch.nn.functional.linear(x, model[0].weight, model[0].bias).detach()
    result = hidden.sigmoid()
    gradient = 2 * (result - y)
    expected = {"0": (hidden, gradient * result * (1 - result)), "1": (result, gradient)}
    for name, (values, of_values) in expected.items():
        rounding = values - values.half().float()
        by_hand = float((rounding * of_values).abs().sum())
        assert watch.sensitivity[torch.float16][name] == pytest.approx(by_hand, rel=0.02)


def masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Masks as attention does, with the lowest number of whatever type it is given."""
    lowest = torch.finfo(x.dtype).min
    if self.in_place:
        mask = torch.zeros_like(x).masked_fill_(torch.arange(x.shape[-1]) > 4, lowest)
        scores = x * 1.0
        scores += mask
    else:
        scores = x.masked_fill(torch.arange(x.shape[-1]) > 4, lowest)
    return x + torch.softmax(scores, -1)


@pytest.mark.parametrize("in_place", [True, False])
def test_masks_of_a_types_lowest_number_are_not_kept_with_a_culprit(in_place: bool) -> None:
    *parts, last = faulty(3000.0)
    masks = [Parts(masked, in_place=in_place) for _ in range(2)]
    model = nn.Sequential(*parts, masks[0], nn.Linear(8, 8), masks[1], last)
    found = mpinit.suggest(model, adam(model), step)
    assert (found.level, found.keep_fp32) == ("O2", ["2"]), str(found)


def test_bfloat16_where_the_models_own_forward_overflows() -> None:
    def normed(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x) * 3e4
        return y / (y.square().mean() + 1).sqrt()  # type: ignore[no-any-return]

    model = Parts(normed, body=mlp())
    found = mpinit.suggest(model, adam(model), step)
    assert (found.level, found.keep_fp32) == ("O5", []), str(found)
    assert found.finding is not None and (found.finding.kind, found.finding.where) == ("forward", "")


def test_the_words_paste() -> None:
    model = faulty(3000.0)
    found = mpinit.suggest(model, adam(model), step)
    assert found.to_keywords() == "opt_level='O2', keep_fp32=['2']"
    mpinit.initialize(model, adam(model), found.level, **found.keywords, verbosity=0)
    assert "forward" in str(found) and "(does not agree)" in str(found)


def test_what_an_initialised_model_was_given_is_kept() -> None:
    model = faulty(3000.0)
    optimizer = start(model, "O2", keep_fp32=["0"], growth_interval=7)
    found = mpinit.suggest(model, optimizer, step)
    assert found.keep_fp32 == ["2"]
    assert found.keywords["keep_fp32"] == ["0", "2"] and found.keywords["growth_interval"] == 7


def test_a_fixed_scale_that_lets_gradients_vanish() -> None:
    model = mlp()
    found = mpinit.suggest(model, adam(model), lambda m, o: step(m, o) * 1e-8, loss_scale=1.0)
    assert found.finding is not None and found.finding.kind == "underflow"
    assert (found.level, found.keywords["loss_scale"]) == ("O2", "dynamic")


def test_weights_that_diverged() -> None:
    model = mlp()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1e20)
    found = mpinit.suggest(model, adam(model), step)
    assert found.level is None and not found.precision_is_at_fault and "learning rate" in found.reason


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"levels": "O2"}, "a tuple of levels"),
        ({"levels": ("02",)}, "letter O"),
        ({"levels": ()}, "a tuple of levels"),
        ({"los_scale": 1}, "loss_scale"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    model = mlp()
    with pytest.raises(ValueError, match=message):
        mpinit.suggest(model, adam(model), step, **arguments)


def test_steps_that_cannot_be_compared() -> None:
    model = mlp()
    data = iter(batches(20))
    with pytest.raises(ValueError, match="another batch"):
        mpinit.suggest(model, adam(model), lambda m, o: mse(m, next(data)))
    with pytest.raises(ValueError, match="not the copy"):
        mpinit.suggest(model, adam(model), lambda m, o: mse(model, batches(1)[0]))
    with pytest.raises(ValueError, match="did not run the model"):
        mpinit.suggest(model, adam(model), lambda m, o: torch.ones(()))
    with pytest.raises(TypeError, match="must return the loss"):
        mpinit.suggest(model, adam(model), lambda m, o: m(batches(1)[0][0]))
    with pytest.raises(TypeError, match="a model, an optimizer"):
        mpinit.suggest(3, adam(model), step)  # type: ignore[arg-type]
    stranger = torch.optim.Adam([*model.parameters(), nn.Parameter(torch.ones(1))])
    with pytest.raises(ValueError, match="not the model's"):
        mpinit.suggest(model, stranger, step)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.LBFGS])
def test_optimizers_with_schedulers_are_copied(make: Any) -> None:
    model = mlp()
    optimizer = make(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def whole(model: Any, optimizer: Any) -> torch.Tensor:
        loss = step(model, optimizer)
        backward(loss, optimizer)
        if make is not torch.optim.LBFGS:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    assert mpinit.suggest(model, optimizer, whole).keep_fp32 == []
