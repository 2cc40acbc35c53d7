"""The real Wan2.2 modules at toy sizes, shared by the random and the trained checkpoints."""

from collections.abc import Sequence
from dataclasses import dataclass

from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

# Latent channels of the Wan2.1 autoencoder, which both A14B models use.
LATENT_CHANNELS = 16
# An image-to-video input: noisy latents, latents of the image, and a mask that holds four frames per latent frame.
MASK_CHANNELS = 4
IMAGE_INPUT_CHANNELS = 2 * LATENT_CHANNELS + MASK_CHANNELS
PAD_ID, END_ID, UNKNOWN_ID = 0, 1, 2


@dataclass(frozen=True, slots=True)
class TransformerSize:
    """Width and depth of a transformer; `text_width` must be the width of its text encoder."""

    heads: int
    head_width: int
    hidden: int
    layers: int
    text_width: int


def flow_scheduler(shift: float) -> UniPCMultistepScheduler:
    """Make the sampler of Wan2.2; a larger shift spends more steps at high noise."""
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=shift
    )


def text_encoder(vocabulary: int, width: int) -> UMT5EncoderModel:
    """Make a two-layer UMT5 encoder; its weights come from torch's global generator."""
    config = UMT5Config(
        vocab_size=vocabulary,
        d_model=width,
        d_kv=width // 4,
        d_ff=2 * width,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=width // 4,
        relative_attention_max_distance=32,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        pad_token_id=PAD_ID,
        eos_token_id=END_ID,
    )
    return UMT5EncoderModel(config).eval()


def transformer(size: TransformerSize, channels_in: int, channels_out: int) -> WanTransformer3DModel:
    """Make a Wan transformer; its weights come from torch's global generator."""
    model = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=size.heads,
        attention_head_dim=size.head_width,
        in_channels=channels_in,
        out_channels=channels_out,
        text_dim=size.text_width,
        freq_dim=256,
        ffn_dim=size.hidden,
        num_layers=size.layers,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=1024,
    )
    return model.eval()


def vae_21(
    width: int, multipliers: Sequence[int], statistics: tuple[list[float], list[float]] | None = None
) -> AutoencoderKLWan:
    """Make the autoencoder of the A14B models: 8x8 pixels and 4 frames to a latent of 16 channels.

    `statistics` are mean and standard deviation of each latent channel; without them Wan2.1's own are kept.
    """
    known = {} if statistics is None else {"latents_mean": statistics[0], "latents_std": statistics[1]}
    vae = AutoencoderKLWan(
        base_dim=width,
        z_dim=LATENT_CHANNELS,
        dim_mult=list(multipliers),
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        **known,
    )
    return vae.eval()


def vae_22(width: int, multipliers: Sequence[int]) -> AutoencoderKLWan:
    """Make the autoencoder of the 5B model: 16x16 pixels and 4 frames to a latent of 48 channels."""
    channels = 48
    vae = AutoencoderKLWan(
        base_dim=width,
        decoder_base_dim=width,
        z_dim=channels,
        dim_mult=list(multipliers),
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        is_residual=True,
        patch_size=2,
        in_channels=12,
        out_channels=12,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
        latents_mean=[0.0] * channels,
        latents_std=[1.0] * channels,
    )
    return vae.eval()
