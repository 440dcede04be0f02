"""torch's own modules, at every level."""

import inspect
from collections import OrderedDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import DTYPES, Cnn, Parts, level_arguments, quietly, sgd, train, train_plainly
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import mpinit

LEVELS = ["O0", "O1", "O2", "O3"]
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in (*model.named_parameters(), *model.named_buffers())}


class Assorted(nn.Module):
    """Parameters and buffers of many types."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.fine = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("wide", torch.full((3,), 0.1, dtype=torch.float64))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
        self.register_buffer("index", torch.arange(3))
        self.register_buffer("phase", torch.ones(3, dtype=torch.complex64))
        self.register_buffer("nothing", None)
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.fine * self.wide).to(self.frozen.dtype) * self.frozen * self.unsaved
        return self.norm(self.linear(x) * scale * self.mask + self.index)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("level", "batchnorm"), [("O0", F32), ("O2", F32), ("O3", None)])
def test_floating_tensors_are_cast_and_nothing_else(level: str, batchnorm: torch.dtype | None, dtype: str) -> None:
    model = Assorted()
    mpinit.initialize(model, sgd(model), **level_arguments(level, DTYPES[dtype]))
    body = F32 if level == "O0" else DTYPES[dtype]
    norm = batchnorm or body
    expected = {f"norm.{name}": norm for name in ("weight", "bias", "running_mean", "running_var")}
    expected |= dict.fromkeys(["linear.weight", "linear.bias", "frozen", "unsaved"], body)
    expected |= {"mask": torch.bool, "index": torch.int64, "phase": torch.complex64}
    expected |= dict.fromkeys(["fine", "wide"], torch.float64)
    assert dtypes_of(model) == expected | {"norm.num_batches_tracked": torch.int64}
    assert model(torch.randn(4, 3)).dtype is F32


def test_cast_model_type_false_leaves_weights_and_inputs() -> None:
    model = quietly(nn.Linear(2, 2), "O3", cast_model_type=False)
    assert model.weight.dtype is F32
    assert model(torch.ones(1, 2)).dtype is F32
    assert quietly(nn.Linear(2, 2), "O2", cast_model_type="False").weight.dtype is F32


class UsersBatchNorm(nn.BatchNorm1d):
    """A user's own, whose kernel is not known."""

    def forward(self, x: Tensor) -> Tensor:
        mean, var = x.mean(0), x.var(0, unbiased=False)
        assert x.dtype is self.running_mean.dtype, "a module kept in float32 gets float32"
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


NORMS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.BatchNorm1d(4),
    "affine=False": lambda: nn.BatchNorm1d(4, affine=False),
    "no running statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "sync": lambda: nn.SyncBatchNorm(4),
    "user's": lambda: UsersBatchNorm(4),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", NORMS)
def test_batchnorm_stays_float32_and_works_in_train_and_eval(norm: str, dtype: str) -> None:
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(4, 4), NORMS[norm](), nn.Linear(4, 4))
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    quietly(model, "O2", cast_model_type=DTYPES[dtype], loss_scale=1.0)
    for name, kept in dtypes_of(model[1]).items():
        assert kept is (torch.int64 if name == "num_batches_tracked" else F32)
    # SyncBatchNorm trains on an accelerator only.
    for mode in (False,) if norm == "sync" else (True, False):
        model.train(mode)
        x = torch.randn(8, 4, requires_grad=True)
        model(x).square().sum().backward()
        assert x.grad is not None and x.grad.dtype is F32 and bool(x.grad.isfinite().all())
        assert seen.pop() is DTYPES[dtype], "what comes out of a BatchNorm is 16-bit again"


def blocks() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for block in (self.first, self.second):
            x = block["norm"](block["linear"](x))
        return self.head(x)

    first, second = (nn.ModuleDict({"linear": nn.Linear(4, 4), "norm": nn.LayerNorm(4)}) for _ in range(2))
    return Parts(run, first=first, second=second, head=nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))


NORM_NAMES = {"first.norm", "second.norm"}
KEPT: dict[str, tuple[Any, set[str]]] = {
    "a name": ("head", {"head.0", "head.1"}),
    "a name below": ("head.1", {"head.1"}),
    "a wildcard": ("*.norm", NORM_NAMES),
    "a type": (nn.LayerNorm, NORM_NAMES),
    "a predicate": (lambda name, module: isinstance(module, nn.LayerNorm) and name.startswith("first"), {"first.norm"}),
    "several": (["second.linear", nn.LayerNorm], NORM_NAMES | {"second.linear"}),
    "everything": (lambda name, module: True, NORM_NAMES | {"first.linear", "second.linear", "head.0", "head.1"}),
}


@pytest.mark.parametrize("level", ["O2", "O3"])
@pytest.mark.parametrize("what", KEPT)
def test_keep_fp32_leaves_modules_in_float32(what: str, level: str) -> None:
    keep, expected = KEPT[what]
    model = blocks()
    taken: dict[str, tuple[torch.dtype, torch.dtype]] = {}
    for name, module in model.named_modules():
        if not list(module.children()):
            module.register_forward_hook(lambda _, x, y, name=name: taken.update({name: (x[0].dtype, y.dtype)}))
    quietly(model, level, keep_fp32=keep, loss_scale=1.0)
    out = model(torch.randn(3, 4))
    out.sum().backward()
    assert out.dtype is F32
    kept = {name.rpartition(".")[0] for name, dtype in dtypes_of(model).items() if dtype is F32}
    assert kept == expected
    if what in ("a wildcard", "a type", "a predicate", "a name below"):
        assert all(taken[name][1] is (F16) for name in expected), "what they return is 16-bit again"
    assert all(dtypes == (F16, F16) for name, dtypes in taken.items() if name not in expected)


def tied() -> Any:
    embedding, head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
    head.weight = embedding.weight
    return Parts(lambda self, x: self.head(self.embedding(x)), embedding=embedding, head=head)


@pytest.mark.parametrize("level", LEVELS)
def test_tied_parameters_stay_tied(level: str) -> None:
    model = tied()
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, **level_arguments(level, F16))
    assert model.head.weight is model.embedding.weight
    assert len(list(mpinit.master_params(optimizer))) == 1
    before = model.state_dict()["head.weight"].clone()
    train(model, optimizer, [(torch.arange(5), torch.arange(5))], nn.functional.cross_entropy)
    after = model.state_dict()
    assert torch.equal(after["head.weight"], after["embedding.weight"])
    assert not torch.equal(after["head.weight"], before)
    mpinit.undo(model)
    assert model.head.weight is model.embedding.weight


def test_a_parameter_tied_into_a_module_kept_float32_is_refused() -> None:
    model = tied()
    with pytest.raises(ValueError, match=r"embedding\.weight.*shared.*keep_fp32"):
        quietly(model, keep_fp32="head")
    assert model.head.weight.dtype is F32
    assert "forward" not in vars(model)


def _symmetric() -> nn.Module:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).transpose(-1, -2)

    linear = nn.Linear(4, 4)
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


def _old_weight_norm() -> nn.Module:
    with pytest.warns(FutureWarning):
        return nn.utils.weight_norm(nn.Linear(4, 4))


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "symmetric": _symmetric,
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(4, 4)),
    "old weight_norm": _old_weight_norm,
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(4, 4)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("what", PARAMETRIZED)
def test_parametrized_weights_train(what: str, level: str, dtype: str) -> None:
    x, y = torch.randn(8, 4), torch.randn(8, 4)

    def build() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(PARAMETRIZED[what](), nn.Tanh(), nn.Linear(4, 4))

    reference, model = build(), build()
    expected = train_plainly(reference, sgd(reference), [(x, y)] * 5, nn.functional.mse_loss)
    optimizer = sgd(model)
    mpinit.initialize(model, optimizer, **level_arguments(level, DTYPES[dtype]))
    losses = train(model, optimizer, [(x, y)] * 5, nn.functional.mse_loss)
    assert losses == pytest.approx(expected, abs=0.005 if dtype == "fp16" else 0.05)
    mpinit.undo(model)
    assert set(dtypes_of(model).values()) == {F32}
    assert model(x).dtype is F32


def test_weights_computed_without_16_bit_work_in_float32() -> None:
    model = nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4))
    quietly(model, keep_fp32="0", loss_scale=1.0)
    model(torch.randn(2, 4)).sum().backward()
    assert model[1].weight.dtype is F16


@pytest.mark.parametrize("made", [lambda: nn.LazyLinear(2), nn.LazyBatchNorm1d], ids=["linear", "batchnorm"])
def test_lazy_modules_are_refused_until_they_are_initialised(made: Callable[[], nn.Module]) -> None:
    lazy = made()
    model = nn.Sequential(OrderedDict(start=nn.Linear(3, 3), late=lazy))
    with pytest.raises(ValueError, match=r"'late\.\w+'.*lazy.*forward"):
        mpinit.initialize(model, opt_level="O2")
    model(torch.ones(2, 3))
    quietly(model, loss_scale=1.0)
    model(torch.ones(2, 3)).sum().backward()
    assert model.late.weight.dtype is (F32 if isinstance(lazy, nn.BatchNorm1d) else F16)


class Probe(nn.Module):
    """Hands back what it was given and remembers it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.given: Any = None

    def forward(self, value: Any, *, flag: bool = False, other: Any = None) -> Any:
        """Remembers."""
        self.given = value
        return value


@pytest.mark.parametrize("call", [lambda m, v: m(v), lambda m, v: m.forward(v), lambda m, v: m(value=v)])
def test_inputs_and_outputs_are_cast_in_containers(call: Callable[[nn.Module, Any], Any]) -> None:
    x, probe = torch.ones(2), quietly(Probe(), "O3")
    value = {"a": [(x, 1)], "ids": torch.arange(2)}
    returned = call(probe, value)
    assert (probe.given["a"][0][0].dtype, returned["a"][0][0].dtype) == (F16, F32)
    assert probe.given["ids"] is returned["ids"] is value["ids"]
    assert value["a"][0][0] is x, "what the caller holds is not touched"
    assert call(probe, ids := torch.arange(2)) is ids


@pytest.mark.parametrize("outputs", ["bf16", "fp32", torch.float16, None])
@pytest.mark.parametrize("level", LEVELS)
def test_cast_model_outputs(level: str, outputs: Any) -> None:
    model = quietly(Cnn(), level, cast_model_outputs=outputs)
    expected = {"bf16": BF16, "fp32": F32, F16: F16, None: F32}[outputs]
    x = torch.randn(2, 1, 8, 8)
    if level == "O1" and outputs is None:
        expected = F16  # a linear layer came last, and O1 in the scope of a thread leaves outputs as they are
    assert model(x).dtype is expected
    assert model.forward(x).dtype is expected


@pytest.mark.parametrize("level", LEVELS)
def test_signature_and_documentation_of_forward_stay(level: str) -> None:
    probe = Probe()
    expected = inspect.signature(probe.forward)
    quietly(probe, level)
    assert inspect.signature(probe.forward) == expected
    assert probe(torch.ones(2), flag=True, other=SimpleNamespace(a=1)).dtype is F32


def test_forward_hooks_run_once_and_see_what_the_caller_sees() -> None:
    model = nn.Linear(2, 2)
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    model.register_forward_hook(lambda m, args, output: seen.append((args[0].dtype, output.dtype)))
    quietly(model, "O2")
    model(torch.ones(1, 2))
    assert seen == [(F32, F32)]


PADDING = torch.tensor([[False, False, False, True]] * 2)


# Attention does not call its output layer, an nn.Linear: kept alone, it keeps the attention.
KEPT_IN_LAYERS = [nn.LayerNorm, nn.MultiheadAttention, nn.Linear, "*linear1", "*.out_proj", nn.TransformerEncoderLayer]


def encoder() -> nn.TransformerEncoder:
    torch.manual_seed(0)
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["all", "padded"])
@pytest.mark.parametrize("level", ["O2", "O3", "O5"])
@pytest.mark.parametrize("keep", KEPT_IN_LAYERS, ids=str)
def test_evaluation_and_training_give_the_float32_result(keep: Any, level: str, padding: torch.Tensor | None) -> None:
    model, x = encoder(), torch.randn(2, 4, 8)
    want = model.train()(x, src_key_padding_mask=padding)
    mpinit.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), level, keep_fp32=[keep])
    trained = model(x, src_key_padding_mask=padding)
    with torch.no_grad():
        evaluated = model.eval()(x, src_key_padding_mask=padding)
    seen = slice(None) if padding is None else slice(0, 3)
    torch.testing.assert_close(evaluated[:, seen], trained[:, seen], rtol=0, atol=0)
    torch.testing.assert_close(evaluated[:, seen].float(), want[:, seen], rtol=0.05, atol=0.05)


def test_fast_path_is_off_only_where_it_would_pass_module_by() -> None:
    original = torch.backends.mha.get_fastpath_enabled
    plain, first, second = encoder(), encoder(), encoder()
    mpinit.initialize(plain, None, "O2")
    assert torch.backends.mha.get_fastpath_enabled is original
    for model in (first, second):
        mpinit.initialize(model, None, "O2", keep_fp32=[nn.LayerNorm])
        assert not torch.backends.mha.get_fastpath_enabled()
    mpinit.undo(first)
    assert not torch.backends.mha.get_fastpath_enabled()
    casts = mpinit.initialize(nn.Linear(2, 2), None, "O1", patch_torch_functions="model")
    mpinit.undo(second)
    assert torch.backends.mha.get_fastpath_enabled()
    with torch.autocast("cpu"):
        assert not torch.backends.mha.get_fastpath_enabled()
    mpinit.undo(casts)
    assert torch.backends.mha.get_fastpath_enabled is original
