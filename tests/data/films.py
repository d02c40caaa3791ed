"""Videos with sound, without loss."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from torch import Tensor

LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}


def film(path: Path, video: Tensor, sound: Tensor | None, rate: int = 16000, fps: int = 24, delay: float = 0.0) -> Path:
    """A .mkv of uint8 [F, 3, H, W] and samples [K, S], of 16 bits, which begin `delay` seconds late, and its caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_text(path.stem)
    with av.open(str(path), "w") as container:
        pictures = container.add_stream("ffv1", rate=fps)
        pictures.height, pictures.width, pictures.pix_fmt = *video.shape[2:], "bgr0"
        track = None if sound is None else container.add_stream("pcm_s16le", rate=rate, layout=LAYOUTS[len(sound)])
        for number, pixels in enumerate(video.permute(0, 2, 3, 1).numpy()):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = number
            container.mux(pictures.encode(frame))
        container.mux(pictures.encode())
        if track is not None:
            values = (sound * 2**15).round().clamp(-(2**15), 2**15 - 1).short().T.reshape(1, -1).numpy()
            samples = av.AudioFrame.from_ndarray(values, format="s16", layout=LAYOUTS[len(sound)])
            samples.sample_rate, samples.time_base, samples.pts = rate, Fraction(1, rate), round(delay * rate)
            container.mux(track.encode(samples))
            container.mux(track.encode())
    return path
