"""A name of release 0.2.0: importing it raises an error with the recipe that replaces it."""

raise ImportError(
    "mpinit.integrations.timm was removed: timm's own scaler works with a model that is initialised without a loss "
    'scale. Call `mpinit.initialize(model, optimizer, opt_level="O2", loss_scale=1.0)`, then `scaler = '
    'timm.utils.NativeScaler(device="cuda")`, and in the loop `scaler(loss, optimizer, clip_grad=1.0, '
    "parameters=model.parameters())`",
    name=__name__,
)
