"""A small BERT and its word pieces, made from nothing but the text that it is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForSequenceClassification, BertModel

PAD, UNKNOWN, CLS, SEP, MASK = range(5)
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
MASKED_SHARE = 0.15


def make_tokenizer(texts: Sequence[str], *, vocabulary: int, length: int) -> Tokenizer:
    """Word pieces of lower-case text, at most so many; every text becomes so many of them.

    Unknown words fall apart into pieces that are known, down to letters.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.BertProcessing((SPECIAL[SEP], SEP), (SPECIAL[CLS], CLS))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PAD, pad_token=SPECIAL[PAD])
    return tokenizer


def token_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Tensor:
    """`(texts, length)`, int64."""
    return torch.tensor([encoding.ids for encoding in tokenizer.encode_batch(list(texts))])


def bert_config(vocabulary: int, *, layers: int, width: int, length: int, classes: int) -> BertConfig:
    """Heads of 64 channels, feed-forward layers of four times the width."""
    return BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        intermediate_size=4 * width,
        max_position_embeddings=length,
        pad_token_id=PAD,
        num_labels=classes,
    )


def make_classifier(config: BertConfig, bert: dict[str, Tensor] | None = None) -> BertForSequenceClassification:
    """A classifier on top of an encoder, which may have been trained."""
    model = BertForSequenceClassification(config)
    if bert is not None:
        model.bert.load_state_dict(bert)
    return model


class Pretraining(nn.Module):
    """An encoder that learns classes and masked words at once; returns the sum of both losses.

    J. Devlin et al., "BERT", NAACL 2019, section 3.1: of 15 % of the tokens, which are masked, the original is
    predicted. (Their replacement of some by random words or none is left out.)
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.bert = BertModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.words = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        mask = ids != PAD
        hidden_by_chance = (torch.rand(ids.shape) < MASKED_SHARE) & (ids > MASK)
        outputs: Any = self.bert(ids.masked_fill(hidden_by_chance, MASK), attention_mask=mask.long())
        words = self.words(outputs.last_hidden_state[hidden_by_chance])
        return cross_entropy(self.classifier(outputs.pooler_output), labels) + cross_entropy(
            words, ids[hidden_by_chance]
        )
