"""Hyper-parameters of a model: frozen, checked once, written beside every artifact."""

import dataclasses
import difflib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from export_grok.errors import ConfigError
from export_grok.regular_file import read_regular

__all__ = [
    "DTYPES",
    "ENGINE",
    "EXPORT",
    "GROK_1",
    "HEAD_DTYPES",
    "SUMS",
    "TENSOR_PARALLEL_SIZES",
    "Dtype",
    "EngineOptions",
    "ExportOptions",
    "GrokConfig",
    "HeadDtype",
    "RankConfig",
    "Sums",
]

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

HeadDtype = Literal["float32", "int8"]
HEAD_DTYPES: tuple[HeadDtype, ...] = get_args(HeadDtype)

Sums = Literal["plan", "between"]
SUMS: tuple[Sums, ...] = get_args(Sums)

TENSOR_PARALLEL_SIZES = (1, 2, 4, 8)

# Far beyond any model: a typing error must not make us walk a billion file names, and the bytes of
# every tensor are to be a number of 64 bits.
MAX_COUNT = 10_000
MAX_SIZE = 1 << 24

# Keys that published config files carry and that say nothing we can vary: the one allowed value.
_FIXED = {
    "tied_embeddings": True,
    "activation": "gelu_tanh",
    "column_parallel_scale_groups": 1,
}
_INFORMATIVE = {"widening_factor", "quantisation", "golden"}


@dataclass(frozen=True, kw_only=True)
class GrokConfig:
    """Hyper-parameters of the whole model, never of one rank.

    Attributes:
        ffn_size: width of an expert.
        sequence_len: longest prompt plus answer the model was trained for, in tokens.
        attn_logit_cap: attention logits x become cap * tanh(x / cap).
        attn_output_multiplier: what the original calls so; it scales the attention *logits*.
        embedding_multiplier_scale: factor on the token embedding.
        output_multiplier_scale: factor on the logits.
        row_parallel_scale_groups: groups of rows, each with its own int8 scales, in the matrices
            that are cut by rows (attention out, expert down). The others have one group.

    Raises:
        ConfigError: a value cannot work; all such values are named.
    """

    num_layers: int
    emb_size: int
    num_q_heads: int
    num_kv_heads: int
    key_size: int
    ffn_size: int
    vocab_size: int
    num_experts: int = 8
    num_selected_experts: int = 2
    sequence_len: int = 8192
    pad_token: int = 0
    bos_token: int = 1
    eos_token: int = 2
    rms_norm_eps: float = 1e-5
    rope_base: float = 10000.0
    attn_logit_cap: float = 30.0
    attn_output_multiplier: float
    embedding_multiplier_scale: float
    output_multiplier_scale: float
    row_parallel_scale_groups: int = 8

    def __post_init__(self) -> None:
        faults = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                faults.append(f"{field.name} is {value!r}; it must be a number")
            elif field.type is int and not isinstance(value, int):
                faults.append(f"{field.name} is {value!r}; it must be a whole number")
            elif field.name.endswith("_token"):
                if not 0 <= value < 2**31:
                    faults.append(f"{field.name} is {value}; it must be a token id, 0 or more")
            elif not 0 < value <= sys.float_info.max:
                faults.append(f"{field.name} is {value}; it must be a positive finite number")
            elif field.type is int and value > _most(field.name):
                faults.append(
                    f"{field.name} is {value}; it must be {_most(field.name)} at the most"
                )
        if not faults:
            faults += self._contradictions()
        if faults:
            raise ConfigError("; ".join(faults))

    def _contradictions(self) -> list[str]:
        faults = []
        if self.num_q_heads % self.num_kv_heads:
            faults.append(
                f"{self.num_q_heads} query heads cannot be shared evenly by "
                f"{self.num_kv_heads} key/value heads (num_q_heads, num_kv_heads)"
            )
        if self.key_size % 2:
            faults.append(f"key_size is {self.key_size}; rotary embedding needs an even size")
        if self.num_selected_experts > self.num_experts:
            faults.append(
                f"num_selected_experts is {self.num_selected_experts}; "
                f"there are {self.num_experts} experts (num_experts)"
            )
        for name, rows in (("num_q_heads * key_size", self.q_size), ("ffn_size", self.ffn_size)):
            if rows % self.row_parallel_scale_groups:
                faults.append(
                    f"{name} is {rows}; its rows cannot be cut into "
                    f"{self.row_parallel_scale_groups} equal groups (row_parallel_scale_groups)"
                )
        return faults

    @property
    def q_size(self) -> int:
        """Columns of the query matrix."""
        return self.num_q_heads * self.key_size

    @property
    def kv_size(self) -> int:
        """Columns of the key matrix, and of the value matrix."""
        return self.num_kv_heads * self.key_size

    def for_rank(self, tensor_parallel: int) -> "RankConfig":
        """Return what one of `tensor_parallel` ranks holds.

        Raises:
            ConfigError: the model cannot be cut into so many equal parts.
        """
        return RankConfig(model=self, tensor_parallel=tensor_parallel)

    def to_dict(self) -> dict[str, int | float]:
        """Return the fields as plain numbers, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any], *, source: str = "config") -> "GrokConfig":
        """Return the config that `values` describe.

        Args:
            values: the fields by name. Keys that published files carry and that do not vary
                (`tied_embeddings`, `activation`, ...) may stand there with their only value.
            source: where the values come from, for messages.

        Raises:
            ConfigError: a key is missing, unknown or has a value that cannot work.
        """
        known = {field.name: field for field in dataclasses.fields(cls)}
        faults = []
        for key, allowed in _FIXED.items():
            if key in values and values[key] != allowed:
                faults.append(f"{key} is {values[key]!r}; only {allowed!r} is Grok-1")
        for key in values.keys() - known.keys() - _FIXED.keys() - _INFORMATIVE:
            near = difflib.get_close_matches(key, known, n=1)
            faults.append(
                f"unknown key {key!r}" + (f", did you mean {near[0]!r}?" if near else "")
            )
        for name, field in known.items():
            if name not in values and field.default is dataclasses.MISSING:
                faults.append(f"{name} is missing")
        if faults:
            raise ConfigError(f"{source}: " + "; ".join(sorted(faults)))
        try:
            return cls(**{name: values[name] for name in known if name in values})
        except ConfigError as error:
            raise ConfigError(f"{source}: {error}") from error

    @classmethod
    def from_file(cls, path: Path) -> "GrokConfig":
        """Return the config written in the JSON file `path`.

        Raises:
            ConfigError: the file cannot be read, is no JSON object, or holds a wrong value.
        """
        try:
            values = json.loads(read_regular(path).decode())
        except (OSError, RecursionError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"{path} holds a {type(values).__name__}; it must hold an object")
        return cls.from_dict(values, source=str(path))


def _most(name: str) -> int:
    return MAX_COUNT if name.startswith("num_") or name == "key_size" else MAX_SIZE


@dataclass(frozen=True, kw_only=True)
class RankConfig:
    """What one rank of a tensor-parallel group holds: an even share of heads, columns, vocabulary.

    Raises:
        ConfigError: something does not divide.
    """

    model: GrokConfig
    tensor_parallel: int

    def __post_init__(self) -> None:
        allowed = [size for size in TENSOR_PARALLEL_SIZES if self._divides(size)]
        if self.tensor_parallel not in allowed:
            raise ConfigError(
                f"{self.model.num_kv_heads} key/value heads, {self.model.ffn_size} expert columns "
                f"and {self.model.row_parallel_scale_groups} scale groups cannot be shared evenly "
                f"by {self.tensor_parallel} ranks; use {', '.join(map(str, allowed))}"
            )

    def _divides(self, size: int) -> bool:
        model = self.model
        groups = model.row_parallel_scale_groups
        return (
            model.num_kv_heads % size == 0
            and model.ffn_size % size == 0
            and model.vocab_size % size == 0
            # a rank's rows are whole groups, or lie in the one group there is
            and (groups % size == 0 or groups == 1)
        )

    @property
    def num_q_heads(self) -> int:
        """Query heads of this rank."""
        return self.model.num_q_heads // self.tensor_parallel

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads of this rank."""
        return self.model.num_kv_heads // self.tensor_parallel

    @property
    def q_size(self) -> int:
        """Columns of the query matrix that this rank holds."""
        return self.model.q_size // self.tensor_parallel

    @property
    def kv_size(self) -> int:
        """Columns of the key matrix, and of the value matrix, that this rank holds."""
        return self.model.kv_size // self.tensor_parallel

    @property
    def ffn_size(self) -> int:
        """Columns of every expert that this rank holds."""
        return self.model.ffn_size // self.tensor_parallel

    @property
    def row_parallel_scale_groups(self) -> int:
        """Groups of rows in this rank's part of a matrix that is cut by rows."""
        return max(1, self.model.row_parallel_scale_groups // self.tensor_parallel)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding that this rank holds."""
        return self.model.vocab_size // self.tensor_parallel


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How the graphs of a checkpoint are made.

    Attributes:
        dtype: of activations and cache; None for the first that the backend takes; graphs
            without a backend are float32 then.
        head: matrix of the head: "float32" is the embedding's table itself, "int8" a copy of it in
            the folder, a quarter as long.
        config: of the checkpoint, if it has no `config.json` and is not Grok-1.
        layers: only the first so many.
        copy_weights: copy the weights into the folder; else the graphs point at them where they
            lie.
        overwrite: replace what the folder holds.

    Raises:
        ConfigError: there is no such dtype, or no such head.
    """

    dtype: Dtype | None = None
    head: HeadDtype = "float32"
    config: GrokConfig | None = None
    layers: int | None = None
    copy_weights: bool = False
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in (None, *DTYPES):
            raise ConfigError(f"dtype is {self.dtype!r}; use {', '.join(DTYPES)}")
        if self.head not in HEAD_DTYPES:
            raise ConfigError(f"head is {self.head!r}; use {', '.join(HEAD_DTYPES)}")


EXPORT = ExportOptions()


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How an engine is built from graphs. None is for what the backend takes by default.

    Attributes:
        allow_functions: let ops that could not be lowered run by their slow function bodies.
        tensor_parallel: ranks that share every layer.
        sm: GPU architectures to build for, as compute capability times ten: 90 is an H100's.
        batch: rows of a decode step.
        chunk: tokens of a prompt that go through the layers at once.
        max_length: longest row, prompt and answer together, in tokens.
        gpu_memory: of one GPU, in GB; by default the most that GPUs of an architecture have.
        sums: where ranks are summed: "plan" in the plans, "between" by NCCL between plans of
            parts of a graph.

    Raises:
        ConfigError: a number is out of range, or sums are asked for that there are not; all such
            are named.
    """

    allow_functions: bool = False
    tensor_parallel: int = 1
    sm: tuple[int, ...] | None = None
    batch: int | None = None
    chunk: int | None = None
    max_length: int | None = None
    gpu_memory: float | None = None
    sums: Sums = "plan"

    def __post_init__(self) -> None:
        faults = [
            f"{name} is {value}; it must be 1 or more"
            for name in ("tensor_parallel", "batch", "chunk", "max_length")
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.gpu_memory is not None and not 0 < self.gpu_memory < float("inf"):
            faults.append(f"gpu_memory is {self.gpu_memory}; it must be a number of GB")
        if self.sm is not None and not self.sm:
            faults.append("sm names no architecture; say e.g. 90")
        if self.sums not in SUMS:
            faults.append(f"sums is {self.sums!r}; use {', '.join(SUMS)}")
        if self.sums == "between" and self.tensor_parallel == 1:
            faults.append(
                "sums is 'between', and one rank has no sums: say --tp 2 or more, or leave it away"
            )
        if faults:
            raise ConfigError("; ".join(faults))

    def given(self) -> tuple[str, ...]:
        """Return the names of the fields that are not left to the backend."""
        return tuple(
            field.name
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        )


ENGINE = EngineOptions()

# Source: the hyper-parameters in xai-org/grok-1 run.py.
GROK_1 = GrokConfig(
    num_layers=64,
    emb_size=6144,
    num_q_heads=48,
    num_kv_heads=8,
    key_size=128,
    ffn_size=32768,
    vocab_size=131072,
    attn_output_multiplier=0.08838834764831845,
    embedding_multiplier_scale=78.38367176906169,
    output_multiplier_scale=0.5773502691896257,
)
