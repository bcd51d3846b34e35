"""Embeddings of sentences, by sentence-transformers."""

from datasets import Dataset
from made_up import texts
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer import losses, modules

encoder = modules.Transformer("BAAI/bge-base-en-v1.5")
model = SentenceTransformer(modules=[encoder, modules.Pooling(encoder.get_word_embedding_dimension())])
trainer = SentenceTransformerTrainer(
    model,
    SentenceTransformerTrainingArguments("out", fp16=True, per_device_train_batch_size=32),
    train_dataset=Dataset.from_dict({"anchor": texts(longest=200), "positive": texts(longest=200, seed=1)}),
    loss=losses.MultipleNegativesRankingLoss(model),
)
trainer.train()
