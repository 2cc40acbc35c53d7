"""Command line of the training: `python -m models.training t2v OUT --work DIR --seed 0`."""

import argparse
import logging
from pathlib import Path

import torch

from models.training.evaluate import evaluate_i2v, evaluate_t2v
from models.training.i2v import make_i2v
from models.training.stages import Recipe
from models.training.t2v import make_t2v


def main() -> None:
    """Train or score one checkpoint."""
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    # The number of threads decides the order of sums, and so the bytes of the result.
    torch.set_num_threads(1)
    match arguments.command:
        case "t2v":
            make_t2v(arguments.out, arguments.work, Recipe(arguments.seed, arguments.scale))
        case "i2v":
            make_i2v(arguments.out, arguments.work, Recipe(arguments.seed, arguments.scale))
        case "score-t2v":
            print(evaluate_t2v(arguments.checkpoint))
        case "score-i2v":
            print("whole prompts:", evaluate_i2v(arguments.checkpoint))
            print("motion words alone:", evaluate_i2v(arguments.checkpoint, motion_only=True))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.training", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("t2v", "text-to-video"), ("i2v", "image-to-video")):
        train = commands.add_parser(name, help=f"train a {what} checkpoint")
        train.add_argument("out", type=Path, help="folder of the checkpoint")
        train.add_argument("--work", type=Path, required=True, help="folder of the stage files; a run resumes from it")
        train.add_argument("--seed", type=int, default=0)
        train.add_argument("--scale", type=float, default=1.0, help="shrinks steps and clips; 0.01 is a trial run")
        score = commands.add_parser(f"score-{name}", help=f"score a {what} checkpoint with the pixel test")
        score.add_argument("checkpoint", type=Path)
    return parser


if __name__ == "__main__":
    main()
