"""The real pipelines on tiny checkpoints: all layouts, batches, cancels, faults, and what is left behind."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from numpy.typing import NDArray
from PIL import Image

from common.domain.jobs import ErrorClass, Phase
from common.domain.profiles import PROFILES
from models.pixel_test import expected_from_prompt, read_clip, verdict
from models.random_checkpoint import Layout, build
from tests.unit.engine_support import (
    GREEN_SQUARE,
    RED_CIRCLE,
    Recorder,
    batch,
    is_step,
    parameters,
    process_ended,
    rendered,
)
from worker.engine.base import (
    Alive,
    EngineBrokenError,
    EngineConfig,
    FramesReady,
    Member,
    MemberCancelled,
    MemberDecoded,
    MemberFailed,
    MemberInterrupted,
    PhaseStarted,
)
from worker.engine.process import EngineProcess
from worker.engine.wan import WanEngine
from worker.engine.wan_decode import stream_decode, to_uint8
from worker.engine.wan_pipelines import activation_bytes

PROFILE_OF = {
    Layout.T2V_A14B: "wan2.2-t2v-a14b",
    Layout.I2V_A14B: "wan2.2-i2v-a14b",
    Layout.TI2V_5B: "wan2.2-ti2v-5b",
}
TRAINED = Path(__file__).parents[2] / "models" / "trained" / "tiny-wan2.2-t2v"


def loaded(model: str, folder: Path) -> WanEngine:
    # One thread: the tests' matrices are too small to share, and threads that wait for each other starve other tests.
    engine = WanEngine(EngineConfig("wan", model, folder, threads=1), folder)
    engine.load()
    return engine


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[Layout, WanEngine]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {layout: loaded(PROFILE_OF[layout], build(layout, root / layout)) for layout in Layout}


@pytest.fixture
def text_engine(engines: dict[Layout, WanEngine]) -> WanEngine:
    return engines[Layout.T2V_A14B]


@pytest.fixture
def image_engine(engines: dict[Layout, WanEngine]) -> WanEngine:
    return engines[Layout.I2V_A14B]


def png(level: int, size: tuple[int, int] = (64, 64), mode: str = "RGB") -> bytes:
    gradient = np.linspace(level, 255, size[0] * size[1]).reshape(size[1], size[0]).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(gradient).convert(mode).save(file, "PNG")
    return file.getvalue()


def with_image(name: str, image: bytes | None, **changes: Any) -> Member:
    return Member(name, 1, parameters(**changes), image)


def difference(one: NDArray[Any], two: NDArray[Any]) -> int:
    return int(np.abs(one.astype(int) - two).max())


@contextmanager
def hooked(module: torch.nn.Module, action: Any) -> Iterator[list[int]]:
    """Call action(module, args, kwargs, output) after each forward; yields the batch sizes seen."""
    sizes: list[int] = []

    def after(_module: Any, _args: Any, kwargs: Any, output: Any) -> Any:
        sizes.append(len(kwargs["hidden_states"]))
        return action(sizes[-1], output)

    handle = module.register_forward_hook(after, with_kwargs=True)
    yield sizes
    handle.remove()


@pytest.mark.parametrize(
    ("layout", "image", "more"),
    [
        (Layout.T2V_A14B, None, {}),
        (Layout.I2V_A14B, png(20), {}),
        (Layout.TI2V_5B, None, {"guidance_scale_2": None}),
        (Layout.TI2V_5B, png(20), {"guidance_scale_2": None}),
    ],
)
def test_every_layout_gives_all_frames(
    engines: dict[Layout, WanEngine], layout: Layout, image: bytes | None, more: dict[str, Any]
) -> None:
    run = rendered(engines[layout], with_image("j0", image, num_frames=13, **more))
    decoded = run.outcomes()["j0"]
    assert isinstance(decoded, MemberDecoded)
    assert run.frames().shape == (decoded.frames_total, 64, 64, 3) == (13, 64, 64, 3)
    assert [len(chunk) for chunk in run.chunks["j0"]] == [1, 4, 4, 4]
    assert decoded.timings_ms.keys() == {"text", "denoise", "decode"}


def test_the_phases_and_steps_are_reported_in_order(text_engine: WanEngine) -> None:
    run = rendered(text_engine, parameters())
    assert [event.phase for event in run.events if isinstance(event, PhaseStarted)] == [
        Phase.TEXT,
        Phase.DENOISE,
        Phase.DECODE,
    ]
    assert [(step.step, step.steps) for step in run.steps()] == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_job_alone_is_what_the_stock_pipeline_makes(text_engine: WanEngine, tmp_path: Path) -> None:
    asked = parameters()
    stock = WanPipeline.from_pretrained(build(Layout.T2V_A14B, tmp_path))
    stock.scheduler = type(stock.scheduler).from_config(stock.scheduler.config, flow_shift=asked.flow_shift)
    video = stock(
        asked.prompt,
        asked.negative_prompt,
        height=64,
        width=64,
        num_frames=9,
        num_inference_steps=4,
        guidance_scale=4.0,
        guidance_scale_2=3.0,
        generator=torch.Generator("cpu").manual_seed(asked.seed),
    ).frames[0]
    assert np.array_equal(rendered(text_engine, asked).frames(), (video * 255).round().astype(np.uint8))


def test_the_seed_decides(text_engine: WanEngine) -> None:
    first, again = rendered(text_engine, parameters()), rendered(text_engine, parameters())
    other = rendered(text_engine, parameters(seed=8))
    assert np.array_equal(first.frames(), again.frames())
    assert not np.array_equal(first.frames(), other.frames())


def test_two_prompts_in_one_batch_give_the_frames_of_each_alone() -> None:
    engine = loaded("tiny-wan2.2-t2v", TRAINED)
    red, green = (parameters(prompt, num_inference_steps=10, seed=3) for prompt in (RED_CIRCLE, GREEN_SQUARE))
    together = rendered(engine, red, green)
    for job_id, asked in (("j0", red), ("j1", green)):
        frames = together.frames(job_id)
        assert difference(frames, rendered(engine, asked).frames()) <= 1
        expected = expected_from_prompt(asked.prompt)
        assert expected is not None
        assert verdict(expected, read_clip(frames)).ok


@pytest.mark.parametrize("layout", [Layout.I2V_A14B, Layout.TI2V_5B])
def test_images_in_one_batch_give_the_frames_of_each_alone(engines: dict[Layout, WanEngine], layout: Layout) -> None:
    second = {"guidance_scale_2": None} if layout is Layout.TI2V_5B else {}
    # Bright pictures: normalised twice, they would differ from their runs alone.
    jobs = [with_image(f"j{i}", png(level), seed=i, **second) for i, level in enumerate((200, 160))]
    together = rendered(engines[layout], *jobs)
    for job in jobs:
        alone = rendered(engines[layout], job).frames(job.job_id)
        assert difference(together.frames(job.job_id), alone) <= 1


def test_the_input_image_matters(engines: dict[Layout, WanEngine]) -> None:
    jobs = [with_image("j0", image, guidance_scale_2=None) for image in (None, png(0), png(200))]
    videos = [rendered(engines[Layout.TI2V_5B], job).frames() for job in jobs]
    assert difference(videos[0], videos[1]) > 1
    assert difference(videos[1], videos[2]) > 1


def test_text_and_image_jobs_of_one_batch_are_both_rendered(engines: dict[Layout, WanEngine]) -> None:
    jobs = [with_image("j0", None, guidance_scale_2=None), with_image("j1", png(9), guidance_scale_2=None)]
    outcomes = rendered(engines[Layout.TI2V_5B], *jobs).outcomes()
    assert all(isinstance(outcomes[job_id], MemberDecoded) for job_id in ("j0", "j1"))


@pytest.mark.parametrize("image", [None, b"no picture"])
def test_a_bad_image_fails_its_job_and_spares_its_mate(image_engine: WanEngine, image: bytes | None) -> None:
    outcomes = rendered(image_engine, with_image("j0", image), with_image("j1", png(9))).outcomes()
    failed = outcomes["j0"]
    assert isinstance(failed, MemberFailed)
    assert failed.error is ErrorClass.INVALID_INPUT
    assert isinstance(outcomes["j1"], MemberDecoded)


def test_an_image_for_a_text_model_is_refused(text_engine: WanEngine) -> None:
    failed = rendered(text_engine, with_image("j0", png(9))).outcomes()["j0"]
    assert isinstance(failed, MemberFailed)
    assert failed.error is ErrorClass.INVALID_INPUT


@pytest.mark.parametrize("mode", ["RGBA", "L", "P", "1"])
def test_images_of_every_mode_and_shape_are_taken(image_engine: WanEngine, mode: str) -> None:
    job = with_image("j0", png(9, (90, 70), mode), num_inference_steps=1)
    assert isinstance(rendered(image_engine, job).outcomes()["j0"], MemberDecoded)


def test_guidance_of_one_needs_no_negative_prompt(text_engine: WanEngine) -> None:
    pair = [parameters(negative_prompt=text, guidance_scale=1.0, guidance_scale_2=1.0) for text in ("", "anything")]
    first, second = (rendered(text_engine, asked).frames() for asked in pair)
    assert np.array_equal(first, second)


def test_a_prompt_is_encoded_once(text_engine: WanEngine) -> None:
    encoder = text_engine.pipelines.text.text_encoder  # type: ignore[union-attr]
    calls: list[int] = []
    handle = encoder.register_forward_hook(lambda *_: calls.append(1))
    for seed in (1, 2):
        rendered(text_engine, parameters("a prompt of this test", negative_prompt="and its opposite", seed=seed))
    handle.remove()
    assert len(calls) == 2


def test_a_job_after_a_cancelled_one_is_undisturbed(text_engine: WanEngine) -> None:
    undisturbed = rendered(text_engine, parameters()).frames()
    cancelled = rendered(
        text_engine, parameters(num_frames=17, seed=9), recorder=Recorder(cancel=frozenset({"j0"}), when=is_step(2))
    )
    assert isinstance(cancelled.outcomes()["j0"], MemberCancelled)
    assert len(cancelled.steps()) == 2
    assert np.array_equal(rendered(text_engine, parameters()).frames(), undisturbed)


def test_a_job_after_one_cancelled_while_decoding_is_undisturbed(text_engine: WanEngine) -> None:
    undisturbed = rendered(text_engine, parameters()).frames()
    recorder = Recorder(cancel=frozenset({"j0"}), when=lambda event: isinstance(event, FramesReady))
    assert isinstance(rendered(text_engine, parameters(seed=9), recorder=recorder).outcomes()["j0"], MemberCancelled)
    assert np.array_equal(rendered(text_engine, parameters()).frames(), undisturbed)


def test_a_cancelled_member_is_dropped_and_its_mate_undisturbed(text_engine: WanEngine) -> None:
    recorder = Recorder(cancel=frozenset({"j0"}), when=is_step(2))
    outcomes = rendered(text_engine, parameters(seed=9), parameters(), recorder=recorder).outcomes()
    assert isinstance(outcomes["j0"], MemberCancelled)
    assert "j0" not in recorder.chunks
    assert difference(recorder.frames("j1"), rendered(text_engine, parameters()).frames()) <= 1


def test_an_interrupt_stops_in_the_middle_of_a_step(text_engine: WanEngine) -> None:
    seen: list[object] = []

    def third_block(event: object) -> bool:
        seen.append(event)
        phases = [index for index, one in enumerate(seen) if isinstance(one, PhaseStarted)]
        blocks = sum(isinstance(one, Alive) for one in seen[phases[-1] :]) if len(phases) == 2 else 0
        return blocks == 3  # a step of this model has four: two in each of its forward passes

    run = rendered(text_engine, parameters(), parameters(), recorder=Recorder(interrupt=True, when=third_block))
    assert not run.steps()
    assert run.outcomes().keys() == {"j0", "j1"}
    assert all(isinstance(outcome, MemberInterrupted) for outcome in run.outcomes().values())


def test_a_passed_deadline_is_a_timeout(text_engine: WanEngine) -> None:
    failed = rendered(text_engine, parameters(), recorder=Recorder(deadline=0.0)).outcomes()["j0"]
    assert isinstance(failed, MemberFailed)
    assert failed.error is ErrorClass.TIMEOUT


def test_latents_that_are_not_finite_fail_their_job_only(text_engine: WanEngine) -> None:
    def spoil_first_row(_size: int, output: Any) -> Any:
        output[0][0] = float("nan")
        return output

    with hooked(text_engine.pipelines.text.transformer, spoil_first_row):  # type: ignore[union-attr]
        run = rendered(text_engine, parameters(), parameters(seed=9))
    failed = run.outcomes()["j0"]
    assert isinstance(failed, MemberFailed)
    assert failed.error is ErrorClass.NAN_OUTPUT
    assert difference(run.frames("j1"), rendered(text_engine, parameters(seed=9)).frames()) <= 1


def out_of_memory_above(limit: int) -> Any:
    def action(size: int, output: Any) -> Any:
        if size > limit:
            msg = "CUDA out of memory (simulated)"
            raise torch.OutOfMemoryError(msg)
        return output

    return action


def test_a_batch_that_does_not_fit_is_halved(text_engine: WanEngine) -> None:
    jobs = [parameters(seed=seed) for seed in range(4)]
    with hooked(text_engine.pipelines.text.transformer, out_of_memory_above(2)) as sizes:  # type: ignore[union-attr]
        run = rendered(text_engine, *jobs)
    assert sizes[0] == 4
    assert set(sizes[1:]) == {2}
    for number, job in enumerate(jobs):
        assert difference(run.frames(f"j{number}"), rendered(text_engine, job).frames()) <= 1


def test_a_job_that_does_not_fit_alone_fails_and_two_in_a_row_ask_for_a_new_process(text_engine: WanEngine) -> None:
    recorder = Recorder()
    with hooked(text_engine.pipelines.text.transformer, out_of_memory_above(0)):  # type: ignore[union-attr]
        healthy = [text_engine.run(batch(parameters()), recorder.emit, recorder)]
        failed = recorder.outcomes()["j0"]
        recorder = Recorder()
        healthy.append(text_engine.run(batch(parameters()), recorder.emit, recorder))
    assert isinstance(failed, MemberFailed)
    assert (failed.error, "64x64, 9 frames" in failed.detail) == (ErrorClass.OOM, True)
    assert healthy == [True, False]
    assert isinstance(rendered(text_engine, parameters()).outcomes()["j0"], MemberDecoded)  # and the count starts anew


def test_a_lost_device_ends_the_process(text_engine: WanEngine) -> None:
    def fail(_size: int, _output: Any) -> Any:
        msg = "CUDA error: an illegal memory access was encountered"
        raise RuntimeError(msg)

    with hooked(text_engine.pipelines.text.transformer, fail), pytest.raises(EngineBrokenError):  # type: ignore[union-attr]
        rendered(text_engine, parameters())
    text_engine.reset()


@pytest.mark.parametrize("layout", [Layout.T2V_A14B, Layout.TI2V_5B])
def test_the_streaming_decode_is_bit_identical(engines: dict[Layout, WanEngine], layout: Layout) -> None:
    vae = engines[layout].pipelines.text.vae  # type: ignore[union-attr]
    latents = torch.randn(1, vae.config.z_dim, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        whole = vae.decode(latents / std + mean, return_dict=False)[0]
    chunks = list(stream_decode(vae, latents))
    assert [chunk.shape[2] for chunk in chunks] == [1, 4, 4]
    assert torch.equal(torch.cat(chunks, 2), whole)


def test_an_abandoned_decode_leaves_no_features(text_engine: WanEngine) -> None:
    vae = text_engine.pipelines.text.vae  # type: ignore[union-attr]
    decoding = stream_decode(vae, torch.zeros(1, vae.config.z_dim, 3, 4, 4))
    next(decoding)
    assert any(feature is not None for feature in vae._feat_map)  # noqa: SLF001
    decoding.close()
    assert all(feature is None for feature in vae._feat_map)  # noqa: SLF001


def test_every_level_has_its_byte() -> None:
    levels = torch.linspace(-1, 1, 256).view(1, 1, 1, 1, 256).expand(1, 3, 1, 1, 256)
    assert to_uint8(levels)[0, 0, :, 0].tolist() == list(range(256))


@pytest.mark.parametrize(("model", "published_gb"), [("wan2.2-t2v-a14b", 31), ("wan2.2-ti2v-5b", 10.1)])
def test_the_estimate_of_activations_is_near_the_published_peaks(model: str, published_gb: float) -> None:
    assert activation_bytes(PROFILES[model]) / 1e9 == pytest.approx(published_gb, rel=0.15)


def test_the_child_process_renders_real_frames() -> None:
    engine = EngineProcess(EngineConfig("wan", "tiny-wan2.2-t2v", TRAINED, threads=1))
    capabilities = engine.start(120)
    recorder, pid = Recorder(), engine.pid
    for event in engine.run(batch(parameters()), stall_s=60, deadline=recorder.deadline):
        recorder.emit(event)
    engine.stop(10)
    assert capabilities.versions["diffusers"].startswith("0.42")
    assert recorder.frames().shape == (9, 64, 64, 3)
    assert pid is not None
    assert process_ended(pid)
