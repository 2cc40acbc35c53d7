"""Builds tiny checkpoints with random weights in the folder layout of the hub: `python -m models.random_checkpoint`.

They load and run exactly as the real ones do, show noise, and have the same bytes on every build.
"""

import argparse
import string
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline
from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import Unigram
from transformers import PreTrainedTokenizerFast

from models import parts

Module = TypeVar("Module")

SIZE = parts.TransformerSize(heads=2, head_width=24, hidden=128, layers=2, text_width=32)
MULTIPLIERS = (1, 1, 1, 1)
LONGEST_PROMPT = 512


class Layout(StrEnum):
    """The three published models of Wan2.2."""

    T2V_A14B = "t2v-a14b"
    I2V_A14B = "i2v-a14b"
    TI2V_5B = "ti2v-5b"


def build(layout: Layout, out: Path) -> Path:
    """Write a random checkpoint of this layout into the folder `out` and return it; needs no network."""
    builders = {Layout.T2V_A14B: _t2v_a14b, Layout.I2V_A14B: _i2v_a14b, Layout.TI2V_5B: _ti2v_5b}
    pipeline = builders[layout]()
    pipeline.save_pretrained(out, safe_serialization=True)
    return out


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make an untrained tokenizer that knows single bytes and characters, so any text is legal."""
    pieces = ["<pad>", "</s>", "<unk>"]
    pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    # Metaspace marks the start of a word with this character.
    pieces += ["\u2581", *string.ascii_letters, *string.digits, *string.punctuation]
    # Equal scores: the longest match does not matter when every piece is one character.
    tokenizer = Tokenizer(Unigram([(piece, -1.0) for piece in pieces], unk_id=parts.UNKNOWN_ID, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", parts.END_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106  # a token of text, not a credential
        eos_token="</s>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        model_max_length=LONGEST_PROMPT,
    )


def _t2v_a14b() -> DiffusionPipeline:
    tokenizer = byte_tokenizer()
    channels = parts.LATENT_CHANNELS
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_seeded(0, lambda: parts.text_encoder(len(tokenizer), SIZE.text_width)),
        vae=_seeded(1, lambda: parts.vae_21(8, MULTIPLIERS)),
        transformer=_seeded(2, lambda: parts.transformer(SIZE, channels, channels)),
        transformer_2=_seeded(3, lambda: parts.transformer(SIZE, channels, channels)),
        scheduler=parts.flow_scheduler(12.0),
        boundary_ratio=0.875,
    )


def _i2v_a14b() -> DiffusionPipeline:
    tokenizer = byte_tokenizer()
    inputs, outputs = parts.IMAGE_INPUT_CHANNELS, parts.LATENT_CHANNELS
    return WanImageToVideoPipeline(
        tokenizer=tokenizer,
        text_encoder=_seeded(0, lambda: parts.text_encoder(len(tokenizer), SIZE.text_width)),
        vae=_seeded(1, lambda: parts.vae_21(8, MULTIPLIERS)),
        transformer=_seeded(2, lambda: parts.transformer(SIZE, inputs, outputs)),
        transformer_2=_seeded(3, lambda: parts.transformer(SIZE, inputs, outputs)),
        scheduler=parts.flow_scheduler(5.0),
        image_encoder=None,
        image_processor=None,
        boundary_ratio=0.9,
    )


def _ti2v_5b() -> DiffusionPipeline:
    """Build the one folder that serves text and image input: both pipelines load it."""
    tokenizer = byte_tokenizer()
    vae = _seeded(1, lambda: parts.vae_22(16, MULTIPLIERS))
    channels = vae.config.z_dim
    return WanPipeline(
        tokenizer=tokenizer,
        text_encoder=_seeded(0, lambda: parts.text_encoder(len(tokenizer), SIZE.text_width)),
        vae=vae,
        transformer=_seeded(2, lambda: parts.transformer(SIZE, channels, channels)),
        transformer_2=None,
        scheduler=parts.flow_scheduler(5.0),
        expand_timesteps=True,
    )


def _seeded(seed: int, make: Callable[[], Module]) -> Module:
    """Draw the weights from a generator of their own, so that one module never changes the bytes of another."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make()


def main() -> None:
    """Build the layout named on the command line."""
    parser = argparse.ArgumentParser(prog="python -m models.random_checkpoint", description=__doc__)
    parser.add_argument("layout", type=Layout, choices=list(Layout))
    parser.add_argument("out", type=Path, help="folder to write")
    arguments = parser.parse_args()
    print(build(arguments.layout, arguments.out))


if __name__ == "__main__":
    main()
