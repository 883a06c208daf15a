"""Small LLaVAs with random weights in the architecture of the shipped model vlm-scenes: a SigLIP encoder and a Llama.
Their tokenizer is learned from a few texts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    SiglipImageProcessor,
    SiglipVisionConfig,
)

BEGIN, END, PAD, IMAGE = "<s>", "</s>", "<pad>", "<image>"
USER, ASSISTANT = "USER:", "ASSISTANT:"
LETTERS = r" ?[A-Z](?=[A-Z])|(?<=[A-Z])[A-Z]"
DIGITS = r" ?[0-9]"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}USER: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'image' %}<image>\n{% endfor %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %} "
    "{% else %}ASSISTANT: {% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}{% endif %}"
    "{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of the network."""

    image: int  # height and width of a picture in pixels
    patch: int  # height and width of an image patch in pixels
    vision_width: int  # channels of the encoder's states
    vision_layers: int
    vision_heads: int
    vision_ffn: int  # channels of the encoder's feed-forward layers
    width: int  # channels of the language model's states
    layers: int
    heads: int
    head_dim: int  # channels of a head
    ffn: int  # channels of the language model's feed-forward layers
    positions: int  # maximum number of tokens in a text, image tokens included

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2


def build_tokenizer(texts: Iterable[str], pieces: int = 1024) -> PreTrainedTokenizerFast:
    """Learn a byte-level tokenizer from texts. pieces: vocabulary size, special tokens included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(LETTERS), "isolated"),
            pre_tokenizers.Split(Regex(DIGITS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    marks = [
        AddedToken(BEGIN, special=True, normalized=False),
        AddedToken(END, special=True, normalized=False),
        AddedToken(PAD, special=True, normalized=False),
        AddedToken(IMAGE, special=True, normalized=False, rstrip=True),
        AddedToken(USER, special=True, normalized=False, rstrip=True),
        AddedToken(ASSISTANT, special=True, normalized=False, lstrip=True),
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=pieces,
        min_frequency=2,
        show_progress=False,
        special_tokens=marks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator((text for text in texts), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens={"image_token": IMAGE},
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = TEMPLATE
    return fast


def configuration(shape: Shape, units: list[str]) -> LlavaConfig:
    """Return the model's configuration. units: the tokens, ordered by id. The projector reads the output of the
    encoder's last layer, without the final norm. There is no class token."""
    return LlavaConfig(
        vision_config=SiglipVisionConfig(
            hidden_size=shape.vision_width,
            intermediate_size=shape.vision_ffn,
            num_hidden_layers=shape.vision_layers,
            num_attention_heads=shape.vision_heads,
            image_size=shape.image,
            patch_size=shape.patch,
            vision_use_head=False,
        ),
        text_config=LlamaConfig(
            vocab_size=len(units),
            hidden_size=shape.width,
            intermediate_size=shape.ffn,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.heads,
            head_dim=shape.head_dim,
            max_position_embeddings=shape.positions,
            tie_word_embeddings=True,
            bos_token_id=units.index(BEGIN),
            eos_token_id=units.index(END),
            pad_token_id=units.index(PAD),
        ),
        image_token_index=units.index(IMAGE),
        image_seq_length=shape.patches,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        tie_word_embeddings=True,
    )


def build_model(shape: Shape, units: list[str], seed: int) -> LlavaForConditionalGeneration:
    """Build the model with random weights. units: the tokens, ordered by id."""
    torch.manual_seed(seed)
    model = LlavaForConditionalGeneration(configuration(shape, units))
    model.set_attn_implementation("eager")
    return model


def build_processor(tokenizer: PreTrainedTokenizerFast, shape: Shape) -> LlavaProcessor:
    """Build the model's processor. It resizes pictures to the model's square, scales values to -1 ... 1, and has the
    chat template."""
    return LlavaProcessor(
        image_processor=SiglipImageProcessor(size={"height": shape.image, "width": shape.image}),
        tokenizer=tokenizer,
        patch_size=shape.patch,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        image_token=IMAGE,
        chat_template=TEMPLATE,
    )
