"""The decorator that switches gradients off, in place of ``torch.no_grad()``.

Below the public face: no public function shows whether gradients are on inside of it.
"""

from collections.abc import Callable

import pytest
import torch

from mpinit.basics.running import without_gradients


def is_on(fails: bool = False) -> tuple[bool, bool]:
    """Return whether gradients are on, and whether a product has a graph."""
    if fails:
        raise ValueError("of the function")
    return torch.is_grad_enabled(), (torch.ones(1, requires_grad=True) * 2).requires_grad


@pytest.mark.parametrize("decorator", [torch.no_grad(), without_gradients], ids=["torch", "mpinit"])
def test_gradients_are_off_inside_and_as_before_outside(decorator: Callable[..., Callable[..., object]]) -> None:
    inside = decorator(is_on)
    nested = decorator(lambda: (inside(), torch.is_grad_enabled()))
    assert (inside.__name__, inside()) == ("is_on", (False, False))
    assert nested() == ((False, False), False)
    assert is_on() == (True, True)
    with pytest.raises(ValueError, match="of the function"):
        inside(fails=True)
    assert is_on() == (True, True)
    with torch.no_grad():
        assert inside() == (False, False) == is_on()
    with torch.inference_mode():
        assert inside() == (False, False)
        assert torch.is_inference_mode_enabled()
    assert torch.func.grad(lambda x: x * (2.0 if inside()[0] else 3.0))(torch.ones(())) == 3.0
    assert is_on() == (True, True)
