"""Which apex names are covered, and how each is spelled in mpinit or torch: data, read by ``mpinit check-apex``."""

from __future__ import annotations

from typing import Final

# A package or module: naming it is covered, and what it holds is covered where it stands in COVERED.
MODULES: Final[dict[str, str]] = {
    "apex": "mpinit",
    "apex.amp": "mpinit.amp",
    "apex.amp.amp": "mpinit.amp",
    "apex.amp.__version__": "mpinit.__version__",
    "apex.amp.frontend": "mpinit.amp",
    "apex.amp.handle": "mpinit.amp",
    "apex.amp.scaler": "mpinit.amp",
    "apex.amp.opt": "mpinit.amp",
    "apex.amp.lists": "mpinit.register_half_function and its siblings",
    "apex.parallel": "torch.nn.parallel",
    "apex.parallel.distributed": "torch.nn.parallel",
    "apex.parallel.sync_batchnorm": "torch.nn",
    "apex.parallel.optimized_sync_batchnorm": "torch.nn",
    "apex.normalization": "torch.nn",
    "apex.normalization.fused_layer_norm": "torch.nn",
    "apex.optimizers": "torch.optim",
    "apex.optimizers.fused_adam": "torch.optim",
    "apex.optimizers.fused_sgd": "torch.optim",
    "apex.optimizers.fused_adagrad": "torch.optim",
    "apex.optimizers.fused_lamb": "torch.optim",
    "apex.optimizers.fused_novograd": "torch.optim",
    "apex.multi_tensor_apply": "torch._foreach_*",
    "apex.multi_tensor_apply.multi_tensor_apply": "torch._foreach_*",
    "apex.fp16_utils": "mpinit.initialize(opt_level='O2')",
    "apex.fp16_utils.fp16util": "mpinit.initialize(opt_level='O2')",
    "apex.fp16_utils.fp16_optimizer": "mpinit.initialize(opt_level='O2')",
    "apex.fp16_utils.loss_scaler": "mpinit.initialize(loss_scale=...)",
}

_AMP: Final = {
    "initialize": "mpinit.initialize",
    "scale_loss": "mpinit.scale_loss",
    "master_params": "mpinit.master_params",
    "state_dict": "mpinit.state_dict",
    "load_state_dict": "mpinit.load_state_dict",
    "init": "mpinit.initialize(model, optimizer, opt_level='O1')",
    "disable_casts": "mpinit.disable_casts",
    "half_function": "mpinit.half_function",
    "float_function": "mpinit.float_function",
    "promote_function": "mpinit.promote_function",
    "register_half_function": "mpinit.register_half_function",
    "register_float_function": "mpinit.register_float_function",
    "register_promote_function": "mpinit.register_promote_function",
    "_amp_state": "mpinit.loss_scale(optimizer) and mpinit.state_dict(optimizer)",
}

_PARALLEL: Final = {
    "DistributedDataParallel": "torch.nn.parallel.DistributedDataParallel",
    "Reducer": "torch.distributed.all_reduce",
    "LARC": "no counterpart; stays apex.parallel.LARC",
    "SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "convert_syncbn_model": "torch.nn.SyncBatchNorm.convert_sync_batchnorm",
    "create_syncbn_process_group": "torch.distributed.new_group",
}

_NORMALIZATION: Final = {
    "FusedLayerNorm": "torch.nn.LayerNorm",
    "MixedFusedLayerNorm": "torch.nn.LayerNorm",
    "FusedRMSNorm": "torch.nn.RMSNorm",
    "MixedFusedRMSNorm": "torch.nn.RMSNorm",
    "fused_layer_norm": "torch.nn.functional.layer_norm",
    "fused_layer_norm_affine": "torch.nn.functional.layer_norm",
    "mixed_dtype_fused_layer_norm_affine": "torch.nn.functional.layer_norm",
    "fused_rms_norm": "torch.nn.functional.rms_norm",
    "fused_rms_norm_affine": "torch.nn.functional.rms_norm",
    "mixed_dtype_fused_rms_norm_affine": "torch.nn.functional.rms_norm",
}

_OPTIMIZERS: Final = {
    "FusedAdam": "torch.optim.AdamW(fused=True)",
    "FusedSGD": "torch.optim.SGD(fused=True)",
    "FusedAdagrad": "torch.optim.Adagrad(fused=True)",
    "FusedLAMB": "no counterpart; stays apex.optimizers.FusedLAMB",
    "FusedNovoGrad": "no counterpart; stays apex.optimizers.FusedNovoGrad",
}

_MULTI_TENSOR: Final = {
    "multi_tensor_applier": "torch._foreach_*",
    "MultiTensorApply": "torch._foreach_*",
}

_FP16_UTILS: Final = {
    "FP16_Optimizer": "mpinit.initialize(opt_level='O2')",
    "FP16Model": "mpinit.initialize(opt_level='O3', keep_batchnorm_fp32=True)",
    "network_to_half": "mpinit.initialize(opt_level='O3', keep_batchnorm_fp32=True)",
    "convert_network": "mpinit.initialize(opt_level='O3', keep_batchnorm_fp32=True)",
    "convert_module": "torch.nn.Module.to(dtype)",
    "BN_convert_float": "mpinit.initialize(keep_batchnorm_fp32=True)",
    "tofp16": "torch.Tensor.half",
    "prep_param_lists": "mpinit.initialize(opt_level='O2')",
    "master_params_to_model_params": "mpinit.initialize(opt_level='O2')",
    "model_grads_to_master_grads": "mpinit.initialize(opt_level='O2')",
    "to_python_float": "torch.Tensor.item",
    "clip_grad_norm": "torch.nn.utils.clip_grad_norm_",
    "DynamicLossScaler": "mpinit.initialize(loss_scale='dynamic')",
    "LossScaler": "mpinit.initialize(loss_scale=128.0)",
}


def _all(package: str, names: dict[str, str]) -> dict[str, str]:
    return {f"{package}.{name}": spelling for name, spelling in names.items()}


def _only(package: str, names: dict[str, str], *wanted: str) -> dict[str, str]:
    return {f"{package}.{name}": names[name] for name in wanted}


_LISTS: Final = ("functional_overrides", "torch_overrides", "tensor_overrides")

COVERED: Final[dict[str, str]] = {
    "apex.__version__": "mpinit.__version__",
    **_all("apex.amp", _AMP),
    **_only(
        "apex.amp.amp",
        _AMP,
        *("init", "half_function", "float_function", "promote_function"),
        *("register_half_function", "register_float_function", "register_promote_function"),
    ),
    **_only("apex.amp.frontend", _AMP, "initialize", "state_dict", "load_state_dict"),
    "apex.amp.frontend.Properties": "mpinit.Properties",
    "apex.amp.frontend.opt_levels": "mpinit.OPT_LEVELS",
    **_only("apex.amp.handle", _AMP, "scale_loss", "disable_casts"),
    "apex.amp.handle.AmpHandle": "mpinit.initialize(model, optimizer, opt_level='O1')",
    "apex.amp.handle.NoOpHandle": "mpinit.initialize(model, optimizer, enabled=False)",
    "apex.amp.scaler.LossScaler": "mpinit.loss_scale(optimizer)",
    "apex.amp.opt.OptimWrapper": "mpinit.scale_loss",
    "apex.amp._amp_state.master_params": "mpinit.master_params",
    **{f"apex.amp.lists.{name}": MODULES["apex.amp.lists"] for name in _LISTS},
    **_all("apex.parallel", _PARALLEL),
    **_only("apex.parallel.distributed", _PARALLEL, "DistributedDataParallel", "Reducer"),
    "apex.parallel.distributed.flat_dist_call": "torch.distributed.all_reduce or broadcast, tensor by tensor",
    **_only("apex.parallel.sync_batchnorm", _PARALLEL, "SyncBatchNorm"),
    **_only("apex.parallel.optimized_sync_batchnorm", _PARALLEL, "SyncBatchNorm"),
    **_all("apex.normalization", _NORMALIZATION),
    **_all("apex.normalization.fused_layer_norm", _NORMALIZATION),
    **_all("apex.optimizers", _OPTIMIZERS),
    "apex.optimizers.fused_adam.FusedAdam": _OPTIMIZERS["FusedAdam"],
    "apex.optimizers.fused_sgd.FusedSGD": _OPTIMIZERS["FusedSGD"],
    "apex.optimizers.fused_adagrad.FusedAdagrad": _OPTIMIZERS["FusedAdagrad"],
    "apex.optimizers.fused_lamb.FusedLAMB": _OPTIMIZERS["FusedLAMB"],
    "apex.optimizers.fused_novograd.FusedNovoGrad": _OPTIMIZERS["FusedNovoGrad"],
    **_all("apex.multi_tensor_apply", _MULTI_TENSOR),
    **_only("apex.multi_tensor_apply.multi_tensor_apply", _MULTI_TENSOR, "MultiTensorApply"),
    **_all("apex.fp16_utils", _FP16_UTILS),
    **_only(
        "apex.fp16_utils.fp16util",
        _FP16_UTILS,
        *("FP16Model", "network_to_half", "convert_network", "convert_module", "BN_convert_float", "tofp16"),
        *("prep_param_lists", "master_params_to_model_params", "model_grads_to_master_grads"),
        *("to_python_float", "clip_grad_norm"),
    ),
    **_only("apex.fp16_utils.fp16_optimizer", _FP16_UTILS, "FP16_Optimizer"),
    **_only("apex.fp16_utils.loss_scaler", _FP16_UTILS, "DynamicLossScaler", "LossScaler"),
}

# What apex's amp put on optimizers, wherever the optimizer came from.
OPTIMIZER_ATTRIBUTES: Final[dict[str, str]] = {
    "_amp_stash": "mpinit.master_params(optimizer)",
    "_lazy_init_maybe_master_weights": "not needed: masters are made by mpinit.initialize",
    "_amp_lazy_init": "not needed: masters are made by mpinit.initialize",
    "_prepare_amp_backward": "mpinit.scale_loss",
    "_post_amp_backward": "mpinit.scale_loss",
    "_master_params_to_model_params": "not needed: optimizer.step() does it",
}

# Top-level modules that apex's build installed beside it.
KERNEL_MODULES: Final = (
    "amp_C",
    "apex_C",
    "syncbn",
    "fused_layer_norm_cuda",
    "fused_adam_cuda",
    "mlp_cuda",
    "fused_dense_cuda",
    "distributed_adam_cuda",
    "distributed_lamb_cuda",
    "xentropy_cuda",
    "fused_weight_gradient_mlp_cuda",
)
