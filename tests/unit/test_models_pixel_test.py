"""The pixel test reads every scene of the closed world, also after a video codec."""

from pathlib import Path

import av
import numpy as np
import pytest
from numpy.typing import NDArray

from models.pixel_test import Seen, Verdict, expected_from_prompt, read_clip, sentence, verdict
from models.video_file import read_mp4
from models.world import LENGTHS, WORLD, Scene, centred_placement, prompt_of, render, varied_prompt

RED_CIRCLE = Seen("red", "circle", "right", "blue")


def seen_in(scene: Scene) -> Seen:
    return Seen(scene.colour, scene.shape, scene.motion, scene.background)


def drawn(scene: Scene, frames: int, seed: int) -> NDArray[np.uint8]:
    clip = render(scene, frames, centred_placement(np.random.default_rng(seed)))
    return (clip * 255).round().astype(np.uint8)


def write_h264(frames: NDArray[np.uint8], path: Path) -> None:
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=16, options={"crf": "23"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for picture in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def test_reads_every_scene_of_the_world() -> None:
    seen = {scene: read_clip(drawn(scene, LENGTHS[number % 3], number)) for number, scene in enumerate(WORLD)}

    assert len(seen) == 345
    assert seen == {scene: seen_in(scene) for scene in WORLD}


def test_reads_floats_as_it_reads_bytes() -> None:
    clip = drawn(WORLD[0], 9, 0)

    assert read_clip(clip.astype(np.float32) / 255) == read_clip(clip)


@pytest.mark.parametrize("number", range(0, len(WORLD), 29))
def test_an_h264_round_trip_keeps_colour_motion_and_background(number: int, tmp_path: Path) -> None:
    scene = WORLD[number]
    write_h264(drawn(scene, 9, number), tmp_path / "clip.mp4")

    frames, _ = read_mp4(tmp_path / "clip.mp4")

    assert verdict(seen_in(scene), read_clip(frames)).ok


def test_a_plain_picture_shows_only_its_background() -> None:
    assert read_clip(np.full((9, 64, 64, 3), 250, dtype=np.uint8)) == Seen(None, None, None, "white")


@pytest.mark.parametrize("shape", [(64, 64, 3), (1, 64, 64, 3), (9, 64, 64, 4)])
def test_an_array_that_is_no_clip_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="at least two frames"):
        read_clip(np.zeros(shape, dtype=np.uint8))


def test_the_usual_sentence_is_understood() -> None:
    assert [expected_from_prompt(prompt_of(scene)) for scene in WORLD] == [seen_in(scene) for scene in WORLD]


def test_what_was_seen_is_said_as_the_prompt_said_it() -> None:
    assert [sentence(seen_in(scene)) for scene in WORLD] == [prompt_of(scene) for scene in WORLD]


def test_every_word_order_of_the_training_is_understood() -> None:
    rng = np.random.default_rng(0)

    assert all(expected_from_prompt(varied_prompt(scene, rng)) == seen_in(scene) for scene in WORLD)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("A RED ball, moving rightwards, on a blue backdrop!", RED_CIRCLE),
        ("a violet box rising over a grey background", Seen("purple", "square", "up", "gray")),
        ("a static orange pyramid against white", Seen("orange", "triangle", "still", "white")),
        ("moving left", Seen(None, None, "left", None)),
        ("a red circle moving up then down on black", Seen("red", "circle", None, "black")),
        ("a red circle on a blue square", None),
        ("a blue circle moving up on a blue background", None),
        ("eine Katze im Regen", None),
        ("", None),
    ],
)
def test_prompts_outside_the_usual_sentence(prompt: str, expected: Seen | None) -> None:
    assert expected_from_prompt(prompt) == expected


def test_a_differing_motion_is_wrong_and_a_differing_shape_only_doubtful() -> None:
    seen = Seen("red", "square", "left", "blue")

    assert verdict(RED_CIRCLE, seen) == Verdict(wrong=("motion",), doubtful=("shape",))


def test_what_the_prompt_leaves_open_is_right() -> None:
    assert verdict(Seen(None, None, "right", None), RED_CIRCLE) == Verdict((), ())


def test_an_empty_clip_is_said_to_show_nothing() -> None:
    assert sentence(Seen(None, None, None, "white")) == "nothing on a white background"
