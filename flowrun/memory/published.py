"""Settings of the public checkpoints' networks, in the words of diffusers and transformers, so that nothing is downloaded.

Which parameters they make is compared with the published counts by a test.
"""

from __future__ import annotations

from typing import Any

VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}
VAE_16 = {**VAE, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
CLIP_L = {
    "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12, "projection_dim": 768,
    "vocab_size": 49408,
}  # fmt: skip
CLIP_G = {
    "hidden_size": 1280, "intermediate_size": 5120, "num_attention_heads": 20, "num_hidden_layers": 32, "projection_dim": 1280,
    "vocab_size": 49408,
}  # fmt: skip
T5_XXL = {
    "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu",
    "vocab_size": 32128,
}  # fmt: skip
UMT5_XXL = {**T5_XXL, "vocab_size": 256384}
QWEN3_4B = {
    "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip
QWEN2_5_VL_7B = {
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584, "patch_size": 14,
    },
}  # fmt: skip

# Model option -> component -> settings; what is not said is the class's own default.
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "sdxl": {
        "unet": {
            "sample_size": 128, "block_out_channels": [320, 640, 1280], "attention_head_dim": [5, 10, 20],
            "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
            "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
            "transformer_layers_per_block": [1, 2, 10], "cross_attention_dim": 2048, "use_linear_projection": True,
            "addition_embed_type": "text_time", "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816,
        },
        "vae": {**VAE, "latent_channels": 4, "scaling_factor": 0.13025},
        "text_encoder": CLIP_L,
        "text_encoder_2": CLIP_G,
        "scheduler": {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "prediction_type": "epsilon"},
    },
    "sd3_5_medium": {
        "transformer": {
            "sample_size": 128, "num_layers": 24, "num_attention_heads": 24, "attention_head_dim": 64, "out_channels": 16,
            "caption_projection_dim": 1536, "joint_attention_dim": 4096, "pooled_projection_dim": 2048,
            "pos_embed_max_size": 384, "qk_norm": "rms_norm", "dual_attention_layers": list(range(13)),
        },
        "vae": {**VAE_16, "shift_factor": 0.0609, "scaling_factor": 1.5305},
        "text_encoder": CLIP_L,
        "text_encoder_2": CLIP_G,
        "text_encoder_3": T5_XXL,
        "scheduler": {"shift": 3.0},
    },
    "flux1_dev": {
        "transformer": {"guidance_embeds": True},
        "vae": {**VAE_16, "shift_factor": 0.1159, "scaling_factor": 0.3611},
        "text_encoder": CLIP_L,
        "text_encoder_2": T5_XXL,
        "scheduler": {"shift": 3.0, "use_dynamic_shifting": True},
    },
    "flux2_klein_base_4b": {
        "transformer": {
            "num_layers": 5, "num_single_layers": 20, "num_attention_heads": 24, "joint_attention_dim": 7680, "guidance_embeds": False,
        },
        "vae": {},
        "text_encoder": QWEN3_4B,
        "scheduler": {"shift": 3.0, "use_dynamic_shifting": True},
    },
    "qwen_image": {
        "transformer": {},
        "vae": {},
        "text_encoder": QWEN2_5_VL_7B,
        "scheduler": {"use_dynamic_shifting": True},
    },
    "z_image": {
        "transformer": {},
        "vae": {**VAE_16, "shift_factor": 0.1159, "scaling_factor": 0.3611},
        "text_encoder": QWEN3_4B,
        "scheduler": {"shift": 6.0},
    },
    "wan2_1_t2v_1_3b": {
        "transformer": {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30},
        "vae": {},
        "text_encoder": UMT5_XXL,
        "scheduler": {"flow_shift": 3.0, "use_flow_sigmas": True, "prediction_type": "flow_prediction"},
    },
}  # fmt: skip

# Parameters of the checkpoints' files.
COUNTS: dict[str, dict[str, int]] = {
    "sdxl": {"unet": 2_567_463_684, "vae": 83_653_863, "text_encoder": 123_060_480, "text_encoder_2": 694_659_840},
    "sd3_5_medium": {
        "transformer": 2_243_171_520, "vae": 83_819_683, "text_encoder": 123_650_304, "text_encoder_2": 694_659_840,
        "text_encoder_3": 4_762_310_656,
    },
    "flux1_dev": {"transformer": 11_901_408_320, "vae": 83_819_683, "text_encoder": 123_060_480, "text_encoder_2": 4_762_310_656},
    "flux2_klein_base_4b": {"transformer": 3_875_544_576, "vae": 84_046_115, "text_encoder": 4_022_468_096},
    "qwen_image": {"transformer": 20_430_401_088, "vae": 126_892_531, "text_encoder": 8_292_166_656},
    "z_image": {"transformer": 6_154_908_736, "vae": 83_819_683, "text_encoder": 4_022_468_096},
    "wan2_1_t2v_1_3b": {"transformer": 1_418_996_800, "vae": 126_892_531, "text_encoder": 5_680_910_336},
}  # fmt: skip
