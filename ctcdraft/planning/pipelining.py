"""Predicted latency of early exit with pipelined layers, of which the decoding loop has none.

In predictive pipelined decoding (Yang et al. 2023) and SPEED (Hooper et al. 2023) a token is predicted from the hidden
state of a lower layer, and the next token's layers begin while the upper ones of this token are still computed. If the
last layer confirms the prediction, the next token has had a head start of the layers between; else it begins anew.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctcdraft.errors import check_float, check_int


def pipelined_layer_times(confirmed: Sequence[bool], layers: int, exit_layer: int) -> int:
    """Return the time until the last token is known, in times of one layer, from when the first one begins.

    confirmed: for all tokens but the last, whether the prediction below was the token.

        4 layers, predicted after 1; yes, no, yes       begins   0   1   5   6
                                                        known    4   5   9   10       (one after the other: 16)
    """
    check_exit(layers, exit_layer)
    return sum(exit_layer if is_right else layers for is_right in confirmed) + layers


def pipelined_speedup(rate: float, layers: int, exit_layer: int, layer_time: float = 1.0) -> float:
    """Return the speed-up of long texts over one token after the other.

    Args:
        rate: share of predictions that are confirmed.
        layer_time: time of a layer while others are computed too, for layers / exit_layer tokens at most, in times of a
            layer alone. 1 is a device that has room for all of them.
    """
    check_exit(layers, exit_layer)
    check_float(rate, "rate", least=0, most=1)
    check_float(layer_time, "layer_time", above=0)
    return layers / (layer_time * (rate * exit_layer + (1 - rate) * layers))


def check_exit(layers: int, exit_layer: int) -> None:
    check_int(layers, "layers")
    check_float(check_int(exit_layer, "exit_layer"), "exit_layer", most=layers)
