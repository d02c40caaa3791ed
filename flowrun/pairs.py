"""A folder of pairs: noises, and the latents that a teacher made from them. Written by one command, read by one source.

<folder>/rows.csv               id,prompt,seed,height,width
<folder>/<id>.safetensors       noise [C, h, w] and latents [C, h, w], fp32
"""

from __future__ import annotations

TABLE = "rows.csv"
COLUMNS = ("id", "prompt", "seed", "height", "width")
