"""initialize: what it is given, what it returns, and the session behind it.

Below the public face: the registry and torch's namespaces show what a session leaves.
"""

import copy
import gc
import logging
import tomllib
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from loops import same
from models import CASES, OPTIMIZERS, equal_tensors, level_arguments, quietly, sgd, train, train_plainly
from torch import nn

import mpinit
from mpinit import registry
from mpinit.autocast import thread_flags
from mpinit.autocast.installation import INSTALLATION

LEVELS = ["O0", "O1", "O2", "O3", "O4", "O5"]


@pytest.mark.parametrize(
    ("level", "keywords"),
    [
        ("O1", {"keep_batchnorm_fp32": True}),
        ("O1", {"keep_batchnorm_fp32": "True"}),
        ("O1", {"master_weights": False}),
        ("O1", {"master_weights": "None"}),
        ("O1", {"cast_model_type": False}),
        ("O0", {"keep_batchnorm_fp32": True}),
        ("O0", {"master_weights": True}),
        ("O3", {"cast_model_type": "torch.float16"}),
        ("O2", {"loss_scale": "dynamic", "master_weights": "True", "keep_batchnorm_fp32": "True"}),
    ],
)
def test_redundant_keywords_are_accepted(level: str, keywords: dict[str, Any]) -> None:
    model, plain = quietly(nn.Linear(2, 2), level, **keywords), quietly(nn.Linear(2, 2), level)
    assert model.weight.dtype is plain.weight.dtype
    assert model(torch.ones(1, 2)).dtype is plain(torch.ones(1, 2)).dtype


@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
def test_it_may_be_called_in_inference_mode(level: str) -> None:
    case, states = CASES["transformer"], []
    for is_inside in (False, True):
        model = case.build()
        parameters = list(model.parameters())
        optimizers = [torch.optim.SGD(half, 0.01) for half in (parameters[::2], parameters[1::2])]
        with torch.inference_mode(is_inside):
            mpinit.initialize(model, optimizers[0], level, loss_scale=1.0)
            mpinit.add_optimizers(optimizers[1])
        for optimizer in optimizers:
            train(model, optimizer, case.batches(2), case.loss)
        with torch.inference_mode(is_inside):
            mpinit.undo(model)
        train_plainly(model, optimizers[0], case.batches(2), case.loss)
        states.append(model.state_dict())
    assert equal_tensors(*states)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_casts_of_a_thread_outlive_initialize(level: str) -> None:
    model = mpinit.initialize(nn.Linear(2, 2), opt_level=level)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == (torch.float16 if level == "O1" else torch.bfloat16)
    with torch.inference_mode(), pytest.raises(RuntimeError, match="call mpinit outside of that block"):
        mpinit.undo(model)
    mpinit.undo(model)
    model(torch.ones(1, 2)).sum().backward()
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("came_in", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_16_bit_weights_are_accepted_with_a_log_line(
    level: str, came_in: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    model = CASES["cnn"].build().to(came_in)
    before = {name: value.float() for name, value in model.named_parameters()}
    optimizer = sgd(model)
    with caplog.at_level(logging.INFO, "mpinit"):
        mpinit.initialize(model, optimizer, level)
    about = [record.getMessage() for record in caplog.records if "had a 16-bit dtype already" in record.getMessage()]
    assert len(about) == 1 and "features.0.weight" in about[0]
    state = model.state_dict()
    if level in ("O0", "O2", "O5"):
        same(mpinit.master_params(optimizer), before.values())
        assert all(torch.equal(state[name], value) for name, value in before.items())
    run(model, optimizer, steps=1)


FILE = """
opt_level = "O2"
cast_model_type = "bfloat16"
loss_scale = 64.0
keep_fp32 = ["head"]
num_losses = 3
verbosity = 0
"""


def configured(tmp_path: Path, kind: str) -> Any:
    path = tmp_path / "mine.toml"
    path.write_text(FILE, encoding="utf-8")
    return {"path": path, "string": str(path), "mapping": tomllib.loads(FILE)}[kind]


@pytest.mark.parametrize("kind", ["path", "string", "mapping"])
def test_a_configuration_beats_the_level(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = CASES["cnn"].build()
    optimizer = sgd(model)
    with caplog.at_level(logging.DEBUG, "mpinit"):
        mpinit.initialize(model, optimizer, config=configured(tmp_path, kind))
    assert model.features[0].weight.dtype is torch.bfloat16
    assert model.head.weight.dtype is torch.float32
    assert [mpinit.loss_scale(optimizer, i) for i in range(3)] == [64.0] * 3
    assert not caplog.records


@pytest.mark.parametrize("level", LEVELS)
def test_initialize_logs_one_line(level: str, caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    model = nn.Linear(2, 2)
    with caplog.at_level(logging.INFO, "mpinit"):
        mpinit.initialize(model, sgd(model), level)
    assert len(caplog.records) == 1
    line = caplog.records[0].getMessage()
    assert caplog.records[0].name == "mpinit"
    for part in (level, "Linear", "SGD", "loss_scale"):
        assert part in line
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("level", LEVELS)
def test_verbosity_0_logs_nothing(level: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mpinit"):
        quietly(nn.Linear(2, 2).half() if level == "O2" else nn.Linear(2, 2), level, verbosity=0)
    assert not caplog.records


@pytest.mark.parametrize("network", ["cnn", "lstm"])
@pytest.mark.parametrize("level", LEVELS)
def test_disabled_is_the_script_without_mpinit(network: str, level: str) -> None:
    case = CASES[network]
    plain, model = case.build(), case.build()
    expected = train_plainly(plain, OPTIMIZERS["adam"](plain.parameters()), case.batches(3), case.loss)
    optimizer = OPTIMIZERS["adam"](model.parameters())
    untouched = copy.copy(vars(optimizer)), {name: copy.copy(vars(m)) for name, m in model.named_modules()}
    assert mpinit.initialize(model, optimizer, level, enabled=False) == (model, optimizer)
    assert registry.of(model) is None
    losses = []
    for x, y in case.batches(3):
        optimizer.zero_grad()
        loss = case.loss(model(x), y)
        with mpinit.scale_loss(loss, optimizer) as scaled_loss:
            assert scaled_loss is loss
            scaled_loss.backward()
        assert list(mpinit.master_params(optimizer)) == list(model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert losses == expected
    assert equal_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    assert mpinit.state_dict() == mpinit.state_dict(optimizer) == {}
    mpinit.load_state_dict({"loss_scaler0": {"loss_scale": 2.0, "unskipped": 1}}, optimizer)
    assert mpinit.loss_scale(optimizer) == 1.0
    assert not mpinit.step_was_skipped(optimizer)
    mpinit.undo([model, optimizer])
    assert untouched == (vars(optimizer), {name: vars(m) for name, m in model.named_modules()})
    mpinit.initialize(model, optimizer, level)


def test_disabled_initialize_still_checks_types() -> None:
    with pytest.raises(TypeError, match="Module"):
        mpinit.initialize("model", enabled=False)


def pair(**keywords: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = CASES["cnn"].build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    mpinit.initialize(model, optimizer, **{"verbosity": 0} | keywords)
    return model, optimizer


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> list[float]:
    return train(model, optimizer, CASES["cnn"].batches(steps), CASES["cnn"].loss)


@pytest.mark.parametrize("function", [mpinit.state_dict, lambda: mpinit.load_state_dict({})])
def test_without_an_optimizer_there_must_be_one_session(function: Any) -> None:
    with pytest.raises(RuntimeError, match=r"none.*initialize"):
        function()
    pairs = pair(opt_level="O2"), pair(opt_level="O3")
    with pytest.raises(RuntimeError) as caught:
        function()
    for (model, optimizer), level in zip(pairs, ("O2", "O3"), strict=True):
        assert level in str(caught.value)
        assert type(model).__name__ in str(caught.value)
        assert type(optimizer).__name__ in str(caught.value)
    mpinit.undo(pairs[0][0])
    assert "loss_scaler0" in mpinit.state_dict()


@pytest.mark.parametrize("function", [lambda o: mpinit.scale_loss(torch.ones(()), o), mpinit.loss_scale])
def test_unknown_optimizer_error_lists_the_sessions(function: Any) -> None:
    pair(opt_level="O5")
    stranger = OPTIMIZERS["adam"](nn.Linear(1, 1).parameters())
    kept = pair(opt_level="O5")
    with pytest.raises(RuntimeError, match=r"Adam was not initialised.*session \d+ \(O5: Cnn; SGD\)"):
        function(stranger)
    mpinit.undo(kept[0])


def test_one_loss_cannot_belong_to_two_sessions() -> None:
    (_, first), (_, second) = pair(opt_level="O2"), pair(opt_level="O3")
    with pytest.raises(ValueError, match=r"O2.*O3.*one initialize call"):
        mpinit.scale_loss(torch.ones(()), [first, second])


def test_models_and_optimizers_find_session_and_undo_ends_it() -> None:
    models = [CASES["cnn"].build(), CASES["unet"].build()]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    mpinit.initialize(models, optimizers, "O2")
    found = {registry.of(owner) for owner in (*models, *optimizers)}
    assert len(found) == 1 and registry.live() == list(found)
    mpinit.undo(optimizers[1])
    assert all(registry.of(owner) is None for owner in (*models, *optimizers))
    assert {p.dtype for model in models for p in model.parameters()} == {torch.float32}
    with pytest.raises(ValueError, match="nothing to undo"):
        mpinit.undo(models[0])


@pytest.mark.parametrize(("level", "more"), [*((o, {}) for o in LEVELS[:4]), ("O2", {"master_weights": "split"})])
def test_undone_session_keeps_nothing_alive(level: str, more: dict[str, Any]) -> None:
    model, optimizer = pair(**level_arguments(level, torch.bfloat16) | more)
    run(model, optimizer)
    held = [model, optimizer, model.head, model.head.weight, registry.of(model), next(mpinit.master_params(optimizer))]
    watched = [weakref.ref(thing) for thing in held]
    del held, model, optimizer
    gc.collect()
    assert [reference() for reference in watched] == [None] * len(watched)
    assert not thread_flags.is_on(), "casts go with their session"
    mpinit.initialize(CASES["cnn"].build(), opt_level="O1")
    assert len(INSTALLATION._sessions) == 1, "what stood in torch's namespaces goes at the next initialize"
    assert "data" not in vars(nn.Parameter)


@pytest.mark.parametrize(("level", "masters"), [("O2", True), ("O5", True), ("O5", "split"), ("O5", "model")])
def test_float64_weights_that_have_gradients_are_trained(level: str, masters: Any) -> None:
    model = nn.Linear(3, 2).double()
    whole = nn.Sequential(nn.Linear(3, 3), model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.5)
    with torch.no_grad():
        model.weight.fill_(1.0)
    model.weight.grad = torch.full((2, 3), 0.25, dtype=torch.float64)
    mpinit.initialize(whole, optimizer, level, master_weights=masters, loss_scale=1.0)
    optimizer.step()
    mpinit.undo(whole)
    assert model.weight.dtype is torch.float64 and model.weight.eq(0.875).all()
    assert (
        model.weight.grad is not None and model.weight.grad.dtype is torch.float64 and model.weight.grad.eq(0.25).all()
    )
