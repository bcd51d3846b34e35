"""A classifier, by a plain loop of PyTorch."""

import torch
from made_up import labelled
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, DataCollatorWithPadding

tokenizer = AutoTokenizer.from_pretrained("google-bert/bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("google-bert/bert-base-uncased").cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
loader = DataLoader(labelled(tokenizer), batch_size=16, collate_fn=DataCollatorWithPadding(tokenizer))

model.train()
for _ in range(3):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(**batch.to("cuda")).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
