"""The modules that are trained, at the sizes of the published checkpoints, and their tokenizer."""

from typing import Final

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from models import parts
from models.world import BACKGROUNDS, COLOURS, MOTIONS, SHAPES, SYNONYMS

SIZE: Final = parts.TransformerSize(heads=4, head_width=32, hidden=384, layers=4, text_width=64)
VAE_WIDTH: Final = 16
VAE_MULTIPLIERS: Final = (1, 2, 2, 2)
# A pipeline pads every prompt to this many tokens, and Wan attends to the padding.
PIPELINE_TOKENS: Final = 512

# The order fixes the token ids of the published checkpoints. "blue" is a colour and a background, hence once.
WORDS: Final = (*dict.fromkeys((*COLOURS, *BACKGROUNDS, *SHAPES, *MOTIONS, "background", "on", "with", "moving")),)


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of the world's words; any other text vanishes, so every prompt is legal."""
    specials = ("<pad>", "</s>", "<unk>")
    vocabulary = {word: number for number, word in enumerate((*specials, *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))  # noqa: S106  # a token of text, no credential
    synonyms = [normalizers.Replace(_any_word(many), one) for one, many in SYNONYMS.items()]
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), *synonyms])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(_any_word(WORDS), behavior="removed", invert=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", parts.END_ID)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
        unk_token="<unk>",  # noqa: S106
        model_max_length=PIPELINE_TOKENS,
    )


def word_encoder(tokenizer: PreTrainedTokenizerFast) -> UMT5EncoderModel:
    """Make the text encoder for the words of this tokenizer."""
    return parts.text_encoder(len(tokenizer), SIZE.text_width)


def t2v_transformer() -> WanTransformer3DModel:
    """Make a text-to-video transformer that starts by predicting nothing, which steadies the first steps."""
    model = parts.transformer(SIZE, parts.LATENT_CHANNELS, parts.LATENT_CHANNELS)
    nn.init.zeros_(model.proj_out.weight)
    nn.init.zeros_(model.proj_out.bias)
    return model


def i2v_transformer(t2v_state: dict[str, torch.Tensor]) -> WanTransformer3DModel:
    """Make an image-to-video transformer that ignores the image and behaves as the text-to-video one does."""
    model = parts.transformer(SIZE, parts.IMAGE_INPUT_CHANNELS, parts.LATENT_CHANNELS)
    name = "patch_embedding.weight"
    widened = torch.zeros_like(model.patch_embedding.weight)
    widened[:, : parts.LATENT_CHANNELS] = t2v_state[name]
    model.load_state_dict({**t2v_state, name: widened})
    return model


def small_vae(statistics: tuple[list[float], list[float]] | None = None) -> AutoencoderKLWan:
    """Make the autoencoder; `statistics` are mean and standard deviation of each latent channel."""
    return parts.vae_21(VAE_WIDTH, VAE_MULTIPLIERS, statistics)


def channels_last(module: nn.Module) -> None:
    """Lay the convolution weights out as oneDNN wants them on a CPU; the values stay the same."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv3d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last_3d)
        elif isinstance(layer, nn.Conv2d):
            layer.weight.data = layer.weight.data.contiguous(memory_format=torch.channels_last)


def _any_word(words: tuple[str, ...]) -> Regex:
    return Regex(rf"\b({'|'.join(words)})\b")
