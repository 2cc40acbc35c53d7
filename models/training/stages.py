"""Stages of a training run: each leaves one safetensors file, and is skipped when the file is there."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

logger = logging.getLogger(__name__)

Tensors: TypeAlias = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What decides the result of a run, besides the code: two equal recipes may share stage files."""

    seed: int = 0
    scale: float = 1.0

    def steps(self, full: int) -> int:
        """Shrink a number of steps or clips for a trial run; at least two are left."""
        return max(2, round(full * self.scale))


def stage(work: Path, name: str, recipe: Recipe, make: Callable[[], Tensors]) -> Tensors:
    """Return the tensors of this stage, made now or read from an earlier run.

    Raises ValueError when the file was made by another recipe.
    """
    file = work / f"{name}.safetensors"
    if not file.exists():
        started = time.monotonic()
        _write(file, make(), recipe)
        logger.info("stage %s took %.0f s", name, time.monotonic() - started)
    return _read(file, recipe)


def state_of(module: nn.Module, prefix: str = "") -> Tensors:
    """Copy the weights of a module, so that several modules fit into one stage file."""
    return {
        f"{prefix}{name}": tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in module.state_dict().items()
    }


def under(tensors: Mapping[str, torch.Tensor], prefix: str) -> Tensors:
    """Select the tensors whose names begin with a prefix, and drop it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _write(file: Path, tensors: Tensors, recipe: Recipe) -> None:
    """Write aside first, so that a run that is stopped leaves no half file that would be taken for a whole one."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata={"recipe": json.dumps(asdict(recipe))})
    part.replace(file)


def _read(file: Path, recipe: Recipe) -> Tensors:
    with safe_open(file, framework="pt") as stored:
        made_by = json.loads(stored.metadata()["recipe"])
        if made_by != asdict(recipe):
            message = f"{file} was made by {made_by}, not by {asdict(recipe)}: use another --work folder"
            raise ValueError(message)
        return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118  # no iterator is offered
