"""Summaries by T5, which the evaluation generates."""

from made_up import texts, tokens
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
)

tokenizer = AutoTokenizer.from_pretrained("google/flan-t5-base")
model = AutoModelForSeq2SeqLM.from_pretrained("google/flan-t5-base")
answers = tokenizer(texts(longest=100, seed=1), truncation=True, max_length=128)["input_ids"]
rows = tokens(tokenizer).add_column("labels", answers)
arguments = Seq2SeqTrainingArguments(
    "out",
    per_device_train_batch_size=8,
    eval_strategy="epoch",
    predict_with_generate=True,
    generation_max_length=64,
    generation_num_beams=4,
)
collator = DataCollatorForSeq2Seq(tokenizer, model)
trainer = Seq2SeqTrainer(model, arguments, collator, train_dataset=rows, eval_dataset=rows)
trainer.train()
