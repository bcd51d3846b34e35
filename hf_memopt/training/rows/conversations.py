"""Write a conversation, a prompt with its completion, or an instruction as text, and say which characters are learned.

Conversations are written by the tokenizer's own chat template. What the assistant says is learned, with what ends its
turn, and nothing else. Where it stands follows from the template's ``{% generation %}`` marks, else from writing the
conversation once more for each answer, with a mark in its place. The column names are those of TRL's ``data_utils``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from functools import cache
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import TemplateError

ROLES = {"human": "user", "gpt": "assistant", "bing": "assistant", "function": "tool", "observation": "tool"}
ROLES |= {"function_call": "assistant", "model": "assistant"}
"""What ShareGPT, LLaMA-Factory and Gemini call the roles."""
PROMPT = (
    "Below is an instruction that describes a task{paired}. Write a response that appropriately completes the request."
    "\n\n### Instruction:\n{instruction}\n\n{given}### Response:\n"
)
"""The prompt of Stanford Alpaca, for tokenizers without a chat template. Source: tatsu-lab/stanford_alpaca, README."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""What APIs and templates call the thoughts of a message."""
MARK = "\ue000answer\ue000"  # of characters for private use, which no template looks for
OPENING = re.compile(r"(<think>\s*</think>\s*)?[ \t]*$")  # what templates write before an answer that is the answer's


class Written(NamedTuple):
    """A text, and the parts of it that are learned."""

    text: str  # the whole text
    # characters (from, to, end of turn): tokens that begin before "to", or that end at the end of the turn or before
    # it. None where all is learned
    spans: list[tuple[int, int, int]] | None = None
    is_chat: bool = False  # whether a chat template wrote it, which writes special tokens such as the first one too


def messages_of(value: Any, *, has_own_none: bool = False) -> list[dict[str, Any]]:
    """Return messages with ``role`` and ``content``; those of ShareGPT, ``from`` and ``value``, are renamed.

    Arguments of calls that are None are left out, unless the row ``has_own_none``, which Arrow has not filled in.
    """
    try:
        return [_message(_without_none(one, "arguments" if has_own_none else None)) for one in value]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"messages={value!r:.80} is no conversation of texts; expected a list of {{'role': ..., 'content': ...}}. "
            "Name the right column: columns={'messages': NAME}"
        ) from error


def _without_none(value: Any, kept: str | None = None) -> Any:
    """Return a value without the None that Arrow fills in where other rows have a field; what is ``kept`` stays."""
    if isinstance(value, Mapping):
        present = {name: part for name, part in value.items() if part is not None}
        return {name: part if name == kept else _without_none(part, kept) for name, part in present.items()}
    return [_without_none(part, kept) for part in value] if isinstance(value, list) else value


def _message(given: dict[str, Any]) -> dict[str, Any]:
    if "role" not in given:
        return {"role": ROLES.get(given["from"], given["from"]), "content": given["value"]}
    given = {**given, "role": ROLES.get(given["role"], given["role"])}
    if isinstance(given.get("content"), list):  # parts, of which templates of text alone know nothing
        return {**given, "content": "".join(part["text"] for part in given["content"])}
    return given


def written_row(row: Mapping[str, Any], tokenizer: Any, *, has_own_none: bool = False) -> Written:
    """Return what a row of text, prompt and completion, or an instruction says to the model.

    Args:
        row: with ``text``; ``prompt`` and ``completion``, both texts or both lists of messages; ``instruction``,
            ``output`` and perhaps ``input``; or ``messages``. Conversations may have ``tools``, a list or its JSON.
        tokenizer: writes conversations by its chat template.
        has_own_none: see ``messages_of``.

    Raises:
        ValueError: a conversation that cannot be written, or whose turns cannot be told apart.
    """
    if "text" in row:
        return Written(row["text"])
    if "messages" in row:
        return _conversation(messages_of(row["messages"], has_own_none=has_own_none), tokenizer, row.get("tools"))
    if "instruction" in row:
        row = _as_prompt(row, has_template=getattr(tokenizer, "chat_template", None) is not None)
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion
        return Written(text, [(len(prompt), len(text), len(text))])
    asked, said = (messages_of(one, has_own_none=has_own_none) for one in (prompt, completion))
    return _conversation([*asked, *said], tokenizer, row.get("tools"), first=len(asked))


def _as_prompt(row: Mapping[str, Any], *, has_template: bool) -> dict[str, Any]:
    instruction, given, output = row["instruction"], row.get("input"), row["output"]
    if has_template:
        question = f"{instruction}\n\n{given}" if given else instruction
        said = [("user", question), ("assistant", output)]
        asked, answered = ({"role": role, "content": content} for role, content in said)
        return {"prompt": [asked], "completion": [answered]}
    paired = ", paired with an input that provides further context" if given else ""
    given = f"### Input:\n{given}\n\n" if given else ""
    return {"prompt": PROMPT.format(paired=paired, instruction=instruction, given=given), "completion": output}


def _conversation(messages: list[dict[str, Any]], tokenizer: Any, tools: Any, first: int = 0) -> Written:
    """Return a conversation as the template writes it; what the assistant says from message ``first`` on is learned."""
    if getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(
            f"tokenizer=<{type(tokenizer).__name__}> has no chat template to write messages by; expected one. "
            "Take the one of the model's chat version: tokenizer.chat_template = "
            "AutoTokenizer.from_pretrained(CHAT_VERSION).chat_template"
        )
    tools = _tools(tools)
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    said = [at for at in answers if at >= first and messages[at].get("weight") != 0]  # OpenAI's: what is not learned
    try:
        text, marks = _rendered(messages, tokenizer, tools)
        if any(one not in text for one in _json_arguments(messages)):  # of a template that writes objects as JSON
            messages = _with_objects(messages)
            text, marks = _rendered(messages, tokenizer, tools)
        end = re.escape(tokenizer.eos_token or "")
        if end and re.search(rf"{end}\s*{end}", text):  # answers that end with it, of a template that writes it too
            messages = [_without_end(one, tokenizer.eos_token) for one in messages]
            text, marks = _rendered(messages, tokenizer, tools)
    except TemplateError as error:  # of roles that do not alternate, or that it does not know
        raise ValueError(
            f"messages={messages!r:.80} cannot be written by the chat template ({error}); expected roles in the order "
            "that it takes. Correct the row, or leave it out: dataset.filter(...)"
        ) from error

    _check_written(messages, text)

    @cache
    def around(at: int, end: int) -> tuple[str, str]:
        """Return what the template writes before and after an answer, without the messages from ``end`` on."""
        marked = [*messages[:at], {"role": "assistant", "content": MARK}, *messages[at + 1 : end]]
        try:
            before, mark, after = tokenizer.apply_chat_template(marked, tools=tools, tokenize=False).partition(MARK)
        except TemplateError:  # the answer of a tool that nobody has called
            before, mark, after = "", "", ""
        before = OPENING.sub("", before)
        if not mark or (end == len(messages) and not (text.startswith(before) and text.endswith(after))):
            raise ValueError(
                f"messages[{at}]={messages[at].get('content')!r:.60} cannot be told from the rest of what the chat "
                "template writes; expected a template that writes each message in one place. Mark the assistant's "
                "answers in it: {% generation %} ... {% endgeneration %}"
            )
        return before, after

    if not said:
        return Written(text, [], is_chat=True)
    if not marks or said != answers:
        pairs = [around(at, len(messages)) for at in said]
        marks = [(len(before), len(text) - len(after)) for before, after in pairs]
    closing = around(said[-1], said[-1] + 1)[1]
    # what ends a turn is what ends the last one too, less the blanks, and the beginning of another special token
    ends = [commonprefix([closing, text[end:]]).rstrip("<|[ \n") for _, end in marks]  # noqa: RUF071
    spans = [(start, end, end + len(last)) for (start, end), last in zip(marks, ends, strict=True)]
    return Written(text, spans, is_chat=True)


def _tools(given: Any) -> Any:
    if not isinstance(given, str):
        return _without_none(given) or None
    try:
        return (json.loads(given) if given.strip() else None) or None
    except json.JSONDecodeError as error:
        raise ValueError(
            f"tools={given!r:.60} is no JSON ({error}); expected a list of functions, or its JSON. Correct the row"
        ) from error


def _calls(message: Mapping[str, Any]) -> list[Any]:
    """Return the functions that a message calls."""
    return [call.get("function", call) for call in message.get("tool_calls") or []]


def _json_arguments(messages: list[dict[str, Any]]) -> list[str]:
    calls = [call.get("arguments") for message in messages for call in _calls(message)]
    return [one for one in calls if isinstance(one, str)]


def _with_objects(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with the arguments of calls as objects, which OpenAI's have as JSON."""
    made = deepcopy(messages)
    for call in (call for message in made for call in _calls(message) if isinstance(call.get("arguments"), str)):
        with suppress(json.JSONDecodeError):
            call["arguments"] = json.loads(call["arguments"])
    return made


def _without_end(message: dict[str, Any], end: str) -> dict[str, Any]:
    content = message.get("content")
    is_ended = message["role"] == "assistant" and isinstance(content, str) and content.rstrip().endswith(end)
    return {**message, "content": content.rstrip().removesuffix(end)} if is_ended and content else message


def _as_json(text: str) -> str:
    """Return a text as templates write it within JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _check_written(messages: list[dict[str, Any]], text: str) -> None:
    """Raise for a message, or a call in it, that the template has left out."""
    for at, message in enumerate(messages):
        content = message.get("content")  # of tools perhaps an object
        thought, _, said = content.rpartition("</think>") if isinstance(content, str) else ("", "", "")
        parts = [said.strip(), *(str(call.get("name") or "") for call in _calls(message))]
        if message is messages[-1]:  # templates leave out what was thought before
            parts += [thought.rpartition("<think>")[2].strip()]
            parts += [one.strip() for name in THOUGHTS if isinstance(one := message.get(name), str)]
        lost = next((one for one in parts if one not in text and _as_json(one) not in text), None)
        if lost is not None:
            is_thought = parts.index(lost) > len(_calls(message))
            fix = (
                "take the thoughts out: dataset.map(...)" if is_thought else "leave such rows out: dataset.filter(...)"
            )
            raise ValueError(
                f"messages[{at}], of the role {message['role']!r}, is not written by the chat template: {lost!r:.60}; "
                "expected a template that writes each message. Take one that knows "
                f"{'what was thought' if is_thought else 'the role and calls of tools'}, or {fix}"
            )


def _rendered(messages: list[dict[str, Any]], tokenizer: Any, tools: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return a conversation as the template writes it, and the characters that the template marks."""
    from transformers.utils.chat_template_utils import render_jinja_template  # seen in 5.8 to 5.23

    template = tokenizer.get_chat_template(tools=tools)
    is_marked = re.search(r"{%-?\s*generation", template) is not None
    made: Any = render_jinja_template(  # texts, and the marks of each; its annotation says str
        [messages],
        tools=tools,
        chat_template=template,
        return_assistant_tokens_mask=is_marked,
        **tokenizer.special_tokens_map,
    )
    return made[0][0], made[1][0] if is_marked else []
