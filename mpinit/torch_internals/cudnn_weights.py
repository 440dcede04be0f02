"""The weights of a recurrent network in one buffer, as cuDNN reads them; torch copies them, and warns, if they are not.

It follows ``torch.nn.RNNBase.flatten_parameters``.
"""

from collections.abc import Sequence
from operator import is_
from typing import Any, Final

import torch

# The name of torch's function -> cuDNN's name of the network, and its number of gates.
NETWORKS: Final = {"lstm": ("LSTM", 4), "gru": ("GRU", 3), "rnn_tanh": ("RNN_TANH", 1), "rnn_relu": ("RNN_RELU", 1)}
_ARGUMENTS: Final = 9


def flatten_casts(function: str, given: Sequence[Any], cast: Sequence[Any]) -> None:
    """Move casts of weights into one buffer, before ``torch.lstm`` or the like is called with them.

    Nothing is done if a weight was not cast, because it is the caller's, or if cuDNN cannot run the network.

    Args:
        function: the function's name, such as "lstm".
        given: its arguments: (input, hidden, weights, has_biases, layers, dropout, train, is_bidirectional,
            batch_first), or (input, batch_sizes, hidden, weights, has_biases, layers, dropout, train,
            is_bidirectional).
        cast: the same arguments after casts.
    """
    if len(cast) != _ARGUMENTS or torch.compiler.is_compiling():
        return
    is_packed = type(cast[3]) is not bool
    place = 3 if is_packed else 2
    weights, has_biases, layers, _, _, is_bidirectional = cast[place : place + 6]
    cudnn: Any = torch.backends.cudnn
    # cudnn.is_acceptable refuses bfloat16, which cuDNN runs.
    is_usable = cudnn.is_available() and cudnn.enabled and all(weight.is_cuda for weight in weights)
    if not is_usable or any(map(is_, weights, given[place])):
        return
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
