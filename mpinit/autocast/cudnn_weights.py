"""The weights of a recurrent network in one buffer, as cuDNN reads them; torch copies them, and warns, if they are not.

It follows ``torch.nn.RNNBase.flatten_parameters``.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, Final

import torch

# The name of torch's function -> cuDNN's name of the network, and its number of gates.
NETWORKS: Final = {"lstm": ("LSTM", 4), "gru": ("GRU", 3), "rnn_tanh": ("RNN_TANH", 1), "rnn_relu": ("RNN_RELU", 1)}
ARGUMENTS: Final = 9


def weights_of(args: Sequence[Any]) -> Sequence[torch.Tensor]:
    """Return the weights among the arguments of ``torch.lstm`` and the like.

    Args:
        args: (input, hidden, weights, has_biases, layers, dropout, train, is_bidirectional, batch_first), or (input,
            batch_sizes, hidden, weights, has_biases, layers, dropout, train, is_bidirectional).
    """
    weights: Sequence[torch.Tensor] = args[3 if _are_packed(args) else 2]
    return weights


def _are_packed(args: Sequence[Any]) -> bool:
    return type(args[3]) is not bool


def flatten_casts(function: str, arguments: Sequence[Any], cast: Sequence[Any]) -> None:
    """Move casts of weights into one buffer, before ``torch.lstm`` or the like is called with them.

    Nothing is done if a weight was not cast, because it is the caller's, or if cuDNN cannot run the network.

    Args:
        function: the function's name, such as "lstm".
        arguments: its arguments, as for :func:`weights_of`.
        cast: the same arguments after casts.
    """
    cudnn: Any = torch.backends.cudnn
    weights = weights_of(cast)
    # cudnn.is_acceptable refuses bfloat16, which cuDNN runs.
    is_usable = cudnn.is_available() and cudnn.enabled and all(weight.is_cuda for weight in weights)
    if not is_usable or torch.compiler.is_compiling() or any(map(is_, weights, weights_of(arguments))):
        return
    is_packed = _are_packed(cast)
    has_biases, layers, _, _, is_bidirectional = cast[4:9] if is_packed else cast[3:8]
    name, gates = NETWORKS[function]
    hidden_size, outputs = weights[0].size(0) // gates, weights[1].size(1)
    projections = outputs if outputs != hidden_size else 0
    stride = (4 if has_biases else 2) + bool(projections)
    batch_first = not is_packed and cast[8]
    on_its_device: Any = torch.cuda.device_of
    with torch.no_grad(), on_its_device(weights[0]):
        torch._cudnn_rnn_flatten_weight(
            *(list(weights), stride, weights[0].size(1), cudnn.rnn.get_cudnn_mode(name), hidden_size, projections),
            *(layers, batch_first, is_bidirectional),
        )
