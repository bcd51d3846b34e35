"""A language model on several GPUs, by DDP in a plain loop: torchrun --nproc-per-node 2 ddp.py."""

import os

import torch
from made_up import tokens
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForLanguageModeling

torch.distributed.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
tokenizer = AutoTokenizer.from_pretrained("openai-community/gpt2")
tokenizer.pad_token = tokenizer.eos_token
model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained("openai-community/gpt2").cuda())
optimizer = torch.optim.AdamW(model.parameters())
rows, collator = tokens(tokenizer), DataCollatorForLanguageModeling(tokenizer, mlm=False)
for batch in DataLoader(rows, batch_size=4, sampler=DistributedSampler(rows), collate_fn=collator):
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(**batch.to("cuda")).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
