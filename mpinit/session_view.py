"""The read interface of a session: all that reports, commands, frameworks and apex's face use of it."""

from typing import Any, Final

import torch
from torch.optim import Optimizer

from .basics.modules import modules_of
from .config.plan import CastPolicy
from .model import forward
from .optimizer.overflow_log import OverflowReport

_REPORTED: Final = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")


class SessionView:
    """The read interface of one session, with what its own attributes do not have. It changes nothing."""

    def __init__(self, session: Any) -> None:
        self._session = session

    def master_of(self, weight: torch.Tensor) -> torch.Tensor | None:
        """Return the float32 values of a weight's master, not to be written to; None if it has none."""
        masters = self._session.masters
        master = masters.of(weight)
        return None if master is None else masters.values(master)

    def values_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the values that an optimizer steps: those of the tensor's master, or else its own."""
        values = self.master_of(tensor)
        return tensor.detach() if values is None else values

    def original_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype of a tensor of the models before ``initialize``."""
        dtype: torch.dtype = self._session.casts.original_dtype(tensor)
        return dtype

    def ids_cast_in_forwards(self) -> set[int]:
        """Return the ids of the models' tensors that are float32 now, and 16-bit in forwards."""
        session = self._session
        found = set(session.casts.narrow)
        for module in modules_of(*session.models):
            for patched in filter(None, map(forward.patched_forward, vars(module).values())):
                found.update(map(id, [] if patched.weights is None else patched.weights.parameters()))
        return found

    def counts(self, optimizer: Optimizer) -> tuple[int, int, int]:
        """Return the steps that an optimizer has done and skipped, and those that it skipped in a row just now."""
        counts = self._session.managed.find(optimizer).skips.counter.read()
        return counts.good, counts.skipped, counts.consecutive

    def overflow(self, optimizer: Optimizer) -> OverflowReport:
        """Return the report of an optimizer's last overflow, or of the gradients that are there now."""
        report: OverflowReport = self._session.managed.find(optimizer).skips.log.report(len(self._session.scalers))
        return report

    @property
    def scales_losses(self) -> bool:
        """Return whether a loss scale is not always 1."""
        return not all(scaler.is_identity for scaler in self._session.scalers)

    @property
    def cast_policy(self) -> CastPolicy:
        """Return whose lists O1 casts by: torch's, or apex's under its old name."""
        policy: CastPolicy = self._session.plan.cast_policy
        return policy

    def settings(self) -> dict[str, Any]:
        """Return the properties to report: the levels' five, and the dtype of optimizer states if it was chosen."""
        properties = self._session.properties
        chosen = [] if properties.optimizer_state == "float32" else ["optimizer_state"]
        return {name: getattr(properties, name) for name in (*_REPORTED, *chosen)}
