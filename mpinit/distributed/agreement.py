"""Comparison of the arguments of ``initialize`` over ranks."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from .verdict import Group, groups_of

# The key of a setting that ranks compare in addition to the keywords.
OPTIMIZERS: Final = "the optimizer's class"
# The settings that may differ between the stages of a pipeline.
_OF_A_STAGE: Final = frozenset({"keep_fp32", "keep_inputs", "entry_points", "keep_batchnorm_fp32", OPTIMIZERS})
_NAMED: Final = 5


def check_at_initialize(
    settings: Mapping[str, str], parameters: Iterable[torch.Tensor], process_group: Group | None
) -> None:
    """Compare settings over the ranks that have shards of the parameters, and over a ``process_group``.

    Raises:
        ValueError: see :func:`check_same`.
    """
    check_same(settings, groups_of(parameters, None))
    if process_group is not None:
        alike = {name: value for name, value in settings.items() if name not in _OF_A_STAGE}
        check_same(alike, [process_group])


def check_same(words: Mapping[str, str], groups: Iterable[Group], parameters: Mapping[str, str] | None = None) -> None:
    """Compare settings over all ranks that some groups reach; all of these ranks have to call it.

    Args:
        words: the settings. One that a rank does not have is not compared with it.
        groups: the groups.
        parameters: those of the model, by name. One that a rank does not have is a difference. Default None: none.

    Raises:
        ValueError: ranks differ. It is raised on each of them, and names the differences.
    """
    distributed: Any = torch.distributed
    records = {distributed.get_rank(): (dict(words), dict(parameters or {}))}
    for group in groups:
        gathered: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(gathered, records, group=group)
        for each in gathered:
            records |= each
    faults = [*_differences({rank: settings for rank, (settings, _) in records.items()})]
    faults = faults or [*_differences({rank: found for rank, (_, found) in records.items()}, "missing")]
    if faults:
        more = f"; and {len(faults) - _NAMED} more" if len(faults) > _NAMED else ""
        raise ValueError(
            f"ranks that train one model were initialised differently: {'; '.join(faults[:_NAMED])}{more}. Call "
            "mpinit.initialize with the same model and keywords on every rank"
        )


def _differences(by_rank: Mapping[int, Mapping[str, str]], missing: str | None = None) -> Iterable[str]:
    for key in dict.fromkeys(key for each in by_rank.values() for key in each):
        first = {by_rank[rank].get(key, missing): rank for rank in sorted(by_rank, reverse=True)}
        first.pop(None, None)
        if len(first) > 1:
            yield f"{key} is " + " and ".join(
                f"{value} on rank {rank}" for value, rank in sorted(first.items(), key=lambda pair: pair[1])
            )
