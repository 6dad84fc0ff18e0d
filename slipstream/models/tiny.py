"""`model: tiny`: a small Llama with a character-level tokenizer, built from a seed, for laptops and tests."""

from __future__ import annotations

import string

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WIDTH = 128
SPECIAL = ("<pad>", "<s>", "</s>", "<unk>", "<q>", "<a>")
CHARACTERS = string.digits + string.ascii_letters + string.punctuation + " \n"

# One turn is <q>text<a>; the answer ends with </s>. No system turn is set apart: it simply comes first.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{{ message['content'] + '</s>' }}"
    "{% else %}{{ '<q>' + message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<a>' }}{% endif %}"
)


def build_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Every printable ASCII character is a token; anything else is <unk>."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<q>", "<a>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_tiny_model(seed: int, vocab_size: int) -> LlamaForCausalLM:
    """About 0.6 million parameters; the same seed gives the same weights.

    Three layers and wide initial weights, because it learns to copy and compare in a hundred steps that way; five
    layers with the usual 0.02 take several times as long (docs/log.md).
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=352,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.06,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)
