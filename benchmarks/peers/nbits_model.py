"""The weights of a checkpoint as one ONNX graph in ONNX Runtime's fastest int8 kernels for a CPU.

Every matrix is a MatMulNBits of 8 bits at accuracy level 4, which rounds activations to int8 block
by block. Attention is one packed GroupQueryAttention that turns and caps by itself. An expert is
the branch of an If, so one without tokens reads nothing. The graph owes nothing to ours: it is
what ONNX Runtime does best.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx
from matrices import Matrices
from numpy.typing import NDArray
from onnx import TensorProto, helper

from export_grok.export.weights_to.values import Rows
from export_grok.files import atomic_file

__all__ = ["GRAPH", "write_nbits_model"]

GRAPH, WEIGHTS = "model.onnx", "model.weights"
MICROSOFT = "com.microsoft"
LARGEST_BLOCK = 256
ACCURACY = 4  # int8 products
ALIGNMENT = 4096
OPSETS = {"": 23, MICROSOFT: 1}

_TYPES = {np.dtype(np.float32): TensorProto.FLOAT, np.dtype(np.uint8): TensorProto.UINT8}


def write_nbits_model(weights: Matrices, out: Path) -> None:
    """Write the graph and the file of its weights to the folder `out`.

    Inputs: `tokens` int64 [1, S]; `last` int32 [1], the place of the last of them; `total` int32,
    how many the cache holds then; caches `keys_N` and `values_N` float32 [1, Hkv, T, D], which are
    to be bound to `keys_out_N` and `values_out_N` too. Output: `logits` [1, V] of the last token.

    Raises:
        OutputError: a file cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    with atomic_file(out / WEIGHTS) as file:
        graph = _Graph(weights, file)
        graph.model()
    model = helper.make_model(
        graph.finished(),
        opset_imports=[helper.make_opsetid(*pair) for pair in OPSETS.items()],
        ir_version=10,
    )
    with atomic_file(out / GRAPH) as file:
        file.write(model.SerializeToString())


class _Tape:
    """Nodes in the order of their making; every value gets a name of its own."""

    def __init__(self, prefix: str = "v") -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._prefix = prefix

    def op(self, op_type: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node of one output; return the output's name."""
        return self.ops(op_type, inputs, 1, domain=domain, **attributes)[0]

    def ops(
        self,
        op_type: str,
        inputs: Sequence[str],
        outputs: int,
        domain: str = "",
        **attributes: Any,
    ) -> list[str]:
        """Add a node; return the names of its outputs."""
        names = [f"{self._prefix}{len(self.nodes)}.{number}" for number in range(outputs)]
        self.nodes.append(
            helper.make_node(op_type, list(inputs), names, domain=domain, **attributes)
        )
        return names


class _Graph:
    """The graph in the making; the bytes of its weights go to `file` at once."""

    def __init__(self, weights: Matrices, file: IO[bytes]) -> None:
        self._weights = weights
        self._config = weights.config
        self._file = file
        self._initialisers: dict[str, TensorProto] = {}
        self._tape = _Tape()

    def finished(self) -> onnx.GraphProto:
        """Return the graph, after `model`."""
        config = self._config
        shape = [1, config.num_kv_heads, "T", config.key_size]
        caches = [
            (f"{part}{{}}_{layer}", TensorProto.FLOAT, shape)
            for layer in range(config.num_layers)
            for part in ("keys", "values")
        ]
        inputs = [
            ("tokens", TensorProto.INT64, [1, "S"]),
            ("last", TensorProto.INT32, [1]),
            ("total", TensorProto.INT32, []),
            *((name.format(""), *rest) for name, *rest in caches),
        ]
        outputs = [
            ("logits", TensorProto.FLOAT, [1, config.vocab_size]),
            *((name.format("_out"), *rest) for name, *rest in caches),
        ]
        return helper.make_graph(
            self._tape.nodes,
            "grok1_nbits",
            [helper.make_tensor_value_info(*row) for row in inputs],
            [helper.make_tensor_value_info(*row) for row in outputs],
            list(self._initialisers.values()),
        )

    def model(self) -> None:
        """Put the whole model on the tape."""
        config, tape, weights = self._config, self._tape, self._weights
        embedding = self._stored("embedding", weights.floats("embedding.weight"))
        factor = self._small("embedding_factor", np.float32(config.embedding_multiplier_scale))
        h = tape.op("Mul", tape.op("Gather", embedding, "tokens"), factor)
        x = self._norm(h, "layers.0.pre_attn_norm")
        for layer in range(config.num_layers):
            name = f"layers.{layer}"
            y = self._norm(self._attention(x, layer), f"{name}.post_attn_norm")
            x, h = self._add_norm(y, h, f"{name}.pre_moe_norm")
            y = self._norm(self._experts(x, name), f"{name}.post_moe_norm")
            following = f"layers.{layer + 1}.pre_attn_norm"
            last = layer + 1 == config.num_layers
            x, h = self._add_norm(y, h, "final_norm" if last else following)
        end = tape.op("Gather", x, self._small("end", np.int64(-1)), axis=1)
        logits = self._product(tape, end, "head", weights.head())
        scale = self._small("head_factor", np.float32(config.output_multiplier_scale))
        tape.nodes.append(helper.make_node("Mul", [logits, scale], ["logits"]))

    def _attention(self, x: str, layer: int) -> str:
        config, tape, weights = self._config, self._tape, self._weights
        name = f"layers.{layer}.attention"
        parts = [weights.matrix(f"{name}.{part}") for part in ("query", "key", "value")]
        packed = Rows(
            codes=np.concatenate([part.codes for part in parts]),
            scales=np.concatenate([part.scales for part in parts]),
        )
        exponents = np.arange(0, config.key_size, 2) / config.key_size
        phase = np.arange(config.sequence_len)[:, None] * config.rope_base**-exponents
        caches = [f"keys_{layer}", f"values_{layer}"]
        turns = [
            self._small(key, table.astype(np.float32))
            for key, table in (("cos", np.cos(phase)), ("sin", np.sin(phase)))
        ]
        query = self._product(tape, x, f"{name}.query_key_value", packed)
        outputs = tape.ops(
            "GroupQueryAttention",
            [query, "", "", *caches, "last", "total", *turns],
            3,
            domain=MICROSOFT,
            num_heads=config.num_q_heads,
            kv_num_heads=config.num_kv_heads,
            scale=config.attn_output_multiplier,
            softcap=config.attn_logit_cap,
            do_rotary=1,
        )
        tape.nodes[-1].output[1:] = [f"keys_out_{layer}", f"values_out_{layer}"]
        return self._product(tape, outputs[0], f"{name}.out", weights.matrix(f"{name}.out"))

    def _experts(self, x: str, name: str) -> str:
        """Put the experts on the tape: each choice of a token has a slot, C neighbouring ones."""
        config, tape, weights = self._config, self._tape, self._weights
        model, chosen = config.emb_size, config.num_selected_experts
        tokens = tape.op("Reshape", x, self._small("flat", np.array([-1, model])))
        router = self._stored(f"{name}.router", weights.floats(f"{name}.router.weight"))
        gates = tape.op("Softmax", tape.op("MatMul", tokens, router))
        count = self._small("chosen", np.array([chosen]))
        gates, experts = tape.ops("TopK", [gates, count], 2)
        line = self._small("line", np.array([-1]))
        gates = tape.op("Reshape", gates, self._small("column", np.array([-1, 1])))
        experts = tape.op("Reshape", experts, line)
        zero = self._small("zero", np.int64(0))
        places, outputs = [], []
        for expert in range(config.num_experts):
            own = tape.op("Equal", experts, self._small(f"number_{expert}", np.int64(expert)))
            slots = tape.op("Reshape", tape.op("NonZero", own), line)
            rows = tape.op("Div", slots, count)
            branches = {
                "then_branch": self._expert(tokens, gates, slots, rows, f"{name}.experts", expert),
                "else_branch": self._no_rows(f"{name}.{expert}"),
            }
            any_slot = tape.op("Greater", tape.op("Size", slots), zero)
            outputs.append(tape.op("If", any_slot, **branches))
            places.append(slots)
        last = self._small("last_axis", np.array([-1]))
        place = tape.op("Unsqueeze", tape.op("Concat", *places, axis=0), last)
        update = tape.op("Concat", *outputs, axis=0)
        empty = tape.op("ConstantOfShape", tape.op("Shape", update))
        by_slot = tape.op("ScatterND", empty, place, update)
        shape = self._small("by_token", np.array([1, -1, chosen, model]))
        middle = self._small("middle_axis", np.array([2]))
        return tape.op("ReduceSum", tape.op("Reshape", by_slot, shape), middle, keepdims=0)

    def _expert(
        self, tokens: str, gates: str, slots: str, rows: str, name: str, expert: int
    ) -> onnx.GraphProto:
        tape = _Tape(f"{name}.{expert}.")

        def product(x: str, part: str) -> str:
            matrix = self._weights.matrix(f"{name}.{part}", expert)
            return self._product(tape, x, f"{name}.{part}.{expert}", matrix)

        x = tape.op("Gather", tokens, rows)
        gate = tape.op("FastGelu", product(x, "gate"), domain=MICROSOFT)
        y = product(tape.op("Mul", gate, product(x, "up")), "down")
        y = tape.op("Mul", y, tape.op("Gather", gates, slots))
        return self._branch(tape, y)

    def _no_rows(self, name: str) -> onnx.GraphProto:
        tape = _Tape(f"{name}.none.")
        empty = helper.make_tensor("", TensorProto.FLOAT, [0, self._config.emb_size], [])
        return self._branch(tape, tape.op("Constant", value=empty))

    def _branch(self, tape: _Tape, y: str) -> onnx.GraphProto:
        rows = helper.make_tensor_value_info(y, TensorProto.FLOAT, None)
        return helper.make_graph(tape.nodes, "branch", [], [rows])

    def _norm(self, x: str, name: str) -> str:
        scale = self._stored(name, self._weights.floats(f"{name}.scale"))
        eps = self._config.rms_norm_eps
        return self._tape.op("SimplifiedLayerNormalization", x, scale, epsilon=eps)

    def _add_norm(self, y: str, h: str, name: str) -> tuple[str, str]:
        """Return the norm of h + y, and h + y."""
        scale = self._stored(name, self._weights.floats(f"{name}.scale"))
        normed, _, _, total = self._tape.ops(
            "SkipSimplifiedLayerNormalization",
            [y, h, scale],
            4,
            domain=MICROSOFT,
            epsilon=self._config.rms_norm_eps,
        )
        self._tape.nodes[-1].output[1:3] = ["", ""]
        return normed, total

    def _product(self, tape: _Tape, x: str, name: str, matrix: Rows) -> str:
        rows, columns = matrix.codes.shape
        # The largest power of two that no border between two scales cuts.
        group = columns // matrix.scales.shape[1]
        block = min(LARGEST_BLOCK, group & -group)
        codes = (matrix.codes.view(np.uint8) ^ 0x80).reshape(rows, -1, block)
        return tape.op(
            "MatMulNBits",
            x,
            self._stored(f"{name}.codes", codes),
            self._stored(f"{name}.scales", matrix.scales_of_blocks(block)),
            domain=MICROSOFT,
            K=columns,
            N=rows,
            bits=8,
            block_size=block,
            accuracy_level=ACCURACY,
        )

    def _small(self, name: str, value: Any) -> str:
        if name not in self._initialisers:
            array = np.asarray(value)
            self._initialisers[name] = onnx.numpy_helper.from_array(array, name)
        return name

    def _stored(self, name: str, array: NDArray[Any]) -> str:
        self._file.write(b"\0" * (-self._file.tell() % ALIGNMENT))
        place = {"location": WEIGHTS, "offset": self._file.tell(), "length": array.nbytes}
        self._file.write(np.ascontiguousarray(array).data)
        tensor = TensorProto(name=name, dims=array.shape, data_type=_TYPES[array.dtype])
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in place.items():
            tensor.external_data.add(key=key, value=str(value))
        self._initialisers[name] = tensor
        return name
