"""Which kind of masters a plan asks for."""

from __future__ import annotations

from ..plan import Masters, Plan
from .full import FullMasters
from .in_model import MastersInModel
from .none import NoMasters
from .split import SplitMasters
from .states import states_for
from .store import MasterStore


def store_for(plan: Plan, scales: bool) -> MasterStore:
    """A new store of the plan's kind, which keeps optimizers' states as the plan says.

    Args:
        plan: what to do.
        scales: whether any loss of the session is scaled at all.
    """
    store = _made(plan, scales)
    store.keep_states(states_for(plan))
    return store


def _made(plan: Plan, scales: bool) -> MasterStore:
    if plan.masters is Masters.SPLIT:
        return SplitMasters(plan.split_bucket_bytes, scales)
    if plan.masters is Masters.IN_MODEL:
        return MastersInModel()
    return FullMasters(scales, plan.gradient_release) if plan.masters is Masters.FULL else NoMasters()
