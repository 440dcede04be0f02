"""What apex has and mpinit's stand-in has not, and what takes its place: said where it is imported."""

from typing import Final

_LEVEL_2: Final = "mpinit.initialize(model, optimizer, opt_level='O2')"
_LEVEL_3: Final = "mpinit.initialize(model, opt_level='O3', keep_batchnorm_fp32=True) or model.half()"
_LAMB: Final = "timm.optim.Lamb, whose always_adapt is use_nvlamb here"
_NORMS: Final = "apex.normalization.fused_layer_norm"

MISSING: Final[dict[str, str]] = {
    "apex.amp.init": "amp.initialize(model, optimizer, opt_level='O1', num_losses=...), before the model is trained",
    "apex.amp.lists": "mpinit.register_half_function and its siblings, one call for each function",
    "apex.amp.opt": "amp.scale_loss(loss, optimizer, loss_id=...) for each loss",
    "apex.fp16_utils.convert_network": _LEVEL_3,
    "apex.fp16_utils.network_to_half": _LEVEL_3,
    "apex.fp16_utils.prep_param_lists": f"{_LEVEL_2} and mpinit.master_params(optimizer)",
    "apex.fp16_utils": f"{_LEVEL_2} for FP16_Optimizer, masters and loss scalers, model.half() for network_to_half",
    **dict.fromkeys(
        (f"{_NORMS}.fused_layer_norm", f"{_NORMS}.fused_layer_norm_affine"), "torch.nn.functional.layer_norm"
    ),
    **dict.fromkeys((f"{_NORMS}.fused_rms_norm", f"{_NORMS}.fused_rms_norm_affine"), "torch.nn.functional.rms_norm"),
    "apex.optimizers.FusedAdagrad": "torch.optim.Adagrad(fused=True)",
    "apex.optimizers.fused_adagrad": "torch.optim.Adagrad(fused=True)",
    "apex.optimizers.FusedLAMB": _LAMB,
    "apex.optimizers.fused_lamb": _LAMB,
    "apex.optimizers.FusedNovoGrad": "timm.optim.NvNovoGrad or torch.optim.AdamW",
    "apex.optimizers.fused_novograd": "timm.optim.NvNovoGrad or torch.optim.AdamW",
    "apex.parallel.LARC": "timm.optim.Lars(trust_clip=True), where the optimizer inside is SGD",
    "apex.parallel.Reducer": "torch.distributed.all_reduce of each gradient, divided by the number of processes",
    "apex.parallel.create_syncbn_process_group": "torch.distributed.new_subgroups(group_size)[0]",
}


def refuse_missing(name: str, kind: type[ImportError | AttributeError] = ImportError) -> None:
    """Raise the error of a name of apex that something else takes the place of."""
    if name in MISSING:
        raise kind(f"{name} is not part of the apex that mpinit provides. In its place, {MISSING[name]}", name=name)
