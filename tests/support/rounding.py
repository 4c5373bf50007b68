"""How far numbers that were computed in float32 may be from others that are the same but for the order of their sums.

Another processor, another number of threads and another layout add the same terms in another order.
"""

import math

import torch

EPS = torch.finfo(torch.float32).eps


def of_model(model, values: torch.Tensor) -> float:
    """The bound for logits or logprobs `values` of `model`: each of its layers, and its head, adds as many terms as the
    model is wide, of which the roundings add up like the steps of a random walk."""
    config = model.config.get_text_config()
    sums = config.num_hidden_layers + 1
    return 4 * sums * math.sqrt(config.hidden_size) * EPS * max(1.0, values.detach().abs().max().item())


def of_numbers(found: dict[str, float], exact: dict[str, float]) -> float:
    """The relative bound for numbers of which `found` were computed in float32 and `exact` in float64, alike.

    How much the terms of a sum cancel out is in their gap, which another order would make another time.
    """
    gaps = [abs(found[name] - value) / abs(value) for name, value in exact.items() if value]
    return 8 * max(EPS, *gaps)
