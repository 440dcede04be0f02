"""Which apex names are covered, and how each is spelled in mpinit or torch: data, read by ``mpinit check-apex``."""

from __future__ import annotations

from typing import Final

_LEVEL_1: Final = "mpinit.initialize(model, optimizer, opt_level='O1')"
_LEVEL_2: Final = "mpinit.initialize(model, optimizer, opt_level='O2')"
_LEVEL_3: Final = "mpinit.initialize(model, opt_level='O3', keep_batchnorm_fp32=True) or model.half()"

# A package's spelling, and after a bar its modules: naming one is covered, and what it holds where it is in COVERED.
_PACKAGES: Final[dict[str, str]] = {
    "apex": "mpinit",
    "apex.amp": "mpinit.amp | amp frontend handle scaler",
    "apex.amp.__version__": "mpinit.__version__",
    "apex.amp.lists": "mpinit.register_half_function and its siblings",
    "apex.parallel": "torch.nn.parallel | distributed",
    "apex.parallel.sync_batchnorm": "torch.nn",
    "apex.normalization": "torch.nn | fused_layer_norm",
    "apex.optimizers": "torch.optim | fused_adam fused_sgd fused_lamb",
    "apex.multi_tensor_apply": "torch._foreach_*",
}

# A package's names: spelling, and after a bar the modules inside of it that have the name too.
_NAMES: Final[dict[str, dict[str, str]]] = {
    "apex.amp": {
        "initialize": "mpinit.initialize | frontend",
        "scale_loss": "mpinit.scale_loss | handle",
        "master_params": "mpinit.master_params | _amp_state",
        "state_dict": "mpinit.state_dict | frontend",
        "load_state_dict": "mpinit.load_state_dict | frontend",
        "disable_casts": "mpinit.disable_casts | handle",
        "half_function": "mpinit.half_function | amp",
        "float_function": "mpinit.float_function | amp",
        "promote_function": "mpinit.promote_function | amp",
        "register_half_function": "mpinit.register_half_function | amp",
        "register_float_function": "mpinit.register_float_function | amp",
        "register_promote_function": "mpinit.register_promote_function | amp",
        "_amp_state": "mpinit.loss_scale(optimizer) and mpinit.state_dict(optimizer)",
    },
    "apex.amp.frontend": {"Properties": "mpinit.Properties", "opt_levels": "mpinit.OPT_LEVELS"},
    "apex.amp.scaler": {"LossScaler": "mpinit.loss_scale(optimizer)"},
    "apex.amp.lists": dict.fromkeys(
        ("functional_overrides", "torch_overrides", "tensor_overrides"), _PACKAGES["apex.amp.lists"]
    ),
    "apex.parallel": {
        "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel | distributed",
        "Reducer": "torch.distributed.all_reduce | distributed",
        "LARC": "no counterpart; stays apex.parallel.LARC",
        "SyncBatchNorm": "torch.nn.SyncBatchNorm | sync_batchnorm",
        "convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
        "create_syncbn_process_group": "torch.distributed.new_group",
    },
    "apex.parallel.distributed": {"flat_dist_call": "torch.distributed.all_reduce or broadcast, tensor by tensor"},
    "apex.normalization": {
        "FusedLayerNorm": "torch.nn.LayerNorm | fused_layer_norm",
        "MixedFusedLayerNorm": "torch.nn.LayerNorm | fused_layer_norm",
        "FusedRMSNorm": "torch.nn.RMSNorm | fused_layer_norm",
        "MixedFusedRMSNorm": "torch.nn.RMSNorm | fused_layer_norm",
        "fused_layer_norm": "torch.nn.functional.layer_norm | fused_layer_norm",
        "fused_layer_norm_affine": "torch.nn.functional.layer_norm | fused_layer_norm",
        "fused_rms_norm": "torch.nn.functional.rms_norm | fused_layer_norm",
        "fused_rms_norm_affine": "torch.nn.functional.rms_norm | fused_layer_norm",
    },
    "apex.optimizers": {
        "FusedAdam": "torch.optim.AdamW(fused=True) | fused_adam",
        "FusedSGD": "torch.optim.SGD(fused=True) | fused_sgd",
        "FusedLAMB": "no counterpart; stays apex.optimizers.FusedLAMB | fused_lamb",
    },
    "apex.multi_tensor_apply": {
        "multi_tensor_applier": "torch._foreach_*",
        "MultiTensorApply": "torch._foreach_*",
    },
}


def _spread(place: str, cell: str, name: str = "") -> dict[str, str]:
    """A cell's spelling for the place itself and for each module of it that stands behind the bar."""
    spelling, _, modules = cell.partition(" | ")
    return {f"{each}{name}": spelling for each in (place, *(f"{place}.{module}" for module in modules.split()))}


MODULES: Final = {each: way for place, cell in _PACKAGES.items() for each, way in _spread(place, cell).items()}

COVERED: Final[dict[str, str]] = {"apex.__version__": "mpinit.__version__"} | {
    each: way
    for package, names in _NAMES.items()
    for name, cell in names.items()
    for each, way in _spread(package, cell, f".{name}").items()
}

# What apex has and its stand-in has not: what to do instead. A name comes before the module that it is in.
MISSING: Final[dict[str, str]] = {
    "apex.amp.init": _LEVEL_1,
    "apex.amp.amp.init": _LEVEL_1,
    "apex.amp.opt": "amp.scale_loss(loss, optimizer, loss_id=...) for each loss",
    "apex.fp16_utils.convert_network": _LEVEL_3,
    "apex.fp16_utils.network_to_half": _LEVEL_3,
    "apex.fp16_utils.prep_param_lists": f"{_LEVEL_2} and mpinit.master_params(optimizer)",
    "apex.fp16_utils": f"{_LEVEL_2} for FP16_Optimizer, masters and loss scalers, model.half() for network_to_half",
    "apex.optimizers.FusedAdagrad": "torch.optim.Adagrad(fused=True)",
    "apex.optimizers.fused_adagrad": "torch.optim.Adagrad(fused=True)",
    "apex.optimizers.FusedNovoGrad": "FusedLAMB or torch.optim.AdamW",
    "apex.optimizers.fused_novograd": "FusedLAMB or torch.optim.AdamW",
}

# What apex's amp put on optimizers, wherever the optimizer came from.
OPTIMIZER_ATTRIBUTES: Final[dict[str, str]] = {
    "_amp_stash": "mpinit.master_params(optimizer)",
    "_lazy_init_maybe_master_weights": "not needed: masters are made by mpinit.initialize",
    "_amp_lazy_init": "not needed: masters are made by mpinit.initialize",
    "_master_params_to_model_params": "not needed: optimizer.step() does it",
}
