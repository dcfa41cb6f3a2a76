"""The model being served: its engine and everything around it that turns text into tokens and back."""

import hashlib
import time
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from openwafer.models.tokenizer import Tokenizer
from openwafer.serve.api.tools import FORMATS, ToolFormat, format_of_template
from openwafer.serve.api.vocabulary import Vocabulary
from openwafer.serve.core import Engine

if TYPE_CHECKING:
    from openwafer.serve.api.grammar import GrammarCompiler

# What a model without a template of its own is given: the words most instruction-tuned models have seen.
PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """`names` are all that clients may ask for; the first is the one that answers carry."""

    names: tuple[str, ...]
    engine: Engine
    tokenizer: Tokenizer
    tool_format: ToolFormat
    has_template: bool
    vocabulary: Vocabulary
    created: int
    fingerprint: str

    @classmethod
    def make(
        cls,
        names: tuple[str, ...],
        engine: Engine,
        tokenizer: Tokenizer,
        *,
        chat_template: str | None = None,
        tool_call_parser: str = "auto",
        description: str = "",
    ) -> "ServedModel":
        """`description` is anything that tells this model and its settings from others, for the fingerprint."""
        own = chat_template or tokenizer.chat_template
        used = Tokenizer(
            tokenizer.backend,
            chat_template=own or PLAIN_TEMPLATE,
            bos_id=tokenizer.bos_id,
            eos_ids=tokenizer.eos_ids,
        )
        seen = f"{names} {description} {used.chat_template}"
        return cls(
            names=names,
            engine=engine,
            tokenizer=used,
            tool_format=format_of_template(own) if tool_call_parser == "auto" else FORMATS[tool_call_parser],
            has_template=own is not None,
            vocabulary=Vocabulary(tokenizer),
            created=int(time.time()),
            fingerprint="fp_" + hashlib.sha256(seen.encode()).hexdigest()[:10],
        )

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def template_knows_tools(self) -> bool:
        return "tools" in (self.tokenizer.chat_template or "")

    @cached_property
    def grammars(self) -> "GrammarCompiler":
        """The compiler of constraints; made when first asked for. Ask in a worker thread: it takes half a second."""
        from openwafer.serve.api.grammar import GrammarCompiler

        return GrammarCompiler(self.tokenizer, self.engine.vocab_size)
