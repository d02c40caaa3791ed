"""What turns words and pictures into a random Qwen2.5-VL's inputs, made in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedTokenizerBase, Qwen2VLImageProcessorPil, Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin

from flowrun.config import ConfigError
from flowrun.spelling import suggest


class PictureProcessor(Qwen2VLProcessor):
    """Without videos, whose processor needs torchvision."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil | None = None,
                 tokenizer: PreTrainedTokenizerBase | None = None, chat_template: str | None = None) -> None:  # fmt: skip
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id, self.video_token_id = map(tokenizer.convert_tokens_to_ids, (self.image_token, self.video_token))
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)


def processor(words: PreTrainedTokenizerBase, settings: Mapping[str, Any], key: str) -> PictureProcessor:
    """settings: of the class that scales pictures and cuts them into patches. Raises ConfigError for unknown ones."""
    known = list(Qwen2VLImageProcessorPil.valid_kwargs.__annotations__)
    for name in settings:
        if name not in known:
            raise ConfigError(f"{key}.{name}", "is no setting of Qwen2VLImageProcessorPil", suggest(name, known))
    return PictureProcessor(Qwen2VLImageProcessorPil(**settings), words, words.chat_template)
