"""Weights in a `.bin` file of torch's: a zip with a pickle in it."""

import importlib
import io
import zipfile
from pathlib import Path
from random import Random

import torch

from export_grok.export.safetensors_header import read_store_header
from export_grok.weights import WeightReader
from scripts.fuzzing.edits import edited_bytes
from scripts.fuzzing.files import Files
from scripts.fuzzing.targets.foreign import HfTarget
from scripts.fuzzing.targets.released import edited_pickle

__all__ = ["TorchTarget"]

# What odd files have torch load, of its own.
for _module in ("torch.nested._internal.ops", "torch._subclasses.schema_check_mode"):
    importlib.import_module(_module)

_BIN = "pytorch_model.bin"


class TorchTarget(HfTarget):
    """A file that `torch.save` wrote."""

    name = "torch"

    def _whole(self, folder: Path) -> Files:
        table = {}
        for path in sorted(folder.glob("*.safetensors")):
            reader = WeightReader(folder)
            for name, weight in read_store_header(path).items():
                array = reader.read(weight)
                kind = {"bfloat16": torch.bfloat16, "float32": torch.float32}[weight.dtype]
                values = torch.frombuffer(bytearray(array.tobytes()), dtype=kind)
                table[name] = values.reshape(weight.shape)
        file = io.BytesIO()
        torch.save(table, file)
        return {"config.json": (folder / "config.json").read_bytes(), _BIN: file.getvalue()}

    @staticmethod
    def _edited(content: bytes, random: Random) -> bytes:
        """Return a file with one thing changed: in its table, its members, or some byte."""
        kind = random.randrange(5)
        if kind == 0:
            size = len(content)
            return edited_bytes(
                content, random, [(0, 100), (size - 3000, size - 1), (0, size - 1)]
            )
        try:
            with zipfile.ZipFile(io.BytesIO(content)) as archive:
                members = {member: archive.read(member) for member in archive.namelist()}
        except Exception:  # it is no zip any more
            return edited_bytes(content, random)
        table = next((name for name in members if name.endswith("data.pkl")), None)
        name = random.choice(sorted(members))
        if kind < 4 and table:
            members[table] = edited_pickle(members[table], random)
        elif kind < 4:
            members["archive/data.pkl"] = members.pop(name)
        else:
            _change_member(members, name, random)
        file = io.BytesIO()
        method = zipfile.ZIP_STORED if random.randrange(10) else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(file, "w", method) as archive:
            for name, data in members.items():
                archive.writestr(name, data)
        return file.getvalue()


def _change_member(members: dict[str, bytes], name: str, random: Random) -> None:
    data = members.pop(name)
    match random.randrange(6):
        case 0:
            members[random.choice(("../x", "/etc/passwd", "archive/constants.pkl", "/"))] = data
        case 1:
            members[name] = data[: len(data) // 2]
        case 2:
            members[name] = edited_bytes(data, random)
        case 3:
            members[name] = random.choice(list(members.values()) or [b""])
        case 4:
            members["archive/byteorder"] = random.choice((b"big", b"", b"little"))
        case _:
            members[name] = data
            members[f"{name}x"] = data
