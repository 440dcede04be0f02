"""scikit-learn's handwritten digits: 1,797 real images of 8 by 8 pixels that ship with the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import sklearn.datasets
import sklearn.model_selection
import torch


@dataclass(frozen=True)
class Digits:
    """Images (N, 1, 8, 8) with values from 0 to 1 and their labels, split once and for all."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor

    def batches(self, size: int, generator: torch.Generator) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One epoch of full batches in a fresh random order."""
        order = torch.randperm(len(self.train_images), generator=generator)
        for start in range(0, len(order) - size + 1, size):
            chosen = order[start : start + size]
            yield self.train_images[chosen], self.train_labels[chosen]


def load_digits() -> Digits:
    """Load and split the data: two thirds to train on, one third, with the same share of each digit, to test on."""
    bunch = sklearn.datasets.load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    parts = sklearn.model_selection.train_test_split(
        images, labels, test_size=1 / 3, stratify=bunch.target, random_state=0
    )
    train_images, test_images, train_labels, test_labels = parts
    return Digits(train_images, train_labels, test_images, test_labels)
