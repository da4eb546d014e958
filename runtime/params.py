"""What a user may choose of a request or an evaluation: the parameters, without what they do."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from export_grok.errors import RequestError

__all__ = [
    "LARGEST_FLOAT32",
    "LARGEST_LOGIT_BIAS",
    "MOST_LOGPROBS",
    "MOST_STOP_STRINGS",
    "SMALLEST_FLOAT32",
    "EvaluationOptions",
    "GenerationParams",
    "SamplingParams",
]

# Logits are divided and multiplied in float32: the ends of its normal numbers.
LARGEST_FLOAT32 = 3.4028234663852886e38
SMALLEST_FLOAT32 = 2.0**-126

# The ranges of OpenAI's API, so that a server in front of a model has no others to explain.
LARGEST_LOGIT_BIAS = 100.0
MOST_LOGPROBS = 20

# OpenAI takes 4. Each string costs a look at every new piece of text.
MOST_STOP_STRINGS = 16

# A message names as many wrong entries of a mapping or a sequence, and the number of the others.
_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The parameters work in the order repetition_penalty, logit_bias, temperature, top_k, top_p,
    min_p; see `export_grok.runtime.sampling`.

    Attributes:
        temperature: divides the logits; 0 takes the most probable token each time.
        top_k: how many of the most probable tokens may be drawn; 0 allows all, and so does a
            number beyond the vocabulary.
        top_p: mass of the most probable tokens that may be drawn; 1 allows all, 0 only the
            most probable one and those equal to it.
        min_p: how probable a token must be to be drawn, as a part of the largest probability at
            this temperature; 0 allows all, 1 only the most probable one and those equal to it.
        repetition_penalty: for every token in the prompt or the answer so far, a logit above 0
            is divided by it and any other is multiplied; 1 changes nothing, more than 1 makes
            repetition less likely.
        logit_bias: numbers that are added to the logits of these token ids, -100 to 100, or -inf,
            which forbids the token. A copy of what is given; not to be changed.
        seed: which random numbers are used. The same seed, step and logits give the same token.
        logprobs: how many of the most probable tokens are reported beside the chosen one, each
            with the logarithm of its probability, 0 to 20; None reports nothing. These are of
            the logits as the engine gives them, before all of the above.

    Raises:
        RequestError: a value is outside its range; all such values are named.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        faults = self._faults()
        if faults:
            raise RequestError("; ".join(faults))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Check the token ids of `logit_bias`, which only a model can.

        A `top_k` beyond the vocabulary is no fault: it allows every token.

        Raises:
            RequestError: an id is outside the vocabulary, or every token of it is forbidden.
        """
        outside = [token for token in self.logit_bias if token >= vocab_size]
        if outside:
            raise RequestError(
                f"logit_bias has {_some(outside)}; a token id of this model is a whole number "
                f"from 0 to {vocab_size - 1}"
            )
        if sum(bias == -float("inf") for bias in self.logit_bias.values()) == vocab_size:
            raise RequestError(
                f"logit_bias forbids all {vocab_size} tokens with -inf; leave one that can be "
                "chosen"
            )

    def _faults(self) -> list[str]:
        faults = []
        # NaN compares false with both ends, so it is refused like any number outside.
        if not _is_number(self.temperature, 0, LARGEST_FLOAT32):
            faults.append(
                f"temperature is {self.temperature!r}; it must be 0 (always the most probable "
                f"token) or a positive number up to {LARGEST_FLOAT32:.2g}"
            )
        if not _is(self.top_k, int) or self.top_k < 0:
            faults.append(f"top_k is {self.top_k!r}; it must be a whole number, 0 (off) or more")
        if not _is_number(self.top_p, 0, 1):
            faults.append(f"top_p is {self.top_p!r}; it must be a number from 0 to 1 (off)")
        if not _is_number(self.min_p, 0, 1):
            faults.append(f"min_p is {self.min_p!r}; it must be a number from 0 (off) to 1")
        if not _is_number(self.repetition_penalty, SMALLEST_FLOAT32, LARGEST_FLOAT32):
            faults.append(
                f"repetition_penalty is {self.repetition_penalty!r}; it must be a positive "
                f"number, 1 (off) or another from {SMALLEST_FLOAT32:.2g} to {LARGEST_FLOAT32:.2g}"
            )
        faults += _faults_of_bias(self.logit_bias)
        if not _is(self.seed, int) or not 0 <= self.seed < 2**64:
            faults.append(f"seed is {self.seed!r}; it must be a whole number from 0 to 2**64 - 1")
        if self.logprobs is not None and not (
            _is(self.logprobs, int) and 0 <= self.logprobs <= MOST_LOGPROBS
        ):
            faults.append(
                f"logprobs is {self.logprobs!r}; it must be None (off) or a whole number from 0 "
                f"to {MOST_LOGPROBS}"
            )
        return faults


@dataclass(frozen=True, kw_only=True)
class GenerationParams(SamplingParams):
    """How one request is answered: how its tokens are chosen, and where the answer ends.

    Attributes:
        max_new_tokens: longest answer, 1 or more; None is as long as the cache allows.
        stop: texts that end the answer and are not part of it, at most 16. One may be given as
            a plain str; here they are a tuple.
        ignore_eos: whether an end token is a token like any other.

    Raises:
        RequestError: a value is outside its range; all such values are named.
    """

    max_new_tokens: int | None = None
    stop: Sequence[str] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)

    def _faults(self) -> list[str]:
        faults = super()._faults()
        if self.max_new_tokens is not None and (
            not _is(self.max_new_tokens, int) or self.max_new_tokens < 1
        ):
            faults.append(
                f"max_new_tokens is {self.max_new_tokens!r}; it must be a whole number, 1 or "
                "more, or None (as long as the cache allows)"
            )
        faults += _faults_of_stop(self.stop)
        if not isinstance(self.ignore_eos, bool):
            faults.append(f"ignore_eos is {self.ignore_eos!r}; it must be True or False")
        return faults


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How a text is cut.

    Attributes:
        window: tokens of a window.
        batch: windows that are read together.
        lines: whether each line is a text of its own, with the end token behind it.

    Raises:
        RequestError: a window has nothing to guess, or a batch no rows.
    """

    window: int = 256
    batch: int = 8
    lines: bool = False

    def __post_init__(self) -> None:
        if self.window < 2 or self.batch < 1:
            raise RequestError(
                f"window is {self.window}, batch {self.batch}; a window needs 2 tokens or more, "
                "a batch 1 row or more"
            )


def _faults_of_bias(bias: object) -> list[str]:
    rule = (
        "it must be a mapping of token ids (0 or more) to numbers from "
        f"{-LARGEST_LOGIT_BIAS:g} to {LARGEST_LOGIT_BIAS:g}, or -inf, which forbids the token"
    )
    if not isinstance(bias, Mapping):
        return [f"logit_bias is {bias!r}; {rule}"]
    wrong = [
        f"{token!r}: {value!r}"
        for token, value in bias.items()
        if not _is(token, int)
        or token < 0
        or not (
            _is_number(value, -LARGEST_LOGIT_BIAS, LARGEST_LOGIT_BIAS) or value == -float("inf")
        )
    ]
    return [f"logit_bias has {_some(wrong)}; {rule}"] if wrong else []


def _faults_of_stop(stop: object) -> list[str]:
    rule = f"it must be a text or a sequence of at most {MOST_STOP_STRINGS} texts, none empty"
    texts = [stop] if isinstance(stop, str) else stop
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        return [f"stop is {stop!r}; {rule}"]
    if "" in texts:
        return [f"stop has an empty text at {list(texts).index('')}, found everywhere; {rule}"]
    if len(texts) > MOST_STOP_STRINGS:
        return [f"stop has {len(texts)} texts; {rule}"]
    return []


def _some(entries: Sequence[object]) -> str:
    more = f" and {len(entries) - _NAMED} more" if len(entries) > _NAMED else ""
    return ", ".join(map(str, entries[:_NAMED])) + more


def _is(value: object, kind: type | tuple[type, ...]) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)  # True is an int


def _is_number(value: Any, low: float, high: float) -> bool:
    return _is(value, (int, float)) and low <= value <= high
