"""The training makes the modules of the published checkpoints, and its shortcuts change nothing."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

from models.training import modules
from models.training.clips import ClipShape, draw_batch
from models.training.flow import TOKENS, FlowPlan, OnePadAttention, Prompts, draw_noise_levels
from models.training.i2v import make_i2v
from models.training.optimise import RunningAverage, learning_rate
from models.training.stages import Recipe, stage, state_of
from models.training.t2v import make_t2v
from models.training.vae import decode_freely, keep_variance

PUBLISHED = Path(__file__).parents[2] / "models" / "trained" / "tiny-wan2.2-t2v"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def published(name: str) -> dict[str, object]:
    loaded: dict[str, object] = json.loads((PUBLISHED / name).read_text())
    return loaded


def test_the_tokenizer_is_the_published_one() -> None:
    made = json.loads(modules.word_tokenizer().backend_tokenizer.to_str())

    # The published file also holds the padding of its last training call, which every pipeline call overrides.
    parts = ("normalizer", "pre_tokenizer", "post_processor", "model", "added_tokens")
    assert {part: made[part] for part in parts} == {part: published("tokenizer/tokenizer.json")[part] for part in parts}


def test_the_modules_have_the_published_sizes() -> None:
    encoder = modules.word_encoder(modules.word_tokenizer()).config.to_dict()
    wanted = published("text_encoder/config.json")
    made = {
        "transformer": dict(modules.t2v_transformer().config),
        "vae": dict(modules.small_vae().config),
    }

    assert {name: encoder[name] for name in ("vocab_size", "d_model", "d_kv", "d_ff")} == {
        name: wanted[name] for name in ("vocab_size", "d_model", "d_kv", "d_ff")
    }
    for folder, config in made.items():
        known = published(f"{folder}/config.json")
        measured = {"latents_mean", "latents_std", "_diffusers_version", "_class_name"}
        assert json.loads(json.dumps({name: config[name] for name in known if name not in measured})) == {
            name: value for name, value in known.items() if name not in measured
        }


def test_one_raised_pad_attends_as_all_pads_do() -> None:
    prompts = Prompts(tokenizer := modules.word_tokenizer(), modules.word_encoder(tokenizer))
    attention = modules.t2v_transformer().blocks[0].attn2
    text = torch.nn.functional.pad(prompts.encode(["a red circle moving right"]), (0, modules.SIZE.text_width))
    latents = torch.randn(1, 12, 128)
    everything = torch.cat([text, torch.zeros(1, modules.PIPELINE_TOKENS - TOKENS, 128)], dim=1)

    short = OnePadAttention(TOKENS)(attention, latents, text)

    assert torch.allclose(short, WanAttnProcessor()(attention, latents, everything), atol=1e-5)


def test_an_image_transformer_begins_as_the_text_one() -> None:
    text_model = modules.t2v_transformer()
    torch.nn.init.normal_(text_model.proj_out.weight)
    image_model = modules.i2v_transformer(state_of(text_model))
    latents, prompt = torch.randn(1, 16, 3, 8, 8), torch.randn(1, TOKENS, modules.SIZE.text_width)
    widened = torch.cat([latents, torch.randn(1, 20, 3, 8, 8)], dim=1)
    given = {"timestep": torch.tensor([500.0]), "encoder_hidden_states": prompt, "return_dict": False}

    with torch.no_grad():
        expected, made = text_model(latents, **given)[0], image_model(widened, **given)[0]

    assert torch.allclose(made, expected, atol=1e-5)


def test_the_autoencoder_begins_with_its_signal_alive() -> None:
    torch.manual_seed(0)
    vae = modules.small_vae()
    keep_variance(vae)
    _, clips = draw_batch(np.random.default_rng(0), ClipShape(2, 5, 32))

    with torch.no_grad():
        latents = vae.encode(clips).latent_dist.mean

    assert 0.2 < latents.std() < 5


def test_decoding_without_the_clamp_is_decoding() -> None:
    torch.manual_seed(0)
    vae, latents = modules.small_vae(), torch.randn(1, 16, 2, 4, 4)

    with torch.no_grad():
        free, clamped = decode_freely(vae, latents), vae.decode(latents).sample

    assert torch.allclose(free.clamp(-1, 1), clamped, atol=1e-5)


def test_the_learning_rate_warms_up_and_falls() -> None:
    rates = [learning_rate(1.0, progress) for progress in (0.0, 0.015, 0.03, 0.5, 1.0)]

    assert rates[0] == 0
    assert max(rates) == rates[2]
    assert rates[-1] == pytest.approx(0.02)


def test_the_running_average_lags_behind_and_is_written_back() -> None:
    layer = torch.nn.Linear(1, 1, bias=False)
    layer.weight.data.fill_(0.0)
    average = RunningAverage([layer], decay=0.5)
    layer.weight.data.fill_(1.0)

    average.update()
    average.write_back()

    assert 0.5 < layer.weight.item() < 1


@pytest.mark.parametrize(("lowest", "highest"), [(0.0, 1.0), (0.86, 1.0), (0.0, 0.89)])
def test_noise_levels_stay_on_their_side(lowest: float, highest: float) -> None:
    plan = FlowPlan("any", 1, 1e-3, 0.9, 0, lowest=lowest, highest=highest)

    levels = draw_noise_levels(plan, torch.Generator().manual_seed(0))

    assert lowest <= levels.min()
    assert levels.max() <= highest


def test_a_finished_stage_is_not_made_again(tmp_path: Path) -> None:
    stage(tmp_path, "one", Recipe(), lambda: {"value": torch.ones(2)})

    again = stage(tmp_path, "one", Recipe(), lambda: pytest.fail("made twice"))

    assert torch.equal(again["value"], torch.ones(2))


def test_a_stage_of_another_recipe_is_refused(tmp_path: Path) -> None:
    stage(tmp_path, "one", Recipe(seed=1), lambda: {"value": torch.ones(2)})

    with pytest.raises(ValueError, match="another --work folder"):
        stage(tmp_path, "one", Recipe(seed=2), lambda: {"value": torch.ones(2)})


@pytest.mark.slow
def test_both_recipes_leave_checkpoints_that_load(tmp_path: Path) -> None:
    recipe = Recipe(seed=0, scale=1e-4)

    make_t2v(tmp_path / "t2v", tmp_path / "work", recipe)
    make_i2v(tmp_path / "i2v", tmp_path / "work", recipe)

    assert WanPipeline.from_pretrained(tmp_path / "t2v").config.boundary_ratio == 0.875
    assert WanImageToVideoPipeline.from_pretrained(tmp_path / "i2v").transformer.config.in_channels == 36
