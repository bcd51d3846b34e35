"""Write a conversation, a prompt with its completion, or an instruction as text, and say which characters are learned.

Conversations are written by the tokenizer's own chat template. What the assistant says is learned, with the special
token that ends its turn, and nothing else: where the template marks it with ``{% generation %}`` its marks count, else
the text before a turn is found by writing the messages up to it. The column names are those of TRL's ``data_utils``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["IGNORED", "Learned", "encode", "learned_text", "messages_of"]

IGNORED = -100  # the label that losses leave out
ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "function": "tool", "observation": "tool"}
"""What ShareGPT's ``from`` calls the roles."""
WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:\n"
)
WITHOUT_INPUT = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:\n"
)
"""The prompts of Stanford Alpaca, for tokenizers without a chat template. Source: tatsu-lab/stanford_alpaca, README."""


@dataclass(frozen=True)
class Learned:
    """A text, and the parts of it that are learned.

    Attributes:
        text: the whole text.
        spans: characters [from, to) that are learned; None for all of them.
        has_special: whether special tokens such as the first one are in the text already.
    """

    text: str
    spans: tuple[tuple[int, int], ...] | None = None
    has_special: bool = False


def messages_of(value: Any) -> list[dict[str, Any]]:
    """Return messages with ``role`` and ``content``; those of ShareGPT, ``from`` and ``value``, are renamed.

    Raises:
        ValueError: what is no list of messages.
    """
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(one, Mapping) for one in value):
        raise ValueError(
            f"messages={value!r:.80} is no conversation; expected a list of {{'role': ..., 'content': ...}}. "
            "Name the right column: columns={'messages': NAME}"
        )
    found = []
    for message in value:
        kept = {name: part for name, part in message.items() if part is not None}  # Arrow fills in what others have
        if "from" in kept and "role" not in kept:
            kept = {"role": ROLES.get(kept["from"], kept["from"]), "content": kept.get("value", "")}
        if "role" not in kept:
            raise ValueError(
                f"messages hold {sorted(kept)!r}; expected 'role' and 'content', or 'from' and 'value', in each. "
                "Rename them: dataset.map(...)"
            )
        found.append(kept)
    return found


def learned_text(row: Mapping[str, Any], tokenizer: Any) -> Learned:
    """Return what a row of text, prompt and completion, or an instruction says to the model.

    Args:
        row: with ``text``; ``prompt`` and ``completion``, both texts or both lists of messages; ``instruction``,
            ``output`` and perhaps ``input``; or ``messages``.
        tokenizer: writes conversations by its chat template.

    Raises:
        ValueError: a conversation that cannot be written, or whose turns cannot be told apart.
    """
    if "messages" in row:
        return _conversation(messages_of(row["messages"]), tokenizer, row.get("tools"))
    if "prompt" in row:
        if isinstance(row["prompt"], str):
            return _completed(row["prompt"], row["completion"])
        asked, answered = messages_of(row["prompt"]), messages_of(row["completion"])
        return _conversation([*asked, *answered], tokenizer, row.get("tools"), first=len(asked))
    if "instruction" in row:
        given = row.get("input") or ""
        if getattr(tokenizer, "chat_template", None) is None:
            prompt = (WITH_INPUT if given else WITHOUT_INPUT).format(instruction=row["instruction"], input=given)
            return _completed(prompt, row["output"])
        question = "\n\n".join(filter(None, (row["instruction"], given)))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": row["output"]}]
        return _conversation(turns, tokenizer, None)
    return Learned(row["text"])


def _completed(prompt: str, completion: str) -> Learned:
    text = prompt + completion
    return Learned(text, ((len(prompt), len(text)),))


def _conversation(messages: list[dict[str, Any]], tokenizer: Any, tools: Any, first: int = 0) -> Learned:
    """Return a conversation as the template writes it; what the assistant says from message ``first`` on is learned."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"tokenizer=<{type(tokenizer).__name__}> has no chat template to write messages by; expected one. "
            "Take the one of the model's chat version: tokenizer.chat_template = "
            "AutoTokenizer.from_pretrained(CHAT_VERSION).chat_template"
        )

    def written(count: int, **options: Any) -> str:
        return str(tokenizer.apply_chat_template(messages[:count], tools=tools or None, tokenize=False, **options))

    if first == 0 and re.search(r"{%-?\s*generation", tokenizer.chat_template):
        return _marked(messages, tokenizer, tools)
    text, spans = written(len(messages)), []
    for at, message in enumerate(messages):
        if message["role"] != "assistant" or at < first:
            continue
        before = written(at, add_generation_prompt=True)
        said = message.get("content") or ""
        said = said if isinstance(said, str) else "".join(part.get("text", "") for part in said)
        thought = message.get("reasoning_content") or said.partition("</think>")[0].partition("<think>")[2]
        thinking = re.compile(rf"\s*(<think>)?\s*{re.escape(thought.strip())}").match(text, len(before))
        after = thinking.end() if thinking else len(before)
        # templates cut blanks, and leave out what was thought in earlier turns
        ways = (said, said.strip(), said.split("</think>")[-1].strip())
        answer = next((way for way in ways if text.find(way, after) >= 0), None)
        if answer is None or not text.startswith(before) or message.get("tool_calls"):
            raise ValueError(
                f"messages[{at}]={said!r:.60} cannot be told from the rest of what the chat template writes; expected "
                "a template that writes one turn after the other. Mark the assistant's answers in it: "
                "{% generation %} ... {% endgeneration %}"
            )
        found = text.find(answer, after)
        spans.append((len(before), found + len(answer)))
    return Learned(text, tuple(spans), has_special=True)


def _marked(messages: list[dict[str, Any]], tokenizer: Any, tools: Any) -> Learned:
    """Return a conversation whose template marks what is learned."""
    from transformers.utils.chat_template_utils import render_jinja_template  # seen in 5.8 to 5.23

    made: Any = render_jinja_template(  # texts, and the marks of each; its annotation says str
        [messages],
        tools=tools or None,
        chat_template=tokenizer.chat_template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    (text,), (spans,) = made
    return Learned(text, tuple(spans), has_special=True)


def encode(rows: Sequence[Mapping[str, Any]], tokenizer: Any, max_length: int | None) -> list[dict[str, list[int]]]:
    """Return ``input_ids`` of each row, and ``labels`` with -100 where nothing is learned.

    Each row ends with one end-of-text token, which is learned. Rows of ``text``, of which all is learned, have no
    ``labels``. Rows are cut to ``max_length`` tokens.

    Raises:
        ValueError: as ``learned_text``; or the tokenizer cannot tell where in the text its tokens stand.
    """
    found = []
    for row in rows:
        ids, learned = _tokens(learned_text(row, tokenizer), tokenizer)
        ids, learned = _ended(ids, learned, tokenizer)
        encoded = {"input_ids": ids[:max_length]}
        if "text" not in row:
            labels = [token if kept else IGNORED for token, kept in zip(ids, learned, strict=True)]
            encoded["labels"] = labels[:max_length]
        found.append(encoded)
    return found


def _tokens(one: Learned, tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return the ids of a text and which of them are learned."""
    options = {"add_special_tokens": not one.has_special, "return_attention_mask": False, "verbose": False}
    if one.spans is None:
        ids = tokenizer(one.text, **options)["input_ids"]
        return ids, [True] * len(ids)
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"tokenizer=<{type(tokenizer).__name__}> cannot tell where in the text its tokens stand; expected a fast "
            "one. Call: AutoTokenizer.from_pretrained(NAME, use_fast=True)"
        )
    made = tokenizer(one.text, return_offsets_mapping=True, **options)
    ids, learned = made["input_ids"], [False] * len(made["input_ids"])
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    for start, end in one.spans:
        last = None
        for at, (left, right) in enumerate(made["offset_mapping"]):
            if right > start and left < end and left < right:
                learned[at], last = True, at
        # the token that ends the turn is the assistant's too
        if last is not None and one.has_special and last + 1 < len(ids) and ids[last + 1] in special:
            learned[last + 1] = True
    return ids, learned


def _ended(ids: list[int], learned: list[bool], tokenizer: Any) -> tuple[list[int], list[bool]]:
    """Return a row that ends with an end-of-text token; after what is learned, that token is learned too."""
    end = tokenizer.eos_token_id
    if end is None or not ids:
        return ids, learned
    learned = [kept or (at > 0 and ids[at] == end and learned[at - 1]) for at, kept in enumerate(learned)]
    last = len(ids) - 1  # before the line break that templates write at the end
    while last > 0 and ids[last] != end and not tokenizer.decode([ids[last]]).strip():
        last -= 1
    return (ids, learned) if ids[last] == end or not learned[last] else ([*ids, end], [*learned, True])
