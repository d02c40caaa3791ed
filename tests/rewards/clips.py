"""A CLIP of random weights at its smallest, saved as published ones are."""

import torch
from transformers import CLIPConfig, CLIPImageProcessor, CLIPModel, CLIPTokenizer

SIDE, WIDTH, EMBEDDED = 16, 32, 16
LAYERS = {"hidden_size": WIDTH, "intermediate_size": 4 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4,
          "projection_dim": EMBEDDED, "hidden_act": "gelu"}  # fmt: skip


def save(folder, seed=0):
    """Returns the network, its tokenizer and its image processor, all read back from `folder`."""
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    text = {**LAYERS, "vocab_size": len(tokens), "max_position_embeddings": 20, "bos_token_id": 52, "eos_token_id": 53}
    torch.manual_seed(seed)
    vision = {**LAYERS, "image_size": SIDE, "patch_size": 8}
    network = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=EMBEDDED))
    for parameter in network.parameters():  # so that no part of it is without influence
        torch.nn.init.normal_(parameter, std=0.3)
    network.logit_scale.data.fill_(2.0)
    network.save_pretrained(folder)
    CLIPTokenizer(vocab={token: i for i, token in enumerate(tokens)}, merges=[]).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}).save_pretrained(folder)
    return CLIPModel.from_pretrained(folder).eval(), CLIPTokenizer.from_pretrained(folder), CLIPImageProcessor.from_pretrained(folder)
