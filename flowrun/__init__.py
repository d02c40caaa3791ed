"""flowrun: fine-tuning of diffusion and flow-matching models, in two stages that are provably one."""

__version__ = "0.1.0"
