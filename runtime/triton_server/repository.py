"""A model of Triton's Python backend on the disk: `config.pbtxt` and `1/model.py`."""

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

from export_grok import __version__
from export_grok.artifacts import MANIFEST, Bundle
from export_grok.errors import ConfigError, OutputError
from export_grok.files import atomic_file, new_folder, output_errors
from export_grok.needs import Disk, Needs, OnNeeds
from export_grok.runtime.triton_server.settings import Settings, instance_kind
from export_grok.runtime.triton_server.tensors import INPUTS, OUTPUTS, Port

__all__ = ["CONFIG", "FILES", "MODEL", "config_text", "write_model"]

CONFIG = "config.pbtxt"
MODEL = "1/model.py"
# In the order of writing: a folder without its configuration is no model.
FILES = (MODEL, CONFIG)

# A file that begins so is ours.
MARK = "# Written by `export-grok package`"
NOTE = f"{MARK} {__version__}. Not run under Triton yet: see docs/embedding.md.\n"

MODEL_TEXT = f'''\
{NOTE}\
"""Grok-1 in Triton's Python backend; the package `export_grok` holds what it does."""

try:
    from export_grok.runtime.triton_server.backend import TritonPythonModel
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"{{error}}; install export-grok with the extra of the bundle's backend into the Python "
        "that Triton's Python backend runs, or name an environment in EXECUTION_ENV_PATH",
        name=error.name,
    ) from error

__all__ = ["TritonPythonModel"]
'''


def write_model(
    repository: Path,
    name: str,
    bundle: Bundle,
    settings: Settings,
    *,
    overwrite: bool = False,
    on_needs: OnNeeds = lambda needs: None,
) -> Path:
    """Write a model into a repository and return its folder.

    Other files in that folder stay. A run that was broken off leaves no configuration, and so no
    model; the next one goes on.

    Args:
        repository: folder of models, made if it is not there.
        name: of the model.
        bundle: that it runs.
        settings: how.
        overwrite: replace the files of an earlier package that is another.
        on_needs: gets what that needs, before anything is written.

    Raises:
        ConfigError: the name is none, or the settings are not for the bundle.
        OutputError: the folder is something else's, or of another package, or cannot be written.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name):
        raise ConfigError(
            f"{name!r} is no name of a model; take letters, digits, _, - and ., no dot or - first"
        )
    settings.check(bundle)
    if (repository / MANIFEST).exists():
        raise OutputError(
            f"{repository} is a bundle, no repository of models; choose another --triton"
        )
    folder = repository / name
    texts = {MODEL: MODEL_TEXT, CONFIG: config_text(name, bundle, settings)}
    wanted = {file: text.encode() for file, text in texts.items()}
    with output_errors(folder):
        found = _found(folder)
    differ = [file for file in FILES if found.get(file) != wanted[file]]
    if not overwrite and any(file in found for file in differ):
        raise OutputError(
            f"{folder / CONFIG} or {MODEL} there is of another package, or was edited; replace "
            "them with --overwrite, or choose another --name"
        )
    lengths = {file: len(wanted[file]) for file in differ}
    on_needs(Needs(disk=(Disk.of_files(folder, lengths),)) if differ else Needs())
    with contextlib.ExitStack() as made:
        for place in (repository, folder):
            if not place.exists():
                made.enter_context(new_folder(place))
        with output_errors(folder):
            (folder / MODEL).parent.mkdir(exist_ok=True)
        for file in differ:
            with atomic_file(folder / file) as opened:
                opened.write(wanted[file])
    return folder


def config_text(name: str, bundle: Bundle, settings: Settings) -> str:
    """Return `config.pbtxt`, in the text format of `inference.ModelConfig`."""
    kind = instance_kind(bundle)
    # The one GPU that a process takes; CUDA_VISIBLE_DEVICES says which of the machine's it is.
    gpus = " gpus: [ 0 ]" if kind == "KIND_GPU" else ""
    parameters = "".join(
        f"parameters {{ key: {_quoted(key)} value {{ string_value: {_quoted(value)} }} }}\n"
        for key, value in settings.parameters().items()
    )
    return (
        f"{NOTE}"
        f"name: {_quoted(name)}\n"
        'backend: "python"\n'
        "max_batch_size: 0\n"
        "model_transaction_policy { decoupled: true }\n"
        f"input [\n{_ports(INPUTS, optional=True)}\n]\n"
        f"output [\n{_ports(OUTPUTS)}\n]\n"
        f"instance_group [ {{ count: 1 kind: {kind}{gpus} }} ]\n"
        f"{parameters}"
    )


def _ports(ports: Iterable[Port], *, optional: bool = False) -> str:
    return ",\n".join(
        f"  {{ name: {_quoted(port.name)} data_type: {port.data_type} "
        f"dims: [ {-1 if port.many else 1} ]{' optional: true' if optional else ''} }}"
        for port in ports
    )


def _quoted(text: str) -> str:
    """Return a string as protobuf's text format has it: bytes beyond ASCII in octal."""
    plain = "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}"
        for byte in text.encode("utf-8", "surrogateescape")
    )
    return f'"{plain}"'


def _found(folder: Path) -> dict[str, bytes]:
    """Return our files in a folder, by name.

    Raises:
        OutputError: a file of their names is not ours, or the folder holds only others.
    """
    if not folder.exists():
        return {}
    found = {}
    for file in FILES:
        if (folder / file).exists():
            found[file] = (folder / file).read_bytes()
            if not found[file].startswith(MARK.encode()):
                raise OutputError(
                    f"{folder / file} is not of this command; choose another --name or --triton"
                )
    begun = {"1", f".{CONFIG}.partial"}
    others = {path.name for path in folder.iterdir()} - begun
    if not found and others:
        raise OutputError(
            f"{folder} is not empty and no model of this command ({min(others)} is in it); choose "
            "another --name or --triton"
        )
    return found
