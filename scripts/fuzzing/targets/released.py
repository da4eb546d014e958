"""The files of a released checkpoint: pickles, one by one, and a folder of them."""

import dataclasses
import io
import itertools
import json
import pickle
import pickletools
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from export_grok.config import GrokConfig
from export_grok.export.checkpoint import RELEASED_FOLDER, open_weights
from export_grok.export.random_checkpoint import write_random_checkpoint
from export_grok.export.released_pickle import arrays_in
from export_grok.weights import Weight, WeightIndex, WeightReader
from scripts.fuzzing.edits import edited_bytes, edited_json, odd_entry
from scripts.fuzzing.files import Files, Placed
from scripts.fuzzing.target import Target

__all__ = [
    "SMALL",
    "CheckpointTarget",
    "PickleTarget",
    "check_lies_within",
    "edited_pickle",
    "files_below",
]

# As small as a model can be.
SMALL = GrokConfig(
    num_layers=1,
    emb_size=8,
    num_q_heads=2,
    num_kv_heads=1,
    key_size=4,
    ffn_size=8,
    vocab_size=32,
    num_experts=2,
    sequence_len=16,
    attn_output_multiplier=0.5,
    embedding_multiplier_scale=2.0,
    output_multiplier_scale=0.5,
    row_parallel_scale_groups=2,
)

# Ends of programs that run something; each would make the file `witness` in the folder it is in.
ATTACKS = (
    b"cos\nsystem\n(X\x0d\x00\x00\x00touch witnesstR.",
    b"cbuiltins\neval\n(X\x17\x00\x00\x00open('witness','w')    tR.",
    b"\x8c\x05posix\x8c\x06system\x93\x8c\x0dtouch witness\x85R.",
    b"\x8c\x0asubprocess\x8c\x05Popen\x93\x8c\x02id\x85R.",
    b"cnumpy\nload\n(X\x0b\x00\x00\x00/etc/passwdtR.",
    b"c__main__\n__builtins__\n.",
    b"(X\x0d\x00\x00\x00touch witnessios\nsystem\n.",
    b"(cos\nsystem\nX\x0d\x00\x00\x00touch witnesso.",
    b"\x82\x01.",
    b"P1\n.",
    b"]\x94h\x00h\x00e.",
)
NAMES = (
    b"builtins",
    b"os",
    b"numpy",
    b"dtype",
    b"ndarray",
    b"_reconstruct",
    b"__main__",
    b"weight",
    b"scales",
    b"O",
    b"f8",
    b"i1",
    b"f4",
)


def edited_pickle(content: bytes, random: Random) -> bytes:
    """Return a pickle with one thing changed: a step of its program, or some byte."""
    if random.randrange(3) == 0:
        # Most of a file is an array's bytes, which may be anything.
        return edited_bytes(content, random, [(0, 200), (len(content) - 170, len(content) - 1)])
    try:
        starts = [at for _, _, at in pickletools.genops(content) if at is not None]
    except Exception:  # it is no pickle any more
        return edited_bytes(content, random)
    if not starts:
        return content + random.choice(ATTACKS)
    starts.append(len(content))
    steps = [content[first:end] for first, end in itertools.pairwise(starts)]
    place = random.randrange(len(steps))
    match random.randrange(9):
        case 0:
            del steps[place]
        case 1:
            steps.insert(place, steps[place])
        case 2:
            other = random.randrange(len(steps))
            steps[place], steps[other] = steps[other], steps[place]
        case 3:
            steps[place] = random.choice(steps)
        case 4:
            steps.insert(place, random.choice(pickletools.opcodes).code.encode("latin-1"))
        case 5:
            code = random.choice(pickletools.opcodes).code.encode("latin-1")
            steps.insert(place, code + random.randbytes(random.choice((1, 2, 4, 8))))
        case 6:
            steps[place:] = [random.choice(ATTACKS)]
        case 7:
            name = random.choice(NAMES)
            steps[place] = pickle.SHORT_BINUNICODE + bytes([len(name)]) + name
        case _:
            steps[place] = edited_bytes(steps[place][:16], random) + steps[place][16:]
    return b"".join(steps)


def check_lies_within(weights: list[Weight], lengths: dict[str, int]) -> None:
    """Hold tensors to the files that they are said to lie in: within, and not on one another."""
    ends: dict[str, int] = {}
    for weight in sorted(weights, key=lambda weight: (weight.offset, weight.nbytes)):
        end = weight.offset + weight.nbytes
        assert ends.get(weight.file, 0) <= weight.offset <= end <= lengths[weight.file], weight
        ends[weight.file] = end


class PickleTarget(Target):
    """One released file of each kind."""

    name = "pickle"
    inputs: ClassVar[int] = 6000

    def __init__(self, folder: Path) -> None:
        write_random_checkpoint(SMALL, folder / "checkpoint")
        released = folder / "checkpoint" / RELEASED_FOLDER
        self._kinds = [
            (released / f"tensor{number:05}_000").read_bytes() for number in (1, 0, 2, 5)
        ]
        self._file = "tensor00000_000"
        (folder / "pickle").mkdir()
        self.placed = Placed(folder / "pickle", {self._file: self._kinds[0]})

    def edit(self, files: Files, random: Random) -> None:
        """Change a step of the file, or a byte, or one of another kind of file."""
        content = files[self._file]
        if content is self._kinds[0]:
            content = random.choice(self._kinds)
        assert isinstance(content, bytes)
        files[self._file] = edited_pickle(content, random)

    def read(self) -> dict[str, Weight]:
        """Find its arrays."""
        return arrays_in(self.folder / self._file)

    def hold(self, said: dict[str, Weight]) -> None:
        """See that they are those that Python's own reader finds."""
        path, found = self.folder / self._file, said
        assert found.keys() in ({"weight", "scales"}, {"array"})
        check_lies_within(list(found.values()), {path.name: path.stat().st_size})
        expected = _standard(path.read_bytes())
        assert found.keys() == expected.keys()
        reader = WeightReader(self.folder)
        for key, weight in found.items():
            shape, dtype, data = expected[key].told()
            assert (weight.name, weight.dtype, weight.shape) == (key, dtype, shape)
            assert not weight.nbytes or reader.read(weight).tobytes() == data


class _Thing:
    """What Python's own reader makes in the place of an object: all that it was told of it."""

    def __init__(self, *arguments: object) -> None:
        self.arguments: tuple[Any, ...] = arguments
        self.state: Any = ()

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def told(self) -> tuple[Any, Any, Any]:
        """Return shape, dtype and bytes of an array."""
        if len(self.arguments) == 4:  # JAX's, around one of numpy's
            self.state = self.arguments[2]
        _, shape, dtype, by_columns, data = self.state
        assert not by_columns
        assert dtype.state[1] in ("<", "|")
        return shape, _DTYPES[dtype.arguments[0]], data


class _Quantised:
    """What the release's class is to a pickle: something with attributes."""


class _Bfloat16:
    """The name of a dtype."""


_DTYPES = {"i1": "int8", "f4": "float32", _Bfloat16: "bfloat16"}


class _Standard(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        special = {"QuantizedWeight8bit": _Quantised, "bfloat16": _Bfloat16}
        return special.get(name, _Thing)


def _standard(content: bytes) -> dict[str, Any]:
    loaded = _Standard(io.BytesIO(content)).load()
    return vars(loaded) if isinstance(loaded, _Quantised) else {"array": loaded}


def files_below(folder: Path) -> Files:
    """Return the content of all files below a folder, by path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


class CheckpointTarget(Target):
    """A folder of released files with its config."""

    name = "checkpoint"
    inputs: ClassVar[int] = 300

    def __init__(self, folder: Path) -> None:
        write_random_checkpoint(SMALL, folder / "whole")
        self._outside = folder / "outside"
        self._outside.write_bytes(
            (folder / "whole" / RELEASED_FOLDER / "tensor00001_000").read_bytes()
        )
        self.placed = Placed(folder / "checkpoint", files_below(folder / "whole"))

    def edit(self, files: Files, random: Random) -> None:
        """Change a pickle, or the config, or which files there are."""
        pickles = [name for name, content in files.items() if isinstance(content, bytes)]
        name = random.choice(pickles) if pickles else ""
        content = files.get(name)
        config = files.get("config.json")
        kind = random.randrange(3)
        if kind == 0 and isinstance(config, bytes):
            files["config.json"] = edited_json(config, random)
        elif kind == 1 and isinstance(content, bytes) and name != "config.json":
            files[name] = edited_pickle(content, random)
        elif files:
            odd_entry(files, random, str(self._outside))

    def read(self) -> tuple[GrokConfig, WeightIndex]:
        """Index the folder."""
        return open_weights(self.folder)

    def hold(self, said: tuple[GrokConfig, WeightIndex]) -> None:
        """See that all tensors lie in the files."""
        config, index = said
        lengths = {file: (self.folder / file).stat().st_size for file in index.files}
        assert lengths == index.files
        check_lies_within(list(index), lengths)
        whole = json.loads(json.dumps(dataclasses.asdict(config)))
        assert GrokConfig.from_dict(whole) == config
