"""Text to tokens and back: a model folder's own tokenizer, or bytes for the tiny model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol, cast

from attrs import frozen
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from kvlift.runtime.worker.model_config import TINY_EOS, ModelRefusedError

BYTE_BOS: Final = 256
BYTE_VOCAB: Final = 256
TEMPLATE_BYTES_MAX: Final = 1 << 20
TEMPLATE_FAULTS: Final = (
    *(TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError),
    RecursionError,
)
"""What a template's own code may raise about messages that it does not expect."""

PLAIN_TEMPLATE: Final = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class TemplateRefusedError(ValueError):
    """The chat template does not take these messages."""


class TextCodec(Protocol):
    """What the HTTP server needs of a tokenizer."""

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        """Token ids; a chat template writes the special tokens itself, other text gets them."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens; bytes that are no UTF-8 become U+FFFD."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Messages as the model wants them, up to where its answer starts.

        Raises `TemplateRefusedError`."""


@frozen
class ChatTemplate:
    """A Jinja template in a sandbox: it may come with somebody else's weights."""

    source: str
    special: Mapping[str, str]

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _refuse
        try:
            return environment.from_string(self.source).render(
                messages=messages, add_generation_prompt=True, **self.special
            )
        except TEMPLATE_FAULTS as error:
            raise TemplateRefusedError(
                f"the chat template refused the messages: {error}"
            ) from error


def _refuse(message: str) -> None:
    raise TemplateError(message)


@frozen
class ByteCodec:
    """One token a byte of UTF-8: ids 0 to 255 are the bytes, 256 opens a text, 257 ends one.

    Ids from 256 on have no text: `decode` leaves them out.
    """

    template: ChatTemplate = ChatTemplate(PLAIN_TEMPLATE, {})

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        return [BYTE_BOS, *text.encode()]

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < BYTE_VOCAB).decode(errors="replace")

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self.template.render(messages)

    @property
    def eos(self) -> int:
        return TINY_EOS


@frozen(eq=False)
class FolderCodec:
    """`tokenizer.json` of a Hugging Face folder and its chat template."""

    tokenizer: Tokenizer
    template: ChatTemplate

    def encode(self, text: str, *, is_chat: bool = False) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=not is_chat).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return self.template.render(messages)


def codec_from_folder(folder: Path) -> FolderCodec:
    """Raises `ModelRefusedError` where its files are missing or damaged."""
    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises plain Exception for every cause
        raise ModelRefusedError(f"{path} cannot be read as a tokenizer: {error}") from error
    return FolderCodec(tokenizer, _template(folder))


def _template(folder: Path) -> ChatTemplate:
    settings: dict[str, object] = {}
    config = folder / "tokenizer_config.json"
    if config.exists():
        try:
            loaded = json.loads(_text_in(config))
        except (ValueError, RecursionError) as error:
            raise ModelRefusedError(f"{config} is not JSON: {error}") from error
        settings = loaded if isinstance(loaded, dict) else {}
    source = settings.get("chat_template")
    own_file = folder / "chat_template.jinja"
    if own_file.exists():
        source = _text_in(own_file)
    if not isinstance(source, str):
        source = PLAIN_TEMPLATE
    if len(source) > TEMPLATE_BYTES_MAX:
        raise ModelRefusedError(
            f"the chat template in {folder} is larger than {TEMPLATE_BYTES_MAX}"
        )
    special = {
        name: _text_of(settings[name])
        for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        if settings.get(name) is not None
    }
    return ChatTemplate(source, special)


def _text_in(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelRefusedError(f"{path} cannot be read as text: {error}") from error


def _text_of(token: object) -> str:
    if isinstance(token, dict):
        return str(cast("dict[str, object]", token).get("content", ""))
    return str(token)
