"""Rows in the formats that people have, against what each says by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from tables import refuses, tables, whole
from templates import CHATML, TEMPLATES, THINKING, TOOLS, byte_tokenizer
from tokenizers.processors import ByteLevel, TemplateProcessing
from transformers import EvalPrediction

import tiny
from hf_memopt import BucketedCollator, read_rows
from hf_memopt.types import Rows

TABLES = tables(__file__)

TURNS = TABLES["turns"]
LABELLED = "sequence-classification"


ANSWERS = {"question": "q", "context": "abcd", "answers": {"text": ["cd"], "answer_start": [2]}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call><|im_end|>'
SORTED = '<tool_call>{"arguments": {"a": 2}, "name": "add"}</tool_call><|im_end|>'
"""As datasets before 4.1 keeps the fields of an object: by their names."""


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def read(rows: list[dict[str, Any]], tokenizer: Any, task: str = "causal-lm", **options: Any) -> Rows:
    return read_rows(datasets.Dataset.from_list(rows), tokenizer, task, **options)


def learned(row: dict[str, Any], tokenizer: Any) -> list[str]:
    """Return the parts of a row that are learned, one after the other."""
    parts: list[list[int]] = [[]]
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        assert label in (-100, token)
        parts = [*parts[:-1], [*parts[-1], token]] if label != -100 else [*parts, []] if parts[-1] else parts
    return [tokenizer.decode(part) for part in parts if part]


def labelled(*labels: Any) -> list[dict[str, Any]]:
    return [{"text": "w1", "label": label} for label in labels]


def every(found: Rows) -> list[dict[str, Any]]:
    return [*found.train, *found.evaluation]


@pytest.mark.parametrize("name", TEMPLATES)
def test_only_answers_are_learned(name: str) -> None:
    template = TEMPLATES[name]
    tokenizer = byte_tokenizer(template.end, template.text)
    found = read([{"messages": TURNS}] * 2, tokenizer)
    row = found.train[0]
    written = tokenizer.apply_chat_template(TURNS, tokenize=False)
    ended = written if written.rstrip().endswith(template.end) else written + template.end
    assert tokenizer.decode(row["input_ids"]) == ended
    expected = [template.learned.format(turn["content"]) for turn in TURNS if turn["role"] == "assistant"]
    tail = ended[ended.rindex(TURNS[-1]["content"]) + len(TURNS[-1]["content"]) :]  # what is added after it is learned
    expected[-1] = expected[-1].partition(TURNS[-1]["content"])[0] + TURNS[-1]["content"] + tail
    if ended == written:
        expected[-1] = expected[-1].rstrip()
    assert learned(row, tokenizer) == expected


def answer(text: str, **parts: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **parts}


def call(arguments: Any) -> dict[str, Any]:
    called = {"type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [called]}


TOOL = {"role": "tool", "content": "4"}
AS_JSON = "{% for one in messages %}{{ one.content | tojson if one.role == 'tool' else one.content }}{% endfor %}"
THOUGHTS = [TURNS[0], answer("<think>who?</think>Hello"), TURNS[2], answer("<think>4 or 5</think>4")]
CALLS = [{"role": "system", "content": "Be kind."}, TURNS[2], call({"a": 2}), TOOL, answer("4", tool_calls=None)]
WEIGHTED = [TURNS[2], answer("No", weight=0), TURNS[2], call('{"a": 2}')]
NO_TOKEN = CHATML.replace("<|im_end|>", "[end]")
OTHER_TURNS: dict[str, tuple[str, str, list[Any], list[str]]] = {
    "thoughts": ("<|im_end|>", THINKING, THOUGHTS, ["Hello<|im_end|>", "<think>\n4 or 5\n</think>\n\n4<|im_end|>"]),
    "calls, not what tools answer": ("<|im_end|>", TOOLS, CALLS, [CALL, "4<|im_end|>"]),
    "arguments as JSON, not answers of weight zero": ("<|im_end|>", TOOLS, WEIGHTED, [CALL]),
    "an end that is no special token": ("</s>", NO_TOKEN, TURNS, ["Hello ü[end]", "It is 4.[end]\n</s>"]),
    "beside JSON": ("</s>", AS_JSON, [{"role": "tool", "content": 'ü "a"\n'}, answer("b")], ["b</s>"]),
}


@pytest.mark.parametrize("name", OTHER_TURNS)
def test_what_is_learned_of_thoughts_calls_and_other_templates(name: str) -> None:
    end, template, turns, parts = OTHER_TURNS[name]
    tokenizer = byte_tokenizer(end, template)
    row = read([{"messages": turns, "tools": None}] * 2, tokenizer).train[0]
    assert [CALL if part == SORTED else part for part in learned(row, tokenizer)] == parts
    assert tokenizer.decode(row["input_ids"]).count("<tool_response>4</tool_response>") == turns.count(TOOL)


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="older datasets hold all objects as structs")
def test_null_arguments_are_the_rows_own_or_told_to_be_left_out(tmp_path: Path) -> None:
    rows = [{"messages": [TURNS[2], call(arguments)]} for arguments in ({"a": 2, "b": None}, {"a": 2})]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = byte_tokenizer("<|im_end|>", TOOLS)
    loaded = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=str(tmp_path))
    as_json, as_structs = (read_rows(one, tokenizer, "causal-lm") for one in (loaded, datasets.Dataset.from_list(rows)))
    both = [[*one.train, *one.evaluation] for one in (as_json, as_structs)]
    written = [sorted(learned(row, tokenizer)[0] for row in made) for made in both]
    assert written == [[CALL.replace("}}", ', "b": null}}'), CALL], [CALL] * 2]
    assert [any("null are left out" in note for note in one.notes) for one in (as_json, as_structs)] == [False, True]


def test_conversations_of_sharegpt_are_the_same_rows() -> None:
    tokenizer = byte_tokenizer("<|im_end|>", CHATML)
    names = {"user": "human", "assistant": "gpt"}
    theirs = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    mine, others = read([{"messages": TURNS}] * 2, tokenizer), read([{"conversations": theirs}] * 2, tokenizer)
    assert mine.train[0] == others.train[0]


WRITTEN = TABLES["completions"]


@pytest.mark.parametrize("name", WRITTEN)
def test_the_completion_is_learned(name: str) -> None:
    row, template, text, parts = WRITTEN[name]
    tokenizer = byte_tokenizer("</s>", template and TEMPLATES[template].text)
    made = read([row] * 2, tokenizer).train[0]
    assert learned(made, tokenizer) == parts
    if text is not None:
        assert tokenizer.decode(made["input_ids"]) == text


def test_blanks_are_learned_where_a_tokenizer_trims_what_it_tells_of_them() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    row = read([{"prompt": "a: ", "completion": "if b:\n    c "}] * 2, tokenizer).train[0]
    assert learned(row, tokenizer) == ["if b:\n    c </s>"]


def test_a_text_ends_once() -> None:
    tokenizer = byte_tokenizer()
    found = read([{"text": text} for text in ("ab", "ab</s>", "a", "</s>")], tokenizer)
    rows = every(found)
    assert sorted(tokenizer.decode(row["input_ids"]) for row in rows) == ["</s>", "a</s>", "ab</s>", "ab</s>"]
    assert all(row.keys() == {"input_ids"} for row in rows)  # the collator copies the labels


def test_cut_rows_keep_what_is_learned() -> None:
    tokenizer = byte_tokenizer()
    rows = [{"prompt": "a", "completion": "bcdef"}] * 3 + [{"prompt": "abcdefgh", "completion": "i"}]
    found = read(rows, tokenizer, max_length=4)
    assert {len(row["input_ids"]) for row in every(found)} == {4}
    assert len(every(found)) == 3
    assert found.notes == (
        "1 of 4 rows without prompt or completion, or with nothing to learn within 4 tokens, were left out",
        "3 of 3 rows fill max_length=4 and may have been cut",
        "1 of 3 rows are kept for evaluation: the data has no split for it",
    )
    message = whole("dataset=<1 rows> has none with prompt or completion")
    refuses(ValueError, message, read, rows[3:], tokenizer, max_length=4)


TWICE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ messages[-1]['content'] }}"
PAIR = {"translation": {"de": "ab", "en": "c"}}
OTHER = {"body": "w1", "stars": 0}
LONG = {**ANSWERS, "question": "which"}
IN_PART: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"messages": TURNS}, {}, "has no chat template to write messages by; expected one"),
    ({"messages": TURNS}, {"template": TWICE}, "cannot be told from the rest of what the chat template writes"),
    ({"text": "b"}, {"prefix": "a: "}, "prefix='a: ' is for task='seq2seq' alone, and task='causal-lm'"),
    (
        {"prompt": "a", "completion": "b", "label": False},
        {},
        r"that nobody wants \(KTO's\).*dataset.filter\(lambda row",
    ),
    (PAIR, {"task": "seq2seq"}, "has tgt_lang=None, and would mark targets as of the language of their"),
    (OTHER, {"task": LABELLED}, r"columns \['body', 'stars'\] are in no format of sequence-classification"),
    (OTHER, {"task": LABELLED, "columns": {"text": "bodi"}}, "name 'bodi', which is not in.*Did you mean 'body'"),
    (LONG, {"task": "question-answering", "max_length": 4}, "max_length=4 has no room for a question and its context"),
]


@pytest.mark.parametrize(("row", "options", "message"), IN_PART)
def test_what_cannot_be_read_is_refused(row: dict[str, Any], options: dict[str, Any], message: str) -> None:
    tokenizer = byte_tokenizer("</s>", options.get("template"))
    if row == PAIR:
        tokenizer.tgt_lang = None  # as of NLLB and mBART, where none is given
    with pytest.raises(ValueError, match=message):
        read([row] * 2, tokenizer, **{name: value for name, value in options.items() if name != "template"})


def test_tokenizers_that_begin_and_end_a_text_do_so_once() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "b</s>"}]
    found = read(rows, tokenizer)
    for row in every(found):
        assert tokenizer.decode(row["input_ids"]) == "<s>ab</s>"
        assert learned(row, tokenizer) == ["b</s>"]


LABELS = TABLES["labels"]
SNLI = {"train": [2, -1, 0, 1] * 3, "test": [-1] * 3}


def of_split(train: list[Any], test: list[Any]) -> Rows:
    """Return rows whose n-th label, of training or test, belongs to the text w<n>."""
    parts = {
        name: datasets.Dataset.from_list([{"text": f"w{at}", "label": label} for at, label in enumerate(labels)])
        for name, labels in (("train", train), ("test", test))
    }
    return read_rows(datasets.DatasetDict(parts), tiny.tokenizer(), "sequence-classification")


@pytest.mark.parametrize("name", LABELS)
def test_labels_by_their_type(name: str) -> None:
    values, kind, encoded = LABELS[name]
    found = of_split(values * 3, values)
    assert found.head["problem_type"] == kind
    assert found.evaluation["labels"][:] == encoded
    if "id2label" in found.head:
        assert found.head["label2id"] == {name: at for at, name in found.head["id2label"].items()}
    if name == "20 whole floats":
        assert found.notes[0].startswith("labels are floats but 20 whole numbers")


@pytest.mark.parametrize(
    ("row", "task", "notes"),
    [
        (
            *({"text": "w1", "score": 0.5, "sentiment": "pos"}, LABELLED),
            [
                "sentiment: 1 class",
                "the part 'label' is read from 'sentiment'; 'score' could be it too: columns={'label': 'score'}",
            ],
        ),
        ({"text": "w1", "target": 0.5}, LABELLED, ["target: regression, one number"]),
        (
            {"text": "w1", "labels": ["a", "b"]},
            "multi-label-classification",
            ["labels: 2 classes, any number of them in a row"],
        ),
        (
            {"tokens": ["w1", "w2"], "pos_tags": ["A", "B"], "chunk_tags": ["C", "C"]},
            "token-classification",
            [
                "pos_tags: 2 classes",
                "the part 'tags' is read from 'pos_tags'; 'chunk_tags' could be it too: columns={'tags': 'chunk_tags'}",
            ],
        ),
    ],
)
def test_notes_say_which_labels_were_taken(row: dict[str, Any], task: str, notes: list[str]) -> None:
    assert [*read([row] * 4, tiny.tokenizer(), task).notes[-len(notes) :]] == notes


def test_classes_that_hardly_repeat_or_were_not_trained_are_refused() -> None:
    with pytest.raises(ValueError, match="labels of 3 rows are 3 different classes, fewer than 2 rows for each"):
        of_split(["a", "b", "c"], ["a"])
    with pytest.raises(ValueError, match=r"label='z' is not among the 2 classes of the training rows"):
        of_split(["a", "b"] * 2, ["z"])


def test_a_task_overrides_the_type() -> None:
    rows = labelled(*[0, 1, 2] * 4)
    assert read(rows, tiny.tokenizer(), LABELLED).head["num_labels"] == 3
    found = read(rows, tiny.tokenizer(), "regression")
    assert (found.head["num_labels"], found.head["problem_type"]) == (1, "regression")
    assert found.train.features["labels"].dtype == "float64"


def test_pairs_of_texts() -> None:
    tokenizer = tiny.tokenizer()
    rows = [{"premise": "w1 w2", "hypothesis": "w3", "label": "yes" if i % 2 else "no"} for i in range(8)]
    found = read(rows, tokenizer, "sequence-classification")
    assert found.head["id2label"] == {0: "no", 1: "yes"}
    assert found.train[0]["input_ids"] == tokenizer("w1 w2", "w3")["input_ids"]


def test_what_cannot_be_read_is_told_in_whole() -> None:
    tokenizer = tiny.tokenizer()
    rows, tests = datasets.Dataset.from_list(labelled(*[0, 1] * 4)), datasets.Dataset.from_list(labelled(3))
    stream, parts = rows.to_iterable_dataset(), datasets.DatasetDict(train=rows, test=tests)
    refuses(TypeError, whole("dataset=<IterableDataset> is a stream"), read_rows, stream, tokenizer, "masked-lm")
    refuses(ValueError, whole("label=3 is not among the 2"), read_rows, parts, tokenizer, LABELLED)
    refuses(ValueError, whole("text=1 is not text"), read, [{"text": 1}] * 2, tokenizer)
    tokenizer = byte_tokenizer("</s>", "{{ raise_exception('No system') }}")
    system = [{"messages": [{"role": "system"}]}] * 2
    refuses(ValueError, whole("messages=[{'role': 'system'}] cannot"), read, system, tokenizer)


def test_token_ids_keep_their_labels() -> None:
    rows = [{"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "label": 5 + i % 2} for i in range(8)]
    found = read(rows, tiny.tokenizer(), "sequence-classification", max_length=2)
    ends = {tuple(row["input_ids"]) for row in every(found)}
    assert (ends, found.head["id2label"]) == ({(5, 6)}, {0: "5", 1: "6"})
    tagged = read([{"input_ids": [5, 6, 7], "labels": [-100, 3, 9]}] * 3, tiny.tokenizer(), "token-classification")
    assert tagged.train[0]["labels"] == [-100, 0, 1]


SPLITS = TABLES["splits"]


@pytest.mark.parametrize("name", SPLITS)
def test_one_split_is_trained_and_one_evaluated(name: str) -> None:
    splits, train, evaluation = SPLITS[name]
    found = read_rows(
        datasets.DatasetDict({split: rows_of_split(split) for split in splits}), byte_tokenizer(), "masked-lm"
    )
    told = [{byte_tokenizer().decode(row["input_ids"]) for row in rows} for rows in (found.train, found.evaluation)]
    assert told == [{train}, {evaluation or train}]


def rows_of_split(name: str) -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": name}] * 3)


def test_splits_that_are_not_used_are_told_and_several_to_train_on_refused() -> None:
    data = datasets.DatasetDict({name: rows_of_split(name) for name in ("train", "dev", "extra")})
    assert "splits that are not used: extra" in read_rows(data, byte_tokenizer(), "masked-lm").notes
    data = datasets.DatasetDict({name: rows_of_split(name) for name in ("train_sft", "test_sft", "train_gen")})
    refuses(ValueError, whole("dataset=<splits train_sft"), read_rows, data, byte_tokenizer(), "masked-lm")


@pytest.mark.parametrize("test", [[{"text": "w1"}], labelled(-1), labelled(None)])
def test_a_split_without_labels_is_not_evaluated(test: list[Any]) -> None:
    parts = {"train": labelled(*[0, 1] * 4), "test": test * 2}
    data = datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in parts.items()})
    found = read_rows(data, tiny.tokenizer(), LABELLED)
    assert (len(found.train), len(found.evaluation)) == (7, 1)
    assert found.notes[0] == "the split 'test' has no label, so it is not evaluated"


def test_splits_whose_ids_are_other_classes_are_refused_with_what_aligns_them() -> None:
    data = datasets.DatasetDict()
    for split, names in (("train", "abcabc"), ("test", "ac")):
        data[split] = datasets.Dataset.from_list(labelled(*names)).class_encode_column("label")
    message = "the classes of the split 'test' are a, c, those of the training rows a, b, c.*for at, name in enumerate"
    with pytest.raises(ValueError, match=message):
        read_rows(data, tiny.tokenizer(), LABELLED)
    train = data["train"]  # what the message says
    names = {name: at for at, name in enumerate(train.features["label"].names)}
    data["test"] = data["test"].align_labels_with_mapping(names, "label")
    assert read_rows(data, tiny.tokenizer(), LABELLED).evaluation["labels"][:] == [0, 2]


@pytest.mark.parametrize("column", ["label", "labels"])
def test_labels_have_the_type_of_the_loss_whatever_their_column_is_called(column: str) -> None:
    several = read(
        [{"text": "w1", column: [at % 3] if at % 2 else [0, 2]} for at in range(12)], tiny.tokenizer(), LABELLED
    )
    assert several.train.features["labels"].feature.dtype == "float64"
    whole = read([{"text": "w1", column: float(at % 2)} for at in range(12)], tiny.tokenizer(), LABELLED)
    assert whole.train.features["labels"].dtype == "int64"


def test_rows_whose_label_is_not_known_are_left_out() -> None:
    found = read(labelled(*[1.0, 0.0, float("nan"), 1.0, None] * 4), tiny.tokenizer(), LABELLED)
    assert (found.head["problem_type"], len(every(found))) == ("single_label_classification", 12)
    assert "8 of 20 rows without text or label, or with nothing to learn, were left out" in found.notes
    with pytest.raises(ValueError, match="label=inf is no finite number"):
        read(labelled(0.5, float("inf")), tiny.tokenizer(), LABELLED)


def test_what_is_not_read_is_told() -> None:
    found = read([{"text": "w1", "label": 0, "id": 1}] * 4, tiny.tokenizer(), LABELLED)
    assert found.notes[:2] == ("all labels are 0: there is nothing to tell apart", "columns that are not read: id")


REFUSED = TABLES["refused"]


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_are_not_as_their_format_says_are_refused(name: str) -> None:
    rows, task, message = REFUSED[name]
    refuses(ValueError, message, read, rows * 2, byte_tokenizer("<|im_end|>", CHATML), task)


def test_masks_of_token_ids_say_what_is_learned() -> None:
    rows = [{"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1]}] * 2
    assert read(rows, byte_tokenizer()).train[0] == {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    both = [{**row, "assistant_masks": [1, 0, 1]} for row in rows]  # of both, as TRL learns
    assert read(both, byte_tokenizer()).train[0]["labels"] == [-100, -100, 7]


def test_no_special_token_is_written_twice() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    row = read([{"prompt": "<s>a", "completion": "b"}] * 2, tokenizer).train[0]
    assert (tokenizer.decode(row["input_ids"]), learned(row, tokenizer)) == ("<s>ab</s>", ["b</s>"])
    tokenizer = byte_tokenizer("<|im_end|>", CHATML)
    ended = [{**turn, "content": turn["content"] + "<|im_end|>" * (turn["role"] == "assistant")} for turn in TURNS]
    mine, theirs = (read([{"messages": turns}] * 2, tokenizer).train[0] for turns in (TURNS, ended))
    assert mine == theirs


def test_an_instruction_and_its_input_are_both_read_by_an_encoder() -> None:
    rows = [{"instruction": "Add.", "input": "2 2", "output": "4"}, {"instruction": "Hi", "input": "", "output": "4"}]
    texts = {byte_tokenizer().decode(row["input_ids"]) for row in every(read(rows, byte_tokenizer(), "seq2seq"))}
    assert texts == {"Add.\n\n2 2", "Hi"}
    asked = read([{"question": "Who?", "context": "I am.", "answer": "I"}] * 2, byte_tokenizer(), "seq2seq")
    assert byte_tokenizer().decode(asked.train[0]["input_ids"]) == "Who?\n\nI am."
    assert not any("context" in note for note in asked.notes)


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({"max_length": 12}, "1 of 4 rows are kept"),
        (
            {},
            "2 of 4 rows have more than model_max_length=8 tokens, which the model may not take",
        ),
        ({"max_length": 8, "prefix": "to: "}, "3 of 4 rows fill max_length=8 and may have been cut"),
    ],
)
def test_rows_that_may_have_been_cut_or_that_the_model_may_not_take_are_told(
    options: dict[str, Any], note: str
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.model_max_length = 8
    rows = [{"document": "a" * source, "summary": "c" * target} for source, target in ((2, 2), (4, 9), (6, 1), (9, 3))]
    assert read(rows, tokenizer, "seq2seq", **options).notes[0].startswith(note)


def test_source_and_target() -> None:
    tokenizer = byte_tokenizer()
    found = read([{"document": "ab", "summary": "c"}] * 2, tokenizer, "seq2seq", prefix="summarize: ")
    assert [tokenizer.decode(found.train[0][name]) for name in ("input_ids", "labels")] == ["summarize: ab", "c"]
    pairs = read([{"translation": None}, {"translation": {"de": "ab", "en": None}}, PAIR, PAIR], tokenizer, "seq2seq")
    assert "2 of 4 rows without translation, or with nothing to learn, were left out" in pairs.notes
    assert "translation: from 'de' to 'en', as they stand in the data" in pairs.notes
    assert [pairs.train[0][name] for name in ("input_ids", "labels")] == tokenizer(["ab", "c"])["input_ids"]


def test_names_of_classes_are_kept_and_rows_that_datasets_marks_as_without_one_left_out() -> None:
    kinds = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["bad", "good"])})
    data = datasets.Dataset.from_dict({"text": ["w1"] * 9, "label": [0, 1, -1] * 3}, features=kinds)
    found = read_rows(data, tiny.tokenizer(), LABELLED)
    assert found.notes[0] == "3 of 9 rows without text or label, or with nothing to learn, were left out"
    assert {row["labels"] for row in every(found)} == {0, 1}
    assert found.head["id2label"] == {0: "bad", 1: "good"}
    tokenizer = byte_tokenizer()  # a class that is a target is learned by its name
    found = read_rows(data, tokenizer, "seq2seq", columns={"source": "text", "target": "label"})
    assert {tokenizer.decode(row["labels"]) for row in every(found)} == {"bad", "good"}


def test_minus_one_beside_three_classes_is_no_label() -> None:
    """As SNLI writes it; of -1, 0 and 1 it may be a class."""
    parts = {name: datasets.Dataset.from_list(labelled(*labels)) for name, labels in SNLI.items()}
    found = read_rows(datasets.DatasetDict(parts), tiny.tokenizer(), LABELLED)
    assert (found.head["id2label"], {*found.train["labels"][:]}) == ({0: "0", 1: "1", 2: "2"}, {0, 1, 2})
    assert found.notes[:3] == (
        "3 of 12 labels are -1, taken for no label beside the classes 0 to 2, and left out; "
        "where -1 is a class, number the classes from 0",
        "3 of 12 rows without text or label, or with nothing to learn, were left out",
        "the split 'test' has no label, so it is not evaluated",
    )
    found = read(labelled(*[-1, 0, 1] * 4), tiny.tokenizer(), LABELLED)
    assert found.head["id2label"] == {0: "-1", 1: "0", 2: "1"}
    tags = read([{"tokens": ["w5"] * 4, "ner_tags": [2, -1, 0, 1]}] * 4, tiny.tokenizer(), "token-classification")
    assert tags.train[0]["labels"][1:-1] == [2, -100, 0, 1]


def test_tags_stand_at_the_first_token_of_a_word() -> None:
    found = read([{"tokens": ["ab", "c"], "ner_tags": [4, 7]}] * 3, byte_tokenizer(), "token-classification")
    assert found.train[0]["labels"] == [0, -100, 1, -100]  # "ab c", of which the space is of the word
    assert found.head["id2label"] == {0: "4", 1: "7"}


def test_answers_are_found_by_their_characters() -> None:
    rows = [ANSWERS] * 2 + [{**ANSWERS, "answers": {"text": [], "answer_start": []}}] * 2
    found, cut = (read(rows, byte_tokenizer(), "question-answering", max_length=most) for most in (512, 4))
    assert {(row["start_positions"], row["end_positions"]) for row in every(found)} == {(3, 4), (0, 0)}
    assert [(row["start_positions"], row["end_positions"]) for row in every(cut)] == [(0, 0)] * 2
    assert "2 of 4 rows" in cut.notes[0]
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(rows[2:]), test=datasets.Dataset.from_list(rows))
    left = "2 of 4 rows without question or context or answers, or with nothing to learn within 4 tokens, were left out"
    found = read_rows(splits, byte_tokenizer(), "question-answering", max_length=4)
    assert f"{left} of the split for evaluation, so they are not in the metrics" in found.notes
    ids = [{"input_ids": [5, 6, 7], "start_positions": at, "end_positions": at} for at in (0, 1, 2)] * 2
    kept = read(ids, byte_tokenizer(), "question-answering", max_length=2)
    assert {row["end_positions"] for row in every(kept)} == {0, 1}


def test_answers_move_with_tokens_that_are_padded_on_the_left() -> None:
    """As XLNet's are, whose classification token is the last one."""
    tokenizer = byte_tokenizer()
    tokenizer.padding_side, tokenizer.cls_token = "left", "<eos>"
    special = [("<eos>", tokenizer.cls_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(pair="$A $B:1 <eos>:1", special_tokens=special)
    none = {**ANSWERS, "question": "which", "answers": {"text": [], "answer_start": []}}
    found = read([ANSWERS, none], tokenizer, "question-answering")
    batch = BucketedCollator(tokenizer)(every(found))
    spans = zip(batch["input_ids"], batch["start_positions"], batch["end_positions"], strict=True)
    assert {tokenizer.decode(ids[start : end + 1]) for ids, start, end in spans} == {"cd", "<eos>"}


@pytest.mark.parametrize(("rows", "kept"), [(2, 1), (50, 5), (990, 99), (2000, 100), (6000, 120)])
def test_without_a_split_a_hundred_rows_are_evaluated_but_never_most(rows: int, kept: int) -> None:
    found = read([{"text": "a"}] * rows, byte_tokenizer())
    assert (len(found.train), len(found.evaluation)) == (rows - kept, kept)
    assert found.notes == (f"{kept} of {rows} rows are kept for evaluation: the data has no split for it",)


@pytest.mark.parametrize(("count", "nothing"), [(3, [None, ""]), (10, [None] * 1500)])  # of which whole batches
def test_rows_with_nothing_in_them_are_left_out(count: int, nothing: list[Any]) -> None:
    found = read([{"text": text} for text in (*nothing, *["ab"] * count)], byte_tokenizer())
    assert len(every(found)) == count
    of = f"{len(nothing)} of {len(nothing) + count}"
    assert found.notes[0] == f"{of} rows without text, or with nothing to learn, were left out"


def test_other_names_are_given() -> None:
    rows = [{"body": "w1", "stars": i % 2} for i in range(6)]
    columns = {"text": "body", "label": "stars"}
    assert read(rows, tiny.tokenizer(), LABELLED, columns=columns).head["num_labels"] == 2


RIGHT = np.array([0, 1, 2, 1])
FOUND = np.array([0, 1, 1, 1])
SCORES, TARGETS = np.array([[1.0, -1.0], [2.0, 3.0]]), np.array([[1.0, 0.0], [1.0, 0.0]])
NUMBERS, FIT = (np.array([[1.0], [2.0], [3.0]]), np.array([2.0, 4.0, 6.0])), {"pearson": 1.0, "rmse": (14 / 3) ** 0.5}
TAGS = [{"tokens": ["w1"], "ner_tags": [0]}] * 4
METRICS: dict[str, tuple[list[dict[str, Any]], str, Any, Any, dict[str, float]]] = {
    "classes": (labelled(0, 1, 2, 0, 1, 2), LABELLED, FOUND, RIGHT, {"accuracy": 0.75, "f1": (1 + 0.8 + 0) / 3}),
    "several classes": (labelled(*[["a", "b"]] * 4), LABELLED, SCORES, TARGETS, {"accuracy": 0.5, "f1": 0.8}),
    "numbers": (labelled(*[0.5] * 4), LABELLED, *NUMBERS, FIT),
    "tags": (TAGS, "token-classification", FOUND, np.array([0, 1, -100, 1]), {"accuracy": 1.0, "f1": 1.0}),
    "answers": ([ANSWERS] * 4, "question-answering", (FOUND, FOUND), (FOUND, RIGHT), {"exact_match": 0.75}),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics(name: str) -> None:
    rows, task, predictions, labels, expected = METRICS[name]
    metrics = read(rows, byte_tokenizer(), task).metrics
    assert metrics is not None
    assert metrics(EvalPrediction(predictions, labels)) == pytest.approx(expected)


def test_generated_texts_are_compared_and_a_language_model_keeps_no_logits() -> None:
    tokenizer = byte_tokenizer()
    right = [tokenizer("ab")["input_ids"], [*tokenizer("c")["input_ids"], -100]]
    found = [tokenizer("ab")["input_ids"], [*tokenizer("d")["input_ids"], tokenizer.pad_token_id]]
    metrics = read([{"document": "ab", "summary": "c"}] * 2, tokenizer, "seq2seq").metrics
    assert metrics is not None
    assert metrics(EvalPrediction(np.array(found), np.array(right))) == {"exact_match": 0.5, "generated_tokens": 1.5}
    text = read([{"text": "ab"}] * 2, tokenizer)
    assert (text.metrics, text.kept_predictions, text.best_metric) == (None, None, "loss")
    logits = np.zeros((2, 3, 100), np.float32)
    message = whole("predictions=<float32 of shape (2, 3, 100)> are logits")
    refuses(ValueError, message, metrics, EvalPrediction(logits, np.array(right)))
