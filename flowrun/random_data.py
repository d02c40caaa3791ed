"""Small folders of random pictures, videos and films with captions, for trying things out; left to the system to remove."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import torch
from PIL import Image

SIZE, FILM_FPS = (64, 64), 24


@cache
def videos() -> Path:
    """A folder of two videos of five random frames, with captions; it is left to the system to remove."""
    folder = Path(tempfile.mkdtemp())
    for name in ("red apple", "pear"):
        (folder / name).mkdir()
        for frame in range(5):
            Image.effect_noise((32, 32), 64).convert("RGB").save(folder / name / f"{frame}.png")
        (folder / f"{name}.txt").write_text(name)
    return folder


@cache
def films() -> Path:
    """The same as films of 16 thousand random samples a second."""
    import av  # of an extra of its own

    folder = Path(tempfile.mkdtemp())
    for name in ("red apple", "pear"):
        with av.open(str(folder / f"{name}.mkv"), "w") as container:
            pictures, sound = container.add_stream("ffv1", rate=FILM_FPS), container.add_stream("pcm_s16le", rate=16000, layout="mono")
            pictures.width, pictures.height, pictures.pix_fmt = 32, 32, "bgr0"
            for _ in range(5):
                container.mux(pictures.encode(av.VideoFrame.from_image(Image.effect_noise((32, 32), 64).convert("RGB"))))
            samples = torch.randint(-(2**15), 2**15, (1, 5 * 16000 // FILM_FPS)).short().numpy()
            heard = av.AudioFrame.from_ndarray(samples, format="s16", layout="mono")
            heard.sample_rate = 16000
            container.mux([*pictures.encode(), *sound.encode(heard), *sound.encode()])
        (folder / f"{name}.txt").write_text(name)
    return folder


@cache
def edits() -> tuple[Path, Path]:
    """Two folders of random pictures of the same names, before and after, the latter with captions; left to the system, too."""
    folder = Path(tempfile.mkdtemp())
    for part in ("before", "after"):
        (folder / part).mkdir()
        for name in ("red apple", "pear"):
            Image.effect_noise(SIZE, 64).convert("RGB").save(folder / part / f"{name}.png")
            (folder / part / f"{name}.txt").write_text(name)
    return folder / "before", folder / "after"
