"""suggest: what it refuses, levels, keywords, several culprits, and what it prints.

Below the public face: the sensitivity is compared with numbers by hand, which the public report does not have.
"""

import fnmatch
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import backward, batches, mlp, mse, start
from models import Parts
from planted_faults import Plant, normed
from torch import nn

import mpinit

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import planted_models
from diagnoses import keeps_up, train

FAULTY = {example.name: example for example in planted_models.faulty()}
HEALTHY = {example.name: example for example in planted_models.healthy()}


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


def test_suggested_keywords_are_valid_python() -> None:
    model = faulty(3000.0)
    found = mpinit.suggest(model, adam(model), step)
    assert found.to_keywords() == "opt_level='O2', keep_fp32=['2']"
    mpinit.initialize(model, adam(model), found.level, **found.keywords)
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


# -- what it says of models whose truth is measured: docs/measure.py tries all of them --------------------------------


def asked(example: planted_models.Example, levels: tuple[str, ...] = ("O2", "O5")) -> Any:
    model, optimizer = example.make()
    (batch,) = example.batches(1, 0)
    return mpinit.suggest(model, optimizer, lambda model, optimizer: example.loss(model, batch), levels)


def trains(example: planted_models.Example, found: Any) -> bool:
    """Return whether a suggestion trains as float32 does, on other batches than the one that was examined."""
    return keeps_up(train(example, found.level, dict(found.keywords)), train(example, "O0", {}))


@pytest.mark.long
@pytest.mark.parametrize("levels", [("O2", "O5"), ("O1",), ("O5",)])
@pytest.mark.parametrize("name", ["transformer, RMSNorm eps 1e-5, padding_idx", "mlp, a norm of zero rows", "lstm"])
def test_healthy_models_are_not_sent_to_float32(name: str, levels: tuple[str, ...]) -> None:
    """Intermediate numbers of a backward formula are large in a padded row; gradients and training are not."""
    found = asked(HEALTHY[name], levels)
    assert (found.level, found.keep_fp32, found.findings) == (levels[0], [], ()), str(found)
    assert trains(HEALTHY[name], found)


CURES = {
    "transformer, RMSNorm with eps 1e-12 and a zero row": (["blocks.*.norm1"], "blocks.0.norm1", "raise the eps"),
    "transformer, mask of -1e9, a row masked whole": (["blocks.*.attn"], "blocks.0.attn", "one position of each row"),
    "mlp, a hand-written norm": (["plant"], "plant", "a power"),
    "cnn, a mean summed first": (["plant"], "plant", "divide before it is summed"),
}


@pytest.mark.filterwarnings("ignore:the eps of")  # of norms that the suggestion leaves in 16 bits, on purpose
@pytest.mark.long
@pytest.mark.parametrize("name", CURES)
def test_modules_of_one_kind_are_kept_together_and_the_suggestion_trains(name: str) -> None:
    keep, where, hint = CURES[name]
    found = asked(FAULTY[name])
    assert (found.level, found.keep_fp32) == ("O2", keep), str(found)
    assert found.finding is not None and found.finding.where == where and hint in found.reason
    assert trains(FAULTY[name], found)


@pytest.mark.long
def test_input_that_must_not_be_rounded_is_kept() -> None:
    example = FAULTY["denoiser, timesteps"]
    for level in ("O2", "O5"):
        found = asked(example, (level,))
        assert (found.level, found.keywords) == (level, {"keep_inputs": ["timestep"]}), str(found)
        assert found.finding is not None and (found.finding.kind, found.finding.where) == ("input", "timestep")
        assert trains(example, found)


def test_o5_is_tried_before_float32_is_advised() -> None:
    example = FAULTY["loss times 400 inside"]
    found = asked(example, ("O2",))
    assert found.level is None and "O5 agrees with float32 as it is" in found.reason
    assert "train in float32" not in found.reason and [run.level for run in found.runs][-1] == "O5"
    found = asked(example)
    assert found.level == "O5" and found.keep_fp32 == []


def test_float32_is_advised_where_o5_failed_too() -> None:
    torch.manual_seed(0)
    model = Parts(lambda self, x: (self.body(x) + 6000.0) - 6000.0, body=mlp())
    found = mpinit.suggest(model, adam(model), step, levels=("O2",))
    assert found.level is None and "train in float32 (O0)" in found.reason
    assert "O5" in [run.level for run in found.runs]


def test_scale_is_the_one_that_training_comes_to() -> None:
    """Check that skips at a scale of 65536, but not of 1024, are no fault."""
    model = mlp()
    found = mpinit.suggest(model, adam(model), lambda m, o: step(m, o) * 30.0)
    assert (found.level, found.keep_fp32) == ("O2", [])
    assert 0 < found.runs[1].skipped < 16 and abs(found.runs[1].training_error) < 0.01


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_noise_of_dropout_is_the_same_in_every_run(dropout: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(dropout), nn.Tanh(), nn.Linear(32, 3))
    found = mpinit.suggest(model, adam(model), lambda m, o: step(m, o) * 30.0)
    assert found.level == "O2" and found.runs[1].loss_error < 0.01 and found.runs[1].skipped > 0


def test_patterns_name_modules_of_one_class_and_place_only() -> None:
    from mpinit.inspect.suggest import _of_one_kind

    model = nn.Module()
    model.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(4), "act": nn.GELU()}) for _ in range(3))
    model.blocks[2]["act"] = nn.ReLU()
    model.blocks[1]["inner"] = nn.ModuleDict({"norm": nn.LayerNorm(4)})
    model.tail = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    names = [name for name, _ in model.named_modules()]
    # A star goes across dots, and would name a norm within a part as well.
    assert _of_one_kind(model, "blocks.0.norm") == ["blocks.0.norm", "blocks.1.norm", "blocks.2.norm"]
    assert _of_one_kind(model, "blocks.0.act") == ["blocks.0.act", "blocks.1.act"]
    assert _of_one_kind(model, "tail.0") == ["tail.0"]
    del model.blocks[1]["inner"]
    (pattern,) = _of_one_kind(model, "blocks.1.norm")
    assert fnmatch.filter(names, pattern) == ["blocks.0.norm", "blocks.1.norm", "blocks.1.inner.norm", "blocks.2.norm"]


def test_harmless_infinity_of_a_backward_formula_does_not_end_the_search() -> None:
    """Check that a norm at 0, whose formula masks a derivative of 0/0, is no fault at any level."""
    model = Parts(lambda self, x: self.body(x) + torch.linalg.vector_norm(x * 0, dim=-1, keepdim=True), body=mlp())
    found = mpinit.suggest(model, adam(model), step)
    assert (found.level, found.findings) == ("O2", ())


def test_trials_leave_no_word_behind(caplog: pytest.LogCaptureFixture) -> None:
    model = faulty(3000.0)
    mpinit.suggest(model, adam(model), lambda m, o: step(m, o) * 1e6)
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (lambda: None, r"step is called as step\(model, optimizer\), on copies of both: too many positional"),
        (lambda model, optimizer, batch: None, r"step is called as step\(model, optimizer\).*missing .*'batch'"),
        (3, "step must be a function of a model and an optimizer, not int"),
    ],
)
def test_a_step_with_other_parameters_is_answered_with_the_call(step: Any, said: str) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with pytest.raises(TypeError, match=said):
        mpinit.suggest(model, torch.optim.SGD(model.parameters(), lr=0.1), step)
    assert torch.equal(model.weight, before)
