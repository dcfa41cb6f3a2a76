"""A decoder as a short list of operations on rows, the same for all families.

The builders below are the only place that knows how a family is wired; who runs a program (the reference beside
this file, the C kernels) knows the operations only. Every operation works on each row (token) by itself, except
`Attend`, which reads the keys and values of the row's own sequence.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from openwafer.models.config import ModelConfig
from openwafer.models.rope import frequencies
from openwafer.serve.matrix import Matrix

Activation = Literal["gelu", "gelu_tanh", "silu", "relu"]


@dataclass(frozen=True)
class Span:
    """`width` columns of a buffer from `start` on."""

    buffer: str
    start: int
    width: int


@dataclass(frozen=True, kw_only=True)
class Embed:
    """dst = table[token] * scale"""

    dst: Span
    table: Matrix
    scale: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AddPosition:
    """dst += table[position]"""

    dst: Span
    table: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Norm:
    """dst = norm of each run of len(weight) columns of src, times weight, plus bias; `centred`: LayerNorm, else RMS."""

    dst: Span
    src: Span
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool


@dataclass(frozen=True, kw_only=True)
class Linear:
    """dst = src @ matrix.T + bias, or dst += that."""

    dst: Span
    src: Span
    matrix: Matrix
    bias: torch.Tensor | None
    adds: bool


@dataclass(frozen=True, kw_only=True)
class Rotate:
    """Rotary positions on each head of dst; `frequencies` in radians per token, [head_size / 2]."""

    dst: Span
    frequencies: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Attend:
    """Store k and v under the row's position in `layer`, then dst = attention of q over the row's sequence."""

    dst: Span
    q: Span
    k: Span
    v: Span
    layer: int
    head_size: int
    window: int | None
    scale: float


@dataclass(frozen=True, kw_only=True)
class Activate:
    """dst = activation(dst), times `up` where there is one."""

    dst: Span
    up: Span | None
    kind: Activation


@dataclass(frozen=True, kw_only=True)
class Add:
    """dst += src"""

    dst: Span
    src: Span


Operation = Embed | AddPosition | Norm | Linear | Rotate | Attend | Activate | Add


@dataclass(frozen=True, kw_only=True)
class Program:
    """`body` runs on all rows, `head` on the rows whose logits are wanted.

    Of a model that is cut into regions, only the first one's program begins with an embedding, and only the last one's
    has a head; between them goes the buffer `x`.
    """

    config: ModelConfig
    widths: Mapping[str, int]  # of the fp32 buffers
    body: tuple[Operation, ...]
    head: tuple[Operation, ...]

    @property
    def num_layers(self) -> int:
        """Layers that have a place in the key/value cache."""
        return sum(isinstance(op, Attend) for op in self.body)

    @property
    def is_packed(self) -> bool:
        """Whether weights are rounded, so that keys and values in fp16 do no harm."""
        return any(isinstance(op, Linear) and op.matrix.format != "fp32" for op in self.body)


Weights = dict[str, Matrix | torch.Tensor]  # matrices of linear layers and embeddings; fp32 vectors


def build_program(config: ModelConfig, weights: Weights) -> Program:
    """A whole model whose weights are all at hand."""
    builder = ProgramBuilder(config)
    body = builder.embedding(weights)
    for layer in range(config.num_hidden_layers):
        body += builder.layer(layer, layer, weights)
    return Program(config=config, widths=builder.widths, body=tuple(body), head=tuple(builder.head(weights)))


class ProgramBuilder:
    """Makes the operations of a model part by part; nothing of a part is kept afterwards.

    Weights go by their names in our modules (a tied head has none of its own). Joined matrices are taken out of the
    given ones: whoever keeps no other reference then never holds a matrix twice.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._weights: Weights = {}
        self._is_gpt = config.family == "gpt"
        self._q_width = config.num_heads * config.head_size
        self._kv_width = config.kv_heads * config.head_size
        inner, gates = config.feed_forward_size, 1 if self._is_gpt else 2
        self.widths = {
            "x": config.hidden_size,  # the residual stream
            "h": config.hidden_size,  # normed
            "qkv": self._q_width + 2 * self._kv_width,
            "attended": self._q_width,
            "inner": gates * inner,
            "logits": config.vocab_size,
        }
        self._freqs = {False: torch.empty(0), True: torch.empty(0)}
        if not self._is_gpt:
            plain = frequencies(config.head_size, config.rope_theta, config.rope_scaling)
            local = config.rope_local_theta
            self._freqs = {False: plain, True: plain if local is None else frequencies(config.head_size, local, None)}

    def embedding(self, weights: Weights) -> list[Operation]:
        with self._using(weights):
            return self._embedding()

    def layer(self, layer: int, place: int, weights: Weights) -> list[Operation]:
        """Layer `layer` of the model; its keys and values are in place `place` of the cache."""
        with self._using(weights):
            return self._gpt_layer(layer, place) if self._is_gpt else self._llama_layer(layer, place)

    def head(self, weights: Weights) -> list[Operation]:
        with self._using(weights):
            return self._head()

    @contextlib.contextmanager
    def _using(self, weights: Weights) -> Iterator[None]:
        self._weights = weights
        yield
        self._weights = {}

    def _embedding(self) -> list[Operation]:
        x = self._span("x")
        scale = self._config.hidden_size**0.5 if self._config.gemma_norms else 1.0
        operations: list[Operation] = [Embed(dst=x, table=self._matrix(self._table_name), scale=scale)]
        if self._is_gpt:
            operations.append(AddPosition(dst=x, table=self._vector("transformer.wpe.weight")))
        return operations

    def _head(self) -> list[Operation]:
        h, name = self._span("h"), "transformer.ln_f" if self._is_gpt else "model.norm"
        matrix = self._matrix(self._table_name if self._config.tied else "lm_head.weight")
        return [
            self._norm(h, self._span("x"), name),
            Linear(dst=self._span("logits"), src=h, matrix=matrix, bias=None, adds=False),
        ]

    @property
    def _table_name(self) -> str:
        return "transformer.wte.weight" if self._is_gpt else "model.embed_tokens.weight"

    def _gpt_layer(self, layer: int, place: int) -> list[Operation]:
        name, x, h = f"transformer.h.{layer}", self._span("x"), self._span("h")
        return [
            self._norm(h, x, f"{name}.ln_1"),
            self._linear(self._span("qkv"), h, f"{name}.attn.c_attn"),
            self._attend(layer, place),
            self._linear(x, self._span("attended"), f"{name}.attn.c_proj", adds=True),
            self._norm(h, x, f"{name}.ln_2"),
            self._linear(self._span("inner"), h, f"{name}.mlp.c_fc"),
            self._activate(None),
            self._linear(x, self._span("inner"), f"{name}.mlp.c_proj", adds=True),
        ]

    def _llama_layer(self, layer: int, place: int) -> list[Operation]:
        config, name = self._config, f"model.layers.{layer}"
        x, h, inner = self._span("x"), self._span("h"), config.feed_forward_size
        gate, up = Span("inner", 0, inner), Span("inner", inner, inner)
        attention_name, mlp = f"{name}.self_attn", f"{name}.mlp"
        operations: list[Operation] = [self._norm(h, x, f"{name}.input_layernorm")]
        heads = (("q_proj", self._q()), ("k_proj", self._k()), ("v_proj", self._v()))
        operations += self._stacked(h, [(f"{attention_name}.{part}", span) for part, span in heads])
        if config.qk_norm:
            operations.append(self._norm(self._q(), self._q(), f"{attention_name}.q_norm"))
            operations.append(self._norm(self._k(), self._k(), f"{attention_name}.k_norm"))
        freqs = self._freqs[config.is_sliding(layer)]
        # q and k lie side by side, so one operation turns the heads of both.
        operations.append(Rotate(dst=Span("qkv", 0, self._q_width + self._kv_width), frequencies=freqs))
        operations.append(self._attend(layer, place))
        operations += self._into_stream(
            self._span("attended"), f"{attention_name}.o_proj", f"{name}.post_attention_layernorm"
        )
        before = "pre_feedforward_layernorm" if config.gemma_norms else "post_attention_layernorm"
        operations.append(self._norm(h, x, f"{name}.{before}"))
        operations += self._stacked(h, [(f"{mlp}.gate_proj", gate), (f"{mlp}.up_proj", up)])
        operations.append(self._activate(up))
        operations += self._into_stream(gate, f"{mlp}.down_proj", f"{name}.post_feedforward_layernorm")
        return operations

    def _into_stream(self, src: Span, name: str, norm: str) -> list[Operation]:
        """A projection that joins the residual stream; Gemma norms it first."""
        x, h = self._span("x"), self._span("h")
        if not self._config.gemma_norms:
            return [self._linear(x, src, name, adds=True)]
        return [self._linear(h, src, name), self._norm(h, h, norm), Add(dst=x, src=h)]

    def _stacked(self, src: Span, parts: list[tuple[str, Span]]) -> list[Operation]:
        """Projections of one input into neighbouring columns: one operation where their formats agree."""
        matrices = [self._matrix(f"{name}.weight") for name, _ in parts]
        biases = [self._weights.get(f"{name}.bias") for name, _ in parts]
        joined = Matrix.stack(matrices)
        if joined is None:
            return [self._linear(span, src, name) for name, span in parts]
        for name, _ in parts:
            del self._weights[f"{name}.weight"]
        first = parts[0][1]
        dst = Span(first.buffer, first.start, sum(span.width for _, span in parts))
        bias = torch.cat([b for b in biases if isinstance(b, torch.Tensor)]) if biases[0] is not None else None
        return [Linear(dst=dst, src=src, matrix=joined, bias=bias, adds=False)]

    def _linear(self, dst: Span, src: Span, name: str, adds: bool = False) -> Linear:
        bias = self._weights.get(f"{name}.bias")
        assert bias is None or isinstance(bias, torch.Tensor)
        return Linear(dst=dst, src=src, matrix=self._matrix(f"{name}.weight"), bias=bias, adds=adds)

    def _norm(self, dst: Span, src: Span, name: str) -> Norm:
        weight = self._vector(f"{name}.weight")
        if self._config.gemma_norms:
            weight = 1 + weight
        bias = self._vector(f"{name}.bias") if self._is_gpt else None
        return Norm(dst=dst, src=src, weight=weight, bias=bias, eps=self._config.norm_eps, centred=self._is_gpt)

    def _attend(self, layer: int, place: int) -> Attend:
        config = self._config
        return Attend(
            dst=self._span("attended"),
            q=self._q(),
            k=self._k(),
            v=self._v(),
            layer=place,
            head_size=config.head_size,
            window=config.sliding_window if config.is_sliding(layer) else None,
            scale=config.attention_scale or config.head_size**-0.5,
        )

    def _activate(self, up: Span | None) -> Activate:
        kind = self._config.nonlinearity
        assert kind in ("gelu", "gelu_tanh", "silu", "relu")
        return Activate(dst=Span("inner", 0, self._config.feed_forward_size), up=up, kind=kind)

    def _q(self) -> Span:
        return Span("qkv", 0, self._q_width)

    def _k(self) -> Span:
        return Span("qkv", self._q_width, self._kv_width)

    def _v(self) -> Span:
        return Span("qkv", self._q_width + self._kv_width, self._kv_width)

    def _span(self, buffer: str) -> Span:
        return Span(buffer, 0, self.widths[buffer])

    def _matrix(self, name: str) -> Matrix:
        found = self._weights[name]
        assert isinstance(found, Matrix), name
        return found

    def _vector(self, name: str) -> torch.Tensor:
        found = self._weights[name]
        assert isinstance(found, torch.Tensor), name
        return found
