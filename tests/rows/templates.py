"""Chat templates as five families of models have them, and a tokenizer of bytes that knows their special tokens."""

from __future__ import annotations

from typing import NamedTuple

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


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "chatml": Template(CHATML, "<|im_end|>", "{}<|im_end|>"),
    "chatml, marked": Template(
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}",
        "<|im_end|>",
        "{}<|im_end|>",
    ),
    "llama 3": Template(
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
        "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        "<|eot_id|>",
        "{}<|eot_id|>",
    ),
    "mistral": Template(
        "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }}[/INST]"
        "{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}",
        "</s>",
        " {}</s>",
    ),
    "gemma": Template(
        "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}"
        "\n{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        "<eos>",
        "{}<end_of_turn>",
    ),
}
TEMPLATES["zephyr"] = Template(
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] + eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
    "</s>",
    "{}</s>",
)
TEMPLATES["chatml, marked with its end"] = Template(
    TEMPLATES["chatml, marked"]
    .text.replace("{% endgeneration %}", "<|im_end|>{% endgeneration %}\n")
    .replace("{% endif %}<|im_end|>\n", "<|im_end|>\n{% endif %}"),
    "<|im_end|>",
    "{}<|im_end|>",
)
TEMPLATES["phi 3"] = Template(
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{{ '<|assistant|>\n' if add_generation_prompt else eos_token }}",
    "</s>",
    "{}<|end|>",
)
TOOLS = (  # as Qwen 2.5
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>{{ m.content }}</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>"
    "{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (  # as Qwen3: the thoughts of the last turn alone are written
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% set parts = m['content'].split('</think>') %}{% if loop.index0 > ns.last %}<think>\n"
    "{{ parts[0].split('<think>')[-1] if parts | length > 1 else '' }}\n</think>\n\n{% endif %}{{ parts[-1] }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


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
