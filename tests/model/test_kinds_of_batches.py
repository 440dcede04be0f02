"""Batches of other libraries' kinds: their integers are never cast, and their floats are."""

from __future__ import annotations

import collections
from typing import Any

import torch
from inputs import F16, F32, X, at_o2
from torch import Tensor, nn


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """As transformers' BatchEncoding: a mapping that moves in place."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def test_a_batchs_integers_are_never_cast_and_its_floats_are() -> None:
    ids = torch.arange(40_000, 40_004)  # beyond what float16 can hold
    batch = Encoding(x=X.clone(), ids=ids)
    seen: list[Any] = []

    def forward(linear: nn.Module, given: Any) -> Tensor:
        seen.extend([type(given), given.x.dtype, given.ids])
        return linear(given.x)

    assert at_o2(forward)(batch).dtype is F32
    assert seen == [type(batch), F16, ids] and seen[2] is ids
    assert batch.x.dtype is F32 and torch.equal(batch.x, X) and batch.ids is ids


def test_trees_that_hold_themselves() -> None:
    items: list[Any] = [X.clone()]
    items.append(items)
    box: dict[str, Any] = {"items": items, "x": X.clone()}
    box["box"] = box

    def forward(linear: nn.Module, given: dict[str, Any]) -> Any:
        assert given["box"] is given and given["items"][1] is given["items"]
        assert given["x"].dtype is given["box"]["items"][1][0].dtype is F16
        given["y"] = linear(given["x"])
        return given

    returned = at_o2(forward)(box)
    assert box["y"].dtype is F32 and box["box"] is box and box["items"][1] is items
    assert returned["x"].dtype is F32 and returned["box"] is returned
