"""From latents to uint8 frames on the host, a few frames at a time.

Against a whole decode this never holds the float video (0.9 GB at 720p), lets the encoder start at once, and can be
cancelled between chunks. The frames are bit-identical to AutoencoderKLWan.decode.
"""

from collections.abc import Generator, Iterator

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

from worker.engine.base import Frames
from worker.engine.wan_pipelines import Vae


@torch.no_grad()
def stream_decode(vae: Vae, latents: torch.Tensor) -> Generator[torch.Tensor, None, None]:
    """Yield (1, 3, f, H, W) in [-1, 1] for latents (1, C, T, h, w): one frame, then four per latent frame.

    Works on the VAE's private cache of features, as its own decode does: one decode at a time.
    """
    if (hook := getattr(vae, "_hf_hook", None)) is not None:
        hook.pre_forward(vae)  # brings an offloaded VAE to the device; only the public methods do so by themselves
    vae.clear_cache()
    try:
        hidden = vae.post_quant_conv(_unscaled(vae, latents))
        for index in range(hidden.shape[2]):
            vae._conv_idx = [0]  # noqa: SLF001
            first = {"first_chunk": True} if index == 0 else {}
            one = hidden[:, :, index : index + 1]
            chunk = vae.decoder(one, feat_cache=vae._feat_map, feat_idx=vae._conv_idx, **first)  # noqa: SLF001
            if vae.config.patch_size is not None:
                chunk = unpatchify(chunk, patch_size=vae.config.patch_size)
            yield torch.clamp(chunk, min=-1.0, max=1.0)
    finally:
        vae.clear_cache()


def _unscaled(vae: Vae, latents: torch.Tensor) -> torch.Tensor:
    """Undo the normalisation of the latents, in the order of operations of the pipelines."""
    scaled = latents.to(vae.device, vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(scaled.device, scaled.dtype)
    inverse = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(scaled.device, scaled.dtype)
    return scaled / inverse + mean


def to_uint8(chunk: torch.Tensor) -> torch.Tensor:
    """(1, 3, f, H, W) in [-1, 1] to (f, H, W, 3) in 0..255, on the device: a quarter of the bytes to copy."""
    return (chunk[0] * 0.5 + 0.5).mul_(255).round_().to(torch.uint8).permute(1, 2, 3, 0).contiguous()


class HostCopies:
    """Copies chunks to the host: through two pinned buffers on a GPU, so that a copy runs beside the next decode."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = [torch.empty(0, dtype=torch.uint8)] * 2

    def stream(self, chunks: Iterator[torch.Tensor]) -> Iterator[Frames]:
        """Yield every chunk as an array, valid until the next one is asked for."""
        if not torch.cuda.is_available():
            yield from (chunk.numpy() for chunk in chunks)
            return
        under_way: tuple[torch.Tensor, torch.cuda.Event] | None = None
        for index, chunk in enumerate(chunks):
            started = self._start(index % 2, chunk)
            if under_way is not None:
                yield _arrived(*under_way)
            under_way = started
        if under_way is not None:
            yield _arrived(*under_way)

    def _start(self, which: int, chunk: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        if self._buffers[which].numel() < chunk.numel():
            self._buffers[which] = torch.empty(chunk.numel(), dtype=torch.uint8, pin_memory=True)
        host = self._buffers[which][: chunk.numel()].view(chunk.shape)
        host.copy_(chunk, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return host, event


def _arrived(host: torch.Tensor, event: torch.cuda.Event) -> Frames:
    event.synchronize()
    array: Frames = host.numpy()
    return array
