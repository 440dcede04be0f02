"""16-bit weights in files of other packages, and what an O5 model writes and reads there."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from . import Row, Table, cell

TRANSFORMERS, ORT = "transformers==5.24.0", "onnx==1.23.2 onnxruntime==1.32.0"
ML = "safetensors==0.8.0 ml_dtypes==0.6.0"


def _in_folder(of: Callable[[Path], str]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        return cell(lambda: of(Path(folder)))


def _row(packages: str, theirs: Callable[[Path], str], ours: Callable[[Path], str] | str, torch: bool = True) -> Row:
    """Make a row of what a 16-bit tensor becomes, and of what an O5 model's state dict does."""

    def measure() -> dict[str, str]:
        return {
            "16-bit tensors": _in_folder(theirs),
            "mpinit at O5": ours if isinstance(ours, str) else _in_folder(ours),
        }

    return Row(packages, measure, torch)


def _numbers(dtype: str = "bfloat16") -> Any:
    import torch

    return torch.linspace(-3, 3, 64).to(getattr(torch, dtype))


def _trained() -> tuple[Any, Any]:
    """Return an O5 model after three steps, and its optimizer."""
    import torch

    import mpinit

    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mpinit.initialize(model, optimizer, opt_level="O5")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _compared(read: Any, written: Any) -> str:
    import torch

    same = torch.equal(read.detach().float(), written.detach().float())
    return f"{_name(read.dtype)}, {'the same numbers' if same else 'other numbers'}"


def _through(
    save: Callable[[dict[str, Any], Path], Any], load: Callable[[Path], dict[str, Any]]
) -> Callable[[Path], str]:
    """Say whether an O5 model that loads what it wrote has the same masters."""

    def ours(folder: Path) -> str:
        import torch

        model, _ = _trained()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        save(model.state_dict(), folder / "file")
        read = load(folder / "file")
        dtypes = ", ".join(sorted({_name(value.dtype) for value in read.values()}))
        other, _ = _trained()
        with torch.no_grad():
            other.weight.zero_()
        other.load_state_dict(read)
        same = all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
        return f"{dtypes}; masters {'bit-equal' if same else 'differ'}"

    return ours


def _numpy_state(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value.numpy() for key, value in state.items()}


def _torch_state(arrays: Any) -> dict[str, Any]:
    import torch

    return {key: torch.from_numpy(arrays[key].copy()) for key in arrays}


def _safe(dtype: str, write: str, read: str, folder: Path) -> str:
    import importlib

    import ml_dtypes

    values = _numbers(dtype)
    if write == "numpy":
        values = values.float().numpy().astype(getattr(ml_dtypes, dtype))
    importlib.import_module(f"safetensors.{write}").save_file({"x": values}, folder / "x")
    found = importlib.import_module(f"safetensors.{read}").load_file(folder / "x")["x"]
    return _compared(found, _numbers(dtype)) if read == "torch" else f"{found.dtype}"


def _safe_ours(module: str) -> Callable[[Path], str]:
    import importlib

    def save(state: dict[str, Any], path: Path) -> None:
        importlib.import_module(f"safetensors.{module}").save_file(
            _numpy_state(state) if module == "numpy" else state, path
        )

    def load(path: Path) -> dict[str, Any]:
        read = importlib.import_module(f"safetensors.{module}").load_file(path)
        return _torch_state(read) if module == "numpy" else dict(read)

    return _through(save, load)


def _np_save(dtype: str, folder: Path) -> str:
    import ml_dtypes
    import numpy as np

    array = _numbers(dtype).float().numpy().astype(getattr(ml_dtypes, dtype))
    np.save(folder / "x.npy", array)
    read = np.load(folder / "x.npy")
    try:
        read.astype(np.float32)
    except Exception as error:
        return f"{read.dtype}; astype(float32): {type(error).__name__}"
    return (
        f"{read.dtype}; astype(float32): {'the same' if (read.astype(np.float32) == array).all() else 'other'} numbers"
    )


def _np_ours(folder: Path) -> str:
    import numpy as np

    def save(state: dict[str, Any], path: Path) -> None:
        np.savez(path.with_suffix(".npz"), **_numpy_state(state))

    return _through(save, lambda path: _torch_state(dict(np.load(path.with_suffix(".npz")))))(folder)


def _torch_numpy(folder: Path) -> str:
    return f"{_numbers().numpy().dtype}"


def _gguf(folder: Path, kind: str = "BF16") -> str:
    import gguf
    import numpy as np
    import torch

    model, _ = _trained()
    values = model.state_dict()["weight"].numpy()
    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    quantised = gguf.GGMLQuantizationType[kind]
    writer.add_tensor("x", gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    read = gguf.GGUFReader(folder / "x.gguf").tensors[0]
    back = torch.from_numpy(gguf.quants.dequantize(read.data, read.tensor_type).astype(np.float32))
    served = torch.equal(back, model.weight.detach().float())
    exact = torch.equal(back, model.state_dict()["weight"])
    found = "the masters" if exact else "the 16-bit weights" if served else "other numbers"
    return f"data read as {read.data.dtype}; {found}"


def _gguf_array(folder: Path) -> str:
    import gguf
    import ml_dtypes

    writer = gguf.GGUFWriter(folder / "x.gguf", "llama")
    writer.add_tensor("x", _numbers().float().numpy().astype(ml_dtypes.bfloat16))
    return "written"


def _onnx(module: str, folder: Path) -> str:
    import importlib

    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    values = np.array([1e-9, 1e-7, 2e-7, 1.0, 20_000.0, 70_000.0, -1e-9, 0.0], np.float32)
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "w"], ["b"])], "g",
        *([helper.make_tensor_value_info(name, TensorProto.FLOAT, [8])] for name in ("a", "b")),
        [numpy_helper.from_array(values, "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])
    onnx.checker.check_model(model)
    converted = importlib.import_module(module).convert_float_to_float16(model)
    back = numpy_helper.to_array(converted.graph.initializer[0]).astype(np.float32)
    return ", ".join(f"{a:.3g} → {b:.3g}" for a, b in zip(values, back, strict=True) if np.float32(np.float16(a)) != b)


def _dcp(saved: str, into: str, folder: Path) -> str:
    import torch
    import torch.distributed.checkpoint as dcp

    values = torch.linspace(-3, 3, 64).to(getattr(torch, saved))
    dcp.save({"x": values}, checkpoint_id=folder)
    target = {"x": torch.zeros(64, dtype=getattr(torch, into))}
    dcp.load(target, checkpoint_id=folder)
    return _compared(target["x"], values)


def _dcp_ours(folder: Path) -> str:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    model, _ = _trained()
    before = {key: value.clone() for key, value in get_model_state_dict(model).items()}
    dcp.save({"model": before}, checkpoint_id=folder)
    other, _ = _trained()
    with torch.no_grad():
        other.weight.zero_()
    read = {"model": get_model_state_dict(other)}
    dcp.load(read, checkpoint_id=folder)
    set_model_state_dict(other, read["model"])
    same = all(torch.equal(value, before[key]) for key, value in other.state_dict().items())
    return f"float32; masters {'bit-equal' if same else 'differ'}"


def _load_state_dict(folder: Path) -> str:
    import torch

    module, values = torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 8).state_dict()
    module.load_state_dict(values)
    return _compared(module.weight, values["weight"])


def _torch_save(folder: Path) -> str:
    import torch

    torch.save(_numbers(), folder / "x")
    return _compared(torch.load(folder / "x"), _numbers())


def _tiny(dtype: str = "float32") -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1, n_positions=16)
    return transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype))


def _saved_dtypes(folder: Path) -> str:
    import json

    from safetensors.torch import load_file

    weights = {_name(value.dtype) for value in load_file(folder / "model.safetensors").values()}
    return f"file {', '.join(sorted(weights))}, config {json.loads((folder / 'config.json').read_text())['dtype']}"


def _pretrained(change: str, folder: Path) -> str:
    import transformers

    model = _tiny("bfloat16")
    if change == "one norm":
        model.transformer.h[0].ln_1.float()
    elif change == "embedding":
        model.transformer.wte.float()
        model.tie_weights()
    model.save_pretrained(folder)
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    kinds = sorted({_name(p.dtype) for p in read.parameters()})
    return f"{_saved_dtypes(folder)}; from_pretrained: {', '.join(kinds)}"


def _pretrained_ours(with_save_in: bool, folder: Path) -> str:
    import torch
    import transformers

    import mpinit
    from mpinit.integrations.pretrained import save_in

    model = _tiny()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mpinit.initialize(model, optimizer, opt_level="O5")
    if with_save_in:
        save_in(model)
    model(torch.arange(8)[None]).logits.square().mean().backward()
    optimizer.step()
    model.save_pretrained(folder)
    read = transformers.GPT2LMHeadModel.from_pretrained(folder)
    same = torch.equal(read.transformer.wte.weight.detach(), model.state_dict()["transformer.wte.weight"])
    kind = _name(read.transformer.wte.weight.dtype)
    return f"{_saved_dtypes(folder)}; from_pretrained: {kind}, masters {'bit-equal' if same else 'lost'}"


def _jnp_save(folder: Path) -> str:
    import jax.numpy as jnp

    jnp.save(folder / "x.npy", jnp.linspace(-3, 3, 64, dtype=jnp.bfloat16))
    return f"{jnp.load(folder / 'x.npy').dtype}"


def _flax(folder: Path) -> str:
    import jax.numpy as jnp
    from flax import serialization

    before = {"x": jnp.linspace(-3, 3, 64, dtype=jnp.bfloat16)}
    into = {"x": jnp.zeros(64, jnp.float32)}
    return f"{serialization.from_bytes(into, serialization.to_bytes(before))['x'].dtype} into a float32 target"


def _keras(folder: Path) -> str:
    import os

    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import numpy as np

    def make(dtype: str) -> Any:
        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, dtype=dtype)])

    model, other = make("float32"), make("bfloat16")
    model.save_weights(folder / "x.weights.h5")
    other.load_weights(folder / "x.weights.h5")
    same = bool((np.asarray(other.weights[0], np.float32) == np.asarray(model.weights[0])).all())
    return f"float32 into bfloat16: {other.weights[0].dtype}, {'the same' if same else 'other'} numbers, no warning"


def _mlx(kind: str, folder: Path) -> str:
    import mlx.core as mx

    mx.set_default_device(mx.cpu)
    values = mx.linspace(-3, 3, 64).astype(mx.bfloat16)
    if kind == "npz":
        mx.savez(str(folder / "x.npz"), x=values)
    else:
        mx.save_safetensors(str(folder / "x.safetensors"), {"x": values})
    read = mx.load(str(folder / f"x.{kind}"))["x"]
    same = mx.array_equal(read, values)
    return f"{str(read.dtype).removeprefix('mlx.core.')}, {'the same' if same else 'other'} numbers"


_FLOAT32 = "nothing of its own: export a state dict, which is float32"
_ROWS = {
    "torch.save": _row(
        "", _torch_save, _through(lambda s, p: __import__("torch").save(s, p), lambda p: __import__("torch").load(p))
    ),
    "Tensor.numpy()": _row(
        "", _torch_numpy, lambda folder: f"state_dict() entries: {_trained()[0].state_dict()['weight'].numpy().dtype}"
    ),
    "load_state_dict, float32 into bfloat16": _row(
        "",
        _load_state_dict,
        _through(lambda s, p: __import__("torch").save(s, p), lambda p: __import__("torch").load(p)),
    ),
    "DCP, float32 into bfloat16": _row("", partial(_dcp, "float32", "bfloat16"), _dcp_ours),
    "DCP, float32 into float16": _row("", partial(_dcp, "float32", "float16"), _dcp_ours),
    "DCP, bfloat16 into float32": _row("", partial(_dcp, "bfloat16", "float32"), _dcp_ours),
    "safetensors.torch, bfloat16": _row(
        ML, partial(_safe, "bfloat16", "torch", "torch"), lambda folder: _safe_ours("torch")(folder)
    ),
    "safetensors.torch, float8_e4m3fn": _row(
        ML, partial(_safe, "float8_e4m3fn", "torch", "torch"), lambda folder: _safe_ours("torch")(folder)
    ),
    "safetensors, bfloat16 of torch, read by numpy": _row(
        ML, partial(_safe, "bfloat16", "torch", "numpy"), lambda folder: _safe_ours("numpy")(folder)
    ),
    "safetensors, bfloat16 of ml_dtypes, written by numpy": _row(
        ML, partial(_safe, "bfloat16", "numpy", "torch"), lambda folder: _safe_ours("numpy")(folder)
    ),
    "safetensors, float8_e4m3fn of torch, read by numpy": _row(
        ML, partial(_safe, "float8_e4m3fn", "torch", "numpy"), lambda folder: _safe_ours("numpy")(folder)
    ),
    "safetensors, float8_e4m3fn of ml_dtypes, written by numpy": _row(
        ML, partial(_safe, "float8_e4m3fn", "numpy", "torch"), lambda folder: _safe_ours("numpy")(folder)
    ),
    "np.save, bfloat16": _row(ML, partial(_np_save, "bfloat16"), _np_ours),
    "np.save, float8_e4m3fn": _row(ML, partial(_np_save, "float8_e4m3fn"), _np_ours),
    "gguf, a bfloat16 array of ml_dtypes": _row(
        "gguf==0.19.0 ml_dtypes==0.6.0", _gguf_array, partial(_gguf, kind="F32")
    ),
    "gguf, quantised to BF16": _row(
        "gguf==0.19.0 ml_dtypes==0.6.0", partial(_gguf, kind="BF16"), "the row's weights are its state_dict()"
    ),
    "onnxruntime.transformers.float16": _row(ORT, partial(_onnx, "onnxruntime.transformers.float16"), _FLOAT32),
    "onnxconverter_common.float16": _row(
        "onnx==1.19.1 onnxconverter-common==1.16.0", partial(_onnx, "onnxconverter_common.float16"), _FLOAT32
    ),
    "save_pretrained, all bfloat16": _row(TRANSFORMERS, partial(_pretrained, ""), partial(_pretrained_ours, False)),
    "save_pretrained, one norm in float32": _row(
        TRANSFORMERS, partial(_pretrained, "one norm"), partial(_pretrained_ours, True)
    ),
    "save_pretrained, the embedding in float32": _row(
        TRANSFORMERS, partial(_pretrained, "embedding"), partial(_pretrained_ours, True)
    ),
    "jnp.save, bfloat16": _row("jax==0.10.2", _jnp_save, "-", torch=False),
    "flax.serialization, bfloat16": _row("flax==0.12.8 jax==0.10.2", _flax, "-", torch=False),
    "keras save_weights": _row("keras==3.15.1 jax==0.10.2", _keras, "-", torch=False),
    "mlx savez, bfloat16": _row("mlx[cpu]==0.32.4", partial(_mlx, "npz"), "-", torch=False),
    "mlx save_safetensors, bfloat16": _row("mlx[cpu]==0.32.4", partial(_mlx, "safetensors"), "-", torch=False),
}

_TEXT = """
The first column is what a 16-bit or float8 tensor is after it was written and read. The second is what an O5 model's
state dict is after the same way there and back, and whether a model that loads it has the masters again. The first row
of `save_pretrained` is without, the other two are with `mpinit.integrations.pretrained.save_in(model)`.
"""

TABLES = (Table("Files", _TEXT, ("16-bit tensors", "mpinit at O5"), _ROWS),)
