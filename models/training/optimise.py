"""One optimiser step, its learning rate, and the running average of the weights."""

import math
from collections.abc import Iterable, Sequence
from typing import Final

import torch
from torch import nn

# A loss far outside the usual range must not throw the weights away.
LARGEST_GRADIENT: Final = 1.0
WARM_UP: Final = 0.03
LAST_SHARE: Final = 0.02


def optimiser(parameters: Iterable[nn.Parameter], learning_rate: float, weight_decay: float) -> torch.optim.AdamW:
    """Make AdamW with a shorter memory of squared gradients than usual, since the runs are short."""
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.99), weight_decay=weight_decay)


def learning_rate(peak: float, progress: float) -> float:
    """Warm up over 3 % of the run, then follow a cosine down to 2 %; progress is 0..1."""
    warm = min(1.0, progress / WARM_UP)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * warm * (LAST_SHARE + (1 - LAST_SHARE) * cosine)


def take_step(adam: torch.optim.AdamW, loss: torch.Tensor, rate: float) -> None:
    """Apply one gradient step at this learning rate."""
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    for group in adam.param_groups:
        group["lr"] = rate
    adam.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(parameters, LARGEST_GRADIENT)
    adam.step()


class RunningAverage:
    """Exponential average of the weights of some modules; it generates far better than the last weights do."""

    def __init__(self, modules: Sequence[nn.Module], decay: float) -> None:
        """Start from the present weights; a decay of 0.999 averages over about a thousand steps."""
        self._live = [parameter for module in modules for parameter in module.parameters()]
        self._average = [parameter.detach().clone() for parameter in self._live]
        self._decay = decay
        self._updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the present weights, faster in the first steps so that the start is forgotten."""
        self._updates += 1
        decay = min(self._decay, (1 + self._updates) / (10 + self._updates))
        torch._foreach_lerp_(  # torch's own optimisers average with it; there is no public name
            self._average, [parameter.detach() for parameter in self._live], 1 - decay
        )

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the average into the modules."""
        for average, parameter in zip(self._average, self._live, strict=True):
            parameter.copy_(average)
