"""From a request's fields to what the engine draws with."""

from openwafer.serve.api.errors import ApiError
from openwafer.serve.api.schema import ChatRequest, Drawing
from openwafer.serve.api.served_model import ServedModel
from openwafer.serve.core import Sampling

# The engine divides by it: top_p 0 means the likeliest token.
_SMALLEST_TOP_P = 1e-6


def room(served: ServedModel, num_prompt_tokens: int) -> int:
    """Tokens that fit behind the prompt; 400 when none does."""
    left = served.engine.max_context - num_prompt_tokens
    if num_prompt_tokens == 0:
        raise ApiError(400, "the prompt is empty: there is nothing to continue", param="prompt", code="empty_prompt")
    if left < 1:
        raise ApiError(
            400,
            f"the prompt has {num_prompt_tokens} tokens and the model's context is {served.engine.max_context} tokens, "
            "prompt and answer together: shorten the prompt",
            param="messages",
            code="context_length_exceeded",
        )
    return left


def asked_tokens(request: Drawing) -> int | None:
    """How long an answer was asked for; None: as long as fits."""
    asked = request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        asked = request.max_completion_tokens
    return None if asked == -1 else asked


def _least_tokens(request: Drawing) -> int:
    """How short an answer may be."""
    if isinstance(request, ChatRequest) and request.min_completion_tokens is not None:
        return request.min_completion_tokens
    return request.min_tokens or 0


def sampling(
    served: ServedModel,
    request: Drawing,
    num_prompt_tokens: int,
    *,
    index: int = 0,
    num_logprobs: int | None = None,
    prompt_logprobs: bool = False,
) -> Sampling:
    """For answer `index` of a request; what is not given has the API's defaults."""
    left = room(served, num_prompt_tokens)
    asked = asked_tokens(request)
    if asked is not None and asked > served.engine.max_context:
        raise ApiError(
            400,
            f"max_completion_tokens is {asked} and the model's whole context is {served.engine.max_context} tokens",
            param="max_completion_tokens" if isinstance(request, ChatRequest) else "max_tokens",
            code="context_length_exceeded",
        )
    max_tokens = left if asked is None else min(asked, left)
    seed = None if request.seed is None else (request.seed + index) % 2**63
    return Sampling(
        max_tokens=max(max_tokens, 1),
        min_tokens=min(_least_tokens(request), max_tokens),
        temperature=_given(request.temperature, 1.0),
        top_p=max(_given(request.top_p, 1.0), _SMALLEST_TOP_P),
        top_k=request.top_k if request.top_k and request.top_k > 0 else None,
        min_p=_given(request.min_p, 0.0),
        frequency_penalty=_given(request.frequency_penalty, 0.0),
        presence_penalty=_given(request.presence_penalty, 0.0),
        logit_bias=_bias(served, request),
        seed=seed,
        stop_ids=frozenset(served.tokenizer.eos_ids),
        num_logprobs=num_logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def stops(request: Drawing) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(served: ServedModel, request: Drawing) -> dict[int, float]:
    biases = {}
    for key, value in (request.logit_bias or {}).items():
        if not (key.isascii() and key.isdigit() and int(key) < served.engine.vocab_size):
            raise ApiError(
                400,
                f"logit_bias: {key[:40]!r} is not a token id of this model (0 to {served.engine.vocab_size - 1})",
                param="logit_bias",
                code="invalid_value",
            )
        biases[int(key)] = value
    return biases
