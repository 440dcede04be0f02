"""The migration page: its Python blocks run, and its tables name things that exist.

Below the public face: the page is compared with the table of refused names.
"""

import importlib
import inspect
import pickle
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks import let_torchvision_load, marked_for
from torch import nn

import mpinit
from mpinit.compat import uninstall_apex
from mpinit.compat.importing import MISSING

PAGE = Path(mpinit.__file__).parents[1] / "docs" / "how-to" / "migrate.md"
TEXT = PAGE.read_text(encoding="utf-8")
BLOCKS = re.findall(r"(?:<!-- (.*?) -->\n)?```python\n(.*?)```", TEXT, re.DOTALL)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| `")]
# Each public name of apex: whether it is there under the old name, and its counterparts.
APEX = {row[0].strip("`"): row[1:] for row in ROWS if row[0].startswith("`apex.") and len(row) == 4}
OTHERS = [row for row in ROWS if len(row) == 3]

# The public names of NVIDIA's apex up to the removal of amp, and of ROCm's.
NAMES = {
    "amp": "_amp_state bfloat16_function disable_casts float_function half_function init initialize lists "
    "load_state_dict master_params promote_function register_bfloat16_function register_float_function "
    "register_half_function register_promote_function scale_loss state_dict",
    "optimizers": "FP16_Optimizer FusedAdagrad FusedAdam FusedLAMB FusedMixedPrecisionLamb FusedNovoGrad FusedSGD",
    "parallel": "DistributedDataParallel LARC Reducer SyncBatchNorm convert_syncbn_model create_syncbn_process_group "
    "multiproc",
    "normalization": "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm",
    "normalization.fused_layer_norm": "fused_layer_norm fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine "
    "manual_rms_norm mixed_dtype_fused_layer_norm_affine mixed_dtype_fused_rms_norm_affine",
    "multi_tensor_apply": "MultiTensorApply multi_tensor_applier",
    "fp16_utils": "BN_convert_float DynamicLossScaler FP16Model FP16_Optimizer LossScaler clip_grad_norm "
    "convert_module convert_network master_params_to_model_params model_grads_to_master_grads network_to_half "
    "prep_param_lists to_python_float tofp16",
}
PACKAGES = ("RNN", "contrib", "fused_dense", "mlp", "pyprof", "reparameterization", "transformer")


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    uninstall_apex()


def beginning() -> dict[str, Any]:
    """What every block finds: the names a training script has."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    return {
        "__name__": "page",
        "torch": torch,
        "mpinit": mpinit,
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": [(torch.randn(4, 8), torch.randint(2, (4,))) for _ in range(4)],
    }


def execute(source: str) -> dict[str, Any]:
    namespace = beginning()
    line = TEXT[: TEXT.index(source)].count("\n")
    exec(compile("\n" * line + source, str(PAGE), "exec"), namespace)
    return namespace


def test_the_page_has_its_blocks_and_rows() -> None:
    assert len(BLOCKS) == TEXT.count("```python") > 8
    assert len(ROWS) > 30


@pytest.mark.parametrize("source", [source for mark, source in BLOCKS if not mark.startswith("skip")])
def test_block(source: str) -> None:
    execute(source)


def test_the_two_loops_train_the_same_weights_within_rounding() -> None:
    marked = dict(BLOCKS)
    theirs = execute(marked["torch.amp"])["model"].state_dict()
    ours = execute(marked["mpinit"])["model"].state_dict()
    torch.testing.assert_close(dict(ours), dict(theirs), rtol=2e-3, atol=2e-3)


def test_what_fp16_optimizer_saved_can_be_read() -> None:
    execute(dict(BLOCKS)["old scalers"])
    for kind in ("LossScaler", "DynamicLossScaler"):
        assert pickle.loads(f"capex.fp16_utils.loss_scaler\n{kind}\n.".encode()).__name__ == "Scaler"


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([A-Za-z_][\w.]*)", cell)


def resolve(name: str) -> Any:
    """The object a dotted name stands for; an AttributeError where there is none."""
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for index, part in enumerate(parts[1:], start=2):
        found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:index]))
    return found


def test_the_page_lists_every_public_name_once() -> None:
    known = [f"apex.{package}.{name}" for package, names in NAMES.items() for name in names.split()]
    known += [f"apex.{package}" for package in PACKAGES]
    assert sorted(APEX) == sorted(known)
    assert len(APEX) == sum(row[0].startswith("`apex.") and len(row) == 4 for row in ROWS)
    mpinit.install_as_apex()
    for package in ("amp", "optimizers", "parallel", "normalization", "multi_tensor_apply", "fp16_utils"):
        public = importlib.import_module(f"apex.{package}").__all__
        assert {f"apex.{package}.{name}" for name in public} <= set(APEX)


@pytest.mark.parametrize("name", APEX)
def test_a_name_is_as_the_page_says(name: str) -> None:
    mpinit.install_as_apex()
    package, _, attribute = name.rpartition(".")
    statement = f"from {package} import {attribute}"
    status, new, note = APEX[name]
    namespace: dict[str, Any] = {}
    if status == "there":
        exec(statement, namespace)
        assert namespace[attribute] is getattr(importlib.import_module(package), attribute)
    else:
        assert status in ("refused", "missing")
        assert (name in MISSING) == (status == "refused")
        way_out = f"In its place, {re.escape(MISSING[name])}" if status == "refused" else "cannot import name"
        with pytest.raises(ImportError, match=way_out):
            exec(statement, namespace)
    assert names_in(new) or status == "missing"
    for word in (*names_in(new), *names_in(note)):
        if word.split(".")[0] in ("mpinit", "torch"):
            assert resolve(word) is not None


@pytest.mark.parametrize("row", OTHERS, ids=lambda row: row[0].strip("`"))
def test_a_row_names_what_there_is(row: list[str]) -> None:
    for name in names_in(row[0]):
        resolve(f"torch.amp.{name}" if name.startswith("GradScaler") else name)
    for name in [*names_in(row[1]), *names_in(row[2])]:
        if name.split(".")[0] in ("mpinit", "torch"):
            assert resolve(name) is not None


def test_links_lead_to_headings() -> None:
    anchors = {
        re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    }
    for link in re.findall(r"\]\(#(.*?)\)", TEXT):
        assert link in anchors


FLAGS = re.findall(r"^\| (\w+): `(\w+)=(.+?)` \|.*?`.*?\"(O\d)\".*?` \|", TEXT, re.MULTILINE)


def accepted(framework: str, flag: str, value: str) -> bool:
    """Whether a framework knows a flag, and its value."""
    let_torchvision_load()
    match framework:
        case "Accelerate":
            assert flag in inspect.signature(importlib.import_module("accelerate").Accelerator).parameters
            return value in importlib.import_module("accelerate.utils").PrecisionType.list()
        case "Transformers":
            return flag in inspect.signature(importlib.import_module("transformers").TrainingArguments).parameters
        case _:
            known = importlib.import_module("lightning.fabric.connector")._PRECISION_INPUT_STR
            return flag == "precision" and value in typing.get_args(known)


@marked_for("accelerate", "transformers", "lightning")
def test_flags_and_levels_on_the_page_exist() -> None:
    assert len(FLAGS) == 8
    assert all(accepted(framework, flag, value.strip('"')) for framework, flag, value, _ in FLAGS)
    types = {"fp16": "O1", "bf16": "O4", "16-mixed": "O1", "bf16-mixed": "O4", "16-true": "O2", "bf16-true": "O5"}
    for framework, flag, value, level in FLAGS:
        assert level == types[flag if framework == "Transformers" else value.strip('"')]
