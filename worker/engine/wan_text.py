"""Prompt embeddings, one prompt at a time, cached.

Encoding alone makes an embedding independent of the batch it is used in; the cache pays for the negative prompt, which
nearly all jobs share, and for clients that try seeds.
"""

from collections import OrderedDict

import torch
from diffusers.pipelines.wan.pipeline_wan import prompt_clean

from worker.engine.wan_pipelines import Pipeline

# What the transformers were trained with. The pipelines' own default differs between call and encode_prompt.
MAX_TOKENS = 512
# An embedding of 4096 x 512 in bfloat16 takes 4 MB untrimmed: at most 1 GB of host memory.
_ENTRIES = 256


class PromptEmbeddings:
    """An LRU of embeddings in host memory, without their padding of zeros."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, torch.Tensor] = OrderedDict()

    def get(self, pipe: Pipeline, texts: list[str], device: torch.device) -> torch.Tensor:
        """Embeddings (N, MAX_TOKENS, width) of the texts, on the device."""
        return torch.stack([_padded(self._one(pipe, text)) for text in texts]).to(device)

    def _one(self, pipe: Pipeline, text: str) -> torch.Tensor:
        key = prompt_clean(text)
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key]
        entry = self._entries[key] = _encode(pipe, text)
        if len(self._entries) > _ENTRIES:
            self._entries.popitem(last=False)
        return entry


# Outside no_grad the result would differ from the pipeline's own in the last bits, and hold the graph.
@torch.no_grad()
def _encode(pipe: Pipeline, text: str) -> torch.Tensor:
    embeds, _ = pipe.encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=MAX_TOKENS)
    row: torch.Tensor = embeds[0].cpu()
    used = int(row.abs().sum(dim=1).nonzero().max()) + 1  # at least the end token is there
    return row[:used].clone()


def _padded(row: torch.Tensor) -> torch.Tensor:
    full = row.new_zeros(MAX_TOKENS, row.shape[1])
    full[: row.shape[0]] = row
    return full
