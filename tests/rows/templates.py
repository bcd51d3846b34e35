"""Chat templates as five families of models have them, and a tokenizer of bytes that knows their special tokens."""

from __future__ import annotations

from typing import NamedTuple

from tables import tables
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = (
    *("<s>", "</s>", "<eos>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>"),
)


class Template(NamedTuple):
    """A chat template, the token that ends a text, and the characters in place of an answer that are learned."""

    text: str
    end: str
    learned: str


TABLES = tables(__file__)
TEMPLATES = {name: Template(*parts) for name, parts in TABLES["templates"].items()}
CHATML = TEMPLATES["chatml"].text
TOOLS = TABLES["tools"]
"""As Qwen 2.5."""
THINKING = TABLES["thinking"]
"""As Qwen3: the thoughts of the last turn alone are written."""


def byte_tokenizer(end: str = "</s>", template: str | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({character: at for at, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    others = [token for token in SPECIAL if token not in ("<s>", end)]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token=end, pad_token="<s>", additional_special_tokens=others
    )
    made.chat_template = template
    return made
