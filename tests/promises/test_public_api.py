"""The public names: their types, their signatures, their messages.

Below the public face: public signatures are compared with the tables of settings.
"""

import inspect
import pydoc
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mpinit
from mpinit import amp
from mpinit.config.properties import OPT_LEVELS, Properties

FUNCTIONS = {
    *("initialize", "add_optimizers", "scale_loss", "master_params", "float32_weights"),
    *("state_dict", "load_state_dict"),
    *(
        "float32_allreduce_hook",
        "loss_scale",
        "step_counts",
        "compile_steps",
        "step_was_skipped",
        "scheduler_step",
        "clip_grad_norm_",
    ),
    *("describe", "disable_casts", "undo", "install_as_apex", "half_function", "float_function", "promote_function"),
    *("register_half_function", "register_float_function", "register_promote_function", "register_input"),
}

CLASSES = {"DynamicLossScale", "GradScaler", "Properties", "TrainState"}

# What mpinit/inspect offers: of mpinit alone, not of amp.
INSPECTORS = {
    *("audit", "explain", "fidelity", "overflow_report", "watch_overflow"),
}

SIGNATURES = {
    "add_optimizers": "(optimizers)",
    "scale_loss": "(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False)",
    "master_params": "(optimizer)",
    "state_dict": "(optimizer=None)",
    "load_state_dict": "(state, optimizer=None)",
    "loss_scale": "(optimizer, loss_id=0)",
    "step_was_skipped": "(optimizer)",
    "disable_casts": "()",
    "explain": "(model, *args, loss=None, opt_level=None, **kwargs)",
}


@pytest.fixture
def pair() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_the_names_that_are_exported() -> None:
    assert sorted(mpinit.__all__) == sorted(
        FUNCTIONS
        | INSPECTORS
        | {"DynamicLossScale", "GradScaler", "Properties", "TrainState", "OPT_LEVELS", "amp", "__version__"}
    )
    assert all(hasattr(mpinit, name) for name in mpinit.__all__)
    assert mpinit.Properties is Properties
    assert mpinit.OPT_LEVELS is OPT_LEVELS


def test_amp_is_a_module_with_the_same_names() -> None:
    assert inspect.ismodule(amp)
    assert sorted(amp.__all__) == sorted(FUNCTIONS - {"install_as_apex"} | CLASSES | {"OPT_LEVELS"})
    for name in amp.__all__:
        assert getattr(amp, name) is getattr(mpinit, name)


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_order_and_defaults_of_the_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(mpinit, name)).parameters.values()
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in parameters]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


KEYWORDS = (
    *("enabled", "cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale"),
    *("cast_model_outputs", "num_losses", "verbosity", "min_loss_scale", "max_loss_scale"),
    *("patch_torch_functions_type", "keep_fp32", "compute_fp32", "keep_inputs", "entry_points", "skip_nonfinite"),
    *("optimizer_state", "grad_dtype", "await_optimizers", "process_group", "config"),
)


def test_initialize_has_22_keywords_which_help_shows() -> None:
    parameters = inspect.signature(mpinit.initialize).parameters
    assert list(parameters) == ["models", "optimizers", "opt_level", *KEYWORDS, "others"]
    assert [parameters[name].default for name in ("optimizers", "opt_level")] == [None, "O1"]
    assert {parameters[name].kind for name in KEYWORDS} == {inspect.Parameter.KEYWORD_ONLY}
    switches = {"enabled": True, "await_optimizers": False}
    assert all(parameters[name].default is switches.get(name) for name in KEYWORDS)
    assert set(Properties.model_fields) < set(KEYWORDS)
    text = pydoc.render_doc(mpinit.initialize, renderer=pydoc.plaintext)
    for name in KEYWORDS:
        assert re.search(rf"^ +(\w+, )?{name}(, \w+)?: ", text, re.MULTILINE), f"{name} is not explained"


@pytest.mark.parametrize("name", sorted(FUNCTIONS | INSPECTORS))
def test_every_function_is_documented_and_typed(name: str) -> None:
    function = getattr(mpinit, name)
    assert inspect.getdoc(function)
    signature = inspect.signature(function)
    assert signature.return_annotation is not inspect.Signature.empty
    assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def test_the_package_says_that_it_is_typed() -> None:
    assert (Path(mpinit.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_returns_mirror_the_arguments_and_are_the_same_objects(level: str) -> None:
    for box in (lambda *xs: xs[0], lambda *xs: list(xs), lambda *xs: tuple(xs)):
        models = [nn.Linear(2, 2), nn.Linear(2, 2)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
        given_models: Any = box(*models)
        given_optimizers: Any = box(*optimizers)
        result = mpinit.initialize(given_models, given_optimizers, level)
        assert type(result) is tuple
        for returned, given in zip(result, (given_models, given_optimizers), strict=True):
            assert type(returned) is type(given)
            if isinstance(given, (list, tuple)):
                assert [id(one) for one in returned] == [id(one) for one in given]
            else:
                assert returned is given
        mpinit.undo(given_models)


@pytest.mark.parametrize("level", OPT_LEVELS)
def test_without_optimizers_only_the_models_come_back(level: str) -> None:
    model = nn.Linear(2, 2)
    assert mpinit.initialize(model, opt_level=level) is model
    mpinit.undo(model)
    models = [nn.Linear(2, 2), nn.Linear(2, 2)]
    returned = mpinit.initialize(models, None, level)
    assert isinstance(returned, list)
    assert [id(one) for one in returned] == [id(one) for one in models]


def test_an_empty_list_of_optimizers_comes_back_as_one() -> None:
    model = nn.Linear(2, 2)
    assert mpinit.initialize(model, [], "O2") == (model, [])


@pytest.mark.parametrize("name", sorted(set(Properties.model_fields)))
def test_every_property_is_a_keyword(name: str, pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = pair
    level = "O1" if name.startswith("patch") else "O5"
    mpinit.initialize(model, optimizer, level, **{name: getattr(OPT_LEVELS[level], name)})


def test_a_keyword_beats_a_configuration_also_the_default(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = pair
    config = {"opt_level": "O1", "max_loss_scale": 4.0, "num_losses": 2}
    mpinit.initialize(model, optimizer, "O2", max_loss_scale=2.0**24, num_losses=1, config=config)
    assert model[0].weight.dtype is torch.float16
    assert mpinit.loss_scale(optimizer) == 2.0**16
    with pytest.raises(ValueError, match="num_losses=1"):
        mpinit.loss_scale(optimizer, 1)


def test_strings_from_a_command_line(pair: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = pair
    mpinit.initialize(model, optimizer, "O2", keep_batchnorm_fp32="False", loss_scale="128.0", cast_model_type="bf16")
    assert model[1].weight.dtype is torch.bfloat16
    assert mpinit.loss_scale(optimizer) == 128.0
    assert isinstance(mpinit.loss_scale(optimizer), float)


USES = Path(__file__).parent / "typed"
ROOT = Path(__file__).parents[2]


def complaints(checker: str, file: Path, cache: Path) -> set[int]:
    """The lines of ``file`` in which ``checker`` finds an error."""
    command = {
        "mypy": ["mypy", "--strict", "--no-error-summary", f"--cache-dir={cache}"],
        "pyright": ["pyright", f"--pythonpath={sys.executable}"],
    }[checker]
    done = subprocess.run([sys.executable, "-m", *command, str(file)], cwd=ROOT, capture_output=True, text=True)
    # pyright is a program for node, which its package fetches when it is first run.
    if checker == "pyright" and not re.search(r"^\d+ errors?, ", done.stdout, re.MULTILINE):
        pytest.skip(f"pyright does not start here: {(done.stderr or done.stdout).strip()[-200:]}")
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(rf"{file.name}:(\d+):.*? error:? ", done.stdout)
    assert bool(found) is bool(done.returncode), done.stdout + done.stderr
    return set(map(int, found))


@pytest.mark.long
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_type_checkers_accept_right_uses_and_refuse_wrong_ones(checker: str, tmp_path: Path) -> None:
    assert complaints(checker, USES / "right.py", tmp_path) == set()
    wrong = USES / "wrong.py"
    lines = wrong.read_text(encoding="utf-8").splitlines()
    assert complaints(checker, wrong, tmp_path) == {n for n, line in enumerate(lines, 1) if line.endswith("  # wrong")}


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1)


REFUSED: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "add_optimizers": (mpinit.add_optimizers, TypeError, "optimizers must be a torch.optim.Optimizer"),
    "undo": (mpinit.undo, ValueError, "is not initialised, so there is nothing to undo"),
    "scale_loss": (lambda model: mpinit.scale_loss(torch.ones(()), model), TypeError, "optimizers must be"),
    "load_state_dict": (lambda model: mpinit.load_state_dict({}, sgd(model)), RuntimeError, "was not initialised"),
    "step_counts": (lambda model: mpinit.step_counts(sgd(model)), RuntimeError, "was not initialised"),
    "overflow_report": (lambda model: mpinit.overflow_report(sgd(model)), RuntimeError, "was not initialised"),
    "audit": (lambda model: mpinit.audit(sgd(model)), TypeError, "audit needs a module and an optimizer, not SGD"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusal_is_a_documented_error_with_its_whole_traceback(name: str) -> None:
    refused, kind, said = REFUSED[name]
    with pytest.raises(kind, match=said) as caught:
        refused(net())
    assert type(caught.value) is kind
    raised_in = Path(str(caught.traceback[-1].path))
    assert raised_in.is_relative_to(Path(mpinit.__file__).parent), "the line that refuses is in the traceback"


def test_an_error_of_the_users_own_code_is_shown_whole() -> None:
    def keep(name: str, module: nn.Module) -> bool:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        mpinit.initialize(net(), opt_level="O2", keep_fp32=keep)
    assert caught.traceback[-1].name == "keep"


def test_a_fourth_positional_argument_is_refused() -> None:
    model = net()
    with pytest.raises(TypeError, match="from 1 to 3 positional arguments"):
        mpinit.initialize(model, sgd(model), "O2", True)  # type: ignore[call-overload]
    assert next(model.parameters()).dtype is torch.float32


@pytest.mark.parametrize("module", ["torch._dynamo", "torch._inductor", "torch.distributed.checkpoint", "transformers"])
def test_importing_imports_nothing_heavy(module: str) -> None:
    code = "import sys, torch; known = {*sys.modules}; import mpinit; sys.exit(sys.argv[1] in {*sys.modules} - known)"
    subprocess.run([sys.executable, "-c", code, module], check=True)
