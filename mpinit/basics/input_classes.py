"""Classes of the user's whose objects are cast as a whole, by functions that were registered for them."""

from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

T = TypeVar("T")
ObjectCast = Callable[[Any, torch.dtype], Any]

# Read by every cast of arguments, so that nothing is asked where nothing is registered.
REGISTERED: Final[dict[type, ObjectCast]] = {}


def register_input(cls: type[T], cast: Callable[[T, torch.dtype], Any] | None) -> None:
    """Register a function that casts objects of a class, and of its subclasses, as inputs and outputs of models.

    Floating tensors in lists, tuples, dicts, dataclasses, classes that are registered in ``torch.utils._pytree``,
    tensordicts and graphs of torch_geometric are cast without it. Objects of other classes are cast only if a function
    is registered. It applies to all models of the process, initialised before or after.

    Args:
        cls: the class. An earlier function for the class is replaced.
        cast: a function of an object and a dtype. The dtype is the model's 16-bit dtype for an argument of ``forward``,
            and the outputs' dtype for a result. It returns an object whose floating tensors have that dtype, and does
            not change the original. None: remove the function of the class.

    Raises:
        TypeError: ``cls`` is not a class, or is ``torch.Tensor``, ``torch.nn.Module`` or a subclass of them; or
            ``cast`` is not callable.

    Example:
        >>> import torch, mpinit
        >>> class Molecule:
        ...     def __init__(self, positions):
        ...         self.positions = positions
        >>> mpinit.register_input(Molecule, lambda molecule, dtype: Molecule(molecule.positions.to(dtype)))
        >>> class Energy(torch.nn.Linear):
        ...     def forward(self, molecule):
        ...         return super().forward(molecule.positions)
        >>> model = mpinit.initialize(Energy(3, 1), opt_level="O5")
        >>> model(Molecule(torch.ones(2, 3))).dtype
        torch.float32
        >>> mpinit.undo(model)
        >>> mpinit.register_input(Molecule, None)
    """
    if not isinstance(cls, type) or issubclass(cls, (torch.Tensor, torch.nn.Module)):
        raise TypeError(f"register_input() needs a class of objects that contain tensors, not {cls!r}")
    if cast is None:
        REGISTERED.pop(cls, None)
        return
    if not callable(cast):
        raise TypeError(
            f"register_input({cls.__name__}, ...) needs a function (object, dtype) -> object, or None, not {cast!r}"
        )
    REGISTERED[cls] = cast


def registered_cast(kind: type) -> ObjectCast | None:
    """Return the cast that is registered for a class or its nearest base; None where there is none."""
    return next((REGISTERED[base] for base in kind.__mro__ if base in REGISTERED), None)
