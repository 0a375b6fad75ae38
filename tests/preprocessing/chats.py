"""Chats, and a small tokenizer with chat templates of the kinds that published models have."""

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from tests.tokenizers_of_models import content_of

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{{ bos_token }}{%- for message in messages %}{%- if message.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n{%- else %}<|im_start|>{{ message.role }}\n"
    "{{ message.content | trim }}<|im_end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
# what was thought is left out of all messages but the last, which begins with an empty thought
THINKING = (
    "{%- for message in messages %}<|im_start|>{{ message.role }}\n"
    "{%- if message.role == 'assistant' %}"
    "{%- set said = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- if loop.last %}{{ '\n<think>\n\n</think>\n\n' + said }}{%- else %}{{ '\n' + said }}{%- endif %}"
    "{%- else %}{{ '\n' + message.content }}{%- endif %}<|im_end|>{{ '\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
STRICT = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# what a tokenizer without tokens for chats needs: the space before an answer is not marked, and is in its first token
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {% if m.role == 'assistant' %}{% generation %}{{ m.content }}{{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content + '\n' }}{% endif %}{% endfor %}"
)
UNENDED = PLAIN.replace("{{ eos_token }}{% endgeneration %}", "{% endgeneration %}{{ '\n' }}")
WITHIN_A_LINE = PLAIN.replace("{% generation %}", "[{% generation %}Say").replace(
    "{% endgeneration %}", "{% endgeneration %}] "
)
WITH_ITS_SPACE = PLAIN.replace(": {% if", ":{% if").replace("n %}{{ m.content }}", "n %} {{ m.content }}")
MARKING = {
    "marked": MARKED, "plain": PLAIN, "unended": UNENDED, "within a line": WITHIN_A_LINE,
    "with its space": WITH_ITS_SPACE.replace("{% else %}", "{% else %} "),
}  # fmt: skip
TEMPLATES = {"ChatML": CHATML, "marked": MARKED, "thinking": THINKING, "strict": STRICT}


def make_tokenizer(folder: Path, template: str = "ChatML") -> Path:
    """Write tokenizer.json and tokenizer_config.json, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_str(content_of("Qwen"))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    config = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATES[template]}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_chats(count: int, seed: int = 1, turns: int = 3) -> list[dict[str, Any]]:
    """Chats of one to `turns` turns, of words that say something of each other."""
    chosen = random.Random(seed)
    words = ["the", "mill", "grinds", "grain", "into", "flour", "while", "water", "turns", "its", "wheel", "sacks"]
    chats = []
    for number in range(count):
        messages = []
        for _ in range(chosen.randrange(1, turns + 1)):
            asked = chosen.choices(words, k=chosen.randrange(2, 12))
            messages.append({"role": "user", "content": f"Say it twice, é: {' '.join(asked)}"})
            messages.append({"role": "assistant", "content": " ".join([*asked, "水車", *asked])})
        chats.append({"id": number, "messages": messages})
    return chats


def write_chats(path: Path, chats: list[dict[str, Any]]) -> Path:
    """Write chats as lines of JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats))
    return path
