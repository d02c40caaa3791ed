"""A folder of pairs: noises, and the latents that a teacher made from them. Written by one command, read by one source.

<folder>/rows.csv               id,prompt,seed,height,width, and frames of videos
<folder>/<id>.safetensors       noise and latents [C, h, w], of videos [C, f, h, w], fp32
"""

from __future__ import annotations

TABLE = "rows.csv"
COLUMNS = ("id", "prompt", "seed", "height", "width")
FRAMES = "frames"
