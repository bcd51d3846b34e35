"""A language model by a loop of accelerate, which accumulates gradients."""

import torch
from accelerate import Accelerator
from made_up import tokens
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")
tokenizer.pad_token = tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2")
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
loader = DataLoader(tokens(tokenizer), batch_size=8, collate_fn=collator)
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for _ in range(3):
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()
