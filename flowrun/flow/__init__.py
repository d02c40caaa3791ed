"""The mathematics of flow matching: path, schedule, training densities, steps. Imports torch only.

sigma in [0, 1] is the noise level: 1 = noise, 0 = clean. B rows; latents are [B, ...], a number per row is [B].
All arithmetic is in fp32 or wider: bf16 has 8 bits of fraction, which is coarser than one sampling step.
"""
